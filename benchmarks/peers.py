"""kill -9 of a rank under ttp and other systems: time until all ranks make a new step, and number of repeated steps.

The other systems are torchft, NVIDIA's resiliency extension (its launcher) and plain torchrun, if they are installed
for the Python of ``--peers``; see ``peers_rank`` for what each of them does.
"""

from __future__ import annotations

import os
import signal
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from subprocess import Popen
from subprocess import run as finish
from typing import NamedTuple

from benchmarks.result import Result
from benchmarks.resume import Times, wait_until, warm_state
from benchmarks.world import free_port, kill_all, scratch, without_ttp

PYTHON = "BENCH_PEERS_PYTHON"
"""Environment variable with the path of the Python that has the other systems; ``--peers`` sets it."""
RANKS, MEGABYTES, STEPS = 2, 25.0, 25
"""Number of ranks, size of the checkpoint, and number of steps before each kill."""
TTP = ("ttp, keep", "ttp, warm")
"""ttp with its two kinds of continuity."""
SYSTEMS = {"torchrun": "torch", "NVRx": "nvidia_resiliency_ext", "torchft": "torchft"}
"""Name of each other system -> package that has to be installed for it."""


class Step(NamedTuple):
    """A process's note after a step.

    Args:
        pid: the process.
        made: number of steps that it has made.
        at: time on the machine's monotonic clock, in seconds.
    """

    pid: int
    made: int
    at: float


def needs() -> str:
    """Return the reason why this group cannot be measured here; empty: it can be measured."""
    return "" if os.environ.get(PYTHON) else "give --peers PYTHON, a Python that has the other systems installed"


def run(quick: bool) -> Iterator[Result]:
    """Measure a job of two ranks for each system, one after the other."""
    python, kills, own = os.environ[PYTHON], 1 if quick else 5, 0.0
    for system in (*TTP, *installed(python)) if not quick else (TTP[0], "torchrun"):
        try:
            times = killed(system, python, kills)
        except TimeoutError as problem:
            if system in TTP:
                raise
            print(f"left out: {problem}", file=sys.stderr)
            continue
        middle = {what: statistics.median(each[what] for each in times) for what in times[0]}
        own = own or middle["all"]
        some, again, step, worst = middle["some"], middle["again"], middle["step"], max(each["all"] for each in times)
        how = f"median of {kills}, worst {worst:.0f}; one rank {some:.0f}; {again:.0f} steps again; a step {step:.0f}"
        name = f"{RANKS} ranks, {MEGABYTES:g} MB, {system}"
        yield Result(f"kill -9 -> all ranks at a new step, {name}", middle["all"], "ms", None, how)
        if system not in TTP:
            yield Result(f"ttp, keep / {system}", own / middle["all"], "x", None, "ratio of these times")


def installed(python: str) -> list[str]:
    """Return the systems of ``SYSTEMS`` that ``python`` has installed."""
    look = "import importlib.util as u, sys; print(*[int(u.find_spec(name) is not None) for name in sys.argv[1:]])"
    found = finish([python, "-c", look, *SYSTEMS.values()], check=True, capture_output=True, text=True).stdout.split()
    return [system for system, there in zip(SYSTEMS, found, strict=True) if there == "1"]


def killed(system: str, python: str, kills: int) -> list[Times]:
    """Run one job, and kill its ranks one after the other.

    Returns:
        For each kill: milliseconds until the last (``all``) and the first rank (``some``) has made a new step, number
        of repeated steps (``again``), and milliseconds of a step before the kill (``step``).
    """
    with scratch() as directory, ExitStack() as jobs:
        env = without_ttp() | {"PEERS_DIR": str(directory), "TTP_RUN_DIR": str(directory / "run")}
        env["OMP_NUM_THREADS"] = "1"
        try:
            first = [
                jobs.enter_context(_started(command, env, directory))
                for command in commands(system, python, kills, env)
            ]
            return [_kill(directory, number % RANKS, first[-1], system in TTP) for number in range(kills)]
        except TimeoutError as problem:
            logs = [log.read_text()[-4000:] for log in directory.glob("log*")]
            raise TimeoutError(f"{system}: {problem}\n" + "\n".join(logs)) from None
        finally:
            (directory / "over").touch()


