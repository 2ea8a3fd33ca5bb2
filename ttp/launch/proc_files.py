"""Reads what the kernel says of a process in ``/proc``.

A name there may be no text: the kernel keeps 15 bytes of it, and the last one may be half a character.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

PROC = Path("/proc")
PF_EXITING = 0x4
"""A flag of the kernel: the process ends."""


def stat_of(pid: int | str, proc: Path = PROC) -> list[str]:
    """Return the fields of ``stat`` that follow the name: state, parent, group, session and so on; see ``proc(5)``.

    Raises:
        OSError: there is no such process.
    """
    text = (proc / str(pid) / "stat").read_text(errors="replace")
    return text.rpartition(")")[2].split()  # a name may hold anything, but ends with the last parenthesis


def status_of(pid: int) -> dict[str, str]:
    """Return the lines of ``status`` by their names.

    Raises:
        OSError: there is no such process.
    """
    lines = (PROC / str(pid) / "status").read_text(errors="replace").splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def start_of(pid: int) -> int:
    """Return when a process started, in clock ticks since boot, which tells a reused pid; 0: not known."""
    with contextlib.suppress(OSError):
        return int(stat_of(pid)[19])
    return 0


def identity(pid: int) -> list[object]:
    """Return what tells a process from others, to be kept in JSON and given to ``has_ended`` or ``lives``."""
    return [pid, start_of(pid), _pid_namespace()]


def has_ended(identity: list[object]) -> bool:
    """Return whether a process has ended; False if it was one of another container, whose processes are not seen."""
    pid, start, namespace = int(str(identity[0])), *identity[1:]
    return namespace == _pid_namespace() and (start_of(pid) != start or is_ending(pid))


def lives(identity: list[object]) -> bool:
    """Return whether a process runs; False if it was one of another container."""
    pid, start, namespace = int(str(identity[0])), *identity[1:]
    return namespace == _pid_namespace() and start_of(pid) == start != 0 and not is_ending(pid)


def _pid_namespace() -> str:
    with contextlib.suppress(OSError):
        return (PROC / "self/ns/pid").readlink().name
    return ""


def is_ending(pid: int) -> bool:
    """Return whether a process has begun to end. It cannot be stopped any more; to free its memory may take seconds."""
    with contextlib.suppress(OSError):
        return bool(int(stat_of(pid)[6]) & PF_EXITING)
    return False


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped, as SIGSTOP does it; one that a debugger has stopped does not count."""
    with contextlib.suppress(OSError):
        return stat_of(pid)[0] == "T"
    return False


def number_in(file: Path, name: str) -> int | None:
    """Return the number behind a name in a file of lines that begin with a name and a number; None: it is not there."""
    try:
        lines = [line.split() for line in file.read_text(errors="replace").splitlines()]
    except OSError:
        return None
    return next((int(w[1]) for w in lines if len(w) > 1 and w[0] == name and w[1].isdecimal()), None)
