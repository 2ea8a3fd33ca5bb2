"""Worlds of ranks, forked from one process that has imported torch and megatron-core: that takes seconds each time.

As a program: reads one JSON line per world from standard input (``ranks``, ``program``, ``arguments``, ``env``,
``directory``), runs ``program`` of ``worlds.py`` in that many processes, and answers with their exit codes.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[3]
PATIENCE_S = 120.0


class Nursery:
    """The process, as a test sees it."""

    def __init__(self) -> None:
        env = {k: v for k, v in os.environ.items() if not k.startswith(("TTP_", "TORCHELASTIC", "PET_"))}
        env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__))], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, text=True
        )

    def run(
        self, directory: Path, program: str, ranks: int = 4, env: dict[str, str] | None = None, **arguments: Any
    ) -> list[int]:
        """Exit codes by rank. What a rank printed or raised is in ``directory/rank<r>.out``."""
        directory.mkdir(parents=True, exist_ok=True)
        order = {
            "ranks": ranks,
            "program": program,
            "arguments": arguments,
            "env": env or {},
            "directory": str(directory),
        }
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return list(json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        """No worlds any more."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()


def main() -> None:
    """Serve worlds until standard input ends."""
    warnings.simplefilter("ignore")
    import torch

    torch.set_num_threads(1)
    worlds = importlib.import_module("tests.adapters.megatron.worlds")
    importlib.import_module("tests.adapters.megatron.seed_gpt3")
    importlib.import_module("ttp.adapters.megatron.adapter")
    for name in ("core", "core.models.gpt", "core.optimizer", "core.distributed", "core.pipeline_parallel"):
        importlib.import_module(f"megatron.{name}")
    for line in sys.stdin:
        print(json.dumps(_run(worlds, json.loads(line))), flush=True)


def _run(worlds: Any, order: dict[str, Any]) -> list[int]:
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
        out = os.open(directory / f"rank{rank}.out", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for stream in (1, 2):
            os.dup2(out, stream)
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


if __name__ == "__main__":
    main()
