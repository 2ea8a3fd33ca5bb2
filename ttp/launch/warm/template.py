"""The process that workers are forked from. It has one thread, imports what they import, and waits.

Runs as ``python -c "from ttp.launch.warm.template import main; main(...)"``. The descriptor it is given is one end of a
pair of sockets that carry one JSON object per message; requests for workers bring descriptors too: stdout, stderr and
the worker's own socket to the launcher. A worker runs nothing of its program before the launcher has said ``go`` there:
a worker that comes too late, because this process was stopped, finds that end closed and ends.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import os
import resource
import runpy
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any, NoReturn

from ttp.launch import nccl
from ttp.launch.proc_files import stat_of
from ttp.launch.warm import memory
from ttp.launch.warm.rules import Program, differing, set_by_program
from ttp.launch.warm.waiting import readable
from ttp.polling import poll

SHARE = 0.25
"""Share of one core that imports may take while ranks train and no restart waits."""
GO_S = 10.0
"""Seconds that a worker waits to become its launcher's child, and for the launcher's ``go``."""
LOOK_S = 0.1
PR_SET_PDEATHSIG = 1
PR_SET_MM, PR_SET_MM_ARG_END = 35, 9
DEVICES = ("/dev/nvidia-uvm", "/dev/davinci", "/dev/kfd")
"""Prefixes of files that are opened when a device is initialised."""
IDLE_THREADS = (b"jemalloc_bg_thd\n",)
"""Names of threads that a forked process can do without. pyarrow brings jemalloc, which handles forks itself."""
FIRST_IS_OURS = not getattr(sys.flags, "safe_path", False)
"""Whether the first entry of ``sys.path`` is the folder of the program."""


class NotTheSameError(Exception):
    """The imports of this process differ from those of the ranks."""


class EnvironmentReads:
    """Records which variables are read while modules are imported."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.read_all = ""
        self.now = ""

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Record reads while the block runs."""
        kind: Any = os._Environ
        get, walk = kind.__getitem__, kind.__iter__

        def noting_get(environ: Any, name: Any) -> Any:
            self.names.add(os.fsdecode(name) if isinstance(name, (str, bytes)) else "")
            return get(environ, name)

        def noting_walk(environ: Any) -> Any:
            self.read_all = self.read_all or self.now
            return walk(environ)

        kind.__getitem__, kind.__iter__ = noting_get, noting_walk
        try:
            yield
        finally:
            kind.__getitem__, kind.__iter__ = get, walk


class Template:
    """Imports, then forks on request until its launcher is gone.

    Args:
        launcher: socket to the launcher.
    """

    def __init__(self, launcher: socket.socket) -> None:
        self._launcher = launcher
        self._hurry = False
        self._path = list(sys.path)
        self._reads = EnvironmentReads()
        self._open = _handles()
        self._set: dict[str, str | None] = {}
        self._score = memory.die_first()

    def run(self, imports: str, skip: tuple[str, ...]) -> NoReturn:
        """Import, then fork on request. Never returns: a worker runs its program to the end and exits.

        Args:
            imports: path of the list that a rank has written, see ``ttp.processor.import_list``.
            skip: names of modules and packages that are not imported.
        """
        began_s = time.monotonic()
        try:
            wanted = json.loads(Path(imports).read_text())
            _check_startup()
            with self._reads.noted():
                done = self._import(wanted["path"], wanted["modules"], skip)
            reason = set_by_program(wanted["environ"], dict(os.environ), self._reads.names) or _why_no_fork()
            if reason is not None:
                raise NotTheSameError(reason)
            first = _first_environment()
            self._set = {name: os.environ.get(name) for name in differing(first, dict(os.environ))}
            sys.path[:] = self._path  # programs change theirs as they run
        except (NotTheSameError, OSError, ValueError, LookupError) as problem:
            self._say(state="refused", reason=str(problem))
            os._exit(0)
        gc.collect()
        gc.freeze()  # all of this is shared with all workers until one writes to it
        took_s = time.monotonic() - began_s
        self._say(state="ready", modules=done, bytes=_resident(), seconds=took_s, read=sorted(self._reads.names),
                  read_all=self._reads.read_all)  # fmt: skip
        while True:
            order, handed = self._receive()
            if "program" in order:
                self._fork(order, handed)
            for descriptor in handed:
                os.close(descriptor)

    def _import(self, path: list[str], modules: list[list[str]], skip: tuple[str, ...]) -> int:
        sys.path[1 if FIRST_IS_OURS else 0 :] = path
        wanted = [(n, f) for n, f in modules if not any(n == left or n.startswith(left + ".") for left in skip)]
        again = [(name, file) for name, file in wanted if self._import_one(name, file) is not None]
        for name, file in again:  # modules that import one another may need a certain order
            if (problem := self._import_one(name, file)) is not None:
                raise NotTheSameError(f"import {name} fails: {problem!r} (TTP_WARM_SKIP={name} leaves it out)")
        return len(wanted)

    def _import_one(self, name: str, file: str) -> Exception | None:
        """Import a module. Returns the exception that it raises, if any."""
        if name in sys.modules:
            return None
        before_s = time.process_time()
        self._reads.now = name
        try:
            found = importlib.import_module(name)
        except Exception as problem:
            return problem
        if (getattr(found, "__file__", None) or file) != file:
            raise NotTheSameError(f"import {name} gives {found.__file__} here and {file} in the ranks")
        if _has_threads() and _keeps_threads():
            raise NotTheSameError(f"import {name} starts a thread (TTP_WARM_SKIP={name} leaves it out)")
        if opened := sorted(_handles() - self._open):
            raise NotTheSameError(f"import {name} opens {opened[0]} (TTP_WARM_SKIP={name} leaves it out)")
        self._pause((time.process_time() - before_s) * (1 / SHARE - 1))
        return None

    def _pause(self, seconds: float) -> None:
        """Leave the cores to the ranks for a while, unless a restart waits."""
        if not self._hurry and readable(self._launcher.fileno(), seconds):
            self._receive()  # the only possible message now: hurry
            self._hurry = True

    def _say(self, **what: Any) -> None:
        self._launcher.send(json.dumps(what).encode())

    def _receive(self) -> tuple[dict[str, Any], list[int]]:
        data, handed, _, _ = socket.recv_fds(self._launcher, 64, 4)
        if not data:
            os._exit(0)  # the launcher is gone
        if not handed:
            return {}, []
        with os.fdopen(handed.pop(0)) as order:  # its place is shared with who wrote it
            order.seek(0)
            return json.load(order), handed

    def _fork(self, order: dict[str, Any], handed: list[int]) -> None:
        """Fork twice, so that the worker becomes a child of the launcher, which then gets its exit code."""
        between = os.fork()
        if between:
            os.waitpid(between, 0)
            return
        try:
            if os.fork():
                os._exit(0)
            self._launcher.close()
            memory.die_as_before(self._score)
            become(order, self._set, *handed)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
        _run(Program(**order["program"]))


def become(order: dict[str, Any], changed: dict[str, str | None], stdout: int, stderr: int, own: int) -> None:
    """Become what a fresh worker is before its program begins; returns when the launcher has said ``go``.

    Args:
        order: order of the launcher.
        changed: variables that the imports have set, or removed (None).
        stdout: descriptor of the standard output.
        stderr: descriptor of the standard error.
        own: descriptor of the socket to the launcher.
    """
    os.setsid()
    os.sched_setaffinity(0, order["cores"])
    threading.main_thread()._set_native_id()  # type: ignore[attr-defined] # which is that of the process forked from
    with socket.socket(fileno=own) as launcher:
        if not order["stdin"]:
            with Path(os.devnull).open() as nothing:
                os.dup2(nothing.fileno(), 0)
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        for descriptor in (stdout, stderr):
            os.close(descriptor)
        if os.isatty(1):
            sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr] # what files have unless told
        os.chdir(order["cwd"])
        os.environ.clear()
        os.environ.update(order["environ"])
        for name, value in changed.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        if os.environ.get("TTP_PORT"):
            nccl.prepare()  # as ``import ttp`` does, where it looks at variables of this worker
        wanted = Program(**order["program"])
        command = [wanted.interpreter, *wanted.options, *(["-m"] if wanted.module else []), wanted.name]
        _call_it([*command, *wanted.arguments])
        _reseed()
        if not _may_go(launcher, order["launcher"]):
            os._exit(1)


def _may_go(launcher: socket.socket, parent: int) -> bool:
    """Wait to become the launcher's child, and for its ``go``. Return whether both came."""
    looks = range(round(GO_S / LOOK_S))  # not by the clock: the whole host may have been suspended
    if not any(poll(lambda: os.getppid() == parent, LOOK_S, 0.0005) for _ in looks):
        return False
    launcher.send(b"%d" % os.getpid())
    return any(readable(launcher.fileno(), LOOK_S) for _ in looks) and launcher.recv(8) == b"go"


