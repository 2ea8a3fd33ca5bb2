"""Forks processes from one that has imported torch: a start costs a tenth of a second, not three to five.

The ranks of launchers that are forked here are forked too, from their first start, as in a warm restart. If
``TTP_CONTINUITY`` is set, their first start is cold, as it is for users. The controllers of forked processes are always
forked.
"""

from __future__ import annotations

import ctypes
import functools
import json
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from multiprocessing import forkserver, popen_forkserver, resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ttp.config import Config
from ttp.launch import controller_process, host
from ttp.launch.warm import template
from ttp.launch.warm.rules import digest
from ttp.launch.warm.starter import Ready, WarmStarter
from ttp.launch.warm.worker import ForkedWorker

PRELOAD = [
    "encodings.idna",
    "grpc._channel",
    "grpc._interceptor",
    "grpc._server",
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "torch.distributed._composable.replicate_with_fsdp",
    "torch.distributed.optim",
    "torch._dynamo",
    "torch.utils.serialization.config",
    "torch.distributed.launcher.api",
    "ttp.api",
    "ttp.chaos.job",
    "ttp.cli.main",
    "ttp.controller.driver",
    "ttp.controller.service",
    "ttp.controller.spans",
    "ttp.launch.agent",
    "ttp.launch.install",
    "ttp.launch.warm.template",
    "ttp.mindio.protocol.handler_recovery",
    "ttp.processor.processor",
    "ttp.restoring",
    "ttp.store.choice",
    "ttp.store.writable",
    "ttp.testing.kit",
    "ttp.adapters.torch.adapter",
    "ttp.adapters.torch.regroup",
    "ttp.adapters.torch.sharding.shard_discovery",
    "ttp.adapters.torch.sharding.zero_sharding",
    "ttp.adapters.torch.sharding.replicated_optimizer",
    "sklearn.datasets",  # of the first example
    "tests.forking",  # imports pytest, which would take each process longer than all the rest of its start
    "tests.frozen",  # the last
]
"""Modules that most forked processes need, those too that are imported only when they are needed: 20 ms in each."""

WITH_MINDSPORE = [
    "mindspore",
    *(name for name in PRELOAD if name.partition(".")[0] in ("encodings", "grpc", "sklearn")),
    *(name for name in PRELOAD if name.startswith(("ttp.cli", "ttp.controller", "ttp.processor"))),
    *PRELOAD[-2:],
]
"""What launchers of MindSpore's jobs are forked from, whose users may not have torch."""

LAUNCHERS = ("ttp", "ttp.launch.run", "torch.distributed.run")

_server = multiprocessing.get_context("forkserver")
SERVER = "FORK_SERVER_ADDRESS"


def share() -> None:
    """Start the process that is forked, for this process and those that it starts: the workers of a test run."""
    _server.set_forkserver_preload(PRELOAD)
    forkserver.ensure_running()
    shared: Any = forkserver._forkserver
    os.environ[SERVER] = shared._forkserver_address


