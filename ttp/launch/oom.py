"""Tells kills by the out-of-memory killer from others, by the kernel's counters for each cgroup.

SIGKILL does not tell its sender. But ``oom_kill`` in ``memory.events`` (cgroup v2) or ``memory.oom_control`` (v1) of
the victim's own cgroup is raised before the signal is sent, whatever limit was hit. Where that cgroup has no memory
controller, the nearest one above counts; where there is none, ``/proc/vmstat`` counts for the whole machine. So the
counter is read while the process lives and again after its death. Each counted kill explains one death.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ttp.launch.cgroups import Mount, groups, mounts

logger = logging.getLogger("ttp.launch")

COUNTER = "oom_kill"
FILES = {1: "memory.oom_control", 2: "memory.events"}
"""Where it is, by version of cgroups."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where kills are counted: ``name`` for the operator, ``file`` with lines of names and numbers."""

    name: str
    file: Path


class OomWatch:
    """Knows how often the out-of-memory killer had struck when it was made. Never raises.

    Args:
        pids: processes of this host that live.
        system: where ``/proc`` is; for tests.
    """

    def __init__(self, pids: Iterable[int] = (), system: Path = Path("/")) -> None:
        self._proc = system / "proc"
        self._place: dict[int, _Place] = {}
        self._before: dict[Path, int] = {}
        try:
            known = list(mounts(self._proc))
        except (OSError, ValueError, LookupError) as problem:  # a signal is an Exception, too, in torch's launcher
            logger.debug("cgroups are not to be had: %s", problem)
            known = []
        for pid in pids:
            self._remember(pid, known)

    def explain(self, pid: int) -> str:
        """A text if ``pid`` was killed for lack of memory, else empty. Ask once, after its death."""
        place = self._place.get(pid)
        count = _read(place.file) if place is not None else None
        if place is None or count is None or count <= self._before[place.file]:
            return ""
        before = self._before[place.file]
        self._before[place.file] += 1
        return f"out of memory ({place.name}, {COUNTER} {before} -> {count})"

    def _remember(self, pid: int, known: list[Mount]) -> None:
        try:
            places = [
                _Place(group.name, group.folder / FILES[group.version]) for group in groups(pid, known, self._proc)
            ]
            for place in (*places, _Place("this machine", self._proc / "vmstat")):
                count = _read(place.file)
                if count is not None:
                    self._place[pid] = place
                    self._before.setdefault(place.file, count)
                    return
        except (OSError, ValueError, LookupError) as problem:  # a signal is an Exception, too, in torch's launcher
            logger.debug("pid %d: its cgroup cannot be told: %s", pid, problem)


def _read(file: Path) -> int | None:
    try:
        lines = file.read_text().splitlines()
    except (OSError, ValueError):
        return None
    counts = (line.split() for line in lines)
    return next((int(c[1]) for c in counts if len(c) == 2 and c[0] == COUNTER and c[1].isdecimal()), None)
