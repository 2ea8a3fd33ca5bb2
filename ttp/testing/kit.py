"""Test that a training program resumes bit for bit after one of its ranks is killed.

``run`` launches the program once per planned kill and once more to the end; each launch is called a life and resumes
from the checkpoint of the life before. The result is compared with that of an unbroken run without ttp. ::

    found = kit.run(kit.Job("my_program", kills=[kit.Kill("backward"), kit.Kill("on_log", rank=1, after=3)]), tmp_path)
    print(found)
    found.check()

``my_program`` is a module, or the path of a file, with ``main(steps, save_dir, report)``. ``main`` trains for ``steps``
steps, protects itself with ``save_dir``, calls ``report(step, loss)`` at the end of each step, and returns a dict of
the values to compare: objects with ``state_dict()``, or plain values. The default process group (gloo) exists when
``main`` is called. Seeds differ between ranks and between lives, so that nothing is equal by chance. The phases are

======== ==========================================================
forward  inside the model, after its first layer
backward when the gradient arrives at that layer
in_step  half of the parameters are updated (Adam, SGD)
stepped  ``step()`` is about to return; schedulers, averages and the rest of the step come after it
======== ==========================================================

and phases that the program names itself, by calling ``kit.at("on_log")`` in one of its callbacks.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import psutil

from ttp.errors import EXIT_SAVED
from ttp.launch.ports import hold_port

KILLED = -9
WRITTEN_S = 20
"""Seconds to wait, after the ranks have ended, for the controller to write the incident file."""


@dataclass(frozen=True, slots=True)
class Kill:
    """The planned death of a rank by SIGKILL.

    Args:
        phase: the phase in which the rank dies; see the module's docstring.
        rank: the rank that kills itself.
        after: number of optimizer steps that this life finishes first.
    """

    phase: str
    rank: int = 0
    after: int = 1


@dataclass(frozen=True)
class Job:
    """The job to run.

    Args:
        program: module or path of the program; see the module's docstring.
        kills: one for each life but the last.
        world_size: number of ranks.
        steps: the ``steps`` that ``main`` gets.
        launcher: ``"ttp"`` or ``"torchrun"``; ``""`` starts the ranks directly.
        env: environment variables for the program.
        may_lose: number of finished steps that may be repeated after a kill, for programs with a shard that is on one
            rank only (``buddy``).
    """

    program: str
    kills: Sequence[Kill]
    world_size: int = 2
    steps: int = 10
    launcher: str = ""
    env: dict[str, str] = field(default_factory=dict)
    may_lose: int = 0


@dataclass(frozen=True, slots=True)
class Row:
    """The result of one kill.

    Args:
        kill: the kill.
        codes: exit codes of that life, by rank; with a launcher, its one exit code.
        version: the version from which the next life resumes; None if none was saved.
        lost: number of steps that a surviving rank had finished and the next life repeated.
        may_lose: ``may_lose`` of the job.
    """

    kill: Kill
    codes: tuple[int, ...]
    version: int | None
    lost: int
    may_lose: int = 0

    @property
    def good(self) -> bool:
        """Whether the rank was killed, a version was saved, and at most ``may_lose`` steps were lost."""
        wanted = [EXIT_SAVED] * len(self.codes)
        if len(wanted) > 1:
            wanted[self.kill.rank] = KILLED
        ended = list(self.codes) == wanted or self.codes == (0,)
        return ended and self.version is not None and self.lost <= self.may_lose


@dataclass(frozen=True)
class Report:
    """The results of all kills and the comparison with the unbroken run.

    Args:
        rows: one for each kill.
        differences: the differences from the unbroken run, in words.
        story: the last part of every log.
    """

    rows: tuple[Row, ...]
    differences: tuple[str, ...]
    story: str

    def check(self) -> None:
        """Raise an ``AssertionError`` with this report and the logs, unless all rows are good and nothing differs."""
        assert all(row.good for row in self.rows) and not self.differences, f"{self}\n{self.story}"

    def __str__(self) -> str:
        lines = ["phase           rank  after  exit codes      saved  steps lost"]
        for row in self.rows:
            kill, codes = row.kill, " ".join(map(str, row.codes))
            saved = "-" if row.version is None else row.version
            lines.append(f"{kill.phase:<15} {kill.rank:>4}  {kill.after:>5}  {codes:<14}  {saved!s:>5}  {row.lost:>10}")
        return "\n".join([*lines, *self.differences] if self.differences else [*lines, "all bits and logs are equal"])


class Process(Protocol):
    """The part of ``subprocess.Popen`` that is used here."""

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code; minus the signal's number if a signal ended the process."""

    def kill(self) -> None:
        """Send SIGKILL."""


