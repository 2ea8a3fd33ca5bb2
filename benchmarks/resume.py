"""kill -9 of a rank under ``ttp run``: time until the checkpoint is durable, and until every rank's next step."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import Popen

from benchmarks.result import Result
from benchmarks.world import kill_all, scratch, start, without_ttp
from ttp.store.held import Held

WAIT_S = 120.0
WANTED_MS = {2: 1000.0, 4: 1500.0}
"""Budgets in ms for a warm restart, by number of ranks."""
WANTED_KEPT_MS = {(4, 1): 400.0}
"""Budgets in ms for survivors that keep their state, by number of ranks and megabytes."""
THROUGH_DISK = "keep, all read"
"""Survivors keep their processes, and read the checkpoint like new processes."""
IN_LOOP = "keep, one_step"
"""Survivors keep their processes, and do not leave their training loops."""
WAITS = "keep, all wait"
"""Survivors keep their processes, and continue only when the checkpoint is durable."""
SLOW_MB_S = 100.0
WRITE_BYTES = 1 << 20
"""Speed of the slow storage in MB/s, and the bytes of one write request of the kernel to it."""
SLOW_JOBS = ((2, 25, "ddp"), (2, 500, "ddp"))
JOBS = (
    *((2, 1, "ddp"), (2, 25, "ddp"), (2, 500, "ddp"), (2, 25, "compiled")),
    *((4, 1, "ddp"), (4, 25, "ddp"), (4, 500, "ddp"), (4, 25, "hsdp"), (4, 500, "hsdp")),
)
PARTS = ("began", "grouped", "wrapped", "restored", "step")
"""Points that a restarted rank notes: process began, process group made, optimizer wrapped, restored, first step."""
Times = dict[str, float]


def run(quick: bool) -> list[Result]:
    """Measure by number of ranks, size of the checkpoint, layout, and continuity."""
    if quick:
        return measured(2, 1, "ddp", "warm", 1)
    found: list[Result] = []
    for ranks, megabytes, layout in JOBS:
        in_loop = (IN_LOOP,) if layout == "ddp" else ()
        for continuity in ("off", "warm", THROUGH_DISK, "keep", *in_loop):
            found += measured(ranks, megabytes, layout, continuity, 5)
    return [*found, *slow_storage()]


def slow_storage() -> list[Result]:
    """Measure with storage of 100 MB/s (FUSE): survivors wait for it, or continue with a checkpoint held in memory."""
    found: list[Result] = []
    for ranks, megabytes, layout in SLOW_JOBS:
        for continuity in ("warm", WAITS, "keep"):
            found += measured(ranks, megabytes, layout, continuity, 3, slow=True)
    return found


def measured(
    ranks: int, megabytes: float, layout: str, continuity: str, kills: int, *, slow: bool = False
) -> list[Result]:
    """Return the medians over several kills in one job."""
    runs = killed(ranks, megabytes, layout, continuity, kills, slow=slow)
    middle = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
    name = f"{ranks} ranks, {megabytes:g} MB, {layout.upper()}, {'cold' if continuity == 'off' else continuity}"
    parts = ", ".join(f"{part} {middle[part]:.0f}" for part in PARTS[:-1])
    name += ", slow storage" if slow else ""
    budget = WANTED_MS[ranks] if not slow and continuity != "off" and megabytes <= 25 else None
    if continuity in ("keep", IN_LOOP):
        budget = WANTED_KEPT_MS.get((ranks, round(megabytes)), budget)
    worst = max(run["step"] for run in runs)
    how = f"median of {kills}, worst {worst:.0f}; last rank, ms after the kill: {parts}"
    return [
        Result(f"kill -9 -> durable, {name}", middle["durable"], "ms", None, "the checkpoint has its name"),
        Result(f"kill -9 -> next step, {name}", middle["step"], "ms", budget, how),
    ]


def killed(
    ranks: int, megabytes: float, layout: str, continuity: str, kills: int, *, slow: bool = False
) -> list[Times]:
    """Run one job, and kill its ranks one after the other.

    Returns:
        For each kill: milliseconds from the kill until the checkpoint is durable, and until the last rank has reached
        each of ``PARTS``.
    """
    with scratch() as directory, _storage(directory, slow=slow):
        env = without_ttp() | {"RESUME_DIR": str(directory), "TTP_RUN_DIR": str(directory / "run")}
        env["OMP_NUM_THREADS"] = "1"
        flags = ["--standalone", "--nproc-per-node", str(ranks), "--max-restarts", str(kills)]
        script = [str(Path(__file__).with_name("resume_rank.py")), str(megabytes), layout]
        log = directory / "log"
        if continuity == THROUGH_DISK:
            continuity, env["RESUME_READ"] = "keep", "1"
        if continuity == WAITS:
            continuity, env["TTP_SHADOW_S"] = "keep", "off"
        if continuity == IN_LOOP:
            continuity, env["RESUME_ONE_STEP"] = "keep", "1"
        job = start("ttp", ["run", "--continuity", continuity, *flags, *script], env, log)
        try:
            return [_kill(job, directory, ranks, launch, continuity) for launch in range(kills)]
        except TimeoutError as problem:
            raise TimeoutError(f"{problem}\n{log.read_text()[-4000:]}") from None
        finally:
            (directory / "over").touch()
            kill_all(job)


@contextlib.contextmanager
def _storage(directory: Path, *, slow: bool) -> Iterator[None]:
    """Mount slow storage at the job's directory of checkpoints, if ``slow``."""
    if not slow:
        yield
        return
    from tests.disks.bad_disk import BadDisk, Rule

    with BadDisk(directory / "checkpoints", directory / "below") as disk:
        disk.rules(Rule(("WRITE",), r"distcp$|speed", delay_s=WRITE_BYTES / SLOW_MB_S / 1e6))
        yield


