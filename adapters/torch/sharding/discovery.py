"""Finds which ranks hold the same parts of the training state, by comparing the tensors of all ranks.

Theory of operation
-------------------
Tensors of a rank that are cut among the same ranks (``dtensor_chunks.cut_among``) have the same replicas: together they
are one shard of this rank. Tensors that are not cut are another. A rank describes each of its shards (names, whole
shapes, which part is on this rank), and the ranks exchange digests of these descriptions once: ranks with the same
digest hold the same shard. The process groups of sharding libraries need not be known, and a thousand ranks exchange
some hundred kilobytes.

Equal names and shapes do not prove equal content: two pipeline stages may both call a layer ``0.weight``. So ranks
count as replicas of each other only if they are connected, by the meshes of distributed tensors or the groups of
DistributedDataParallel modules. If nothing connects any ranks (gradients are reduced by hand), all count as connected,
and their weights are compared once (``unconnected``).
All other cases are refused, because a name in a checkpoint must stand for one thing.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ttp.adapters.torch.saving.checkpoint import TensorOrChunks
from ttp.adapters.torch.sharding.exchange import broadcast_bytes, gather_or_refuse
from ttp.adapters.torch.sharding.names import first_of
from ttp.adapters.torch.sharding.shard_discovery import Key, RankShards, ShardEntry, describe, held, key_of, view_of
from ttp.adapters.torch.sharding.sharding import Sharding, TrainingObjects
from ttp.core.layout import REPLICATED, Layout, Rank, Shard, compact_ranks
from ttp.errors import ConfigError
from ttp.store.encoding import decode, encode

log = logging.getLogger("ttp.adapters.torch")

COMMON = "common"
"""Name of the shard that every rank holds, in a job with further shards; with ZeRO-1 the state in no partition."""
_LISTED_MAX = 4

Identity = tuple[Any, ...]
"""A value that identifies a shard: ranks that hold the same shard compute the same value."""

RENAME = (
    "give every stage names of its own, as torch.distributed.pipelining does: for example wrap it, "
    "nn.ModuleDict({'stage1': stage})"
)


class FoundSharding(Sharding):
    """The sharding that ``discover`` has found by comparing all ranks.

    Args:
        parts: the objects of the job.
        layout: the replica groups of the job.
        mine: the shards of this rank, by the key that their tensors have in common.
        flat_groups: True if param groups differ between ranks.
        elsewhere: names that only other ranks have.
    """

    def __init__(
        self,
        parts: TrainingObjects,
        layout: Layout,
        mine: Mapping[Key, Shard],
        flat_groups: bool,
        elsewhere: Collection[str],
    ) -> None:
        super().__init__(parts, layout)
        self.flat_groups, self._elsewhere = flat_groups, frozenset(elsewhere)
        self._cutter, self._mine, self._explicit = parts.cutter, dict(mine), parts.layout is not None
        self._parameters: dict[Shard, list[str]] = defaultdict(list)
        for name in parts.names.parameters:
            self._parameters[self._mine[key_of(parts, name, dist.get_rank())]].append(name)

    def parameters_of(self, shard: Shard) -> Collection[str]:
        """See ``Sharding``."""
        if len(self.layout.groups) == 1:
            return self._names.parameters.keys()  # also those that were added after the discovery
        return self._parameters.get(shard, ())

    def carries(self, shard: Shard, value: Any) -> bool:
        """See ``Sharding``. Every shard carries tensors made after the discovery, and any with an explicit layout."""
        return self._explicit or self._mine.get(self._cutter.cut("", value), shard) == shard

    def stored(self, owner: str, tensor: Tensor) -> TensorOrChunks:
        """See ``Sharding``."""
        return self._cutter.stored(owner, tensor)

    def elsewhere(self) -> Collection[str]:
        """See ``Sharding``."""
        return self._elsewhere


def discover(parts: TrainingObjects) -> FoundSharding:
    """Find the sharding by exchanging descriptions between all ranks. A collective call.

    Raises:
        ConfigError: ranks use one name for different things, parameters that DistributedDataParallel ignores cannot be
            assigned, or an explicit layout does not fit the tensors; the text says what to do.
    """
    me = dist.get_rank()
    mine: dict[Key, list[ShardEntry]] = {}

    def view() -> bytes:
        mine.update(held(parts, me))
        return view_of(parts, mine).encode()

    views = [RankShards.decode(data) for data in gather_or_refuse(view)]
    shards = same_shards(views)
    if parts.layout is None:
        refuse_left_alone(views)
        refuse_strangers(shards, views)
        layout, names = named(shards, parts.world_size)
    else:
        layout = parts.layout
        names = explicit({i: ranks for i, ranks in shards.items() if i[-1] in layout.groups}, layout)
    elsewhere = _names_elsewhere(views, mine, me)
    found = {key: names[i] for key, i in zip(mine, _identities(views)[me], strict=True) if i in names}
    flat = len({view.groups for view in views}) > 1
    if me == 0 and layout.unreplicated() and not parts.buddy:
        log.warning("%s", _alone(layout))
    return FoundSharding(parts, layout, found, flat, elsewhere)


# ------------------------------------------------------------------- which ranks hold the same shard: pure functions


def same_shards(views: Sequence[RankShards]) -> dict[Identity, tuple[Rank, ...]]:
    """Return the ranks that hold each shard, ordered by their lowest ranks. ``views`` has one description per rank."""
    found: dict[Identity, list[Rank]] = defaultdict(list)
    for rank, identities in enumerate(_identities(views)):
        for identity in identities:
            found[identity].append(Rank(rank))
    return {identity: tuple(ranks) for identity, ranks in found.items()}


def _identities(views: Sequence[RankShards]) -> list[list[Identity]]:
    """Return for each rank the identities of its shards."""
    return [
        [(own.parts, own.label) if own.label else (own.parts, connected, view.stages) for own in view.shards]
        for view, connected in zip(views, _components(views), strict=True)
    ]


def _components(views: Sequence[RankShards]) -> list[int]:
    """Return for each rank the lowest rank to which it is connected, directly or through other ranks."""
    if not any(view.scopes for view in views):
        return [0] * len(views)
    parent = list(range(len(views)))

    def root(rank: int) -> int:
        while parent[rank] != rank:
            parent[rank] = rank = parent[parent[rank]]
        return rank

    for rank, view in enumerate(views):
        for lowest in view.scopes:
            one, two = sorted((root(rank), root(lowest)))
            parent[two] = one
    return [root(rank) for rank in range(len(views))]


def refuse_strangers(shards: Mapping[Identity, Sequence[Rank]], views: Sequence[RankShards]) -> None:
    """Refuse ranks that hold parameters of the same names and shapes, but are not connected.

    Raises:
        ConfigError: there are such ranks.
    """
    first: dict[str, Sequence[Rank]] = {}
    for identity, ranks in shards.items():
        other = first.setdefault(identity[0], ranks)
        if other is not ranks:
            one, two = (describe(views[group[0]], group[0]) for group in (other, ranks))
            raise ConfigError(
                f"{one} and {two} hold parameters of the same names and shapes, and neither a mesh nor a "
                f"DistributedDataParallel connects them. If they are different parts of the model, {RENAME}. With "
                "tensor parallelism use fully_shard() or replicate(): DistributedDataParallel takes the mesh from its "
                "parameters. If they are replicas, give wrap_optimizer() layout=ttp.Layout(world_size, {shard: ranks, "
                "...})"
            )


def refuse_left_alone(views: Sequence[RankShards]) -> None:
    """Refuse parameters that DistributedDataParallel was told to ignore, if it is unknown which ranks have copies.

    Trained parameters are accepted if their names differ between ranks: then each rank has a shard of its own.
    Parameters that are not trained are accepted if they are equal on all ranks.

    Raises:
        ConfigError: there are other such parameters.
    """
    holders: dict[str, list[Rank]] = defaultdict(list)
    listed: dict[str, tuple[str, ...]] = {}
    for rank, view in enumerate(views):
        for shard in view.shards:
            if shard.alone:
                holders[shard.names].append(Rank(rank))
                listed[shard.names] = shard.alone
    for names, ranks in holders.items():
        if len(ranks) > 1:
            raise ConfigError(
                f"DistributedDataParallel was told to ignore {', '.join(listed[names])}, so nothing makes these "
                f"parameters equal on ranks {compact_ranks(ranks)}, and the optimizer trains them under the same names "
                "on all these ranks: a checkpoint would hold the values of one rank only. If they are different "
                "parameters (experts), give them a name of their own on each rank, for example "
                "nn.ModuleDict({f'expert{rank}': expert}); only that rank can then save them, unless wrap_optimizer() "
                "is given buddy=True. If they are copies that the program keeps equal itself, say so: wrap_optimizer("
                f"layout=ttp.Layout.data_parallel({len(views)}))"
            )
    contents: dict[tuple[str, ...], str] = {}
    for view in views:
        if view.frozen and contents.setdefault(view.frozen_names, view.frozen) != view.frozen:
            raise ConfigError(
                f"DistributedDataParallel was told to ignore {', '.join(view.frozen_names)}, which no optimizer "
                "trains, and they are not equal on all ranks: a checkpoint would hold the values of one rank only. "
                "Make them equal, or give them a name of their own on each rank"
            )


def named(shards: Mapping[Identity, Sequence[Rank]], world_size: int) -> tuple[Layout, dict[Identity, Shard]]:
    """Name the shards.

    A single shard that all ranks hold is called ``model``. If there are several shards, those that all ranks hold are
    called ``common``, the others ``model-0`` and so on.

    Returns:
        The layout, and the name of each shard.
    """
    names: dict[Identity, Shard] = {}
    cut = [identity for identity, ranks in shards.items() if len(ranks) < world_size]
    width = len(str(max(0, len(cut) - 1)))
    for number, identity in enumerate(cut):
        names[identity] = Shard(f"{REPLICATED}-{number:0{width}d}")
    for number, identity in enumerate(identity for identity in shards if identity not in names):
        names[identity] = Shard(f"{COMMON}-{number}" if number else COMMON) if len(shards) > 1 else REPLICATED
    return Layout(world_size, {names[identity]: tuple(ranks) for identity, ranks in shards.items()}), names


def explicit(shards: Mapping[Identity, Sequence[Rank]], layout: Layout) -> dict[Identity, Shard]:
    """Return the name that an explicit layout gives to each shard.

    Raises:
        ConfigError: ranks that hold copies of one shard in the layout have different parameters, two shards have the
            same names and shapes, or a shard of the layout has no parameters.
    """
    first: dict[str, Sequence[Rank]] = {}
    meant: dict[str, str] = {}
    for (parts, label), ranks in shards.items():
        if (twin := meant.setdefault(parts, label)) != label:
            raise ConfigError(
                f"shards {twin!r} and {label!r} of the layout have parameters of the same names and shapes, and a "
                f"checkpoint can have one of each name: {RENAME}"
            )
        other = first.setdefault(label, ranks)
        if other is not ranks:
            raise ConfigError(
                f"in the layout ranks {compact_ranks([other[0], ranks[0]])} hold copies of shard {label!r}, but their "
                "parameters differ in names, shapes or the way they are cut: give each shard the ranks that hold the "
                "same parameters"
            )
    silent = [shard for shard in layout.groups if shard not in first]
    if silent:
        raise ConfigError(f"no parameter belongs to shard {silent[0]!r} of the layout: remove that shard")
    return {identity: Shard(identity[1]) for identity in shards}


# ------------------------------------------------------------------------------------------------ names of other ranks


def _names_elsewhere(views: Sequence[RankShards], mine: Mapping[Key, Iterable[ShardEntry]], me: int) -> set[str]:
    """Return the names in the model that only other ranks have (other pipeline stages). A collective call.

    Names that every rank holds are not sent, so most jobs send nothing; the others are sent once per stage.

    Raises:
        ConfigError: this rank and another one use a name for different things.
    """
    speakers: dict[str, int] = {}
    holders: dict[str, set[int]] = defaultdict(set)
    for rank, view in enumerate(views):
        for shard in view.shards:
            speakers.setdefault(shard.names, rank)
            holders[shard.names].add(rank)
    own = {shard.names: [e.name for e in mine[key]] for shard, key in zip(views[me].shards, mine, strict=True)}
    known = {name: digest for digest, names in own.items() for name in names}
    others: set[str] = set()
    problem = ""
    for digest, speaker in speakers.items():
        if len(holders[digest]) == len(views):
            continue
        names = decode(broadcast_bytes(encode(own.get(digest, [])), speaker))
        clash = [name for name in names if known.setdefault(name, digest) != digest]
        problem = problem or (_clash(clash, describe(views[speaker], speaker), len(views)) if clash else "")
        if digest not in own:
            others.update(names)
    if problem:
        raise ConfigError(problem)
    return {name.removeprefix("model.") for name in others if name.startswith("model.")}


def _alone(layout: Layout) -> str:
    alone = layout.unreplicated()
    return (
        f"{len(alone)} of {len(layout.groups)} shards ({first_of(alone, _LISTED_MAX)}) are on one rank each: when that "
        "rank dies, nothing can be saved. Training goes on; to be protected, keep two copies of each shard, for "
        "example with fully_shard() over a mesh of two dimensions: init_device_mesh(device, (2, world_size // 2), "
        'mesh_dim_names=("replicate", "shard")), or give wrap_optimizer() buddy=True'
    )


def _clash(names: Sequence[str], where: str, world_size: int) -> str:
    listed = first_of([name.partition(".")[2] for name in names], _LISTED_MAX)
    return (
        f"{where} and other ranks have different tensors under the same name ({listed}), or equal ones beside tensors "
        f"that differ. If they differ, {RENAME}. If they are copies that the program keeps equal (the outer weights of "
        f"DiLoCo), give wrap_optimizer() layout=ttp.Layout({world_size}, {{shard: ranks, ...}}) and shard_of="
    )
