"""Tells kills by the out-of-memory killer from others, by the kernel's counters for each cgroup.

SIGKILL does not tell its sender. But ``oom_kill`` in ``memory.events`` (cgroup v2) or ``memory.oom_control`` (v1) of
the victim's own cgroup is raised before the signal is sent, whatever limit was hit. Where that cgroup has no memory
controller, the nearest one above counts; where there is none, ``/proc/vmstat`` counts for the whole machine. So the
counter is read while the process lives and again after its death. Each counted kill explains one death.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

logger = logging.getLogger("ttp.launch")

COUNTER = "oom_kill"


@dataclass(frozen=True, slots=True)
class _Place:
    """Where kills are counted: ``name`` for the operator, ``file`` with lines of names and numbers."""

    name: str
    file: Path


@dataclass(frozen=True, slots=True)
class _Mount:
    """A mounted cgroup hierarchy. In a container the ``root`` of the mount need not be that of the hierarchy."""

    version: int
    root: str
    point: Path

    @property
    def counters(self) -> str:
        """Name of the file in each cgroup."""
        return "memory.events" if self.version == 2 else "memory.oom_control"


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
            mounts = list(self._mounts())
        except Exception as problem:
            logger.debug("cgroups are not to be had: %s", problem)
            mounts = []
        for pid in pids:
            self._remember(pid, mounts)

    def explain(self, pid: int) -> str:
        """A text if ``pid`` was killed for lack of memory, else empty. Ask once, after its death."""
        place = self._place.get(pid)
        count = _read(place.file) if place is not None else None
        if place is None or count is None or count <= self._before[place.file]:
            return ""
        before = self._before[place.file]
        self._before[place.file] += 1
        return f"out of memory ({place.name}, {COUNTER} {before} -> {count})"

    def _remember(self, pid: int, mounts: list[_Mount]) -> None:
        try:
            for place in (*self._cgroups(pid, mounts), _Place("this machine", self._proc / "vmstat")):
                count = _read(place.file)
                if count is not None:
                    self._place[pid] = place
                    self._before.setdefault(place.file, count)
                    return
        except Exception as problem:
            logger.debug("pid %d: its cgroup cannot be told: %s", pid, problem)

    def _mounts(self) -> Iterator[_Mount]:
        for line in (self._proc / "self" / "mountinfo").read_text().splitlines():
            fields, _, source = line.partition(" - ")
            _, _, _, root, point, *_ = fields.split()
            kind, _, *options = source.split()
            if kind == "cgroup2":
                yield _Mount(2, root, Path(point))
            elif kind == "cgroup" and "memory" in ",".join(options).split(","):
                yield _Mount(1, root, Path(point))

    def _cgroups(self, pid: int, mounts: list[_Mount]) -> Iterator[_Place]:
        """The cgroup of a process and those above it, the innermost first."""
        with contextlib.suppress(OSError, ValueError):
            for line in (self._proc / str(pid) / "cgroup").read_text().splitlines():
                _, controllers, path = line.split(":", 2)
                version = 2 if not controllers else 1
                if version == 1 and "memory" not in controllers.split(","):
                    continue
                for mount in mounts:
                    if mount.version == version:
                        yield from _chain(mount, PurePosixPath(path))


def _chain(mount: _Mount, path: PurePosixPath) -> Iterator[_Place]:
    inside = path.relative_to(mount.root) if path.is_relative_to(mount.root) else PurePosixPath()
    for part in (inside, *inside.parents):
        name = PurePosixPath(mount.root) / part
        yield _Place(f"cgroup {name}", mount.point / part / mount.counters)


def _read(file: Path) -> int | None:
    try:
        lines = file.read_text().splitlines()
    except (OSError, ValueError):
        return None
    counts = (line.split() for line in lines)
    return next((int(c[1]) for c in counts if len(c) == 2 and c[0] == COUNTER and c[1].isdecimal()), None)
