"""Describes the parameters of FullyShardedDataParallel (FSDP1), which are ranges of one flat tensor.

A module of another library that shards flat tensors can describe them by a method ``flat_pieces()``, which yields a
``FlatPiece`` for each of its parameters.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from ttp.adapters.torch.sharding.names import ModelNames
from ttp.errors import ConfigError


@dataclass(frozen=True, slots=True)
class FlatPiece:
    """The part of one parameter that is on this rank.

    Args:
        parameter: the parameter object that the optimizer has.
        owner: the flat tensor.
        shape: shape of the whole parameter.
        start: position, in the flattened parameter, of the first element on this rank.
        offset: position of that element in this rank's memory of the flat tensor.
        count: number of elements on this rank.
        ranks: the ranks over which the flat tensor is cut.
    """

    parameter: Tensor
    owner: Any
    shape: tuple[int, ...]
    start: int
    offset: int
    count: int
    ranks: tuple[int, ...]

    def of(self, tensor: Tensor) -> Tensor:
        """Return the elements on this rank, of the parameter or of a tensor that the optimizer keeps for it."""
        memory: Tensor | None = getattr(self.owner, "_local_shard", None)  # absent before the first forward pass
        if tensor is self.parameter and memory is not None:
            return memory.detach()[self.offset : self.offset + self.count]
        return tensor.detach()

    def describes(self, tensor: Tensor) -> bool:
        """Return whether ``tensor`` is the parameter, or a tensor of the optimizer that is cut as the parameter is."""
        return tensor is self.parameter or tensor.shape == (self.count,)


def flat_pieces(model: nn.Module, names: ModelNames) -> dict[str, FlatPiece]:
    """Return the piece of every flattened parameter, by each of the parameter's names.

    Raises:
        ConfigError: FSDP1 was used without ``use_orig_params=True``, so the optimizer has the flat tensors instead of
            the parameters.
    """
    by_identity: dict[int, FlatPiece] = {}
    for module in _wrapped(model):
        handle: Any = module._handle
        if handle is None or not handle.uses_sharded_strategy:
            continue
        if not handle._use_orig_params:
            raise ConfigError(
                "FullyShardedDataParallel without use_orig_params=True gives the optimizer flat tensors instead of "
                "the parameters: set use_orig_params=True, or use fully_shard()"
            )
        by_identity.update((id(piece.parameter), piece) for piece in _pieces(handle))
    for module in model.modules():
        if (others := getattr(module, "flat_pieces", None)) is not None:
            by_identity.update((id(piece.parameter), piece) for piece in others())
    return {name: by_identity[id(p)] for name, p in names.parameters.items() if id(p) in by_identity}


def flat_scopes(model: nn.Module) -> Iterator[tuple[int, ...]]:
    """Yield the groups of ranks over which FSDP1 shards parameters, and over which it replicates the shards."""
    for module in _wrapped(model):
        for group in (module.process_group, getattr(module, "_inter_node_pg", None)):
            if group is not None:
                yield tuple(dist.get_process_group_ranks(group))


def _pieces(handle: Any) -> Iterator[FlatPiece]:
    flat = handle.flat_param
    ranks = tuple(sorted(dist.get_process_group_ranks(handle.process_group)))
    for parameter, info, shape in zip(flat._params, flat._shard_param_infos, flat._shapes, strict=True):
        here = (info.intra_param_start_idx, info.offset_in_shard, info.numel_in_shard) if info.in_shard else (0, 0, 0)
        start, offset, count = here
        yield FlatPiece(parameter, flat, tuple(shape), start, offset, count, ranks)


def _wrapped(model: nn.Module) -> Iterator[Any]:
    library: Any = sys.modules.get("torch.distributed.fsdp")
    for module in model.modules() if library is not None else ():
        if isinstance(module, library.FullyShardedDataParallel):
            yield module
