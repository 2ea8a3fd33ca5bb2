"""Read and write ``group_info.pb``, which lists the ranks that hold the same checkpoint as the rank it belongs to.

MindSpore writes the file when it compiles a parallel graph, to the path in ``GROUP_INFO_FILE``. It writes none on CPU,
nor in plain data parallelism. The format (``mindspore/train/node_strategy_pb2.py``, 2.10)::

    ParallelGroupMap { repeated ParallelGroupItem = 1; ParallelGroupRanks ckpt_restore_rank_list = 2; }
    ParallelGroupItem { string group_name = 1; ParallelGroupRanks parallel_group_ranks = 2; }
    ParallelGroupRanks { repeated uint32 dim = 1; }
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ttp.core.layout import WORLD_SIZE_MAX
from ttp.errors import CheckpointError, UsageError
from ttp.mindspore_files.file_messages import make, parse
from ttp.store.durable import write_durably
from ttp.store.plain_file import read_plain

NAME = "group_info.pb"
"""The usual name of the file, which is in the folder ``rank_N`` of its rank."""

SIZE_MAX = 1 << 26


@dataclass(frozen=True, slots=True)
class GroupInfo:
    """The contents of a ``group_info.pb``.

    Args:
        replicas: the ranks whose checkpoints are interchangeable, including the rank of the file.
        groups: name of a communication group of that rank -> the ranks of the group.
    """

    replicas: tuple[int, ...]
    groups: Mapping[str, tuple[int, ...]]


def read_group_info(path: Path) -> GroupInfo:
    """Read a ``group_info.pb``.

    Raises:
        CheckpointError: the file is absent, damaged, or no ``group_info.pb``.
    """
    try:
        return parse_group_info(read_plain(Path(path), SIZE_MAX))
    except OSError as problem:
        raise CheckpointError(f"{path} cannot be read: {problem.strerror or problem}") from None
    except ValueError as problem:
        raise CheckpointError(f"{path} is no group_info.pb, or damaged: {problem}") from None


def parse_group_info(data: bytes) -> GroupInfo:
    """Parse the bytes of a ``group_info.pb``.

    Raises:
        ValueError: the bytes are malformed, or the list of replicas is missing.
    """
    told = parse("GroupMap", data)
    groups = {group.group_name: _ranks(group.ranks) for group in told.groups}
    replicas = _ranks(told.replicas)
    if not replicas:
        raise ValueError("it has no list of the ranks to restore from")
    if len(set(replicas)) < len(replicas):
        raise ValueError("a rank is listed twice")
    return GroupInfo(tuple(sorted(replicas)), groups)


def write_group_info(
    path: Path | str, replicas: Iterable[int], groups: Mapping[str, Iterable[int]] | None = None
) -> None:
    """Durably write a file that ``mindspore.restore_group_info_list(path)`` can read.

    If writing fails, there is no file, or the old one.

    Args:
        path: the file to write, usually ``rank_N/group_info.pb`` for the replicas of rank N.
        replicas: the ranks whose checkpoints are interchangeable.
        groups: name of a communication group -> its ranks. MindSpore's readers ignore them.

    Raises:
        UsageError: ``replicas`` is empty, or holds something that cannot be a rank.
        OSError: writing failed.
    """
    write_durably(Path(path), encode_group_info(replicas, groups))


def encode_group_info(replicas: Iterable[int], groups: Mapping[str, Iterable[int]] | None = None) -> bytes:
    """Return the bytes that ``write_group_info`` writes.

    Raises:
        UsageError: ``replicas`` is empty, or holds something that cannot be a rank.
    """
    ranks = sorted(set(replicas))
    if not ranks or ranks[0] < 0 or ranks[-1] >= WORLD_SIZE_MAX:
        raise UsageError(f"replicas={ranks!r:.100}: give the ranks that hold the same state, at least one")
    items = [
        make("Group", group_name=name, ranks=make("Ranks", dim=members)) for name, members in (groups or {}).items()
    ]
    return bytes(make("GroupMap", groups=items, replicas=make("Ranks", dim=ranks)).SerializeToString())


def _ranks(told: Any) -> tuple[int, ...]:
    ranks = tuple(told.dim)
    if any(rank >= WORLD_SIZE_MAX for rank in ranks):
        raise ValueError(f"rank {max(ranks)} is too large")
    return ranks
