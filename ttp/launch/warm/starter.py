"""Keeps the process that workers are forked from, for one launcher; says why where there is none.

Everything here gives up rather than wait or raise: a worker that is not forked is started as always.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from ttp.config import Config
from ttp.launch.memory_file import memory_file
from ttp.launch.proc_files import identity, stat_of
from ttp.launch.warm import memory
from ttp.launch.warm.rules import PER_WORKER, Program, no_room, program, why_not
from ttp.launch.warm.waiting import readable
from ttp.launch.warm.worker import ForkedWorker
from ttp.processor.import_list import FILE
from ttp.store.durable import replace_file

logger = logging.getLogger("ttp.launch")

CODE = (
    "import sys; sys.path[0] = sys.path[0] or {!r}; from ttp.launch.warm.template import main; main({}, {}, {!r}, {!r})"
)
"""The first entry of the path is that of the workers to come. Python has the current directory there."""
PR_SET_CHILD_SUBREAPER, PR_GET_CHILD_SUBREAPER = 36, 37
MESSAGE_BYTES = 1 << 20
STALL_S = 3.0
"""Seconds that a restart waits for a process that makes no progress. Then workers are started as always."""
AWAY_S = 1.5
"""Seconds between two looks, which come at once, that show that this launcher did not run: it may have been stopped
together with the process that it waits for.
"""
IMPORT_S = 30.0
"""Seconds that a restart waits for one that does: it imports what each worker would otherwise import for itself. On a
busy host these are seconds of processor time, as it would take each worker longer by the clock, too.
"""
BUSY = 10
"""How many times longer that may be by the clock. What gets less than this share of a processor is not short of one,
but waits itself.
"""
FORK_S = 10.0
"""Seconds that a worker may take to be forked. It takes a tenth of one, but cores may be busy; a start takes longer."""
FORK_LOOK_S = 0.1
NO_FURTHER = "the process to fork from gets no further"
STATUS_FILE = "warm.json"


@dataclass(frozen=True, slots=True)
class Ready:
    """What the process has reported about itself."""

    modules: int
    size: int
    """Resident bytes; workers share them for as long as they do not write to them."""
    seconds: float
    read: frozenset[str]
    read_all: str


class WarmStarter:
    """The owner of the process. One for each launcher; call ``look`` now and then while workers run.

    Args:
        config: says whether it is wanted, and which modules are left out.
        run_dir: directory in which ranks list their imports; log and status of the process go there too.
    """

    def __init__(self, config: Config, run_dir: Path) -> None:
        self._skip, self._run_dir = config.warm_skip, run_dir
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._started_with: dict[str, str] = {}
        self._first: tuple[Program, dict[str, str]] | None = None
        self._ready: Ready | None = None
        self._hurried = False
        self._off = "" if config.continuity != "off" else "TTP_CONTINUITY=off"
        for name in (FILE, STATUS_FILE):
            (run_dir / name).unlink(missing_ok=True)
        if self._off:
            self._note(self._off)

    @property
    def ready(self) -> bool:
        """True if a worker can be forked at once, as far as is known."""
        return self._ready is not None and not self._off

    def look(self) -> None:
        """Start the process once the ranks have listed their imports, and take its messages."""
        if self._off:
            return
        if self._process is None:
            if self._first is not None and (self._run_dir / FILE).exists():
                self._start(*self._first)
        elif self._ready is None:
            self._hear(0.0)
        elif self._process.poll() is not None:
            self._give_up(self._how_it_ended())

    def imports(self) -> bytes | None:
        """Return the imports that the ranks of this host have listed, as ``prepare`` takes them; None: nothing yet."""
        path = self._run_dir / FILE
        return path.read_bytes() if not self._off and path.exists() else None

    def prepare(self, command: Sequence[str], environ: Mapping[str, str], imports: bytes | None) -> None:
        """Start the process before there are ranks on this host. Call it now and then instead of ``look``.

        Args:
            command: command line of the ranks to come.
            environ: their environment, without what differs between them.
            imports: imports of ranks of other hosts; None: not known yet.
        """
        if self._first is None and imports and not self._off:
            wanted = program(command, sys.executable)
            if isinstance(wanted, str):
                self._give_up(wanted)
                return
            (self._run_dir / FILE).write_bytes(imports)
            self._first = wanted, dict(environ)
        self.look()

    def refuse(self, reason: str) -> None:
        """Start workers as always from now on, for this reason."""
        if not self._off:
            self._give_up(reason)

    def hurry(self) -> None:
        """Hurry the imports: a restart is near, and the ranks, which are leaving, no longer need the cores."""
        if self._socket is not None and self._ready is None and not self._hurried:
            self._hurried = True
            self._send(b"{}")

    def worker(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        stdout: IO[Any] | None,
        stderr: IO[Any] | None,
        *,
        stdin: bool = True,
        is_rank: bool = True,
    ) -> ForkedWorker | None:
        """Fork a worker. None: it has to be started, and the reason is logged.

        Args:
            command: its command line.
            environ: its whole environment.
            stdout: its standard output; None: that of this process.
            stderr: its standard error; None: that of this process.
            stdin: whether it has the standard input of this process; else it has none.
            is_rank: False: its environment may differ from that of the ranks, for which nothing follows from that.
        """
        if self._off:
            return None
        try:
            outputs = (stdout.fileno() if stdout else 1, stderr.fileno() if stderr else 2)
            return self._worker(command, environ, outputs, stdin, is_rank)
        except (OSError, ValueError, LookupError, TypeError, AssertionError) as problem:  # no signal to the launcher
            self._give_up(repr(problem))
            return None

    def close(self) -> None:
        """End the process."""
        if self._socket is not None:
            self._socket.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._process = self._socket = None

    def _worker(
        self, command: Sequence[str], environ: Mapping[str, str], outputs: tuple[int, int], stdin: bool, is_rank: bool
    ) -> ForkedWorker | None:
        wanted = program(command, sys.executable)
        if isinstance(wanted, str):
            self._give_up(wanted)
            return None
        if self._process is None:
            self._first = self._first or ((wanted, dict(environ)) if is_rank else None)
            return None
        if self._ready is None and not self._wait_ready():
            return None
        assert self._ready is not None
        reason = why_not(self._started_with, environ, self._ready.read, self._ready.read_all)
        if reason is None and self._first is not None and self._first[0].options != wanted.options:
            reason = f"workers have other options of Python: {' '.join(wanted.options)}"
        if reason is not None:
            if is_rank:
                self._give_up(reason)
            return None
        order = {
            "program": {name: getattr(wanted, name) for name in Program.__slots__},
            "environ": dict(environ),
            "cwd": str(Path.cwd()),
            "launcher": os.getpid(),
            "stdin": stdin,
            "cores": sorted(os.sched_getaffinity(0)),  # of this thread: torch binds it while it starts a worker
        }
        return self._fork(order, command, outputs)

    def _start(self, wanted: Program, environ: Mapping[str, str]) -> None:
        try:
            said = json.loads((self._run_dir / FILE).read_text())
            reason = no_room(len(said["modules"]), said["bytes"], memory.left())
        except (OSError, ValueError, LookupError) as problem:
            reason = f"what the ranks have imported cannot be read: {problem!r}"
        if reason is not None:
            self._give_up(reason)
            return
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._started_with = {name: value for name, value in environ.items() if name not in PER_WORKER}
        code = CODE.format(
            str(wanted.folder), theirs.fileno(), os.getpid(), str(self._run_dir / FILE), ",".join(self._skip)
        )
        command = [wanted.interpreter, *wanted.options, "-c", code.ljust(4096)]  # room for the workers' command lines
        try:
            with (self._run_dir / "warm.log").open("ab") as log, theirs:
                self._process = subprocess.Popen(
                    command, env=self._started_with, stdout=log, stderr=log, pass_fds=[theirs.fileno()]
                )
        except OSError as problem:
            ours.close()
            self._give_up(f"the process to fork from cannot be started: {problem}")
            return
        self._socket = ours
        self._note("preparing")

    def _wait_ready(self) -> bool:
        """Wait until the process has imported everything; False: it does not get there, and was given up."""
        self.hurry()
        began_s = moved_s = last_s = time.monotonic()
        first = used = _ticks(self._process.pid) if self._process is not None else 0
        while self._ready is None and self._process is not None:
            self._hear(0.05)
            now_s, spent = time.monotonic(), _ticks(self._process.pid) if self._process is not None else 0
            if (away_s := now_s - last_s) > AWAY_S:
                began_s, moved_s = began_s + away_s, moved_s + away_s
            last_s = now_s
            if spent > used:
                used, moved_s = spent, now_s
            took_s, used_s = now_s - began_s, (used - first) / os.sysconf("SC_CLK_TCK")
            too_long = took_s > IMPORT_S and not took_s / BUSY < used_s < IMPORT_S
            if self._process is not None and (too_long or now_s - moved_s > STALL_S):
                self._give_up(NO_FURTHER)
        return self._ready is not None

    def _hear(self, within_s: float) -> None:
        assert self._socket is not None
        if not readable(self._socket.fileno(), within_s):
            return
        try:
            data = self._socket.recv(MESSAGE_BYTES)
        except ConnectionResetError:  # it had not read all of what was sent to it
            data = b""
        said = json.loads(data) if data else {}
        if said.get("state") != "ready":
            self._give_up(said.get("reason") or self._how_it_ended())
            return
        self._ready = Ready(said["modules"], said["bytes"], said["seconds"], frozenset(said["read"]), said["read_all"])
        logger.info(
            "the next restart is warm: %d modules are imported (%.0f MiB, %.1f s)",
            self._ready.modules, self._ready.size / 2**20, self._ready.seconds,
        )  # fmt: skip
        self._note("ready")

    def _how_it_ended(self) -> str:
        """Return how the process has ended. Its socket closes a little earlier than that is known."""
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STALL_S)
        return f"the process to fork from has ended with {self._process.returncode}; see warm.log in the run directory"

    def _fork(self, order: dict[str, Any], command: Sequence[str], outputs: tuple[int, int]) -> ForkedWorker | None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, theirs, _in_memory(json.dumps(order)) as said_of_it, adopting():
            assert self._socket is not None
            self._socket.settimeout(FORK_S)
            socket.send_fds(self._socket, [b"{}"], [said_of_it.fileno(), *outputs, theirs.fileno()])
            theirs.close()
            if not self._answers(ours):
                self._give_up(NO_FURTHER)
                return None
            said = ours.recv(64)
            if not said:
                self._give_up("a worker could not be forked; see warm.log in the run directory")
                return None
            worker = ForkedWorker(int(said), command)
            ours.send(b"go")
            return worker

    def _answers(self, worker: socket.socket) -> bool:
        """Wait for a worker that is being forked; False: ``FORK_S`` is over, or the process to fork from is stopped."""
        assert self._process is not None
        for _ in range(round(FORK_S / FORK_LOOK_S)):  # not by the clock: the whole host may have been suspended
            if readable(worker.fileno(), FORK_LOOK_S):
                return True
            if stat_of(self._process.pid)[0] in ("T", "t"):
                return False
        return False

    def _send(self, data: bytes) -> None:
        assert self._socket is not None
        try:
            self._socket.send(data, socket.MSG_DONTWAIT)
        except OSError as problem:
            self._give_up(f"the process to fork from does not listen: {problem}")

    def _give_up(self, reason: str) -> None:
        """Start workers as always from now on."""
        self.close()
        self._ready, self._off = None, reason
        logger.warning("restarts are cold: %s", reason)
        self._note(reason)

    def _note(self, state: str) -> None:
        """Write the state to a file for ``ttp status``."""
        known: dict[str, Any] = {"state": state, "launcher": identity(os.getpid())}
        if self._ready is not None:
            known |= {
                "modules": self._ready.modules,
                "bytes": self._ready.size,
                "seconds": round(self._ready.seconds, 3),
            }
        try:
            replace_file(self._run_dir / STATUS_FILE, json.dumps(known).encode())
        except OSError as problem:
            logger.debug("%s cannot be written: %s", STATUS_FILE, problem)


def read_status(run_dir: Path) -> dict[str, Any] | None:
    """Return what the launcher of this host has noted; None: nothing.

    Returns:
        ``state`` (``preparing``, ``ready``, or why restarts are cold), ``launcher`` (see ``proc_files.identity``); once
        ready ``modules``, ``bytes``, ``seconds``.
    """
    try:
        found = json.loads((run_dir / STATUS_FILE).read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and isinstance(found.get("state"), str) else None


def _in_memory(text: str) -> IO[bytes]:
    """Return a file in memory with this text, because an environment may be too large for one message of a socket."""
    file = memory_file()
    file.write(text.encode())
    file.flush()
    return file


@contextlib.contextmanager
def adopting() -> Iterator[None]:
    """Make orphans below this process its children while the block runs: workers are, as their parent ends at once."""
    before, prctl = ctypes.c_int(), ctypes.CDLL(None).prctl
    prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(PR_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)


def _ticks(pid: int) -> int:
    """Return the processor time of a process so far, in clock ticks; only ever compared with itself."""
    try:
        words = stat_of(pid)
    except OSError:
        return 0
    return int(words[11]) + int(words[12])
