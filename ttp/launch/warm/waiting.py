"""Waits for a descriptor of any number: ``select.select`` takes none above 1023, and a launcher may inherit many."""

from __future__ import annotations

import select


def readable(descriptor: int, within_s: float) -> bool:
    """Wait until a descriptor can be read, or is closed; False: neither came within ``within_s`` seconds."""
    waiting = select.poll()
    waiting.register(descriptor, select.POLLIN)
    return bool(waiting.poll(max(0.0, within_s) * 1000))