def commands(system: str, python: str, kills: int, env: dict[str, str]) -> list[list[str]]:
    """Return the commands that start a job of ``system``, and add the variables that its processes need to ``env``."""
    script, folder = str(Path(__file__).with_name("peers_rank.py")), Path(python).parent
    flags = ["--standalone", "--max-restarts", str(kills)]
    ranks = [*flags, "--nproc-per-node", str(RANKS), script]
    torchrun = [python, "-m", "torch.distributed.run"]
    if system in TTP:
        how = ["--continuity", system.removeprefix("ttp, ")]
        return [[sys.executable, "-m", "ttp", "run", *how, *ranks, "ttp", str(MEGABYTES)]]
    if system == "torchft":
        port = free_port()
        env["TORCHFT_LIGHTHOUSE"] = f"http://127.0.0.1:{port}"
        lighthouse = [str(folder / "torchft_lighthouse"), "--min_replicas", "1", "--join_timeout_ms", "1000"]
        one = [*torchrun, *flags, "--nproc-per-node", "1", script, "torchft", str(MEGABYTES)]
        return [[*lighthouse, "--bind", f"127.0.0.1:{port}"], *([*one, str(slot)] for slot in range(RANKS))]
    env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # else restarted ranks find addresses of dead ranks
    launcher = [str(folder / "ft_launcher")] if system == "NVRx" else torchrun
    return [[*launcher, *ranks, "restart", str(MEGABYTES)]]


@contextmanager
def _started(command: list[str], env: dict[str, str], directory: Path) -> Iterator[Popen[bytes]]:
    with (directory / f"log{len(list(directory.glob('log*')))}").open("w") as log:
        job = Popen(command, env=env, stdout=log, stderr=log, cwd=directory)
    try:
        yield job
    finally:
        kill_all(job)


def _kill(directory: Path, slot: int, job: Popen[bytes], warm: bool) -> Times:
    """Kill the process of ``slot`` when all ranks have made ``STEPS`` steps, and wait until all have made a new one."""
    wait_until(lambda: all(_by_the_last(directory, each) >= STEPS for each in range(RANKS)), job)
    if warm:
        wait_until(lambda: warm_state(directory) == "ready", job)
    before = _steps(directory, slot)
    at = time.monotonic()
    os.kill(before[-1].pid, signal.SIGKILL)
    most = max(step.made for each in range(RANKS) for step in _steps(directory, each) if step.at <= at)

    def new(each: int) -> list[Step]:
        return [step for step in _steps(directory, each) if step.at > at and step.made > most]

    wait_until(lambda: all(new(each) for each in range(RANKS)), job)
    there = [new(each)[0].at for each in range(RANKS)]
    again = next(step for step in _steps(directory, slot) if step.pid != before[-1].pid and step.at > at)
    gaps = [b.at - a.at for a, b in zip(before[-STEPS:], before[1 - STEPS :], strict=False)]
    return {
        "all": (max(there) - at) * 1e3,
        "some": (min(there) - at) * 1e3,
        "again": max(0, most + 1 - again.made),
        "step": statistics.median(gaps) * 1e3,
    }


def _steps(directory: Path, slot: int) -> list[Step]:
    path = directory / f"slot{slot}"
    lines = [line.split() for line in path.read_text().split("\n")[:-1]] if path.exists() else []
    return [Step(int(pid), int(made), float(at)) for pid, made, at in lines]


def _by_the_last(directory: Path, slot: int) -> int:
    """Return the number of steps that the present process of ``slot`` has noted."""
    steps = _steps(directory, slot)
    return sum(step.pid == steps[-1].pid for step in steps)
