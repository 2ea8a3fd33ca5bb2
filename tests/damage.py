"""Damages files without changing their size, as broken memory or a broken disk does."""

from __future__ import annotations

from pathlib import Path


def flip(file: Path, at: int | None = None) -> None:
    """Flip one bit of the byte ``at``; None: of the byte in the middle."""
    data = bytearray(file.read_bytes())
    data[len(data) // 2 if at is None else at] ^= 1
    file.write_bytes(data)
