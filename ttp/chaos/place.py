"""The place of a job: its hosts, its own disk if it needs one, and its port; made for a job and removed after it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ttp.chaos import world
from ttp.chaos.disk import Disk
from ttp.chaos.hosts import Hosts, ThisMachine, new_tag
from ttp.chaos.launching import CONTROLLER_PORT
from ttp.chaos.namespaces import Namespaces
from ttp.chaos.script import Script
from ttp.chaos.switchboard import remove_abandoned
from ttp.errors import ConfigError
from ttp.launch.ports import hold_port

BYTES_PER_WIDTH = 1_000
"""Bytes of a checkpoint for each unit of ``Script.width``, rounded up: weights and moments take about 600."""
CHECKPOINTS = 6
"""Number of checkpoints that a disk has room for: those that retention keeps, drafts, and one being written."""
SPARE_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Place:
    """Hosts, disk and port of one job."""

    hosts: Hosts
    disk: Disk | None
    port: int


@dataclass(slots=True)
class Places:
    """Makes places for jobs that run at the same time, so that no two share a network or a port."""

    _free: set[int] = field(default_factory=lambda: set(range(1, 255)))
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @contextlib.contextmanager
    def place(self, script: Script, folder: Path) -> Iterator[Place]:
        """Yield a place for one job, whose files go to ``folder``.

        Raises:
            ConfigError: this machine cannot provide what the script needs.
        """
        if not world.inside():
            with contextlib.closing(_this_machine(script)) as machine, hold_port() as holding:
                yield Place(machine, None, holding.getsockname()[1])
            return
        with self._lock:
            network = self._free.pop()
        try:
            with _disk(script, folder) as disk, contextlib.closing(Namespaces(network, script.hosts, folder)) as hosts:
                yield Place(hosts, disk, CONTROLLER_PORT)
        finally:
            with self._lock:
                self._free.add(network)


def missing(script: Script) -> str:
    """Return, in words, the needs of the script that only a chaos world meets; empty if there are none."""
    words = {"hosts": "several hosts", "mount": "a disk that can be filled"}
    return " and ".join(words[need] for need in sorted(script.needs))


def _this_machine(script: Script) -> ThisMachine:
    if script.needs:
        raise ConfigError(
            f"this script needs {missing(script)}, and so namespaces, which are not used here: "
            f"{world.obstacle() or '--plain switches them off'}"
        )
    remove_abandoned()
    return ThisMachine(new_tag())


def _disk(script: Script, folder: Path) -> contextlib.AbstractContextManager[Disk | None]:
    if "mount" not in script.needs:
        return contextlib.nullcontext()
    return contextlib.closing(Disk(folder / "disk", SPARE_BYTES + CHECKPOINTS * BYTES_PER_WIDTH * script.width))
