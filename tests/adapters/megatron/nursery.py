"""Forks worlds of ranks from one process that has imported torch and megatron-core: the imports take seconds."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import socket
import sys
import time
import warnings
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tests.e2e.forked import ended, lead
from tests.forking import fork
from tests.ports import free_port
from ttp.controller.__main__ import main as controller_main

PATIENCE_S = 120.0
LEAVING_S = 20.0
ATTEMPTS = 5
HERE = "tests.adapters.megatron"
IMPORTS = (
    *(f"{HERE}.{name}" for name in ("worlds", "seed_gpt3")),
    "ttp.adapters.megatron.adapter",
    *(f"megatron.core{part}" for part in ("", ".models.gpt", ".optimizer", ".distributed", ".pipeline_parallel")),
    "megatron.core.models.gpt.gpt_layer_specs",
)
_of_this = multiprocessing.get_context("fork")


class Nursery:
    """The process that worlds are forked from, as a test uses it."""

    def __init__(self) -> None:
        self._start()

    def _start(self) -> None:
        self._orders, theirs = multiprocessing.Pipe()
        self._process = fork(_serve, (theirs,), daemon=False)
        theirs.close()

    def run(
        self,
        directory: Path,
        program: str,
        ranks: int = 4,
        env: dict[str, str] | None = None,
        controller: bool = False,
        **arguments: Any,
    ) -> list[int]:
        """Run ``program`` of ``worlds.py`` in a world, and return exit codes by rank.

        A rank's output is in ``directory/rank<r>.out``. If a controller is wanted, it is there before the ranks.
        If the process has ended since the last world, another one takes its place, and the test's report says so.
        """
        if not self._process.is_alive():
            with warnings.catch_warnings():
                warnings.simplefilter("always")  # the world is none the worse for it
                warnings.warn(f"the process to fork worlds from had ended with {self._process.exitcode}", stacklevel=2)
            self._orders.close()
            self._start()
        directory.mkdir(parents=True, exist_ok=True)
        self._orders.send((directory, program, ranks, env or {}, controller, arguments))
        codes: list[int] = self._orders.recv()
        return codes

    def close(self) -> None:
        """End the process."""
        self._orders.close()
        self._process.join(60)


def _serve(orders: Connection) -> None:
    """Run worlds until the other end of ``orders`` is closed."""
    warnings.simplefilter("ignore")
    for name in IMPORTS:
        importlib.import_module(name)
    while True:
        try:
            order = orders.recv()
        except EOFError:
            return
        orders.send(_run(*order))


def _run(
    directory: Path, program: str, ranks: int, env: dict[str, str], controller: bool, arguments: dict[str, Any]
) -> list[int]:
    serving = _serving(env) if controller else None
    world = [
        _of_this.Process(target=_rank, args=(directory, program, rank, ranks, env, arguments)) for rank in range(ranks)
    ]
    for process in world:
        process.start()
    codes = ended(world, PATIENCE_S)
    if serving is not None:
        serving.terminate()  # it writes its last lines
        serving.join(LEAVING_S)
        serving.kill()
    return codes


def _serving(env: dict[str, str]) -> BaseProcess:
    """Start a controller that ranks with this environment find."""
    for _ in range(ATTEMPTS):
        port = free_port()
        env["TTP_PORT"] = str(port)
        controller = _of_this.Process(target=_control, args=(env, port))
        controller.start()
        while controller.is_alive():
            with socket.socket() as knock:
                if knock.connect_ex(("127.0.0.1", port)) == 0:
                    return controller
            time.sleep(0.01)
    raise RuntimeError("no controller could be started")


def _control(env: dict[str, str], port: int) -> None:
    os.setsid()
    run_dir = Path(env["TTP_RUN_DIR"])
    run_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    arguments = ["--port", str(port), "--run-dir", str(run_dir)]
    lead(lambda: sys.exit(controller_main(arguments)), env, run_dir / "controller.log")


def _rank(directory: Path, program: str, rank: int, ranks: int, env: dict[str, str], arguments: dict[str, Any]) -> None:
    module, _, function = program.rpartition(".")
    place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    home = importlib.import_module(f"{HERE}.{module or 'worlds'}")
    lead(
        lambda: getattr(home, function)(**arguments),
        env | place | {"JOB_DIR": str(directory)},
        directory / f"rank{rank}.out",
    )