Start = Callable[[str, Sequence[object], dict[str, str], Path], Process]
"""A function (module, arguments, env, log) that starts ``python -m MODULE ARGUMENTS``.

``env`` is the complete environment; the output is appended to the file ``log``.
"""


def start_python(module: str, arguments: Sequence[object], env: dict[str, str], log: Path) -> Process:
    """Start a Python module as a subprocess in its own session; the default ``Start``."""
    with log.open("a") as said:
        command = [sys.executable, "-m", module, *map(str, arguments)]
        return subprocess.Popen(command, env=env, stdout=said, stderr=said, start_new_session=True)


def run(job: Job, directory: Path, *, start: Start = start_python, timeout_s: float = 150) -> Report:
    """Run the job with all its kills, run it unbroken without ttp, and compare the two.

    Args:
        job: the job and its kills.
        directory: directory for all files of both runs.
        start: function that starts a process.
        timeout_s: largest duration of a life, in seconds.

    Returns:
        The result of each kill, and the differences from the unbroken run.
    """
    with hold_port() as ours, hold_port() as masters:
        ports = int(ours.getsockname()[1]), int(masters.getsockname()[1])
        hurt = _Lives(job, directory / "hurt", ports, start, timeout_s, protected=True)
        whole = _Lives(job, directory / "unbroken", ports, start, timeout_s, protected=False)
        hurt.live_all(job.kills)
        whole.live_all(())
    versions, logs, rows = hurt.saved(), [hurt.log(rank) for rank in range(job.world_size)], []
    for life, kill in enumerate(job.kills):
        codes = hurt.codes[life] if life < len(hurt.codes) else hurt.codes[-1]
        survivors = [log for rank, log in enumerate(logs) if rank != kill.rank] or logs
        lost = max(len(_steps(log, life) & _steps(log, life + 1)) for log in survivors)
        rows.append(Row(kill, codes, versions[life] if life < len(versions) else None, lost, job.may_lose))
    return Report(tuple(rows), tuple(_differences(hurt, whole, logs)), hurt.story() + whole.story())


def _steps(log: Sequence[tuple[int, int, str]], life: int) -> set[int]:
    return {step for each, step, _ in log if each == life}


def _differences(hurt: _Lives, whole: _Lives, logs: Sequence[Sequence[tuple[int, int, str]]]) -> list[str]:
    found = [f"{each.name} ended with {each.codes[-1]}" for each in (hurt, whole) if set(each.codes[-1]) != {0}]
    for rank, log in enumerate(logs):
        expected = {step: said for _, step, said in whole.log(rank)}
        found += [
            f"rank {rank} reported {said} in step {step}, not {expected.get(step)}"
            for _, step, said in log
            if said != expected.get(step)
        ]
        ours, theirs = hurt.result(rank), whole.result(rank)
        names = sorted({*ours, *theirs})
        found += [f"rank {rank}: {name} differs" for name in names if ours.get(name) != theirs.get(name)]
    return found


