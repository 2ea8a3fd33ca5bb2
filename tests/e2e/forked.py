"""Lives of a job whose ranks are forked from one process that has imported torch: a start takes a second, not ten.

Each life has a controller of its own, and no launcher: the ranks witness each other's deaths.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing
import os
import time
import traceback
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil

from tests.e2e.harness import Job
from tests.ports import free_port

PRELOAD = [
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "torch.distributed._composable.replicate_with_fsdp",
    "torch.distributed.optim",
    "torch._dynamo",
    "ttp.adapters.torch.adapter",
    "ttp.adapters.torch.sharding.replicated_optimizer",
]

LOST = 255
"""Exit code that multiprocessing gives ranks whose server is gone."""

_server = multiprocessing.get_context("forkserver")


@dataclass
class ForkedJob(Job):
    """``module.main()`` on every rank, life after life, in one directory. ``hosts`` are by rank."""

    module: str = "tests.e2e.sharded_job"
    lives: list[list[int]] = field(default_factory=list)
    """Exit codes by rank of each life so far."""

    def live(self, timeout_s: float) -> list[int]:
        """One life to its end; who has not ended by then is killed, and has -15 for an exit code."""
        life = len(self.lives)
        run_dir = self.directory / f"run{life}"
        run_dir.mkdir(parents=True)
        _server.set_forkserver_preload(PRELOAD)
        ranks = [
            _server.Process(target=_rank, args=(self.module, self._env(life, rank), self._said(rank)), daemon=True)
            for rank in range(self.ranks)
        ]
        for process in ranks:
            process.start()
        codes = _ended(ranks, timeout_s)
        self.lives.append(codes)
        _stop_controllers(run_dir)
        return codes

    def _env(self, life: int, rank: int) -> dict[str, str]:
        if rank == 0:
            self.port, self._store = free_port(), f"file://{self.directory}/store.{uuid.uuid4().hex}"
        env = {
            "RANK": str(rank),
            "LOCAL_RANK": str(self.hosts[:rank].count(self.hosts[rank]) if self.hosts else rank),
            "WORLD_SIZE": str(self.ranks),
            "JOB_DIR": str(self.directory),
            "JOB_STEPS": str(self.steps),
            "JOB_FAULTS": json.dumps(self.faults),
            "JOB_STORE": self._store,
        }
        if self.protected:
            env |= {
                "MASTER_ADDR": "127.0.0.1",
                "TTP_PORT": str(self.port),
                "TTP_RUN_DIR": str(self.directory / f"run{life}"),
                "TTP_OT": "60",
                "TTP_STANDBYS": "0",
                "TTP_TOKEN": "a secret",
                "TORCHELASTIC_RESTART_COUNT": str(life),
            }
        if self.protected and self.hosts:
            env |= {"TTP_HOST": self.hosts[rank], "TTP_RUN_DIR": str(self.directory / f"run{life}" / self.hosts[rank])}
        return env | self.env

    def _said(self, rank: int) -> Path:
        return self.directory / f"rank{rank}.out"

    def story(self) -> str:
        """What ranks and controllers said."""
        files = [self._said(rank) for rank in range(self.ranks)]
        files += sorted(self.directory.glob("checkpoints/incidents/*.jsonl"))[-1:]
        files += (self.directory / f"run{len(self.lives) - 1}").rglob("controller.log")
        return "\n".join(f"--- {path.name}\n{path.read_text()[-4000:]}" for path in files if path.exists())


def _ended(ranks: Sequence[BaseProcess], timeout_s: float) -> list[int]:
    deadline = time.monotonic() + timeout_s
    for process in ranks:
        process.join(max(0.1, deadline - time.monotonic()))
        if process.is_alive():
            process.terminate()
            process.kill()
            process.join()
    codes = [-1 if process.exitcode is None else process.exitcode for process in ranks]
    if LOST in codes:
        raise RuntimeError("the process that ranks are forked from was killed: what became of them is not known")
    return codes


def _stop_controllers(run_dir: Path) -> None:
    """They would leave by themselves, a while after the last rank."""
    for process in psutil.process_iter(["environ"]):
        if (process.info["environ"] or {}).get("TTP_RUN_DIR", "").startswith(str(run_dir)):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def _rank(module: str, env: dict[str, str], said: Path) -> None:
    out = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(out, stream)
    for name in [n for n in os.environ if n.startswith(("TTP_", "TORCHELASTIC", "PET_"))]:
        del os.environ[name]
    os.environ |= env
    try:
        importlib.import_module(module).main()
    except SystemExit as leaving:
        os._exit(leaving.code if isinstance(leaving.code, int) else 1)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)
