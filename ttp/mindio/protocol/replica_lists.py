"""Decide which ranks save and which ranks repair others, in jobs whose programs declare the replica sets.

A *replica set* of ``n`` ranks, in ascending order, holds ``off = n // copies`` pieces: piece ``i`` is on the ranks at
the places ``i``, ``i + off``, ``i + 2 off`` and so on. If ``n`` is not a multiple of ``copies``, some pieces have one
more copy. ``shift`` gives ``off`` directly, and the last copies may then be incomplete.

A type of state (dense parameters, experts) is described by the sets of all ranks together: each rank is in one set,
which all ranks of the set declare in the same way. Sets of one type may differ in size.

The save handlers of one set work together, so all of them get the same list: one rank for each piece, *in the order of
the pieces*. ``choose`` takes the first rank that can save a piece; ``sources`` takes the next copy in ascending order
after the rank that lacks the piece, wrapping around.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from ttp.core.layout import Layout, Rank, Shard, compact_ranks, ranks_text
from ttp.errors import ConfigError
from ttp.mindio.protocol.messages import ReplicaSet, Transfer, TypeRanks

TYPES_MAX = 64
"""Largest number of types of state."""


@dataclass(frozen=True, slots=True)
class Replicas:
    """The replica sets of a whole job.

    Args:
        world_size: number of ranks.
        types: for every type of state, its sets in the order of their lowest ranks.
    """

    world_size: int
    types: tuple[tuple[ReplicaSet, ...], ...]

    def layout(self) -> Layout:
        """Return the layout for ``ttp.core.decide``, in which every piece of every set is a shard."""
        groups = {
            Shard(f"type{index}-rank{group.ranks[0]}-piece{place}"): holders(group, place)
            for index, sets in enumerate(self.types)
            for group in sets
            for place in range(pieces(group))
        }
        return Layout(self.world_size, groups)


def check_set(group: ReplicaSet, rank: Rank, world_size: int) -> ReplicaSet:
    """Check a set, and return it with ascending ranks and an explicit number of copies.

    Raises:
        ConfigError: the set is not valid; the text says why.
    """
    ranks = tuple(sorted(group.ranks))
    shown = f"the replica set {compact_ranks(ranks[:1000])} of rank {rank}"
    if len(set(ranks)) != len(ranks) or not ranks:
        raise ConfigError(f"{shown} is empty or names a rank twice")
    if ranks[0] < 0 or ranks[-1] >= world_size:
        raise ConfigError(f"{shown} names a rank outside 0..{world_size - 1}")
    if rank not in ranks:
        raise ConfigError(f"{shown} does not contain the rank itself")
    copies = len(ranks) if group.copies == -1 else group.copies
    if not 1 <= copies <= len(ranks):
        raise ConfigError(f"{shown}: copies = {group.copies}: it has to be from 1 to {len(ranks)}, the number of ranks")
    if not 0 <= group.shift <= len(ranks):
        raise ConfigError(f"{shown}: shift = {group.shift}: it has to be from 0 to {len(ranks)}, the number of ranks")
    return ReplicaSet(ranks, copies, group.shift)


def gather(world_size: int, said: Mapping[Rank, Sequence[ReplicaSet]]) -> Replicas:
    """Return the replica sets of the job, from the declarations of all ranks.

    Raises:
        ConfigError: ranks have not declared sets, or contradict each other; the text says which.
    """
    said = _with_undeclared(world_size, said)
    silent = [rank for rank in range(world_size) if not said.get(Rank(rank))]
    if silent:
        raise ConfigError(f"no replica sets were declared by {ranks_text(silent)}")
    count = len(said[Rank(0)])
    odd = [rank for rank in range(world_size) if len(said[Rank(rank)]) != count]
    if odd or count > TYPES_MAX:
        raise ConfigError(f"rank 0 declares {count} types of state, {ranks_text(odd)} another number")
    return Replicas(world_size, tuple(_one_type(index, world_size, said) for index in range(count)))


def _with_undeclared(world_size: int, said: Mapping[Rank, Sequence[ReplicaSet]]) -> Mapping[Rank, Sequence[ReplicaSet]]:
    """Add the sets of ranks that were lost before they declared them to a new controller, from the other ranks."""
    silent = [Rank(rank) for rank in range(world_size) if not said.get(Rank(rank))]
    if not silent:
        return said
    count = max((len(sets) for sets in said.values()), default=0)
    objects = [{id(sets[index]): sets[index] for sets in said.values() if len(sets) > index} for index in range(count)]
    by_type = [{rank: group for group in groups.values() for rank in group.ranks} for groups in objects]
    lost = {
        rank: tuple(known[rank] for known in by_type)
        for rank in silent
        if by_type and all(rank in known for known in by_type)
    }
    return {**said, **lost}


def _one_type(index: int, world_size: int, said: Mapping[Rank, Sequence[ReplicaSet]]) -> tuple[ReplicaSet, ...]:
    sets: list[ReplicaSet] = []
    known: dict[Rank, ReplicaSet] = {}
    plain: dict[Rank, ReplicaSet] = {}
    for number in range(world_size):
        rank = Rank(number)
        if plain.get(rank) == said[rank][index]:
            continue  # another rank of the set has declared the same
        mine = check_set(said[rank][index], rank, world_size)
        theirs = known.get(rank)
        if theirs is None:
            taken = [r for r in mine.ranks if r in known]
            if taken:
                raise ConfigError(
                    f"type {index}: rank {rank} declares a set with {ranks_text(taken)}, and these declare others"
                )
            sets.append(mine)
            known.update(dict.fromkeys(mine.ranks, mine))
            plain.update(dict.fromkeys(mine.ranks, said[rank][index]))
        elif theirs != mine:
            raise ConfigError(
                f"type {index}: rank {rank} says that ranks {compact_ranks(mine.ranks)} hold {mine.copies} copies, "
                f"rank {theirs.ranks[0]} says that ranks {compact_ranks(theirs.ranks)} hold {theirs.copies}"
            )
    return tuple(sets)


def pieces(group: ReplicaSet) -> int:
    """Return the number of pieces of a set's state."""
    return group.shift or len(group.ranks) // group.copies


