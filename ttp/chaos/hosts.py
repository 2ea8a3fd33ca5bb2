"""The hosts of one job, as its driver sees them."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import psutil


class Hosts(Protocol):
    """Where a job runs."""

    addresses: list[str]
    names: list[str]

    def start(self, host: int, command: Sequence[str], env: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
        """Run ``command`` on a host; what it prints is appended to ``log``."""

    def listen(self, host: int, command: Sequence[str], env: Mapping[str, str]) -> subprocess.Popen[str]:
        """Run ``command`` in a host's network only, with pipes; it outlives the host."""

    def processes(self, host: int) -> list[psutil.Process]:
        """All processes of the job on a host."""

    def power_off(self, host: int) -> None:
        """The host is gone at once: nothing more is heard from it."""

    def power_on(self, host: int) -> None:
        """A new host takes the place of one that is gone; one that is there is joined to the others again."""

    def cut(self, host: int, *, carrier: bool) -> None:
        """Nothing passes between a host and the others; without ``carrier`` its cable is out, too."""

    def join(self, host: int) -> None:
        """Undo ``cut``."""

    def leftovers(self, host: int) -> list[str]:
        """What a job that is over has left on a host: processes, and files in shared memory."""

    def close(self) -> None:
        """End everything that runs on the hosts."""


def commands(processes: Sequence[psutil.Process]) -> list[str]:
    """What they run, for people; those that have ended and only wait to be collected do not count."""
    texts = []
    for process in processes:
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE:
                texts.append(" ".join(process.cmdline())[:200])
    return texts


def piped(command: Sequence[str], env: Mapping[str, str]) -> subprocess.Popen[str]:
    """Run ``command`` with pipes for lines; what it says on stderr is dropped."""
    pipe, null = subprocess.PIPE, subprocess.DEVNULL
    return subprocess.Popen(command, env=dict(env), text=True, bufsize=1, stdin=pipe, stdout=pipe, stderr=null)
