"""Finds out how much memory is left on this host, and chooses the process that is killed first when there is none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ttp.launch.cgroups import Group, groups, mounts
from ttp.launch.proc_files import number_in

FIRST = 1000
"""Score of a process that the kernel kills first when memory runs out."""
SCORE = Path("/proc/self/oom_score_adj")
FILES = {1: ("memory.limit_in_bytes", "memory.usage_in_bytes"), 2: ("memory.max", "memory.current")}
RECLAIMABLE = {1: "total_inactive_file", 2: "inactive_file"}


def left(system: Path = Path("/")) -> int | None:
    """Return the bytes that this process may still take, by the host and the limits of its cgroups; None: unknown.

    Args:
        system: directory that contains ``proc``; for tests.
    """
    return min(_left(system / "proc"), default=None)


def anonymous() -> int:
    """Return the bytes of anonymous memory of this process, i.e. not of files; 0: the kernel does not say."""
    return (number_in(Path("/proc/self/status"), "RssAnon:") or 0) * 1024


def die_first() -> str:
    """Make this process the one that the kernel kills when memory runs out.

    Returns:
        The argument for ``die_as_before``; empty: nothing has changed, as it is not allowed here.
    """
    try:
        score = SCORE.read_text()
        SCORE.write_text(str(FIRST))
    except OSError:
        return ""
    return score


def die_as_before(score: str) -> None:
    """Undo ``die_first``, in this process or in one that was forked from it.

    Raises:
        OSError: it cannot be undone.
    """
    if score:
        SCORE.write_text(score)


def _left(proc: Path) -> Iterator[int]:
    if available := number_in(proc / "meminfo", "MemAvailable:"):
        yield available * 1024
    try:
        known = list(mounts(proc))
    except (OSError, ValueError):
        return
    for group in groups("self", known, proc):
        try:
            yield _left_of(group)
        except (OSError, ValueError):  # no limit ("max"), or no such controller
            continue


def _left_of(group: Group) -> int:
    limit, used = (int((group.folder / name).read_text()) for name in FILES[group.version])
    return limit - used + (number_in(group.folder / "memory.stat", RECLAIMABLE[group.version]) or 0)
