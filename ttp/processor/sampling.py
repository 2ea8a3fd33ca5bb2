"""Chooses which bytes of a state are read, to compare it with other replicas and to find NaN and Inf in it.

By default a sample is read: everything if the state is small, else evenly spaced blocks of every tensor. The choice of
blocks depends on the version, so a later save can find damage that an earlier one missed. Digests can be compared only
if they are of the same version and were made in the same mode (``TTP_DIGEST``).
"""

from __future__ import annotations

from typing import NamedTuple

WHOLE_BYTES = 64 << 20
"""The largest state, in bytes, that is read whole. That takes about 10 ms of one core."""
SAMPLE_BYTES = 16 << 20
"""Bytes that are read of a larger state. Each costs more to read, because they are spread over the memory."""
SHARE_MIN = 1 << 10
"""The least number of bytes that is read of each tensor, however large the other tensors are."""
BLOCK_BYTES = 64 << 10
BAD_MAX = 8
"""Number of names of tensors with NaN or Inf that are reported."""


class Blocks(NamedTuple):
    """Evenly spaced blocks of a tensor; all numbers count elements, but ``number`` counts blocks."""

    size: int
    number: int
    pitch: int
    start: int


def blocks_of(elements: int, itemsize: int, *, total: int, mode: str, version: int) -> Blocks | None:
    """Return the blocks of a tensor to read; None: all of it is read.

    Args:
        elements: number of elements of the tensor.
        itemsize: bytes of an element.
        total: bytes of the whole state.
        mode: ``sample`` or ``all``, as in ``TTP_DIGEST``.
        version: version of the state.
    """
    if mode == "all" or total <= WHOLE_BYTES:
        return None
    share = max(SHARE_MIN, elements * itemsize * SAMPLE_BYTES // total)
    if elements * itemsize <= share:
        return None
    size = min(BLOCK_BYTES, share) // itemsize
    number = max(1, share // (size * itemsize))
    pitch = elements // number
    return Blocks(size, number, pitch, version * 40_503 % (pitch - size + 1))