def _reseed() -> None:
    """Seed anew what is seeded at import; Python's ``random`` does it at a fork, MindSpore at first use."""
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()


def _call_it(command: list[str]) -> None:
    """Set the command line that ``ps`` shows: the kernel reads it from where this process' own was."""
    sys.orig_argv[:] = command
    try:
        start, end = map(int, stat_of("self")[45:47])
        text = b"\0".join(os.fsencode(word) for word in command) + b"\0"
        if len(text) <= end - start:
            ctypes.memset(start, 0, end - start)
            ctypes.memmove(start, text, len(text))
            ctypes.CDLL(None).prctl(PR_SET_MM, PR_SET_MM_ARG_END, ctypes.c_ulong(start + len(text)), 0, 0)
    except (OSError, ValueError):
        return  # it is only a name


def _run(program: Program) -> NoReturn:
    """Run the program as the interpreter would: same ``__main__``, same end."""
    sys.argv = [program.name, *program.arguments]
    if FIRST_IS_OURS:
        sys.path[:1] = [str(program.folder)]
    main: Any = sys.modules["__main__"]
    main.__dict__.clear()
    main.__dict__.update(
        __name__="__main__", __doc__=None, __package__=None, __spec__=None, __annotations__={}, __builtins__=builtins
    )
    try:
        if program.module:
            getattr(runpy, "_run_module_as_main")(program.name)  # noqa: B009
        else:
            _run_script(program.name, main.__dict__)
    except SystemExit:
        raise
    except BaseException as problem:
        _end_by(problem)
    sys.exit(0)


