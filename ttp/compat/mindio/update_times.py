"""The times of the last update, from which it follows whether a memory error has spoilt the state."""

from __future__ import annotations

import sys
import time
from typing import Any

_times: dict[str, int | None] = {"start": None, "end": None}


def tft_set_update_start_time(start_time: int | None = None) -> None:
    """Set the start of the update; in microseconds, by default from the device's clock."""
    _times["start"] = _now() if start_time is None else start_time


def tft_set_update_end_time(end_time: int | None = None) -> None:
    """Set the end of the update; in microseconds, by default from the device's clock."""
    _times["end"] = _now() if end_time is None else end_time


def tft_can_do_uce_repair(hbm_error_time: int, start_time: int | None = None, end_time: int | None = None) -> bool:
    """Return whether the error came while an update was running or after it, so that the state of replicas is whole.

    Args:
        hbm_error_time: time of the error, in microseconds.
        start_time: start of the last update; None: as given to ``tft_set_update_start_time``.
        end_time: end of the last update; None: as given to ``tft_set_update_end_time``.
    """
    start = _times["start"] if start_time is None else start_time
    end = _times["end"] if end_time is None else end_time
    if start is None or end is None:
        return False
    return max(start, end) < hbm_error_time or start < hbm_error_time < end


def _now() -> int:
    """Return the time in microseconds, by the device's clock where it can be asked, else by the host's."""
    npu: Any = getattr(sys.modules.get("torch"), "npu", None)
    if npu is not None and hasattr(npu.Event, "recorded_time"):
        event = npu.Event()
        event.record()
        return int(event.recorded_time())
    return time.time_ns() // 1000
