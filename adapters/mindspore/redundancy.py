"""Which ranks hold the same slices, by a strategy. Pure; as MindSpore's ``get_parameter_redundancy`` understands it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from ttp.adapters.mindspore.strategy_file import Cut, Strategy
from ttp.errors import CheckpointError

Groups = tuple[tuple[int, ...], ...]
"""Ranks that hold the same, smallest rank first."""

NOT_SAVED = ("accu_grads", "inputs")
"""Names that begin so are in strategies, but in no checkpoint."""


def parameter_groups(strategy: Strategy) -> dict[str, Groups]:
    """For each parameter the ranks that hold the same slice of it.

    Raises:
        CheckpointError: the optimizer's cut does not fit the ranks.
    """
    known: dict[Cut, Groups] = {}  # most parameters are cut like others
    for name, cut in strategy.cuts.items():
        if cut not in known:
            known[cut] = _groups(name, cut, strategy.first_rank)
    return {name: known[strategy.cuts[name]] for name in sorted(strategy.cuts)}


def whole_groups(parameters: Mapping[str, Groups]) -> Groups:
    """Ranks that hold the same slice of every parameter: their checkpoints can stand for each other."""
    held: dict[int, list[int]] = {}
    for name in sorted(parameters):
        if name.startswith(NOT_SAVED):
            continue
        for place, ranks in enumerate(parameters[name]):
            for rank in ranks:
                held.setdefault(rank, []).append(place)
    return same(held)


def same(held: Mapping[int, object]) -> Groups:
    """Ranks by what they hold."""
    groups: dict[str, list[int]] = {}
    for rank in sorted(held):
        groups.setdefault(repr(held[rank]), []).append(rank)
    return tuple(sorted(tuple(ranks) for ranks in groups.values()))


def groups_of_strategies(strategies: Iterable[Strategy]) -> tuple[Groups, dict[str, Groups]]:
    """Groups for whole checkpoints and for each parameter, over all stages."""
    whole: list[tuple[int, ...]] = []
    parameters: dict[str, Groups] = {}
    for strategy in strategies:
        found = parameter_groups(strategy)
        whole += whole_groups(found)
        for name, groups in found.items():
            parameters[name] = parameters.get(name, ()) + groups
    return tuple(sorted(whole)), parameters


def replicas_of(rank: int, parameters: Mapping[str, Groups]) -> tuple[int, ...]:
    """Ranks whose checkpoint ``rank`` may load, as MindSpore's get_ckpt_path_with_strategy chooses them.

    The smallest group of any parameter, if it lies inside the groups of all others; else only ``rank`` itself. A rank
    that no parameter knows has none.
    """
    mine = [ranks for name, groups in parameters.items() if not name.startswith(NOT_SAVED) for ranks in groups]
    mine = [ranks for ranks in mine if rank in ranks]
    if not mine:
        return ()
    smallest = min(mine, key=len)
    inside = all(set(smallest) <= set(ranks) for ranks in mine)
    return smallest if inside else (rank,)


def _groups(name: str, cut: Cut, first: int) -> Groups:
    """Ranks by the coordinates, in the device matrix, that cut the tensor."""
    cutting = sorted({axis for together in cut.axes for axis in together if axis != -1})
    found: dict[tuple[int, ...], list[int]] = {}
    for device in range(math.prod(cut.devices)):
        place = _coordinates(device, cut.devices)
        found.setdefault(tuple(place[-axis - 1] for axis in cutting), []).append(first + device)
    groups = sorted(tuple(ranks) for ranks in found.values())
    return tuple(groups) if cut.shards == 0 else _optimizer_shards(name, cut, groups, first)


def _optimizer_shards(name: str, cut: Cut, groups: Sequence[tuple[int, ...]], first: int) -> Groups:
    count = cut.shards if cut.shards > 0 else math.prod(cut.devices) // cut.step
    if count < 1 or any(len(ranks) % count for ranks in groups):
        raise CheckpointError(
            f"{name}: {len(groups[0])} ranks hold the same slice and cannot share it in {count} parts: the strategy "
            "contradicts itself"
        )
    for ranks in groups:
        by_step = [(rank - first) // cut.step % count if cut.step > 0 else at % count for at, rank in enumerate(ranks)]
        if same(dict(enumerate(by_step))) != same({at: at % count for at in range(len(ranks))}):
            raise CheckpointError(
                f"{name}: opt_weight_shard_step {cut.step} does not deal {count} parts to the ranks {list(ranks)} in "
                "turn: the strategy contradicts itself, and files converted by it would hold wrong data"
            )
    return tuple(sorted(ranks[part::count] for ranks in groups for part in range(count)))


def _coordinates(device: int, devices: Sequence[int]) -> list[int]:
    place = []
    for extent in reversed(devices):
        device, at = divmod(device, extent)
        place.append(at)
    return place[::-1]
