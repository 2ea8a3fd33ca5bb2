"""When the last update was made: whether a memory error spoilt the state can be told from that."""

from __future__ import annotations

import sys
import time
from typing import Any

_times: dict[str, int | None] = {"start": None, "end": None}


def tft_set_update_start_time(start_time: int | None = None) -> None:
    """The update begins; microseconds, by default those of the device."""
    _times["start"] = _now() if start_time is None else start_time


def tft_set_update_end_time(end_time: int | None = None) -> None:
    """The update has ended; microseconds, by default those of the device."""
    _times["end"] = _now() if end_time is None else end_time


def tft_can_do_uce_repair(hbm_error_time: int, start_time: int | None = None, end_time: int | None = None) -> bool:
    """Whether the error came while an update was running or after it, so that the state of replicas is whole.

    Args:
        hbm_error_time: of the error, microseconds.
        start_time: of the last update; None: as told to ``tft_set_update_start_time``.
        end_time: of the last update; None: as told to ``tft_set_update_end_time``.
    """
    start = _times["start"] if start_time is None else start_time
    end = _times["end"] if end_time is None else end_time
    if start is None or end is None:
        return False
    return max(start, end) < hbm_error_time or start < hbm_error_time < end


def _now() -> int:
    """The device's clock where there is one that can be asked, else the host's."""
    npu: Any = getattr(sys.modules.get("torch"), "npu", None)
    if npu is not None and hasattr(npu.Event, "recorded_time"):
        event = npu.Event()
        event.record()
        return int(event.recorded_time())
    return time.time_ns() // 1000
