"""Numbers and times as texts for people."""

from __future__ import annotations

import time


def size_text(size: float) -> str:
    """Bytes as ``812 B``, ``1.5 kB``, ``3.2 GB``; powers of 1000, as disks are sold."""
    if size < 1000:
        return f"{int(size)} B"
    units = ["kB", "MB", "GB", "TB"]
    size /= 1000
    while size >= 999.95 and len(units) > 1:
        size /= 1000
        units.pop(0)
    return f"{size:.1f} {units[0]}"


def duration_text(seconds: float) -> str:
    """Seconds as ``0.3 s``, ``4 min 12 s``, ``3 h 20 min``, ``2 d 4 h``."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, hours, days = int(seconds) // 60, int(seconds) // 3600, int(seconds) // 86400
    if days:
        return f"{days} d {hours % 24} h"
    if hours:
        return f"{hours} h {minutes % 60} min"
    return f"{minutes} min {int(seconds) % 60} s"


def when_text(unix_s: float) -> str:
    """Seconds since 1970 as local time, to the second; empty for 0 and for numbers that are no time."""
    if not unix_s:
        return ""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_s))
    except (OverflowError, ValueError, OSError):
        return ""


def count_text(count: int, noun: str) -> str:
    """``1 rank``, ``2 ranks``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
