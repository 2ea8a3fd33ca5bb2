"""Reports a dead worker to the controller at once, from a thread of the launcher."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen
from typing import Any, Protocol

from ttp.launch.cgroups import Mount, groups, mounts
from ttp.launch.deaths import ORDERLY_EXITS, SIGKILLED, DeathWatch, describe_exit
from ttp.launch.proc_files import is_ending, number_in

logger = logging.getLogger("ttp.launch")

TURN_S = 0.2
"""Seconds within which the thread notices new workers. It reports deaths in between then."""

AFTER_ERROR_S = 1.0
"""Seconds until the thread goes on after an error, which may come again at once."""


class Reporter(Protocol):
    """Receives reports of deaths. Must neither block nor raise."""

    def exited(self, rank: int, pid: int, reason: str, code: int = 0) -> None:
        """Report that process ``pid`` of ``rank`` ended for ``reason``, with exit code ``code`` (0: not known)."""


class WorkerWatch:
    """Watches the workers of this host, one group after the other.

    An orderly exit (0, 75, 70) is not reported, nor is the death of a worker that the launcher itself stops.

    Args:
        shows_death: returns whether a worker (rank, pid) that has ended did not leave its job: its exit is not orderly.
    """

    def __init__(self, shows_death: Callable[[int, int], bool] = lambda *_: False) -> None:
        self._shows_death = shows_death
        self._lock = threading.Lock()
        self._next: tuple[dict[int, Popen[Any]], Reporter] | None = None
        self._expected: set[int] = set()
        self._oom = OomWatch()
        self.died = threading.Event()
        """Set when a worker has ended."""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ttp-worker-watch", daemon=True)
        self._thread.start()

    def watch(self, workers: Mapping[int, Popen[Any]], reporter: Reporter) -> None:
        """Watch these workers (by global rank) instead of the earlier ones."""
        oom = OomWatch(worker.pid for worker in workers.values())
        with self._lock:
            self._next = (dict(workers), reporter)
            self._oom = oom
            self._expected = set()

    def expect(self, pids: Iterable[int]) -> None:
        """Do not report the deaths of these workers: the launcher is about to stop those that do not end already."""
        with self._lock:
            self._expected.update(pid for pid in pids if not is_ending(pid))

    def expects(self, pid: int) -> bool:
        """Return whether ``expect`` was called for this worker."""
        with self._lock:
            return pid in self._expected

    def close(self) -> None:
        """End the thread."""
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        watch = DeathWatch({})
        workers: dict[int, Popen[Any]] = {}
        reporter: Reporter | None = None
        while not self._over.is_set():
            try:
                with self._lock:
                    fresh, self._next = self._next, None
                if fresh is not None:
                    watch.close()
                    workers, reporter = fresh
                    watch = DeathWatch(workers)
                for rank, code in watch.wait(TURN_S).items():
                    self.died.set()
                    if reporter is not None:
                        self._tell(reporter, rank, workers[rank].pid, code)
            except Exception:
                logger.exception("cannot watch the workers; the controller will notice their deaths later")
                self._over.wait(AFTER_ERROR_S)
        watch.close()

    def _tell(self, reporter: Reporter, rank: int, pid: int, code: int) -> None:
        try:
            if self.expects(pid) or (code in ORDERLY_EXITS and not self._shows_death(rank, pid)):
                return
            reason = describe_exit(code, self._oom.explain(pid) if code in SIGKILLED else "")
            reporter.exited(rank, pid, reason, code)
            logger.warning("rank %d (pid %d): %s", rank, pid, reason)
        except Exception:
            what = describe_exit(code)
            logger.exception("cannot report the death of rank %d (%s); the controller will notice it later", rank, what)


# -------------------------------------------------------------------------------------------------------- out of memory
#
# Recognises kills by the out-of-memory killer by the kernel's counter of each cgroup.
#
# SIGKILL does not tell its sender. But the kernel raises ``oom_kill`` in ``memory.events`` (cgroup v2) or
# ``memory.oom_control`` (v1) of the victim's own cgroup before it sends the signal, whatever limit was hit. If that
# cgroup has no memory controller, its nearest ancestor with one counts, else ``/proc/vmstat`` for the whole machine. So
# the counter is read while the process lives and again after its death. Each counted kill explains one death.


COUNTER = "oom_kill"
FILES = {1: "memory.oom_control", 2: "memory.events"}
"""File of the counter, by version of cgroups."""


GROUP = "memory.oom.group"
"""File that is 1 if the kernel kills all processes of a cgroup (v2) together. Kubernetes sets it for each container."""


def killed_together(system: Path = Path("/")) -> str:
    """Return the name of a cgroup with this process that the kernel kills as a whole; empty: none is known.

    Args:
        system: directory that contains ``proc``; for tests.
    """
    with contextlib.suppress(OSError, ValueError, LookupError):
        for group in groups("self", list(mounts(system / "proc")), system / "proc"):
            with contextlib.suppress(OSError):
                if group.version == 2 and (group.folder / GROUP).read_text().strip() == "1":
                    return group.name
    return ""


@dataclass(frozen=True, slots=True)
class _Place:
    """A counter of kills: ``name`` is shown to the operator, ``file`` has lines of a name and a number."""

    name: str
    file: Path


class OomWatch:
    """Compares the counters of the out-of-memory killer with their values when this object was made. Never raises.

    Args:
        pids: live processes of this host.
        system: directory that contains ``proc``; for tests.
    """

    def __init__(self, pids: Iterable[int] = (), system: Path = Path("/")) -> None:
        self._proc = system / "proc"
        self._place: dict[int, _Place] = {}
        self._before: dict[Path, int] = {}
        try:
            known = list(mounts(self._proc))
        except (OSError, ValueError, LookupError) as problem:  # a signal is an Exception, too, in torch's launcher
            logger.debug("cannot read the mounted cgroups: %s", problem)
            known = []
        for pid in pids:
            self._remember(pid, known)

    def explain(self, pid: int) -> str:
        """Return a text if the out-of-memory killer has killed ``pid``, else empty. Call it once, after its death."""
        place = self._place.get(pid)
        count = number_in(place.file, COUNTER) if place is not None else None
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
                count = number_in(place.file, COUNTER)
                if count is not None:
                    self._place[pid] = place
                    self._before.setdefault(place.file, count)
                    return
        except (OSError, ValueError, LookupError) as problem:  # a signal is an Exception, too, in torch's launcher
            logger.debug("cannot find the cgroup of pid %d: %s", pid, problem)
