"""Scheduler and workers of one start of a job on one host."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, Any

from ttp.errors import ConfigError, ToldAs
from ttp.launch.controller_process import tail
from ttp.launch.mindspore.environment import scheduler_environ, worker_environ
from ttp.launch.mindspore.flags import LOOK_S, Job
from ttp.launch.warm.starter import WarmStarter
from ttp.launch.worker_stops import GRACE_S
from ttp.polling import poll


class Processes:
    """The processes of one start. ``stop`` ends all that were started.

    Args:
        job: the job.
        environ: variables of all processes.
        log_dir: directory of the scheduler's log, and of the workers' logs if the job wants them.
        warm: forks workers where that is equivalent to starting them.
    """

    def __init__(self, job: Job, environ: Mapping[str, str], log_dir: Path, warm: WarmStarter) -> None:
        self._job, self._environ, self._log_dir, self._warm = job, dict(environ), log_dir, warm
        self.workers: dict[int, Any] = {}
        """Worker processes by rank: ``Popen``, or an object with the same methods."""
        self.scheduler: Any = None

    def start(self, scheduler: tuple[str, int], run_id: str, launch: int) -> None:
        """Start the scheduler (on host 0) and this host's workers.

        Args:
            scheduler: its numeric address, and its port.
            run_id: id of the job.
            launch: number of starts before this one.

        Raises:
            ConfigError: a program or a log cannot be opened.
        """
        job = self._job
        title = f"--- start {launch} of the job, {time.strftime('%Y-%m-%d %H:%M:%S')}\n"
        if job.node_rank == 0:
            environ = {**self._environ, **scheduler_environ(job, scheduler)}
            self.scheduler = self._spawn(environ, self.scheduler_log, title, is_rank=False)
        for rank in job.ranks:
            log = None if job.log_dir is None else self._log_dir / f"worker_{rank}.log"
            environ = {**self._environ, **worker_environ(job, scheduler, rank, run_id, launch)}
            self.workers[rank] = self._spawn(environ, log, title)

    @property
    def scheduler_log(self) -> Path:
        """Path of the scheduler's log."""
        return self._log_dir / "scheduler.log"

    def codes(self) -> dict[int, int]:
        """Return exit codes of the workers that ended, by rank; negative for a signal."""
        codes = {rank: worker.poll() for rank, worker in self.workers.items()}
        return {rank: code for rank, code in codes.items() if code is not None}

    def stop(self) -> None:
        """End all running processes: workers by SIGTERM, then by SIGKILL; the scheduler at once."""
        left = [worker for worker in self.workers.values() if worker.poll() is None]
        for worker in left:
            _signal(worker, signal.SIGTERM)
        poll(lambda: all(worker.poll() is not None for worker in left), GRACE_S, LOOK_S)
        left = [worker for worker in left if worker.poll() is None]
        for worker in left:
            _signal(worker, signal.SIGKILL)
        self.stop_scheduler(0.0)
        for worker in left:
            worker.wait()

    def stop_scheduler(self, grace_s: float) -> None:
        """End the scheduler; after a good end of the job it may take ``grace_s`` seconds to leave by itself."""
        if self.scheduler is None:
            return
        try:
            self.scheduler.wait(grace_s)
        except subprocess.TimeoutExpired:
            _signal(self.scheduler, signal.SIGKILL)
            self.scheduler.wait()

    def scheduler_tail(self) -> str:
        """Return the last lines that the scheduler wrote."""
        return tail(self.scheduler_log)

    def _spawn(self, environ: dict[str, str], log: Path | None, title: str, is_rank: bool = True) -> Any:
        """Start a process in a process group of its own, so that signals of a terminal go to the launcher only."""
        with ToldAs(ConfigError, f"cannot start {' '.join(self._job.command)[:200]}", OSError), ExitStack() as opened:
            output: IO[bytes] | None = None
            if log is not None:
                log.parent.mkdir(parents=True, exist_ok=True)
                output = opened.enter_context(log.open("ab"))
                output.write(title.encode())
                output.flush()
            forked = self._warm.worker(self._job.command, environ, output, output, stdin=False, is_rank=is_rank)
            return forked or subprocess.Popen(
                self._job.command,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )


def _signal(process: subprocess.Popen[Any], how: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, how)
