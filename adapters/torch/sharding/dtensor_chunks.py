"""Finds which chunks of a sharded tensor are in the memory of this rank."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from ttp.adapters.torch.saving.checkpoint import Chunk, TensorOrChunks, chunks_of
from ttp.adapters.torch.sharding.fsdp1 import flat_pieces
from ttp.adapters.torch.sharding.local_chunks import boxes
from ttp.adapters.torch.sharding.names import ModelNames
from ttp.errors import ConfigError

Ranks = tuple[int, ...]

_Run = tuple[int, int, int]  # begin in the local tensor, begin in the whole tensor, length: along one dimension


def is_distributed(tensor: Any) -> bool:
    """Return whether a tensor is a ``DTensor``, without importing the module of that class."""
    library = sys.modules.get("torch.distributed.tensor")
    return library is not None and isinstance(tensor, library.DTensor)


def local(tensor: Any) -> Tensor:
    """Return the part of a tensor that is in the memory of this rank."""
    return tensor._local_tensor.detach() if is_distributed(tensor) else tensor


def cut_among(tensor: Any) -> Ranks:
    """Return the ranks over which a tensor is sharded, including this rank; empty if the tensor is not sharded.

    Tensors that are cut among the same ranks have the same replicas.

    Raises:
        ConfigError: the tensor is a partial sum, which was not reduced yet.
    """
    if not is_distributed(tensor):
        return ()
    placements = tensor.placements
    if any(placement.is_partial() for placement in placements):
        raise ConfigError(
            f"a parameter of shape {tuple(tensor.shape)} is a partial sum ({placements}): reduce it first"
        )
    cut = [dim for dim, placement in enumerate(placements) if not placement.is_replicate()]
    if not cut:
        return ()
    mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    where = tuple(slice(None) if dim in cut else coordinate[dim] for dim in range(mesh.ndim))
    return tuple(sorted(mesh.mesh[where].flatten().tolist()))


def mesh_ranks(tensor: Any) -> Ranks:
    """Return all ranks of the mesh of a distributed tensor; empty if the tensor is not distributed."""
    return tuple(sorted(tensor.device_mesh.mesh.flatten().tolist())) if is_distributed(tensor) else ()


def stored(tensor: Any) -> TensorOrChunks:
    """Return what this rank writes for a tensor; see ``Sharding.stored``."""
    if not is_distributed(tensor):
        return tensor
    shape, placed = tuple(tensor.shape), _placed(tensor)
    if not cut_among(tensor):
        return (Chunk(local(tensor), shape, (0,) * len(shape), placed=placed),)
    found = _chunks(local(tensor), shape, [_runs(tensor, dim) for dim in range(len(shape))])
    return tuple(replace(chunk, placed=placed) for chunk in found)


def _placed(tensor: Any) -> tuple[int, ...]:
    """See ``IndexEntry.placed``."""
    plain: Any = sys.modules["torch.distributed.tensor"]
    found = [0 if p.is_replicate() else p.dim + 1 if type(p) is plain.Shard else -1 for p in tensor.placements]
    return () if -1 in found else tuple(found)


def empty_beside(parameter: Any, shape: Sequence[int], dtype: torch.dtype, placed: Sequence[int]) -> Tensor | None:
    """Return a new ``DTensor`` on the mesh of ``parameter``, cut as ``placed`` says; None: its mesh is another one."""
    if not is_distributed(parameter) or len(placed) != parameter.device_mesh.ndim:
        return None
    library: Any = sys.modules["torch.distributed.tensor"]
    placements = [library.Shard(cut - 1) if cut else library.Replicate() for cut in placed]
    made: Tensor = library.empty(*shape, dtype=dtype, device_mesh=parameter.device_mesh, placements=placements)
    return made


def flat_chunks(piece: Tensor, shape: Sequence[int], start: int) -> tuple[Chunk, ...]:
    """Describe consecutive elements of a flattened tensor as rectangular chunks of that tensor.

    Args:
        piece: a vector of consecutive elements of the flattened tensor.
        shape: shape of the whole tensor.
        start: position of the first element of ``piece`` in the flattened tensor.
    """
    strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    inside = boxes(shape, strides, 0, start, start + piece.numel())
    return tuple(Chunk(box.of(piece, start), tuple(shape), box.offsets) for box in inside)


def _chunks(here: Tensor, shape: tuple[int, ...], runs: Sequence[Sequence[_Run]]) -> Iterator[Chunk]:
    for box in itertools.product(*runs):
        piece = here[tuple(slice(begin, begin + size) for begin, _, size in box)]
        yield Chunk(piece, shape, tuple(at for _, at, _ in box))


def _runs(tensor: Any, dim: int) -> list[_Run]:
    """Return, along one dimension, the ranges of the whole tensor on this rank, in the order of the local memory."""
    size, mesh = tensor.shape[dim], tensor.device_mesh
    cuts = [(n, p) for n, p in enumerate(tensor.placements) if not p.is_replicate() and p.dim == dim]
    if not cuts:
        return [(0, 0, size)]
    index = torch.arange(size, device="cpu")
    for number, placement in cuts:
        pieces = getattr(placement, "split_factor", 1)
        index = _part(index, pieces, mesh.size(number), mesh.get_coordinate()[number])
    if len(index) != tensor._local_tensor.shape[dim]:
        raise ConfigError(
            f"dimension {dim} of a tensor of shape {tuple(tensor.shape)}, cut as {tensor.placements}, has "
            f"{tensor._local_tensor.shape[dim]} elements here, not {len(index)}: ttp does not know how this version of "
            "torch cuts it. Use another placement, or another version of torch"
        )
    return _stretches(index) or [(0, size, 0)]


def _part(index: Tensor, pieces: int, parts: int, number: int) -> Tensor:
    """Cut ``index`` into ``pieces`` (one for a plain shard), each into ``parts``; return part ``number`` of each."""
    found = [
        chunks[number] for piece in torch.chunk(index, pieces) if number < len(chunks := torch.chunk(piece, parts))
    ]
    return torch.cat(found) if found else index[:0]


def _stretches(index: Tensor) -> list[_Run]:
    if not len(index):
        return []
    begins = [0, *((index.diff() != 1).nonzero().flatten() + 1).tolist(), len(index)]
    return [(here, int(index[here]), following - here) for here, following in itertools.pairwise(begins)]


class Cutter:
    """Describes how the parameters of a model, and the tensors that the optimizer keeps for them, are sharded.

    Args:
        model: the registered module.
        names: names of the model.
    """

    def __init__(self, model: nn.Module, names: ModelNames) -> None:
        self._flat = flat_pieces(model, names)

    def cut(self, owner: str, tensor: Tensor) -> Ranks:
        """Return the ranks over which a tensor is sharded: see ``cut_among``, and ``Sharding.stored`` for ``owner``."""
        return self._flat[owner].ranks if owner in self._flat else cut_among(tensor)

    def is_cut(self, owner: str, tensor: Tensor) -> bool:
        """Return whether the tensor is a distributed tensor or a part of a flat one."""
        return owner in self._flat or is_distributed(tensor)

    def shape(self, owner: str, tensor: Tensor) -> tuple[int, ...]:
        """Return the shape of the whole parameter."""
        return self._flat[owner].shape if owner in self._flat else tuple(tensor.shape)

    def stored(self, owner: str, tensor: Tensor) -> TensorOrChunks:
        """See ``Sharding.stored``."""
        piece = self._flat.get(owner)
        if piece is None or not piece.describes(tensor):
            return stored(tensor)
        shape = piece.shape
        nothing = Chunk(tensor.detach().new_empty((0,) * len(shape)), shape, (0,) * len(shape))
        return flat_chunks(piece.of(tensor), shape, piece.start) if piece.count else (nothing,)

    def chunks(self, owner: str, tensor: Tensor) -> Sequence[Chunk]:
        """Return the chunks of a tensor that are on this rank, for ``load_chunks``; see ``Sharding.stored``."""
        return chunks_of(self.stored(owner, tensor)) or ()

    def absent(self, owner: str) -> bool:
        """Return whether no part of a parameter is on this rank, so that its optimizer keeps nothing for it."""
        return owner in self._flat and not self._flat[owner].count