@functools.cache
def _with_mindspore() -> Any:
    """Start the process that has imported MindSpore, once for this process, and return its address."""
    server: Any = forkserver.ForkServer()
    server.set_forkserver_preload(WITH_MINDSPORE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLOG_v", "3")
        server.ensure_running()
    return server


def fork(
    target: Callable[..., None], arguments: tuple[object, ...], *, daemon: bool = True, mindspore: bool = False
) -> BaseProcess:
    """Start a process that calls ``target`` with torch or MindSpore already imported. It runs when this returns."""
    shared: Any = forkserver._forkserver
    if shared._forkserver_address is None and SERVER in os.environ:
        shared._forkserver_address, shared._forkserver_alive_fd = os.environ[SERVER], os.pipe()[1]
        shared.ensure_running = resource_tracker.ensure_running
    _server.set_forkserver_preload(PRELOAD)
    shared.ensure_running()
    with pytest.MonkeyPatch.context() as patch:
        if mindspore:
            patch.setattr(shared, "_forkserver_address", _with_mindspore()._forkserver_address)
        process = _server.Process(target=_begin, args=(shared._forkserver_address, target, arguments), daemon=daemon)
        process.start()
    return process


def _begin(server: str, target: Callable[..., None], arguments: tuple[object, ...]) -> None:
    """Call ``target`` in a process whose controllers are forked from that server, too."""
    shared: Any = forkserver._forkserver
    shared._forkserver_address, shared.ensure_running = server, resource_tracker.ensure_running
    popen: Any = popen_forkserver  # else a controller would first import the main module, a training program perhaps
    popen.spawn = SimpleNamespace(get_preparation_data=lambda _name: {"sys_path": sys.path})
    place: Any = controller_process
    names = {name: getattr(subprocess, name) for name in ("DEVNULL", "TimeoutExpired")}
    place.subprocess = SimpleNamespace(Popen=ForkedController, **names)
    target(*arguments)


class ForkedPython:
    """``python -m MODULE`` or ``python SCRIPT`` in a session of its own, with the methods of ``Popen`` that tests use.

    It equals a fresh process, except that its imports are done and that functions given to ``atexit`` are not called.

    Args:
        program: The module's name or the script's path.
        arguments: The command-line arguments.
        env: The whole environment.
        log: The file to which stdout and stderr are appended.
        cwd: The working directory; by default this process'.
        mindspore: Whether MindSpore is imported, and torch is not.
    """

    def __init__(
        self,
        program: str | Path,
        arguments: Sequence[object],
        env: dict[str, str],
        log: Path,
        *,
        cwd: Path | None = None,
        mindspore: bool = False,
    ) -> None:
        arguments = (program, list(map(str, arguments)), env, log, cwd or Path.cwd())
        self._process = fork(_main, arguments, daemon=False, mindspore=mindspore)

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkedController(ForkedPython):
    """A controller, started as ``subprocess.Popen`` would. /proc shows its command, and whose it is.

    To ``multiprocessing`` it is no child of its caller, which may be daemonic, and does not wait for it at its end.
    """

    def __init__(self, command: Sequence[str], *, stdout: int, env: dict[str, str], **_: object) -> None:
        log, done = Path(f"/proc/self/fd/{stdout}").readlink(), len(controller_process.COMMAND)
        arguments = ("ttp.controller", command[done:], env, log, Path.cwd(), command)
        process: Any = _server.Process(target=_main, args=arguments, daemon=False)
        process._popen = popen_forkserver.Popen(process)
        self._process = process


def _main(
    program: str | Path,
    arguments: list[str],
    env: dict[str, str],
    log: Path,
    cwd: Path,
    shown: Sequence[str] = (),
) -> None:
    multiprocessing.set_start_method("fork", force=True)  # the default of a fresh one, for workers of loaders
    os.setsid()
    os.chdir(cwd)
    for stream in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), stream)
    os.environ.clear()
    os.environ |= env | {"JOB_LAUNCHER_PID": str(os.getpid())}
    if shown:
        _show(shown)
    sys.path[:0] = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path not in ("", *sys.path)]
    sys.argv = [str(program), *arguments]
    forking: AbstractContextManager[None] = nullcontext()
    if program in LAUNCHERS and "TTP_CONTINUITY" not in env:
        place: Any = host
        place.WarmStarter = starter = _forking_this()
        if program == "torch.distributed.run" and "TTP_PORT" not in env:  # its plug-in does not ask for a starter
            from ttp.launch.warm import torch_workers

            forking = torch_workers.forking(starter(Config(), log.parent))
    if program == "torch.distributed.run":
        _register_plugins()
    with forking:
        _run(program)


def _show(command: Sequence[str]) -> None:
    """Write a command, and the variables by which tests find processes, over those that /proc shows of this process."""
    begin, end, begin_env, end_env = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:49])
    variables = [f"{name}={os.environ[name]}" for name in ("TTP_RUN_DIR", "JOB_DIR") if name in os.environ]
    for words, start, last in ((command, begin, end), (variables, begin_env, end_env)):
        said = b"".join(os.fsencode(word) + b"\0" for word in words)
        assert len(said) <= last - start, f"{len(said)} bytes do not fit in {last - start}"
        ctypes.memset(start, 0, last - start)
        ctypes.memmove(start, said, len(said))


def _run(program: str | Path) -> None:
    if isinstance(program, Path):
        sys.path.insert(0, str(program.parent))
        runpy.run_path(str(program), run_name="__main__")
    else:
        runpy.run_module(program, run_name="__main__", alter_sys=True)


def _register_plugins() -> None:
    """Register torch's plug-ins of this environment. Torch looks for them only when it is imported."""
    rendezvous: Any = sys.modules["torch.distributed.elastic.rendezvous"]
    rendezvous.registry.handler_registry._registry.pop("ttp", None)
    rendezvous._register_out_of_tree_handlers()


def imports(modules: Sequence[tuple[str, str | None]], *path: str, environ: Mapping[str, str] = os.environ) -> str:
    """Return what a rank reports of these modules, of further directories with modules, and of its variables.

    See ``ttp.processor.import_list``.
    """
    variables = {name: digest(value) for name, value in environ.items()}
    return json.dumps({"path": [*path, *sys.path[1:]], "modules": modules, "environ": variables, "bytes": 0})


def _forking_this() -> type[WarmStarter]:
    """Return a starter that forks ranks from a fork of this process, which has all of its imports."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with tempfile.NamedTemporaryFile("w", delete=False) as nothing:
        nothing.write(imports([]))
    launcher = os.getpid()
    pid = os.fork()
    if not pid:
        ours.close()
        variables = dict(os.environ)  # /proc has those of the process that all are forked from
        template._first_environment = lambda: variables
        template.main(theirs.detach(), launcher, nothing.name, "")
    theirs.close()
    said = json.loads(ours.recv(1 << 20))  # it has read the file
    assert said["state"] == "ready", said
    Path(nothing.name).unlink()

    class FromTheFirst(WarmStarter):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self._process, self._socket = ForkedWorker(pid, [str(template.__file__)]), ours  # type: ignore[assignment]
            self._ready = Ready(len(sys.modules), 0, 0.0, frozenset(), "")
            self._note("ready")

        def _worker(self, command: Any, environ: Any, *outputs: Any) -> Any:
            self._started_with = dict(environ)
            return super()._worker(command, environ, *outputs)

    return FromTheFirst
