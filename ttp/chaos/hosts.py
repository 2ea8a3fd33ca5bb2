"""The hosts of a job: their interface, and the implementation that uses this machine as the only host."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import psutil


class Hosts(Protocol):
    """The hosts on which a job runs."""

    addresses: list[str]

    def start(self, host: int, command: Sequence[str], env: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
        """Start ``command`` on a host; its output is appended to ``log``."""

    def listen(self, host: int, command: Sequence[str], env: Mapping[str, str]) -> subprocess.Popen[str]:
        """Start ``command`` in the network of a host, with pipes. The process outlives the host."""

    def processes(self, host: int) -> list[psutil.Process]:
        """Return all processes of the job on a host."""

    def power_off(self, host: int) -> None:
        """Take a host away: its processes are killed and it sends nothing more."""

    def power_on(self, host: int) -> None:
        """Create a new host in place of one that was taken away; reconnect one that exists."""

    def cut(self, host: int, *, carrier: bool) -> None:
        """Cut a host off from the others. ``carrier``: whether its network interface still reports a link."""

    def join(self, host: int) -> None:
        """Undo ``cut``."""

    def leftovers(self, host: int) -> list[str]:
        """Return the processes and the files in shared memory that a finished job has left on a host."""

    def close(self) -> None:
        """End everything that runs on the hosts."""


def commands(processes: Sequence[psutil.Process]) -> list[str]:
    """Return the command lines of processes, cut to 200 characters; zombies are left out."""
    texts = []
    for process in processes:
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE:
                texts.append(" ".join(process.cmdline())[:200])
    return texts


def piped(command: Sequence[str], env: Mapping[str, str]) -> subprocess.Popen[str]:
    """Start ``command`` with line-buffered pipes for stdin and stdout; its stderr is dropped."""
    pipe, null = subprocess.PIPE, subprocess.DEVNULL
    return subprocess.Popen(command, env=dict(env), text=True, bufsize=1, stdin=pipe, stdout=pipe, stderr=null)


def logged(command: Sequence[str], env: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    """Start ``command`` in a session of its own; its output is appended to a file."""
    null, both = subprocess.DEVNULL, subprocess.STDOUT
    with log.open("ab") as out:
        return subprocess.Popen(command, env=dict(env), stdin=null, stdout=out, stderr=both, start_new_session=True)


# --------------------------------------------------------------------------------------------------------- this machine
#
# This machine as the only host of a job, where namespaces cannot be created.


JOB_TAG = "CHAOS_JOB"
"""Environment variable of every process of a job; its value is the tag of the job (``new_tag``)."""


class ThisMachine:
    """This machine as the only host of a job, without namespaces.

    Args:
        tag: tag of the job, by which its processes are found.
    """

    def __init__(self, tag: str) -> None:
        self.addresses = ["127.0.0.1"]
        self._tag = tag
        end_orphans()

    def start(self, host: int, command: Sequence[str], env: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
        """See ``Hosts.start``."""
        return logged(command, {**env, JOB_TAG: self._tag}, log)

    def listen(self, host: int, command: Sequence[str], env: Mapping[str, str]) -> subprocess.Popen[str]:
        """See ``Hosts.listen``."""
        return piped(list(command), env)

    def processes(self, host: int) -> list[psutil.Process]:
        """See ``Hosts.processes``."""
        return [process for process, tag in _tagged() if tag == self._tag]

    def power_off(self, host: int) -> None:
        """See ``Hosts.power_off``."""
        deadline = time.monotonic() + 10
        while (found := self.processes(host)) and time.monotonic() < deadline:
            for process in found:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            psutil.wait_procs(found, timeout=1)

    def power_on(self, host: int) -> None:
        """See ``Hosts.power_on``. Does nothing: this machine is always on."""

    def cut(self, host: int, *, carrier: bool) -> None:
        """See ``Hosts.cut``. Always raises ``OSError``."""
        raise OSError("the only host cannot be cut off")

    def join(self, host: int) -> None:
        """See ``Hosts.join``. Does nothing."""

    def leftovers(self, host: int) -> list[str]:
        """See ``Hosts.leftovers``. Shared memory is not checked, because other jobs of this user may use it."""
        return commands(self.processes(host))

    def close(self) -> None:
        """See ``Hosts.close``."""
        self.power_off(0)


def new_tag() -> str:
    """Return a tag for a job that identifies the process that drives it: ``PID:START:NUMBER``."""
    me = psutil.Process()
    return f"{me.pid}:{me.create_time():.2f}:{time.monotonic_ns()}"


def end_orphans() -> list[int]:
    """Kill the job processes of ``ttp chaos`` runs that were killed themselves, and return their ids."""
    ended = []
    for process, tag in _tagged():
        pid, start, _ = (*tag.split(":"), "", "")[:3]
        if pid.isdecimal() and not _lives(int(pid), start):
            with contextlib.suppress(psutil.Error):
                process.kill()
                ended.append(process.pid)
    return ended


def _lives(pid: int, start: str) -> bool:
    try:
        return f"{psutil.Process(pid).create_time():.2f}" == start
    except psutil.Error:
        return False


def _tagged() -> Iterator[tuple[psutil.Process, str]]:
    for process in psutil.process_iter():
        try:
            tag = process.environ().get(JOB_TAG)
        except (psutil.Error, OSError):
            continue
        if tag and process.pid != os.getpid():
            yield process, tag