def _kill(job: Popen[bytes], directory: Path, ranks: int, launch: int, continuity: str) -> Times:
    """Kill one rank when all ranks have made 5 steps, and wait until all have made a step in the next launch."""
    wait_until(lambda: all(len(_notes(directory, rank, launch).get("step", [])) >= 5 for rank in range(ranks)), job)
    if continuity != "off":
        wait_until(lambda: warm_state(directory) == "ready", job)
    wait_until(lambda: not Held.of(directory / "checkpoints").unfinished(), job)  # one can be held
    before = set(_checkpoints(directory))
    victim = int((directory / f"pid{launch % ranks}").read_text())
    at = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    wait_until(lambda: bool(set(_checkpoints(directory)) - before), job, look_s=0.001)
    durable = time.monotonic()
    wait_until(lambda: all("step" in _notes(directory, rank, launch + 1) for rank in range(ranks)), job)
    notes = [_notes(directory, rank, launch + 1) for rank in range(ranks)]
    # Surviving processes note "began" and "grouped" in their first launch only.
    last = {part: max(n[part][0] for n in notes if part in n) for part in PARTS}
    return {"durable": (durable - at) * 1e3} | {part: (last[part] - at) * 1e3 for part in PARTS}


def _notes(directory: Path, rank: int, launch: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    path = directory / f"rank{rank}"
    for line in path.read_text().split("\n")[:-1] if path.exists() else []:
        of_launch, word, at = line.split()
        if int(of_launch) == launch:
            found.setdefault(word, []).append(float(at))
    return found


def warm_state(directory: Path) -> str:
    path = directory / "run" / "warm.json"
    return str(json.loads(path.read_text())["state"]) if path.exists() else ""


def _checkpoints(directory: Path) -> list[str]:
    folder = directory / "checkpoints"
    return [p.name for p in folder.glob("tft_saved_checkpoints-step_*")] if folder.exists() else []


def wait_until(holds: Callable[[], bool], job: Popen[bytes], look_s: float = 0.02) -> None:
    """Wait until ``holds()``, checked every ``look_s`` seconds.

    Raises:
        TimeoutError: it does not hold within ``WAIT_S``, or the launcher has ended.
    """
    deadline = time.monotonic() + WAIT_S
    while not holds():
        if job.poll() is not None or time.monotonic() > deadline:
            raise TimeoutError(f"the job has not reached the awaited state (exit code of its launcher: {job.poll()})")
        time.sleep(look_s)