def holders(group: ReplicaSet, piece: int) -> tuple[Rank, ...]:
    """Return the ranks that hold a piece, in ascending order."""
    return group.ranks[piece :: pieces(group)]


def choose(
    replicas: Replicas, usable: Collection[Rank], reluctant: Collection[Rank] = ()
) -> Mapping[Rank, tuple[TypeRanks, ...]] | None:
    """Return the save lists of every saver: for each type of state that it saves, the ranks that save it.

    Args:
        replicas: the replica sets of the job.
        usable: ranks that hold the version to save and can be reached.
        reluctant: usable ranks that save a piece only if no other rank has it.

    Returns:
        The lists by rank, in the order of the first list that a rank is in; None if a piece is on no usable rank.
    """
    told: dict[Rank, list[TypeRanks]] = {}
    for index, sets in enumerate(replicas.types):
        for group in sets:
            chosen = [_first(holders(group, piece), usable, reluctant) for piece in range(pieces(group))]
            ranks = tuple(rank for rank in chosen if rank is not None)
            if len(ranks) < len(chosen):
                return None
            for rank in ranks:
                told.setdefault(rank, []).append(TypeRanks(index, ranks))
    return MappingProxyType({rank: tuple(lists) for rank, lists in told.items()})


def renamer(savers: Iterable[Rank]) -> Rank:
    """Return the rank that renames the finished checkpoint: the first saver that is not rank 0, if there is one."""
    ordered = list(savers)
    return next((rank for rank in ordered if rank != 0), ordered[0])


def sources(replicas: Replicas, lacking: Collection[Rank], usable: Collection[Rank]) -> tuple[Transfer, ...] | None:
    """Return the transfers that give each rank in ``lacking`` its pieces, from the next copy after it, cyclically.

    Returns:
        One transfer for each type of state and lacking rank; None if a piece is on no usable rank.
    """
    found: list[Transfer] = []
    for index, sets in enumerate(replicas.types):
        for group in sets:
            for place, rank in enumerate(group.ranks):
                if rank not in lacking:
                    continue
                source = _next_copy(group, place, lacking, usable)
                if source is None:
                    return None
                found.append(Transfer(index, source, rank))
    return tuple(found)


def _next_copy(group: ReplicaSet, place: int, lacking: Collection[Rank], usable: Collection[Rank]) -> Rank | None:
    copies = holders(group, place % pieces(group))
    mine = place // pieces(group)
    for step in range(1, len(copies)):
        other = copies[(mine + step) % len(copies)]
        if other in usable and other not in lacking:
            return other
    return None


def _first(ranks: Iterable[Rank], usable: Collection[Rank], reluctant: Collection[Rank]) -> Rank | None:
    able = [rank for rank in ranks if rank in usable]
    return next((rank for rank in able if rank not in reluctant), able[0] if able else None)
