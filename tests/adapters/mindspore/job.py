"""Runs a MindSpore job under ``ttp run --mindspore``, and reads its output and its files."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.forking import ForkedPython
from tests.ports import free_port
from tests.waiting import until

HERE = Path(__file__).parent
MSRUN = Path(sys.executable).parent / "msrun"
SMALL = ["--hidden", "32", "--images", "256", "--batch", "8", "--epochs", "2"]
"""For the example: epochs of 16 steps with 2 workers, of 8 with 4."""

STEP = re.compile(r"rank (\d+) step (\d+) epoch \d+ (\S+) ([0-9a-f]{16})")
BEGUN = re.compile(r"rank 0 begins after step (\d+)\.")
"""What workers print; ends of lines come late when several of them do at the same time: a text has its own end."""

Kill = tuple[int, int, str]
"""Rank, step, place; see ``mnist_job``."""


@dataclass
class Job:
    """A job directory and how it is launched.

    ``kills`` are faults of the first launch, ``later`` of those after it. ``steps[rank][step]`` is what ``rank``
    printed last
    of a step: the bits of its loss and a digest of its state.
    """

    directory: Path
    workers: int = 2
    kills: list[Kill] = field(default_factory=list)
    arguments: list[str] = field(default_factory=list)
    max_restarts: int = 1
    script: Path = HERE / "mnist_job.py"
    flags: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    later: list[list[Kill]] = field(default_factory=list)
    output: str = ""
    code: int = -1

    def run(self, timeout_s: float = 240, ends: int | None = None) -> Job:
        """Run the job to its end, which is ``ends``, if given. No process is left running."""
        self.directory.mkdir(parents=True, exist_ok=True)
        command = ["run", "--mindspore", "--nproc-per-node", str(self.workers)]
        command += ["--max-restarts", str(self.max_restarts), *self.flags, str(self.script), *self.arguments]
        log = self.directory / "out.log"
        log.unlink(missing_ok=True)
        env = self.environ()
        process = ForkedPython("ttp", command, env, log, cwd=self.directory, mindspore=True)
        try:
            self.code = process.wait(timeout_s)
        finally:
            self._clean(process)
        self.output = log.read_text()
        assert ends in (None, self.code), self.output[-6000:]
        return self

    def run_with_msrun(self, timeout_s: float) -> Job:
        """Run until the last worker has ended; msrun itself ends before the first has begun."""
        logs = self.directory / f"msrun-{len(list(self.directory.glob('msrun-*')))}"
        command = [str(MSRUN), f"--worker_num={self.workers}", f"--local_worker_num={self.workers}", "--join=False"]
        command += [f"--master_port={free_port()}", f"--log_dir={logs}", str(self.script), *self.arguments]
        env = self.environ() | {"MS_NODE_TIMEOUT": "600", "MS_CPU_COMM_OP_TIMEOUT": "600"}
        env["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))  # it starts ``python``
        subprocess.run(command, cwd=self.directory, env=env, check=True, timeout=timeout_s, start_new_session=True)
        try:
            until(lambda: not self._training(), timeout_s, lambda: f"workers of {logs} do not end", 0.2)
        finally:
            self._clean(None)
        self.output = "".join(log.read_text() for log in sorted(logs.glob("worker_*.log")))
        return self

    def _mine(self) -> Iterator[psutil.Process]:
        """Return the processes of this job."""
        for process in psutil.process_iter(["environ"]):
            if (process.info["environ"] or {}).get("JOB_DIR") == str(self.directory):
                yield process

    def _training(self) -> list[psutil.Process]:
        return [one for one in self._mine() if one.info["environ"].get("MS_ROLE") == "MS_WORKER"]

    def environ(self) -> dict[str, str]:
        foreign = ("TTP_", "MS_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC", "DATA_PATH")
        base = {k: v for k, v in os.environ.items() if not k.startswith(foreign)}
        kills = json.dumps([self.kills, *self.later])
        base |= {"MS_ENABLE_TFT": "{TTP:1}", "MINDIO_FOR_MINDSPORE": "1", "JOB_KILLS": kills, "TTP_KEEP": "5"}
        base |= {"TTP_PORT": str(free_port()), "TTP_RUN_DIR": str(self.directory / "run"), "TTP_OT": "90"}
        base |= {"GLOG_v": "3", "PYTHONUNBUFFERED": "1", "JOB_DIR": str(self.directory)}
        return base | self.env

    def _clean(self, process: ForkedPython | None) -> None:
        if process is not None and process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for orphan in self._mine():
            with contextlib.suppress(psutil.NoSuchProcess):
                orphan.kill()

    @property
    def steps(self) -> dict[int, dict[int, tuple[str, str]]]:
        found: dict[int, dict[int, tuple[str, str]]] = {rank: {} for rank in range(self.workers)}
        for rank, step, loss, state in STEP.findall(self.output):
            found[int(rank)][int(step)] = loss, state
        return found

    @property
    def begun(self) -> list[int]:
        """Return the step after which each launch began, from rank 0's output."""
        return [int(step) for step in BEGUN.findall(self.output)]

    @property
    def checkpoints(self) -> list[Path]:
        return sorted((self.directory / "ttp_checkpoints").glob("tft_saved_checkpoints-step_*"))

    def manifest(self, checkpoint: Path) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((checkpoint / "manifest.json").read_text())
        return found
