"""Describes the parts of the training state that a rank holds, for the comparison of ranks in ``discovery``."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
import xxhash
from torch import Tensor, nn

from ttp.adapters.torch.saving.checkpoint import TensorOrChunks
from ttp.adapters.torch.sharding import dtensor_chunks
from ttp.adapters.torch.sharding.data_parallel import pipeline_stages
from ttp.adapters.torch.sharding.dtensor_chunks import Ranks
from ttp.adapters.torch.sharding.fsdp1 import flat_scopes
from ttp.adapters.torch.sharding.names import module_tensors
from ttp.adapters.torch.sharding.sharding import TrainingObjects
from ttp.adapters.torch.tensor_memory import flat_bytes
from ttp.core.layout import Rank, Shard, compact_ranks
from ttp.errors import ConfigError
from ttp.store.encoding import decode, encode


@dataclass(frozen=True, slots=True)
class ShardEntry:
    """One tensor, or one extra state, of this rank.

    Args:
        name: its name in the checkpoint, with ``model.`` or ``extra.`` in front.
        shape: shape of the whole tensor; empty for an extra state.
        cut: the ranks over which it is cut; empty: it is not cut.
        part: offsets and sizes of the chunks on this rank, as text.
    """

    name: str
    shape: tuple[int, ...]
    cut: Ranks
    part: str


@dataclass(frozen=True, slots=True)
class StatedShards:
    """The description that one rank gives of one of its shards.

    Args:
        names: digest of the names and whole shapes of its tensors.
        parts: digest of names, whole shapes, and the part of each tensor that is on this rank.
        label: name of the shard in an explicit layout; empty: there is no such layout.
        alone: if DistributedDataParallel ignores the parameters of this shard, some of their names; else empty.
    """

    names: str
    parts: str
    label: str = ""
    alone: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RankShards:
    """The description that one rank gives of all of its shards.

    Args:
        shards: the shards that it holds.
        scopes: the lowest rank of each group of ranks that it trains with, which identifies the group.
        stages: numbers of the pipeline stages that it runs.
        groups: digest of the optimizer's param groups.
        frozen: digest of the content of the parameters that are not trained and that DistributedDataParallel ignores;
            empty: there are none.
        frozen_names: names of some of these parameters.
    """

    shards: tuple[StatedShards, ...]
    scopes: tuple[int, ...] = ()
    stages: tuple[int, ...] = ()
    groups: str = ""
    frozen: str = ""
    frozen_names: tuple[str, ...] = ()

    def encode(self) -> bytes:
        """Encode the description, for ``decode`` on other ranks."""
        shards = [[s.names, s.parts, s.label, s.alone] for s in self.shards]
        return encode([shards, self.scopes, self.stages, self.groups, self.frozen, self.frozen_names])

    @classmethod
    def decode(cls, data: bytes) -> RankShards:
        """Decode a description: inverse of ``encode``."""
        shards, *others = decode(data)
        return cls(tuple(StatedShards(*shard) for shard in shards), *others)


Key = Ranks | str
"""What the entries of one shard have in common: the ranks over which they are cut, or a shard of an explicit layout."""


ALONE: Key = (-1,)
"""The key of trained parameters that DistributedDataParallel ignores."""
UNWRAPPED: Key = (-2,)
"""The key of parameters that no DistributedDataParallel has; see ``TrainingObjects.unwrapped``."""
_LISTED_MAX = 4

UNNAMED: Key = ()
"""The key of entries that are not cut; with an explicit layout, of buffers and others that are not parameters."""


def held(parts: TrainingObjects, rank: int) -> dict[Key, list[ShardEntry]]:
    """Return the entries of this rank, by the key of their shard.

    Raises:
        ConfigError: an explicit layout does not tell the shard of a parameter.
    """
    found: dict[Key, list[ShardEntry]] = defaultdict(list)
    for entry in _parameters(parts):
        found[key_of(parts, entry.name.removeprefix("model."), rank)].append(entry)
    for entry in _others(parts):
        found[entry.cut if parts.layout is None else UNNAMED].append(entry)
    return found


def key_of(parts: TrainingObjects, name: str, rank: int) -> Key:
    """Return the key of the shard to which the parameter of this name belongs.

    Raises:
        ConfigError: an explicit layout does not tell the shard of the parameter.
    """
    if parts.layout is not None:
        return label_of(parts, name, rank)
    if name in parts.unwrapped:
        return UNWRAPPED
    return ALONE if parts.left_alone.get(name) else parts.cutter.cut(name, parts.names.parameters[name])


def view_of(parts: TrainingObjects, shards: Mapping[Key, Iterable[ShardEntry]]) -> RankShards:
    """Return the description of this rank, with its ``shards`` in the same order."""
    own = tuple(_stated(key, entries) for key, entries in shards.items())
    scopes = sorted({min(ranks) for ranks in _scopes(parts) if ranks})
    groups = [sorted(map(parts.names.of, group["params"])) for group in parts.optimizer.param_groups]
    frozen = [] if parts.layout is not None else sorted(n for n, trained in parts.left_alone.items() if not trained)
    content = _content([parts.names.parameters[name] for name in frozen]) if frozen else ""
    return RankShards(own, tuple(scopes), _stages(parts.model), _digest(groups), content, tuple(frozen[:_LISTED_MAX]))


def label_of(parts: TrainingObjects, name: str, rank: int) -> Shard:
    """Return the shard of an explicit layout to which a parameter of this rank belongs.

    Raises:
        ConfigError: this rank holds several shards and there is no ``shard_of``, or ``shard_of`` returns a shard that
            this rank does not hold.
    """
    assert parts.layout is not None
    mine = parts.layout.shards_of(Rank(rank))
    if parts.shard_of is None and len(mine) == 1:
        return mine[0]
    if parts.shard_of is None:
        raise ConfigError(
            f"in the layout rank {rank} holds {len(mine)} shards ({', '.join(mine[:4])}): give wrap_optimizer() "
            "shard_of=, a function from the name of a parameter to its shard"
        )
    shard = Shard(parts.shard_of(name))
    if shard not in mine:
        raise ConfigError(
            f"shard_of says that {name} belongs to {shard!r}, which rank {rank} does not hold in the layout: it holds "
            f"{', '.join(mine[:4])}"
        )
    return shard


# ------------------------------------------------------------------------------------------------ entries of this rank


def _parameters(parts: TrainingObjects) -> Iterator[ShardEntry]:
    for name, parameter in parts.names.parameters.items():
        cut, stored = parts.cutter.cut(name, parameter), parts.cutter.stored(name, parameter)
        yield ShardEntry(f"model.{name}", parts.cutter.shape(name, parameter), cut, _text(stored))


def _others(parts: TrainingObjects) -> Iterator[ShardEntry]:
    """Yield the entries that are saved and are not parameters: buffers, extra states, modules of ``extra_state``."""
    for name, buffer in parts.names.buffers.items():
        yield ShardEntry(
            f"model.{name}", tuple(buffer.shape), dtensor_chunks.cut_among(buffer), _text(dtensor_chunks.stored(buffer))
        )
    for name in parts.names.extra_states:
        yield ShardEntry(f"model.{name}", (), (), "")
    for key, module in parts.modules.items():
        for name, tensor in module_tensors(module).items():
            shape, part = tuple(tensor.shape), _text(dtensor_chunks.stored(tensor))
            yield ShardEntry(f"extra.{key}.{name}", shape, dtensor_chunks.cut_among(tensor), part)


def _text(stored: TensorOrChunks) -> str:
    chunks = stored if isinstance(stored, tuple) else ()
    return repr([(list(c.offsets), list(c.tensor.shape)) for c in chunks if c.tensor.numel()])


def _stated(key: Key, entries: Iterable[ShardEntry]) -> StatedShards:
    listed = sorted((e.name, list(e.shape), e.part) for e in entries)
    label = key if isinstance(key, str) else ""
    alone = tuple(row[0].removeprefix("model.") for row in listed[:_LISTED_MAX]) if key == ALONE else ()
    return StatedShards(_digest([row[:2] for row in listed]), _digest(listed), label, alone)


def _content(tensors: Iterable[Tensor]) -> str:
    """Return a digest of all bytes of these tensors. Their content is compared nowhere else."""
    digest = xxhash.xxh3_128()
    for tensor in tensors:
        memory = tensor.detach().cpu().contiguous()
        digest.update(repr((tensor.dtype, tuple(tensor.shape))).encode())
        content: Any = flat_bytes(memory).numpy()
        digest.update(content)
    return digest.hexdigest()


def _digest(value: Any) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:24]


def _scopes(parts: TrainingObjects) -> Iterator[Ranks]:
    """Yield the groups of ranks that train this model together, as its DDP and FSDP modules and meshes show them."""
    for ddp in parts.ddps:
        yield tuple(dist.get_process_group_ranks(ddp.process_group))
    yield from flat_scopes(parts.model)
    yield from {dtensor_chunks.mesh_ranks(parameter) for parameter in parts.model.parameters()}


def _stages(model: nn.Module) -> tuple[int, ...]:
    """Return the numbers of the ``torch.distributed.pipelining`` stages made of this model or of its submodules."""
    return tuple(sorted({stage.stage_index for stage in pipeline_stages(model)}))


def describe(view: RankShards, rank: int) -> str:
    """Return the text by which messages name a rank, with its pipeline stages."""
    return f"rank {rank}" + (f" (pipeline stage {compact_ranks(view.stages)})" if view.stages else "")