def _run_script(name: str, names: dict[str, Any]) -> None:
    path = os.path.join(Path.cwd(), name)  # noqa: PTH118 # as Python does it, without a look at links and dots
    names.update(__loader__=SourceFileLoader("__main__", path), __file__=path, __cached__=None)
    exec(compile(Path(path).read_bytes(), path, "exec", dont_inherit=True), names)


def _end_by(problem: BaseException) -> NoReturn:
    """Show an exception that was not caught, below the frames of this file, and leave as the interpreter does."""
    inner = problem.__traceback__
    while inner is not None and inner.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
        inner = inner.tb_next
    problem.__traceback__ = inner
    sys.last_type, sys.last_value, sys.last_traceback = type(problem), problem, inner
    sys.excepthook(type(problem), problem, inner)
    if isinstance(problem, KeyboardInterrupt):
        sys.stdout.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    sys.exit(1)


def _check_startup() -> None:
    """Refuse a startup module that may look at the rank before every program, as it would run only once here."""
    for name in ("sitecustomize", "usercustomize"):
        file = getattr(sys.modules.get(name), "__file__", None)
        source = Path(file).read_bytes() if file else b""
        if b"environ" in source or b"getenv" in source:
            raise NotTheSameError(f"{file} reads variables whenever Python starts")


def _handles() -> set[str]:
    """Return what this process has open and workers would share: connections, pipes, files to write to, devices."""
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the descriptor of the listing itself
            target = str(entry.readlink())
            writes = fcntl.fcntl(int(entry.name), fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY
            if target.startswith(DEVICES) or (not target.startswith("/dev/") and (writes or target[0] != "/")):
                found.add(target)
    return found


def _why_no_fork() -> str | None:
    """Return why a process forked from this one cannot use the imports; None: it can. Finds out by a fork."""
    child = os.fork()
    if not child:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        asked = [getattr(module, "__dict__", {}).get("_is_in_bad_fork") for module in list(sys.modules.values())]
        os._exit(int(any(ask() for ask in asked if callable(ask))))
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0:
        return "the imports have initialised a device, which cannot be forked"
    return None


def _has_threads() -> bool:
    """Return whether there are threads besides this one and ``IDLE_THREADS``."""
    found = 0
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended meanwhile
            found += (task / "comm").read_bytes() not in IDLE_THREADS
    return found > 1


def _keeps_threads() -> bool:
    """Return whether threads of this process outlive a fork.

    A library that is made for forks ends them before and starts them again at its next use, as OpenBLAS does. numpy
    loads that, and it has threads unless ``OMP_NUM_THREADS`` is 1, which torchrun does not set for one rank per host.
    """
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    return _has_threads()


def _first_environment() -> dict[str, str]:
    """Return the variables that this process was started with; Python itself may have set some since."""
    words = Path("/proc/self/environ").read_bytes().split(b"\0")
    return dict(os.fsdecode(word).split("=", 1) for word in words if b"=" in word)


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def main(descriptor: int, launcher: int, imports: str, skip: str) -> None:
    """Run until the launcher (a process id) is gone; for the rest see ``Template.run``."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == launcher:
        Template(socket.socket(fileno=descriptor)).run(imports, tuple(filter(None, skip.split(","))))
