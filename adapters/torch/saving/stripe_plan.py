"""Divides the entries of a shard into parts, which replicas write side by side without asking each other.

All replicas deal alike, because only names, shapes and types count: the tensors that replicas are known to agree on
(those that ``inspection`` compares) are laid end to end in the order of their names, and that line is cut into parts of
the same number of bytes. A tensor that a cut goes through is written as two ``Chunk``s along its first dimension; there
are no more than one for each cut. Everything else is in the first part: plain values, buffers (healthy replicas differ
in them), averages of the weights.

What depends on the rank after all (a module on rank 0 only) is noticed before anything is lost: the parts carry a
digest of how their writer dealt, and the controller has a shard written whole if those differ. The last word has the
committer: every tensor must be there exactly once (``metadata``).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ttp.adapters.torch.saving.checkpoint import Chunk, Leaf, chunks_of
from ttp.adapters.torch.saving.piece_index import StatePath
from ttp.store.digest import digest_bytes

CUT_MIN = 1 << 20
"""A smaller tensor is not cut: half of one is all that parts may differ by."""


@dataclass(frozen=True, slots=True)
class Share:
    """Part ``index`` of ``count``.

    Args:
        index: from 1.
        count: of parts.
        agreed: whether replicas agree on what is at a path; the rest is in the first part.
    """

    index: int
    count: int
    agreed: Callable[[StatePath], bool]

    def of(self, entries: Iterable[Leaf]) -> tuple[list[Leaf], str]:
        """The entries of a shard that are in this part, and a digest of how the shard was divided."""
        listed = sorted(entries, key=lambda entry: tuple(map(str, entry[0])))
        stacks = [chunks_of(value) if self.agreed(path) else None for path, _, value in listed]
        rest = [value for (_, _, value), stack in zip(listed, stacks, strict=True) if stack is None]
        fixed = sum(_size(chunks_of(value) or ()) for value in rest)
        line = _Line(stack for stack in stacks if stack is not None)
        bounds = _bounds(fixed, line.size, self.count)
        mine: list[Leaf] = []
        told: list[Any] = [self.count, fixed]
        for (path, int_keys, value), stack in zip(listed, stacks, strict=True):
            if stack is None:
                mine += [(path, int_keys, value)] * (self.index == 1)
                continue
            at, pieces = line.cut(stack, bounds, self.index - 1)
            if pieces:
                mine.append((path, int_keys, value if _size(pieces) == _size(stack) else tuple(pieces)))
            told.append([list(map(str, path)), at, [_described(chunk) for chunk in stack]])
        return mine, digest_bytes(json.dumps(told).encode())


Stack = Sequence[Chunk]
"""The chunks of one tensor."""


class _Line:
    """Where on the line each tensor lies; what is one tensor under several names (tied weights) lies there once."""

    def __init__(self, stacks: Iterable[Stack]) -> None:
        self.size = 0
        self._at: dict[tuple[Any, ...], int] = {}
        for stack in stacks:
            if _identity(stack) not in self._at:
                self._at[_identity(stack)] = self.size
                self.size += _size(stack)

    def cut(self, stack: Stack, bounds: Sequence[float], wanted: int) -> tuple[int, list[Chunk]]:
        """Where it begins, and what of it is between the bounds number ``wanted`` and the next."""
        begin = at = self._at[_identity(stack)]
        found: list[Chunk] = []
        for chunk in stack:
            found += _cut(chunk, at, bounds, wanted)
            at += _bytes(chunk)
        return begin, found


def _cut(chunk: Chunk, at: int, bounds: Sequence[float], wanted: int) -> Iterator[Chunk]:
    size = _bytes(chunk)
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
    """Where the line is cut, when the first part has ``fixed`` bytes beside it."""
    first = max(0.0, (fixed + size) / count - fixed)
    return [first + k * (size - first) / (count - 1) for k in range(count - 1)]


def _identity(stack: Stack) -> tuple[Any, ...]:
    """Equal for the same memory, seen in the same way: then it is written once, as ``write_shard`` does it."""
    return tuple((_address(c.tensor), c.tensor.stride(), *map(str, _described(c))) for c in stack)


def _address(tensor: Tensor) -> tuple[bool, int]:
    plain = tensor.layout is torch.strided and tensor.numel() > 0
    return (True, tensor.data_ptr()) if plain else (False, id(tensor))


def _described(chunk: Chunk) -> list[Any]:
    return [str(_dtype(chunk)), list(chunk.tensor.shape), list(chunk.offsets), list(chunk.shape)]


def _dtype(chunk: Chunk) -> torch.dtype:
    return chunk.dtype or chunk.tensor.dtype


def _bytes(chunk: Chunk) -> int:
    return chunk.tensor.numel() * _dtype(chunk).itemsize


def _size(stack: Stack) -> int:
    return sum(map(_bytes, stack))
