"""Forks worlds of ranks from one process that has imported torch and megatron-core, because the imports take seconds.

As a program: reads one JSON line per world from standard input (``ranks``, ``program``, ``arguments``, ``env``,
``directory``, ``controller``), runs ``program`` of ``worlds.py`` in that many processes, and answers with their exit
codes. If a controller is wanted, it is forked before the ranks, on a free port.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

from tests.ports import free_port
from ttp.controller.__main__ import main as controller_main

REPOSITORY = Path(__file__).parents[3]
PATIENCE_S = 120.0
LEAVING_S = 20.0
ATTEMPTS = 5


class Nursery:
    """The process of this module, as a test uses it."""

    def __init__(self) -> None:
        env = {k: v for k, v in os.environ.items() if not k.startswith(("TTP_", "TORCHELASTIC", "PET_"))}
        env |= {"PYTHONPATH": str(REPOSITORY)}
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__))], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, text=True
        )

    def run(
        self,
        directory: Path,
        program: str,
        ranks: int = 4,
        env: dict[str, str] | None = None,
        controller: bool = False,
        **arguments: Any,
    ) -> list[int]:
        """Run a world and return exit codes by rank. A rank's output is in ``directory/rank<r>.out``."""
        directory.mkdir(parents=True, exist_ok=True)
        order = {
            "ranks": ranks,
            "program": program,
            "arguments": arguments,
            "env": env or {},
            "directory": str(directory),
            "controller": controller,
        }
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return list(json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()


def main() -> None:
    """Serve worlds until standard input ends."""
    warnings.simplefilter("ignore")
    worlds = importlib.import_module("tests.adapters.megatron.worlds")
    importlib.import_module("tests.adapters.megatron.seed_gpt3")
    importlib.import_module("ttp.adapters.megatron.adapter")
    for name in ("core", "core.models.gpt", "core.optimizer", "core.distributed", "core.pipeline_parallel"):
        importlib.import_module(f"megatron.{name}")
    for line in sys.stdin:
        print(json.dumps(_run(worlds, json.loads(line))), flush=True)


def _run(worlds: Any, order: dict[str, Any]) -> list[int]:
    controller = _serving(order) if order["controller"] else None
    codes = _lives(worlds, order)
    if controller is not None:
        _end(controller)
    return codes


def _serving(order: dict[str, Any]) -> int:
    """Start a controller that ranks find through their environment; return its pid."""
    for _ in range(ATTEMPTS):
        order["env"]["TTP_PORT"] = str(port := free_port())
        pid = _fork_controller(order["env"], port)
        while not _left(pid):
            with socket.socket() as knock:
                if knock.connect_ex(("127.0.0.1", port)) == 0:
                    return pid
            time.sleep(0.01)
    raise RuntimeError("no controller could be started")


def _fork_controller(env: dict[str, str], port: int) -> int:
    if pid := os.fork():
        return pid
    code = 1
    try:
        os.setsid()
        os.environ.update(env)
        run_dir = Path(env["TTP_RUN_DIR"])
        run_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        _say_into(run_dir / "controller.log")
        code = controller_main(["--port", str(port), "--run-dir", str(run_dir)])
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _left(pid: int) -> bool:
    return os.waitpid(pid, os.WNOHANG)[0] == pid


def _end(controller: int) -> None:
    """End the controller unless it has ended. It writes its last lines before."""
    deadline = time.monotonic() + LEAVING_S
    with contextlib.suppress(ProcessLookupError, ChildProcessError):
        os.kill(controller, signal.SIGTERM)
        while not _left(controller):
            if time.monotonic() > deadline:
                os.kill(controller, signal.SIGKILL)
            time.sleep(0.01)


def _lives(worlds: Any, order: dict[str, Any]) -> list[int]:
    world = [_fork(worlds, order, rank) for rank in range(order["ranks"])]
    codes: dict[int, int] = {}
    deadline = time.monotonic() + PATIENCE_S
    while len(codes) < len(world):
        for rank, pid in enumerate(world):
            if rank not in codes and (ended := os.waitpid(pid, os.WNOHANG))[0]:
                codes[rank] = os.waitstatus_to_exitcode(ended[1])
            elif rank not in codes and time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    return [codes[rank] for rank in range(len(world))]


def _fork(worlds: Any, order: dict[str, Any], rank: int) -> int:
    if pid := os.fork():
        return pid
    code = 1
    try:
        directory = Path(order["directory"])
        _say_into(directory / f"rank{rank}.out")
        os.environ.update(order["env"] | {"RANK": str(rank), "LOCAL_RANK": str(rank), "JOB_DIR": str(directory)})
        os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = str(order["ranks"])
        module, _, program = order["program"].rpartition(".")
        home = importlib.import_module(f"tests.adapters.megatron.{module}") if module else worlds
        getattr(home, program)(**order["arguments"])
        code = 0
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _say_into(file: Path) -> None:
    out = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(out, stream)


if __name__ == "__main__":
    main()
