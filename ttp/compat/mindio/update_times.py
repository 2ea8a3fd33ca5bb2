"""The times of the last update, which tell whether replicas can repair the state after a memory error."""

from __future__ import annotations

import sys
import time
from typing import Any

_times: dict[str, int | None] = {"start": None, "end": None}


def tft_set_update_start_time(start_time: int | None = None) -> None:
    """Set the start time of the update, in microseconds; by default the current time of the device's clock."""
    _times["start"] = _now() if start_time is None else start_time


def tft_set_update_end_time(end_time: int | None = None) -> None:
    """Set the end time of the update, in microseconds; by default the current time of the device's clock."""
    _times["end"] = _now() if end_time is None else end_time


def tft_can_do_uce_repair(hbm_error_time: int, start_time: int | None = None, end_time: int | None = None) -> bool:
    """Return whether a memory error happened during the last update or after it, so that replicas are whole.

    Args:
        hbm_error_time: time of the error, in microseconds.
        start_time: start of the last update; None for the time of ``tft_set_update_start_time``.
        end_time: end of the last update; None for the time of ``tft_set_update_end_time``.
    """
    start = _times["start"] if start_time is None else start_time
    end = _times["end"] if end_time is None else end_time
    if not (hbm_error_time and start and end):  # 0 is unknown, too
        return False
    return max(start, end) < hbm_error_time or start < hbm_error_time < end


def _now() -> int | None:
    """Return the time in microseconds by the device's clock, or the host's without a device; None: it is unknown."""
    npu: Any = getattr(sys.modules.get("torch"), "npu", None)
    if npu is None:
        return time.time_ns() // 1000
    event = npu.Event(enable_timing=True)  # else it has no time
    event.record()
    return int(event.recorded_time()) if hasattr(event, "recorded_time") else None  # an older torch_npu
