"""Finds the replica groups of a job from MindSpore's parallel modes and files.

A shard here is the whole state that one rank holds. Ranks that hold the same slice of every parameter form the replica
group of the shard, and one of them writes its whole file, as with MindSpore's TFTRegister. MindSpore's own tools read
such files.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ttp.adapters.mindspore.constraints import parallel_mode
from ttp.core.layout import Layout, Rank, Shard
from ttp.errors import CheckpointError, ConfigError, ToldAs
from ttp.mindspore_files.group_info import read_group_info
from ttp.mindspore_files.redundancy import groups_of_stages, is_saved, same
from ttp.mindspore_files.strategy_file import read_stages

RANK = "{rank}"
"""Placeholder for the rank in a path of ``group_info.pb`` files."""

RankGroups = Sequence[Sequence[int]]
"""The ranks that hold each shard, one entry per shard."""


def layout_of(
    known: Mapping[str, Any] | None,
    parameters: Iterable[Any],
    world_size: int,
    *,
    replicas: RankGroups | None,
    strategy: str | Path | None,
) -> Layout:
    """Find the replica groups of a job.

    Args:
        known: the ``parameter_layout_dict`` of the compiled training network; None: it is not compiled.
        parameters: the parameters of the network.
        world_size: number of ranks of the job.
        replicas: the groups that the user gives; None: ttp finds them.
        strategy: a strategy file (``strategy_ckpt_config``), or a directory with the files of all pipeline stages, for
            a network that does not know the layout of all ranks. With ``{rank}`` in it, it is the path of each rank's
            ``group_info.pb`` (``GROUP_INFO_FILE``) instead.

    Raises:
        ConfigError: the groups cannot be found, or do not fit the job; the message says which argument to give.
    """
    if replicas is not None:
        return of_groups(replicas, world_size)
    if strategy is not None and RANK in str(strategy):
        return of_group_infos(str(strategy), world_size)
    mode = parallel_mode()
    if mode in ("stand_alone", "data_parallel"):
        return Layout.data_parallel(world_size)
    if mode == "hybrid_parallel":
        sliced = [parameter.name for parameter in parameters if parameter.layerwise_parallel]
        if not sliced:
            return Layout.data_parallel(world_size)
        raise ConfigError(
            f"{len(sliced)} parameters are layerwise_parallel ({', '.join(sliced[:3])}, ...): they differ between "
            "ranks, and MindSpore does not tell which ranks hold the same ones. Give TFTRegister(..., "
            "replicas=[[0, 2], [1, 3]]), one list of ranks for each distinct slice"
        )
    if strategy is not None:
        with ToldAs(ConfigError, f"strategy={str(strategy)!r}", CheckpointError):
            stages = read_stages(Path(strategy))
        return of_redundancy(groups_of_stages(stages)[1], world_size)
    if not known:
        raise ConfigError(
            f"parallel_mode is {mode}, and the network is not compiled yet: give TFTRegister(..., strategy=FILE) with "
            "the file of set_auto_parallel_context(strategy_ckpt_config={'save_file': FILE}) (for a pipeline, the "
            "directory with the files of all stages), or give replicas="
        )
    from mindspore.train._utils import get_parameter_redundancy

    return of_redundancy(get_parameter_redundancy(known), world_size)


def of_group_infos(pattern: str, world_size: int) -> Layout:
    """Find the layout in MindSpore's ``group_info.pb`` of every rank; ``{rank}`` in ``pattern`` stands for the rank.

    Raises:
        ConfigError: a file is absent or damaged, or the files contradict each other.
    """
    replicas_of: dict[int, tuple[int, ...]] = {}
    for rank in range(world_size):
        path = Path(pattern.replace(RANK, str(rank)))
        with ToldAs(ConfigError, f"strategy={pattern!r}", CheckpointError):
            replicas_of[rank] = read_group_info(path).replicas
    for rank, replicas in replicas_of.items():
        if rank not in replicas or any(replicas_of.get(other) != replicas for other in replicas):
            raise ConfigError(
                f"strategy={pattern!r}: the file of rank {rank} says that the ranks {list(replicas)} hold the same, "
                "and their files say something else: check that all files are of this job"
            )
    return of_groups(sorted(set(replicas_of.values())), world_size)


def of_groups(groups: RankGroups, world_size: int) -> Layout:
    """Return the layout in which each group holds one slice.

    Raises:
        ConfigError: a rank is missing, in two groups, or alone in a group.
    """
    ranks = sorted(int(rank) for group in groups for rank in group)
    if ranks != list(range(world_size)):
        raise ConfigError(f"replicas={[list(g) for g in groups]}: each of the {world_size} ranks must be in one list")
    alone = [list(group) for group in groups if len(group) < 2]
    if alone:
        raise ConfigError(
            f"replicas={[list(g) for g in groups]}: {alone[0]} has no replica, so its slice is lost with that rank. "
            "The power-off checkpoint needs a data parallelism of at least 2 for every slice: use more ranks, or less "
            "model parallelism"
        )
    if len(groups) == 1:
        return Layout.data_parallel(world_size)
    named = {Shard(f"slice_{min(group)}"): tuple(Rank(int(r)) for r in group) for group in groups}
    return Layout(world_size, named)


def of_redundancy(redundancy: Mapping[str, Iterable[Iterable[int]]], world_size: int) -> Layout:
    """Find the layout in the result of MindSpore's ``get_parameter_redundancy``.

    Args:
        redundancy: for each parameter, the groups of ranks that hold equal slices of it.
        world_size: number of ranks of the job.

    Raises:
        ConfigError: the groups do not fit a job of this size, or a slice has no replica.
    """
    held: dict[int, list[tuple[str, int]]] = {rank: [] for rank in range(world_size)}
    for name, groups in sorted(redundancy.items()):
        if not is_saved(name):
            continue
        for index, group in enumerate(groups):
            for rank in group:
                if int(rank) not in held:
                    raise ConfigError(
                        f"the strategy contains rank {rank}, and the job has {world_size} ranks: give the strategy of "
                        "this job"
                    )
                held[int(rank)].append((name, index))
    for rank, slices in held.items():
        if not slices:
            raise ConfigError(
                f"the strategy does not contain rank {rank}: it is of another job, or of one stage of a pipeline. For "
                "a pipeline give strategy=DIRECTORY, with the files of all stages"
            )
    return of_groups(same(held), world_size)
