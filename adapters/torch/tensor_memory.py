"""Looks at tensors as memory: which are plain, in which order their elements lie, and their bytes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

_T = TypeVar("_T")

_SAMPLED = 64
"""Number of elements in a sample of a tensor."""


def is_plain(tensor: Tensor) -> bool:
    """Return whether the memory of a tensor is its elements: it is strided, not quantised, and of no subclass."""
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided and not tensor.is_quantized


def memory_order(tensor: Tensor) -> list[int]:
    """Return the dimensions as they lie in memory, the outermost first."""
    return sorted(range(tensor.dim()), key=tensor.stride, reverse=True)


def flat_bytes(tensor: Tensor) -> Tensor:
    """Return a view of the memory of a dense tensor as a vector of bytes; see ``as_viewed``."""
    # A dimension of size 1 may have any stride, which reshape(-1) would keep.
    memory = as_viewed(tensor.detach(), tensor)
    return memory.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def as_viewed(memory: Tensor, tensor: Tensor) -> Tensor:
    """Return ``memory`` conjugated and negated if ``tensor`` is such a view of its own memory (``Tensor.conj()``)."""
    turned = memory.conj() if tensor.is_conj() else memory
    return torch._neg_view(turned) if tensor.is_neg() else turned


def sample_of(tensor: Tensor) -> Tensor:
    """Return a copy of some elements in the middle of a tensor that is not empty, as bytes on its device."""
    row = tensor.detach()[tuple(size // 2 for size in tensor.shape[:-1])]
    return flat_bytes(row.reshape(-1)[:_SAMPLED].clone())


def copied_bytes(tensor: Tensor) -> bytes:
    """Return a copy of the elements of a strided tensor, on the host, as bytes."""
    return flat_bytes(tensor.detach().resolve_conj().resolve_neg().contiguous()).numpy().tobytes()


def packs(
    items: Iterable[_T], tensor_of: Callable[[_T], Tensor], bytes_max: int, kind_of: Callable[[_T], object]
) -> Iterator[list[_T]]:
    """Group consecutive items whose tensors are of one kind and have ``bytes_max`` bytes at most, unless it is one."""
    pack: list[_T] = []
    size = 0
    for item in items:
        added = tensor_of(item).nbytes
        if pack and (size + added > bytes_max or kind_of(item) != kind_of(pack[0])):
            yield pack
            pack, size = [], 0
        pack.append(item)
        size += added
    if pack:
        yield pack


Copies = tuple[list[Tensor], list[Tensor]]
"""Targets and sources of copies."""


def by_kind(pairs: Iterable[tuple[Tensor, Tensor]]) -> list[Copies]:
    """Group pairs of target and source by device and dtype: torch would copy a mixed list tensor by tensor."""
    kinds: defaultdict[tuple[Any, Any], Copies] = defaultdict(lambda: ([], []))
    for target, source in pairs:
        targets, sources = kinds[target.device, target.dtype]
        targets.append(target)
        sources.append(source)
    return list(kinds.values())
