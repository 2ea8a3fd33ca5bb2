"""Launchers forked from a process that has imported torch: two and a half seconds of processor time less for each."""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.e2e.forked import fork


class ForkedLauncher:
    """``python -m MODULE ARGUMENTS`` in a session of its own, with the methods of ``Popen`` that tests use.

    Everything of a fresh process is the same but that its imports are there and that functions given to ``atexit``
    are not called.

    Args:
        env: The whole environment.
        log: Where stdout and stderr go, behind what is there.
        cwd: The working directory.
    """

    def __init__(self, module: str, arguments: list[str], env: dict[str, str], log: Path, cwd: Path) -> None:
        self._process = fork(_main, (module, arguments, env, log, cwd), daemon=False)

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("the launcher", timeout or 0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _main(module: str, arguments: list[str], env: dict[str, str], log: Path, cwd: Path) -> None:
    os.setsid()
    for stream in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), stream)
    os.chdir(cwd)
    os.environ.clear()
    os.environ |= env | {"JOB_LAUNCHER_PID": str(os.getpid())}
    sys.path[:0] = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path not in ("", *sys.path)]
    sys.argv = [module, *arguments]
    _register_plugins()
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _register_plugins() -> None:
    """Torch asks the entry points while it is imported, which was under another environment."""
    rendezvous: Any = sys.modules["torch.distributed.elastic.rendezvous"]
    rendezvous.registry.handler_registry._registry.pop("ttp", None)
    rendezvous._register_out_of_tree_handlers()
