"""Whether replicas still agree: a digest of what must be equal on them, and which tensors hold NaN or Inf.

A state of up to 64 MiB is looked at whole; of a larger one evenly spaced blocks, other ones at each version. Digests
can be compared at the same version and in the same mode only.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import xxhash

from ttp.adapters.mindspore.memory import Held

WHOLE_BYTES = 64 << 20
SAMPLE_BYTES = 16 << 20
_SHARE_MIN = 1 << 10
_BLOCK_BYTES = 64 << 10
_BAD_MAX = 8


class Inspector:
    """Looks at memory of the host.

    Args:
        mode: ``sample`` or ``all``.
    """

    def __init__(self, mode: str) -> None:
        self._mode = mode

    def look(self, held: Iterable[Held], version: int) -> tuple[str, tuple[str, ...]]:
        """Digest of the state of ``version``, and names of what is not finite. Nobody changes it meanwhile."""
        known = sorted(held, key=lambda h: h.name)
        total = sum(h.array.nbytes for h in known)
        whole = self._mode == "all" or total <= WHOLE_BYTES
        digest, bad = xxhash.xxh3_128(), list[str]()
        digest.update(json.dumps([(h.name, h.dtype, list(h.shape)) for h in known]).encode())
        for h in known:
            share = h.array.nbytes if whole else max(_SHARE_MIN, h.array.nbytes * SAMPLE_BYTES // total)
            finite = True
            for block in _blocks(h.array.reshape(-1), share, version):
                digest.update(memoryview(block.view(np.uint8)))
                finite = finite and _finite(block)
            if not finite:
                bad.append(h.name)
        return digest.hexdigest(), tuple(bad[:_BAD_MAX])


def _blocks(flat: Any, share: int, version: int) -> Iterator[Any]:
    """All of it, or blocks of about ``share`` bytes together."""
    if flat.nbytes <= share:
        yield flat
        return
    block = max(1, min(_BLOCK_BYTES, share) // flat.itemsize)
    count = max(1, share // (block * flat.itemsize))
    pitch = flat.size // count
    start = version * 40_503 % (pitch - block + 1)
    for number in range(count):
        yield flat[start + number * pitch : start + number * pitch + block]


def _finite(block: Any) -> bool:
    if block.size == 0 or block.dtype.kind in "iub":
        return True
    return bool(np.isfinite(block.astype(np.float32) if block.dtype.kind not in "fc" else block).all())


__all__: Sequence[str] = ["Inspector"]
