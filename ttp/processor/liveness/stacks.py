"""Shows the stacks of all threads of a process, even if it holds the interpreter lock or is blocked in C code.

``install`` makes faulthandler answer a real-time signal: its C handler runs at once, whichever thread holds the
interpreter lock, and appends the Python stacks of all threads to ``run_dir/stacks/<pid>.txt``. ``take`` is the other
side, in any process of the same host and user: it looks at the process from outside, sends the signal, and reads what
was appended.

The first line of the file says which process wrote it, and which signal that process answers. The signal is sent to no
other process, because one that does not catch it would die. For the same reason the handler stays installed for the
life of its process.

The handler walks the frames of other threads while they may run, which is not entirely safe in CPython. So stacks are
only taken of processes that are suspected already.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import os
import re
import signal
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from ttp.launch.proc_files import start_of, status_of
from ttp.launch.run_dir import make_private

log = logging.getLogger("ttp.processor")

FIRST_OFFSET, LAST_OFFSET = 7, 14
"""Offsets from SIGRTMIN; the first unused signal is taken. glibc keeps the first ones, debuggers like the last."""

TEXT_MAX = 8000
"""Maximum number of characters of an answer. The main thread comes first."""

_DUMP_MAX = 1 << 20
_SETTLED_S = 0.1
"""Seconds without growth of the file after which a dump has ended: it has no end mark."""

_POLL_S = 0.01
_THREAD = re.compile(r"(?m)^(?=(?:Current thread|Thread) 0x)")
_IDENT = re.compile(r"0x[0-9a-f]+")

_installed: _Header | None = None
_file: int = -1


@dataclass(frozen=True, slots=True)
class _Header:
    """The first line of a stack file.

    Args:
        pid: the process that writes it.
        started: start of that process, in the kernel's ticks since boot, as a pid may be used again.
        signal: the signal that makes it write.
        main: ident of its main thread.
    """

    pid: int
    started: int
    signal: int
    main: int


def install(run_dir: Path) -> bool:
    """Let processes that know ``run_dir`` ask for the stacks of this one. Never raises; returns whether they can."""
    global _installed, _file
    try:
        signum = _installed.signal if _installed is not None else _free_signal()
        if signum is None:
            log.info("no real-time signal is free: the stacks of this process cannot be taken")
            return False
        header = _Header(os.getpid(), start_of(os.getpid()), signum, threading.main_thread().ident or 0)
        previous, _file = _file, _create(run_dir / "stacks", header)
        faulthandler.register(signum, file=_file, all_threads=True, chain=False)
        _installed = header
        if previous >= 0:
            os.close(previous)
    except Exception as problem:  # no /proc, another OS, a full disk
        log.info("the stacks of this process cannot be taken: %s", problem)
        return False
    return True


def uninstall(run_dir: Path) -> None:
    """Stop offering stacks. The handler stays installed, because a signal on its way would end the process."""
    with contextlib.suppress(OSError):
        _path(run_dir, os.getpid()).unlink(missing_ok=True)


def take(pid: int, run_dir: Path, timeout_s: float) -> str:
    """Return the stacks of process ``pid``, as a text of at most ``TEXT_MAX`` characters. Never raises.

    Args:
        pid: a process of this host and user; may be this process.
        run_dir: run directory of the job on this host.
        timeout_s: seconds to wait for the answer. Call it on a thread that may wait.
    """
    try:
        return _take(pid, run_dir, timeout_s)[:TEXT_MAX]
    except Exception as problem:
        return f"pid {pid}: no stack can be taken: {problem}"[:TEXT_MAX]


# ----------------------------------------------------------------------------------------- the process that is asked


def _free_signal() -> int | None:
    status = status_of(os.getpid())  # Python does not know of handlers that C code has set
    used = int(status["SigCgt"], 16) | int(status["SigIgn"], 16) | int(status["SigBlk"], 16)
    for offset in range(FIRST_OFFSET, LAST_OFFSET + 1):
        signum = int(signal.SIGRTMIN) + offset
        if not used >> (signum - 1) & 1:
            return signum
    return None


def _create(directory: Path, header: _Header) -> int:
    make_private(directory)
    for path in directory.glob("*.txt"):
        if path.stem.isdecimal() and not Path("/proc", path.stem).exists():
            path.unlink(missing_ok=True)  # left by a process that was killed
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    file = os.open(_path(directory.parent, header.pid), flags, 0o600)
    os.write(file, json.dumps(asdict(header)).encode() + b"\n")
    return file


# --------------------------------------------------------------------------------------------- the process that asks


def _take(pid: int, run_dir: Path, timeout_s: float) -> str:
    try:
        status = status_of(pid)
    except (FileNotFoundError, ProcessLookupError):
        return f"pid {pid}: no such process"
    seen = f"pid {pid}: state {status['State']}, {status.get('Threads', '?')} threads, {_waiting(pid)}"
    match status["State"][0]:
        case "T" | "t":
            return f"{seen}\nstopped (SIGSTOP?): no stack can be taken"
        case "Z" | "X":
            return f"{seen}\nit has ended, and its parent has not reaped it (zombie): no stack can be taken"
    header = _header(pid, run_dir)
    if header is None:
        return f"{seen}\nit has no handler that dumps stacks (TTP_STACKS=off, or no processor): no stack can be taken"
    if not int(status["SigCgt"], 16) >> (header.signal - 1) & 1:
        return (
            f"{seen}\nit no longer handles signal {header.signal}, by which stacks are asked for: no stack can be taken"
        )
    return f"{seen}\n{_ask(header, _path(run_dir, pid), timeout_s)}"


def _ask(header: _Header, path: Path, timeout_s: float) -> str:
    before = path.stat().st_size
    os.kill(header.pid, header.signal)
    if not _grown(path, before, timeout_s):
        return f"it did not answer within {timeout_s:g} s: it is in a system call that cannot be interrupted"
    return _arranged(_appended(path, before), header.main)


def _header(pid: int, run_dir: Path) -> _Header | None:
    """Return the header of the stack file, if it is of the process that has this pid now."""
    try:
        with _path(run_dir, pid).open() as file:
            header = _Header(**json.loads(file.readline(1000)))
    except (OSError, ValueError, TypeError):
        return None
    return header if header.pid == pid and header.started == start_of(pid) else None


def _grown(path: Path, size: int, timeout_s: float) -> bool:
    """Wait until the file is longer than ``size`` and grows no more."""
    until, settled_at, last = time.monotonic() + timeout_s, 0.0, size
    while (now := time.monotonic()) < until:
        if (length := path.stat().st_size) != last:
            last, settled_at = length, now + _SETTLED_S
        elif last > size and now >= settled_at:
            break
        time.sleep(_POLL_S)
    return last > size


def _appended(path: Path, offset: int) -> str:
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(_DUMP_MAX).decode(errors="replace")


def _arranged(dump: str, main: int) -> str:
    """Return the stacks, that of the main thread first."""
    blocks = [block.strip() for block in _THREAD.split(dump) if block.strip()]
    mains = [block for block in blocks if _ident(block) == main]
    others = [block for block in blocks if _ident(block) != main]
    named = [re.sub(r"^.*?0x[0-9a-f]+", "Main thread", block) for block in mains]
    return "\n\n".join(named + others)


def _ident(block: str) -> int | None:
    found = _IDENT.search(block.partition("\n")[0])
    return int(found[0], 16) if found else None


# ------------------------------------------------------------------------------------------------------------ /proc


def _path(run_dir: Path, pid: int) -> Path:
    return run_dir / "stacks" / f"{pid}.txt"


def _waiting(pid: int) -> str:
    """Return the kernel function in which the main thread waits, in words."""
    try:
        where = Path(f"/proc/{pid}/wchan").read_text().strip()
    except OSError:
        where = ""
    return f"waits in {where}" if where not in ("", "0") else "no wait in the kernel is shown"
