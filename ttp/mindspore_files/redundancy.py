"""Compute which ranks hold the same slices under a strategy, as MindSpore's ``get_parameter_redundancy`` does."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ttp.mindspore_files.strategy_file import Stage
from ttp.mindspore_files.tensor_layout import TensorLayout

ReplicaGroups = tuple[tuple[int, ...], ...]
"""Groups of ranks that hold the same state; in each group the lowest rank is first."""


def parameter_groups(stage: Stage) -> dict[str, ReplicaGroups]:
    """Return for each parameter the groups of ranks that hold the same slice of it."""
    known: dict[TensorLayout, ReplicaGroups] = {}  # computed once for all parameters with the same layout
    for layout in stage.layouts.values():
        if layout not in known:
            held = layout.holders().values()
            known[layout] = tuple(sorted(tuple(stage.first_rank + rank for rank in ranks) for ranks in held))
    return {name: known[stage.layouts[name]] for name in sorted(stage.layouts)}


def whole_groups(parameters: Mapping[str, ReplicaGroups]) -> ReplicaGroups:
    """Group the ranks that hold the same slice of every parameter: their checkpoints are interchangeable."""
    held: dict[int, list[int]] = {}
    for name in sorted(parameters):
        if not is_saved(name):
            continue
        for place, ranks in enumerate(parameters[name]):
            for rank in ranks:
                held.setdefault(rank, []).append(place)
    return same(held)


def is_saved(name: str) -> bool:
    """Return whether a name in a strategy is in checkpoints: not gradients, nor the network's inputs (``inputs``...).

    MindSpore leaves out every name that begins like these, and so takes ranks with different slices of a parameter
    ``inputs_embed.weight`` for replicas.
    """
    return not (name.startswith("accu_grads.") or (name.startswith("inputs") and "." not in name))


def same(held: Mapping[int, object]) -> ReplicaGroups:
    """Group the ranks with equal values in ``held`` (rank -> description of what the rank holds)."""
    groups: dict[str, list[int]] = {}
    for rank in sorted(held):
        groups.setdefault(repr(held[rank]), []).append(rank)
    return tuple(sorted(tuple(ranks) for ranks in groups.values()))


def groups_of_stages(stages: Iterable[Stage]) -> tuple[ReplicaGroups, dict[str, ReplicaGroups]]:
    """Return the groups of ranks with equal checkpoints, and the groups for each parameter, over all stages."""
    whole: list[tuple[int, ...]] = []
    parameters: dict[str, ReplicaGroups] = {}
    for stage in stages:
        found = parameter_groups(stage)
        whole += whole_groups(found)
        for name, groups in found.items():
            parameters[name] = parameters.get(name, ()) + groups
    return tuple(sorted(whole)), parameters


def replicas_of(rank: int, parameters: Mapping[str, ReplicaGroups]) -> tuple[int, ...]:
    """Return the ranks whose checkpoint ``rank`` may load, as MindSpore's ``get_ckpt_path_with_strategy`` chooses.

    These are the ranks of its smallest group for any parameter, if all its other groups contain that group; otherwise
    only ``rank`` itself. For a rank that is in no parameter's group the result is empty. Only ``is_saved`` differs.
    """
    mine = [ranks for name, groups in parameters.items() if is_saved(name) for ranks in groups]
    mine = [ranks for ranks in mine if rank in ranks]
    if not mine:
        return ()
    smallest = min(mine, key=len)
    inside = all(set(smallest) <= set(ranks) for ranks in mine)
    return smallest if inside else (rank,)
