"""Describes the parameters of FullyShardedDataParallel (FSDP1), which are stretches of one flat tensor.

Another library that cuts flat tensors is shown by a module with ``flat_pieces()``, which yields a ``FlatPiece`` for
each of its parameters.
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
        parameter: as the optimizer has it.
        owner: the flat tensor.
        shape: of the whole parameter.
        start: the first element that is here, counted in the flattened parameter.
        offset: its place in the memory of this rank.
        count: elements that are here.
        ranks: over which the flat tensor is cut.
    """

    parameter: Tensor
    owner: Any
    shape: tuple[int, ...]
    start: int
    offset: int
    count: int
    ranks: tuple[int, ...]

    def of(self, tensor: Tensor) -> Tensor:
        """The elements on this rank, of the parameter or of a tensor that belongs to it."""
        memory: Tensor | None = getattr(self.owner, "_local_shard", None)  # absent before the first forward pass
        if tensor is self.parameter and memory is not None:
            return memory.detach()[self.offset : self.offset + self.count]
        return tensor.detach()

    def describes(self, tensor: Tensor) -> bool:
        """Whether this is the parameter, or a tensor of the optimizer that is cut as the parameter is."""
        return tensor is self.parameter or tensor.shape == (self.count,)


def flat_pieces(model: nn.Module, names: ModelNames) -> dict[str, FlatPiece]:
    """Every parameter that FSDP1 has flattened, by each of its names.

    Raises:
        ConfigError: the flat tensor itself is the parameter.
    """
    by_identity: dict[int, FlatPiece] = {}
    for module in _wrapped(model):
        handle: Any = module._handle
        if handle is None or not handle.uses_sharded_strategy:
            continue
        if not handle._use_orig_params:
            raise ConfigError(
                "FullyShardedDataParallel without use_orig_params=True hides the parameters from their optimizer: set "
                "it, or use fully_shard()"
            )
        by_identity.update((id(piece.parameter), piece) for piece in _pieces(handle))
    for module in model.modules():
        if (others := getattr(module, "flat_pieces", None)) is not None:
            by_identity.update((id(piece.parameter), piece) for piece in others())
    return {name: by_identity[id(p)] for name, p in names.parameters.items() if id(p) in by_identity}


def flat_scopes(model: nn.Module) -> Iterator[tuple[int, ...]]:
    """The groups of ranks that FSDP1 trains with: those it cuts among, and those it copies among."""
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