class _Lives:
    """The launches of one job in one directory."""

    def __init__(
        self, job: Job, directory: Path, ports: tuple[int, int], start: Start, timeout_s: float, *, protected: bool
    ) -> None:
        directory.mkdir(parents=True)
        self._job, self._directory, self._start, self._timeout_s = job, directory, start, timeout_s
        self._ports, self._protected = ports, protected
        self.name = directory.name
        self.codes: list[tuple[int, ...]] = []

    def live_all(self, kills: Sequence[Kill]) -> None:
        """Run a life for each kill and one to the end; stop early if no rank of a killed life ends with 75."""
        if self._job.launcher:
            self.codes = [self._launch(len(kills))]
            return
        for life, kill in enumerate([*kills, None]):
            self.codes.append(self._live(life))
            if kill is not None and EXIT_SAVED not in self.codes[-1]:
                return

    def _live(self, life: int) -> tuple[int, ...]:
        store = f"file://{self._directory}/store.{uuid.uuid4().hex}"
        env = self._env() | {"KIT_STORE": store, "TORCHELASTIC_RESTART_COUNT": str(life)}
        env |= {"TTP_RUN_DIR": str(self._directory / f"run{life}"), "TTP_TOKEN": "of the kit", "TTP_CONTINUITY": "off"}
        world = self._job.world_size
        ranks = [
            self._start(
                "ttp.testing.kit_rank",
                [],
                env | {"RANK": str(r), "LOCAL_RANK": str(r), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)},
                self._directory / f"rank{r}.out",
            )
            for r in range(world)
        ]
        deadline = time.monotonic() + self._timeout_s
        codes = tuple(_ended(rank, deadline) for rank in ranks)
        stop_controllers(self._directory)
        return codes

    def _launch(self, restarts: int) -> tuple[int, ...]:
        ours = self._job.launcher == "ttp" and self._protected
        module, first = ("ttp", ["run"]) if ours else ("torch.distributed.run", [])
        flags = ["--standalone", "--nproc-per-node", self._job.world_size, "--max-restarts", restarts]
        env = self._env() | {"TTP_RUN_DIR": str(self._directory / "run")}
        arguments = [*first, *flags, "--module", "ttp.testing.kit_rank"]
        process = self._start(module, arguments, env, self._directory / "launcher.out")
        code = _ended(process, time.monotonic() + self._timeout_s * (restarts + 1))
        stop_controllers(self._directory)
        return (code,)

    def _env(self) -> dict[str, str]:
        job, (port, master) = self._job, map(str, self._ports)
        base = {k: v for k, v in os.environ.items() if not k.startswith(("TTP_", "TORCHELASTIC", "PET_"))}
        path = os.pathsep.join(filter(None, [str(Path.cwd()), base.get("PYTHONPATH", "")]))
        base |= {
            "PYTHONPATH": path,
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": "1",
            "KIT_DIR": str(self._directory),
            "KIT_STEPS": str(job.steps),
            "KIT_PROGRAM": job.program,
            "KIT_KILLS": json.dumps([asdict(kill) for kill in job.kills] if self._protected else []),
        }
        if not job.launcher:
            base |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": master}
        if self._protected:
            base |= {"TTP_PORT": port, "TTP_OT": "60", "TTP_STANDBYS": "0"}
        return base | job.env

    def saved(self) -> list[int]:
        """Return the version that each incident has saved or found on disk, in the order of the files' names."""
        events: list[Any] = []
        for path in sorted((self._directory / "checkpoints" / "incidents").glob("*.jsonl")):
            events += map(json.loads, path.read_text().splitlines())
        return [event["version"] for event in events if event["kind"] in ("committed", "nothing_new")]

    def log(self, rank: int) -> list[tuple[int, int, str]]:
        """Return (life, step, text) of each report of a rank."""
        path = self._directory / f"reported{rank}.log"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [(int(life), int(step), said) for life, step, said in (line.split(" ", 2) for line in lines)]

    def result(self, rank: int) -> dict[str, str]:
        """Return the digests of a rank's final values, by name."""
        path = self._directory / f"result{rank}.json"
        found: dict[str, str] = json.loads(path.read_text()) if path.exists() else {"it": "did not end"}
        return found

    def story(self) -> str:
        """Return the last part of the logs of all ranks and controllers, and the newest incident file."""
        files = [*sorted(self._directory.glob("*.out")), *self._directory.glob("run*/controller.log")]
        files += sorted(self._directory.glob("checkpoints/incidents/*.jsonl"))[-1:]
        return "\n".join(f"--- {self.name}/{path.name}\n{path.read_text()[-5000:]}" for path in files)


def _ended(process: Process, deadline: float) -> int:
    """Return the exit code of a process; kill it and return -15 if it has not ended by ``deadline``."""
    try:
        return process.wait(max(0.1, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return -15


def stop_controllers(run_dir: Path) -> None:
    """End all processes whose ``TTP_RUN_DIR`` is inside ``run_dir``; controllers would end later by themselves.

    Controllers get ``WRITTEN_S`` seconds to write the end of their incident; other processes are killed at once.
    """
    controllers = []
    for process in psutil.process_iter(["environ", "cmdline"]):
        if not (process.info["environ"] or {}).get("TTP_RUN_DIR", "").startswith(str(run_dir)):
            continue
        with contextlib.suppress(psutil.NoSuchProcess):
            if "ttp.controller" in (process.info["cmdline"] or []):
                process.terminate()
                controllers.append(process)
            else:
                process.kill()
    for process in psutil.wait_procs(controllers, WRITTEN_S)[1]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def at(phase: str) -> None:
    """Mark a phase that the program names: if a kill is planned here, this rank dies; otherwise nothing happens."""
    if _plan is not None:
        _plan(phase)


_plan: Callable[[str], None] | None = None
"""The function that ``at`` calls; ``kit_rank`` sets it in a rank that is to die."""


def plan(kill: Callable[[str], None]) -> None:
    """Set the function that ``at`` calls from now on."""
    global _plan
    _plan = kill
