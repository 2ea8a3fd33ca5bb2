"""Divides the entries of a shard into parts, which replicas write side by side without communicating.

All replicas divide a shard in the same way, because the division depends on names, shapes and types only. The tensors
on which replicas are compared (see ``inspection``) are laid end to end in the order of their names, and that line is
cut into parts of the same number of bytes. A tensor that a cut goes through is written as two ``Chunk``s, divided along
its first dimension of more than one element; each cut goes through one tensor at most. All other values are in the
first part: plain values, buffers (in which healthy replicas differ), averages of the weights.

If the division depends on the rank after all (a module on rank 0 only), this is found before the checkpoint is
committed: each part carries a digest of how its writer divided the shard, and if digests differ, the controller has one
rank write the whole shard. Finally the committer checks that every tensor is there exactly once (``metadata``).
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ttp.adapters.torch.saving.checkpoint import Chunk, chunks_of
from ttp.adapters.torch.saving.flatten_state import StateValue
from ttp.adapters.torch.saving.piece_index import StatePath
from ttp.store.digest import digest_bytes

CUT_MIN = 1 << 20
"""A tensor of fewer bytes is not cut, so the sizes of parts may differ by half of this size."""


@dataclass(frozen=True, slots=True)
class Share:
    """One of the parts into which a shard is divided.

    Args:
        index: number of this part, from 1.
        count: number of parts.
        agreed: returns whether replicas are compared on the value at a path; all other values are in the first part.
    """

    index: int
    count: int
    agreed: Callable[[StatePath], bool]

    def select(self, entries: Iterable[StateValue]) -> tuple[list[StateValue], str]:
        """Return the entries of a shard that are in this part, and a digest of how the shard was divided."""
        listed = sorted(entries, key=lambda entry: tuple(map(str, entry.path)))
        tensors = [chunks_of(entry.value) if self.agreed(entry.path) else None for entry in listed]
        rest = [entry.value for entry, chunks in zip(listed, tensors, strict=True) if chunks is None]
        fixed = sum(_size(chunks_of(value) or ()) for value in rest)
        # Tied weights are there once.
        distinct = {_identity(chunks): chunks for chunks in tensors if chunks is not None}
        places = list(itertools.accumulate(map(_size, distinct.values()), initial=0))
        begins = dict(zip(distinct, places, strict=False))
        bounds = _bounds(fixed, places[-1], self.count)
        mine: list[StateValue] = []
        description: list[Any] = [self.count, fixed]
        for entry, chunks in zip(listed, tensors, strict=True):
            if chunks is None:
                mine += [entry] * (self.index == 1)
                continue
            at = begins[_identity(chunks)]
            pieces = list(_cut(chunks, at, bounds, self.index - 1))
            if pieces:
                mine.append(entry if _size(pieces) == _size(chunks) else entry._replace(value=tuple(pieces)))
            description.append([list(map(str, entry.path)), at, [_described(chunk) for chunk in chunks]])
        return mine, digest_bytes(json.dumps(description).encode())


def _cut(chunks: Sequence[Chunk], at: int, bounds: Sequence[float], wanted: int) -> Iterator[Chunk]:
    """Yield the chunks inside the part number ``wanted`` (from 0) of a tensor that begins at ``at`` on the line."""
    for chunk in chunks:
        yield from _cut_chunk(chunk, at, bounds, wanted)
        at += chunk.nbytes


def _cut_chunk(chunk: Chunk, at: int, bounds: Sequence[float], wanted: int) -> Iterator[Chunk]:
    size = chunk.nbytes
    dim = next((d for d, n in enumerate(chunk.tensor.shape) if n > 1), None)
    rows = chunk.tensor.shape[dim] if dim is not None and size >= CUT_MIN else 1
    pitch = size / rows

    def row(bound: float) -> int:
        return min(rows, max(0, round((bound - at) / pitch))) if pitch else int(bound > at)

    first = row(bounds[wanted - 1]) if wanted else 0
    last = row(bounds[wanted]) if wanted < len(bounds) else rows
    if first >= last:
        return
    if last - first == rows:
        yield chunk
        return
    assert dim is not None
    offsets = (*chunk.offsets[:dim], chunk.offsets[dim] + first, *chunk.offsets[dim + 1 :])
    yield replace(chunk, tensor=chunk.tensor.detach().narrow(dim, first, last - first), offsets=offsets)


def _bounds(fixed: int, size: int, count: int) -> list[float]:
    """Return where to cut the line. The first part also has ``fixed`` bytes that are not on the line."""
    first = max(0.0, (fixed + size) / count - fixed)
    return [first + k * (size - first) / (count - 1) for k in range(count - 1)]


def _identity(chunks: Sequence[Chunk]) -> tuple[Any, ...]:
    """Return a value that is the same for tensors of the same memory and form, which ``write_shard`` writes once."""
    return tuple((_address(c.tensor), c.tensor.stride(), *map(str, _described(c))) for c in chunks)


def _address(tensor: Tensor) -> tuple[bool, int]:
    plain = tensor.layout is torch.strided and tensor.numel() > 0
    return (True, tensor.data_ptr()) if plain else (False, id(tensor))


def _described(chunk: Chunk) -> list[Any]:
    return [str(chunk.stored_dtype), list(chunk.tensor.shape), list(chunk.offsets), list(chunk.shape)]


def _size(chunks: Sequence[Chunk]) -> int:
    return sum(chunk.nbytes for chunk in chunks)
