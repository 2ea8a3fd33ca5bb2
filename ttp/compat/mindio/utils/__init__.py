"""``mindio_ttp.utils``: functions that record the times of updates."""

from __future__ import annotations

from ttp.compat.mindio.update_times import tft_can_do_uce_repair, tft_set_update_end_time, tft_set_update_start_time

__all__ = ["tft_can_do_uce_repair", "tft_set_update_end_time", "tft_set_update_start_time"]
