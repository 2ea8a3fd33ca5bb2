"""Processes forked from one that has imported torch: a start costs a tenth of a second, not three to five."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

PRELOAD = [
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "torch.distributed._composable.replicate_with_fsdp",
    "torch.distributed.optim",
    "torch._dynamo",
    "ttp.api",
    "ttp.processor.processor",
    "ttp.adapters.torch.adapter",
    "ttp.adapters.torch.sharding.replicated_optimizer",
]

_server = multiprocessing.get_context("forkserver")


def fork(target: Callable[..., None], arguments: tuple[object, ...], *, daemon: bool = True) -> BaseProcess:
    """A process that calls ``target`` with torch imported already; it runs when this returns."""
    _server.set_forkserver_preload(PRELOAD)
    process = _server.Process(target=target, args=arguments, daemon=daemon)
    process.start()
    return process


class ForkedPython:
    """``python -m MODULE`` or ``python SCRIPT`` in a session of its own, with the methods of ``Popen`` that tests use.

    Everything of a fresh process is the same but that its imports are there and that functions given to ``atexit``
    are not called.

    Args:
        program: The module's name or the script's path.
        arguments: What follows on the command line.
        env: The whole environment.
        log: Where stdout and stderr go, behind what is there.
    """

    def __init__(self, program: str | Path, arguments: Sequence[object], env: dict[str, str], log: Path) -> None:
        self._process = fork(_main, (program, list(map(str, arguments)), env, log), daemon=False)

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


def _main(program: str | Path, arguments: list[str], env: dict[str, str], log: Path) -> None:
    os.setsid()
    for stream in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), stream)
    os.environ.clear()
    os.environ |= env | {"JOB_LAUNCHER_PID": str(os.getpid())}
    sys.path[:0] = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path not in ("", *sys.path)]
    sys.argv = [str(program), *arguments]
    _register_plugins()
    if isinstance(program, Path):
        sys.path.insert(0, str(program.parent))
        runpy.run_path(str(program), run_name="__main__")
    else:
        runpy.run_module(program, run_name="__main__", alter_sys=True)


def _register_plugins() -> None:
    """Torch asks the entry points while it is imported, which was under another environment."""
    rendezvous: Any = sys.modules["torch.distributed.elastic.rendezvous"]
    rendezvous.registry.handler_registry._registry.pop("ttp", None)
    rendezvous._register_out_of_tree_handlers()
