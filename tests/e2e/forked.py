"""Runs jobs of processes forked from one that has imported torch: a start costs a tenth of a second, not five.

Each life of a job has a controller of its own, and no launcher: the ranks witness each other's deaths.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import time
import traceback
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NoReturn

from tests.e2e.harness import Job
from tests.forking import fork
from tests.ports import free_port
from ttp.testing.kit import stop_controllers

LOST = 255
"""Exit code that multiprocessing gives ranks whose server is gone."""


class Forked:
    """Runs ``module.main()`` in a forked process, as if a Python with these arguments and this environment ran it.

    Code that Python runs when the interpreter ends does not run: tests of such code have to start a Python.
    """

    def __init__(self, module: str, env: dict[str, str], out: Path, arguments: Sequence[object] = ()) -> None:
        self._out, self._err = out, out.with_suffix(".err")
        argv = [module, *map(str, arguments)]
        for said in (self._out, self._err):
            said.unlink(missing_ok=True)
        self._process = fork(_main, (module, env, out, self._err, argv))

    @property
    def out(self) -> str:
        """What the process has written to stdout so far."""
        return self._out.read_text() if self._out.exists() else ""

    @property
    def err(self) -> str:
        """What the process has written to stderr so far."""
        return self._err.read_text() if self._err.exists() else ""

    def wait_for(self, text: str, timeout_s: float = 60) -> None:
        """Wait until the process has written ``text`` to stdout."""
        deadline = time.monotonic() + timeout_s
        while text not in self.out:
            assert self._process.is_alive() and time.monotonic() < deadline, self.out + self.err
            time.sleep(0.01)

    def send_signal(self, number: int) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def wait(self, timeout_s: float = 120) -> int:
        """Return the exit code. A process that has not ended in time is killed (-9)."""
        (code,) = ended([self._process], timeout_s)
        return code

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


@dataclass
class ForkedJob(Job):
    """A job in one directory whose ranks run ``module.main()``, launch after launch. ``hosts`` has a name per rank."""

    module: str = "tests.e2e.sharded_job"
    lives: list[list[int]] = field(default_factory=list)
    """Exit codes by rank of each life so far."""

    ranks_now: list[BaseProcess] = field(default_factory=list)

    def live(self, timeout_s: float) -> list[int]:
        """Run one launch to its end and return its exit codes. Ranks that have not ended in time are killed (-15)."""
        return self.begin().end(timeout_s)

    def begin(self) -> ForkedJob:
        """Start the ranks of a launch."""
        life = len(self.lives)
        run_dir = self.directory / f"run{life}"
        run_dir.mkdir(parents=True)
        said = [self._said(rank) for rank in range(self.ranks)]
        environments = [self._env(life, rank) for rank in range(self.ranks)]
        self.ranks_now = [
            fork(_main, (self.module, env, out, out, [self.module]))
            for env, out in zip(environments, said, strict=True)
        ]
        return self

    def end(self, timeout_s: float) -> list[int]:
        """Wait for the ranks of the running launch and return their exit codes."""
        codes = ended(self.ranks_now, timeout_s)
        stop_controllers(self.directory / f"run{len(self.lives)}")
        self.lives.append(codes)
        return codes

    def kill(self, rank: int) -> None:
        """Send SIGKILL to a rank."""
        os.kill(self.ranks_now[rank].pid or 0, signal.SIGKILL)

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
                "TTP_TOKEN": self.token(),
                "TORCHELASTIC_RESTART_COUNT": str(life),
            }
        if self.protected and self.hosts:
            env |= {"TTP_HOST": self.hosts[rank], "TTP_RUN_DIR": str(self.directory / f"run{life}" / self.hosts[rank])}
        return env | self.env

    def token(self) -> str:
        return "a secret"

    def _of_caller(self) -> dict[str, str]:
        run_dir = str(self.directory / f"run{len(self.lives)}")
        return super()._of_caller() | {"TTP_RUN_DIR": run_dir, "TTP_TOKEN": self.token()}

    def _said(self, rank: int) -> Path:
        return self.directory / f"rank{rank}.out"

    def story(self) -> str:
        """Return the output of ranks and controllers."""
        files = [self._said(rank) for rank in range(self.ranks)]
        files += sorted(self.directory.glob("checkpoints/incidents/*.jsonl"))[-1:]
        files += (self.directory / f"run{len(self.lives) - 1}").rglob("controller.log")
        return "\n".join(f"--- {path.name}\n{path.read_text()[-4000:]}" for path in files if path.exists())


def ended(ranks: Sequence[BaseProcess], timeout_s: float) -> list[int]:
    """Wait for processes, and return their exit codes. Those that have not ended in time are killed."""
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


def _main(module: str, env: dict[str, str], out: Path, err: Path, argv: list[str]) -> None:
    sys.argv = argv
    lead(lambda: sys.exit(importlib.import_module(module).main()), env, out, err)


def lead(job: Callable[[], object], env: dict[str, str], out: Path, err: Path | None = None) -> NoReturn:
    """Run ``job`` as if a fresh process with this environment ran it, and end this process as that one would end.

    Args:
        job: what the process does.
        env: its environment, added to this one without the variables of ttp and of launchers.
        out: the file to which its stdout is appended.
        err: the same for its stderr; None: that file, too.
    """
    for stream, path in ((1, out), (2, err or out)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), stream)
    for name in [n for n in os.environ if n.startswith(("TTP_", "TORCHELASTIC", "PET_"))]:
        del os.environ[name]
    os.environ |= env
    code = 0
    try:
        job()
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
