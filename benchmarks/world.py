"""Starts small real jobs for the benchmarks: a controller, and ranks as processes."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from subprocess import Popen
from typing import Any, NamedTuple

import grpc
import psutil

from ttp.polling import poll
from ttp.store.held import Held
from ttp.testing.kit import stop_controllers
from ttp.wire.channel import open_channel, stub
from ttp.wire.v1 import controller_pb2 as pb
from ttp.wire.v1.controller_pb2_grpc import ControllerStub

REACHED_S = 180
"""Seconds in which the ranks of a job have to begin to train."""
ENDED_S = 30
"""Seconds in which killed processes have to end; one that writes to a disk ends when the disk has answered."""


def free_port() -> int:
    """Return a port that is free at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(module: str, arguments: Sequence[str], env: dict[str, str], log: Path | None = None) -> Popen[bytes]:
    """Start ``python -m MODULE``: a rank, a controller, or a launcher. Its output goes to ``log``, or where ours goes.

    The test that runs all groups replaces this function by one that forks, so that not every process imports torch.
    """
    with log.open("w") if log else contextlib.nullcontext() as stream:
        return Popen([sys.executable, "-m", module, *arguments], env=env, stdout=stream, stderr=stream)


def without_ttp() -> dict[str, str]:
    """Return the environment of this process without its settings of ttp."""
    return {k: v for k, v in os.environ.items() if not k.startswith("TTP_")}


class Job(NamedTuple):
    """A job that trains: its directory, the port and a stub of its controller, the processes of its ranks."""

    directory: Path
    port: int
    service: ControllerStub
    ranks: list[Popen[bytes]]


@contextlib.contextmanager
def controller(run_dir: Path, **settings: str) -> Iterator[tuple[int, ControllerStub, int]]:
    """Run a controller process with environment variables ``settings``; yield its port, a stub, its pid."""
    port = free_port()
    arguments = ["--port", str(port), "--run-dir", str(run_dir)]
    process = start("ttp.controller", arguments, without_ttp() | settings, run_dir / "controller.log")
    channel = open_channel("127.0.0.1", port)
    try:
        grpc.channel_ready_future(channel).result(timeout=60)
        yield port, stub(channel), process.pid
    finally:
        channel.close()
        process.send_signal(signal.SIGTERM)
        process.wait(30)


@contextlib.contextmanager
def job(world_size: int, state_mb: float, resident_gib: float) -> Iterator[Job]:
    """Run ranks (``benchmarks.rank``) with a controller, and yield once they train; one has more memory."""
    with scratch() as directory:
        (directory / "run").mkdir()
        with controller(directory / "run") as (port, service, _):
            more = {"BENCH_STATE_MB": str(state_mb)}
            ranks: list[Popen[bytes]] = []
            try:
                for rank in range(world_size):
                    more["BENCH_RESIDENT_GIB"] = str(resident_gib if rank == world_size - 1 else 0)
                    ranks.append(start("benchmarks.rank", [], _environment(rank, world_size, port, directory) | more))
                _wait_for(service, 3)
                yield Job(directory, port, service, ranks)
            finally:
                _kill(ranks)


def train(module: str, arguments: Sequence[object], world_size: int, *, controlled: bool) -> list[Any]:
    """Run a job of ``module`` to its end.

    Args:
        module: the program of the ranks.
        arguments: its arguments.
        world_size: number of ranks.
        controlled: whether the job has a controller.

    Returns:
        What each rank has printed as a line of JSON; None: it has printed none.

    Raises:
        RuntimeError: a rank's exit code is not 0.
    """
    with scratch() as directory, contextlib.ExitStack() as closing:
        (directory / "run").mkdir()
        port = closing.enter_context(controller(directory / "run"))[0] if controlled else free_port()
        common = {"MASTER_PORT": str(free_port())}
        logs = [directory / f"rank{rank}.log" for rank in range(world_size)]
        ranks = [
            start(module, [*map(str, arguments)], _environment(rank, world_size, port, directory) | common, log)
            for rank, log in enumerate(logs)
        ]
        try:
            codes = [process.wait(timeout=1800) for process in ranks]
        finally:
            _kill(ranks)
        said = [log.read_text() for log in logs]
    if any(codes):
        raise RuntimeError(f"{module} {arguments}: ranks ended with {codes}\n" + "\n".join(said))
    lines = [next((line for line in text.splitlines() if line.startswith(("{", "["))), "null") for text in said]
    return [json.loads(line) for line in lines]


def _kill(ranks: Iterable[Popen[bytes]]) -> None:
    for process in ranks:
        process.kill()
        process.wait()


def kill_all(job: Popen[bytes]) -> None:
    """Kill a launcher with all processes below it, and wait until none of them can write to a file any more.

    Raises:
        TimeoutError: a process has not ended in ``ENDED_S``.
    """
    below: set[psutil.Process] = set()
    if job.poll() is None:
        job.send_signal(signal.SIGSTOP)  # it would start others in place of the killed ones
        while more := {*psutil.Process(job.pid).children(recursive=True)} - below:  # and so would those below it
            _signal(more, signal.SIGSTOP)
            below |= more
    _signal(below, signal.SIGKILL)
    _kill([job])
    if not poll(lambda: all(_has_ended(process) for process in below), ENDED_S, 0.05):
        raise TimeoutError(f"processes of the job with the launcher {job.pid} do not end within {ENDED_S} s")


def _signal(processes: Iterable[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
            process.send_signal(number)


def _has_ended(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE  # nobody may wait for an orphan
    except psutil.NoSuchProcess:
        return True


@contextlib.contextmanager
def protected(directory: Path, **settings: str) -> Iterator[str]:
    """Make this process the only rank of a job with a controller, and yield the job's ``save_dir``.

    ``settings`` are further environment variables.
    """
    (directory / "run").mkdir()
    before = dict(os.environ)
    with controller(directory / "run") as (port, _, _):
        os.environ |= _environment(0, 1, port, directory) | settings
        try:
            yield str(directory / "checkpoints")
        finally:
            os.environ.clear()
            os.environ |= before


def _environment(rank: int, world_size: int, port: int, directory: Path) -> dict[str, str]:
    return without_ttp() | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "TTP_PORT": str(port),
        "TTP_RUN_DIR": str(directory / "run"),
        "TTP_LOG": "ERROR",
        "BENCH_SAVE_DIR": str(directory / "checkpoints"),
        "OMP_NUM_THREADS": "1",
    }


def _wait_for(service: ControllerStub, version: int) -> None:
    """Wait until the job trains and every rank has finished ``version``."""

    def reached() -> bool:
        status = service.GetStatus(pb.GetStatusRequest(), timeout=10)
        return status.stage == "training" and all(r.version >= version for r in status.ranks)

    if not poll(reached, REACHED_S, 0.05):
        raise TimeoutError(f"the ranks did not reach version {version} within {REACHED_S} s")


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """Make a temporary directory in the working directory, on whose disk a job would save.

    At the end its job's controllers are ended, as they write there, and what the job held in shared memory is removed
    too: a launcher that was killed has left both.
    """
    with tempfile.TemporaryDirectory(dir=".", prefix=".bench-") as name:
        directory = Path(name).absolute()
        try:
            yield directory
        finally:
            stop_controllers(directory)
            shutil.rmtree(Held.of(directory / "checkpoints").root, ignore_errors=True)
