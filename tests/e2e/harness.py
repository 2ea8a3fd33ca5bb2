"""Runs ``job.py`` under a real launcher and reads its output files."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import grpc
import psutil

from tests.forking import ForkedPython
from tests.ports import free_port
from ttp.cli.incident_reader import incident_files
from ttp.store.held import Held
from ttp.wire.channel import metadata, open_channel, stub
from ttp.wire.v1 import controller_pb2 as pb

JOB = Path(__file__).with_name("job.py")
PYTHON_BIN = Path(sys.executable).parent


def program(name: str, module: str) -> list[str]:
    """Return the command for a program of this Python: the installed script, or else ``-m`` and its module."""
    script = PYTHON_BIN / name
    return [str(script)] if script.exists() else [sys.executable, "-m", module]


TTP = program("ttp", "ttp")

Process: TypeAlias = subprocess.Popen[Any] | ForkedPython


@dataclass
class Job:
    """A job: its directory, and how it is launched."""

    directory: Path
    ranks: int = 4
    steps: int = 16
    launcher: str = "ttp"
    max_restarts: int = 8
    faults: list[dict[str, Any]] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    flags: list[str] = field(default_factory=list)
    nodes: list[list[str]] = field(default_factory=lambda: [[]])
    hosts: list[str] = field(default_factory=list)
    """Name of each node's host; none: all are this one."""
    local: int = 0
    """Ranks of each node; 0: all nodes have ranks at once."""
    protected: bool = True
    script: Path = JOB
    port: int = 0
    processes: list[Process] = field(default_factory=list)

    def start(self) -> Job:
        self.directory.mkdir(parents=True, exist_ok=True)
        self.port = self.port or free_port()
        self.log = self.directory / "launcher.log"
        self.log.touch()
        self.processes = [self.launch(index) for index in range(len(self.nodes))]
        return self

    def launch(self, index: int) -> Process:
        """Start the launcher of one node."""
        base = {k: v for k, v in os.environ.items() if not k.startswith(("TTP_", "TORCHELASTIC", "PET_"))}
        base |= {
            "JOB_DIR": str(self.directory),
            "JOB_STEPS": str(self.steps),
            "JOB_FAULTS": json.dumps(self.faults),
            "PYTHONUNBUFFERED": "1",
        }
        if self.protected:
            base |= {"TTP_PORT": str(self.port), "TTP_RUN_DIR": str(self.directory / "run"), "TTP_OT": "60"}
        base |= self.env
        ours = self.launcher == "ttp" and self.protected
        flags = self.flags or ([] if any(self.nodes) else ["--standalone"])
        local = str(self.local or self.ranks // len(self.nodes))
        restarts = ["--max-restarts", str(self.max_restarts)]
        arguments = [*flags, *self.nodes[index], "--nproc-per-node", local, *restarts, str(self.script)]
        if self.protected and not ours:  # without it, a restart fails in "Gloo connectFullMesh"
            found = importlib.metadata.entry_points(group="torchrun.handlers", name="ttp")
            assert found, "torchrun finds ttp only where it is installed: pip install -e ."
        module, arguments = ("ttp", ["run", *arguments]) if ours else ("torch.distributed.run", arguments)
        if "LD_PRELOAD" in self.env:  # a forked process has its libraries already
            with self.log.open("a") as log:
                command = [sys.executable, "-m", module, *arguments]
                return subprocess.Popen(
                    command, env=base | self._place(index), stdout=log, stderr=log, start_new_session=True
                )
        return ForkedPython(module, arguments, base | self._place(index), self.log)

    def _place(self, node: int) -> dict[str, str]:
        if not self.hosts:
            return {}
        return {"TTP_HOST": self.hosts[node], "TTP_RUN_DIR": str(self.directory / "run" / self.hosts[node])}

    def wait(self, timeout_s: float = 240) -> int:
        deadline = time.monotonic() + timeout_s
        try:
            return max(p.wait(max(0.1, deadline - time.monotonic())) for p in self.processes)
        except subprocess.TimeoutExpired:
            self.stop()
            raise AssertionError(f"the job did not end within {timeout_s} s:\n{self.story()}") from None

    def run(self, timeout_s: float = 240) -> int:
        return self.start().wait(timeout_s)

    def stop(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        for orphan in psutil.process_iter():  # a launcher that is killed leaves its ranks behind
            with contextlib.suppress(psutil.Error, OSError):
                if Path(f"/proc/{orphan.pid}/fd/1").readlink().is_relative_to(self.directory):
                    orphan.kill()

    def story(self) -> str:
        texts = [self.log.read_text()[-6000:]]
        controller = self.directory / "run" / "controller.log"
        if controller.exists():
            texts.append(controller.read_text()[-6000:])
        return "\n".join(texts)

    def results(self) -> list[dict[str, Any]]:
        return [json.loads((self.directory / f"result{r}.json").read_text()) for r in range(self.ranks)]

    def notes(self, rank: int) -> list[tuple[int, str, int]]:
        path = self.directory / f"rank{rank}.log"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [(int(a), b, int(c)) for a, b, c in (line.split() for line in lines)]

    def starts(self) -> list[int]:
        """Return the version at which each incarnation of the job began, from rank 0's log."""
        return [value for _, kind, value in self.notes(0) if kind == "start"]

    def incidents(self) -> list[list[dict[str, Any]]]:
        """Return the lines of each incident, oldest incident first. Ids are sorted as numbers: 9 comes before 10."""
        paths = reversed(incident_files(self.directory / "checkpoints" / "incidents"))
        return [[json.loads(line) for line in path.read_text().splitlines()] for path in paths]

    def committed(self) -> list[int]:
        return [e["version"] for events in self.incidents() for e in events if e["kind"] == "committed"]

    def ttp(self, *args: str, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
        """Run a command of ttp, forked: its imports would take half a second."""
        from tests.e2e.forked import Forked  # it needs this module

        said = Path(tempfile.mkdtemp(dir=self.directory)) / "out"
        process = Forked("ttp.cli.main", self._of_caller(), said, args)
        return subprocess.CompletedProcess(args, process.wait(timeout_s), process.out, process.err)

    def _of_caller(self) -> dict[str, str]:
        return {"TTP_PORT": str(self.port), "MASTER_ADDR": "127.0.0.1", "TTP_RUN_DIR": str(self.directory / "run")}

    def token(self) -> str:
        """Return the job's token; empty if the launcher has not written it yet."""
        file = self.directory / "run" / "token"
        return file.read_text().strip() if file.exists() else ""

    def wait_for_version(self, version: int, rank: int = 0, timeout_s: float = 150) -> None:
        """Wait until ``rank`` has finished ``version``."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if any(kind == "version" and value >= version for _, kind, value in self.notes(rank)):
                return
            assert all(p.poll() is None for p in self.processes), self.story()
            time.sleep(0.02)
        raise AssertionError(f"version {version} was not reached:\n{self.story()}")


def processes(module: str, argument: object) -> list[psutil.Process]:
    """Return the processes that run this module with this argument."""
    words = {module, str(argument)}
    return [process for process in psutil.process_iter(["cmdline"]) if words <= set(process.info["cmdline"] or ())]


MakeJob = Callable[..., Job]
Unbroken = Callable[[Job], list[dict[str, Any]]]
"""Returns the results of the same job without ttp and faults; see conftest.py."""


def newest_of_survivors(job: Job, life: int, dead: set[int]) -> int:
    """Return the largest version that a rank that was not killed had finished in launch ``life``."""
    versions = [0]
    for rank in set(range(job.ranks)) - dead:
        lives: list[list[int]] = []
        for _, kind, value in job.notes(rank):
            if kind == "start":
                lives.append([value])
            elif kind == "version":
                lives[-1].append(value)
        versions.append(max(lives[life]))
    return max(versions)


def watch_events(job: Job) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the controller's events as ``(kind, facts)`` until the controller ends."""
    deadline = time.monotonic() + 60
    while True:
        channel = open_channel("127.0.0.1", job.port)
        try:
            for event in stub(channel).WatchEvents(pb.WatchEventsRequest(), metadata=metadata(job.token())):
                yield event.kind, json.loads(event.json)
            return
        except grpc.RpcError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        finally:
            channel.close()


def two_nodes() -> list[list[str]]:
    """Return the flags of two nodes that meet at the first one."""
    at = ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    return [["--nnodes", "2", "--node-rank", n, *at] for n in "01"]


@contextlib.contextmanager
def jobs(folder: Path) -> Iterator[Callable[..., Job]]:
    """Yield a function that makes jobs, each in a folder of its own.

    At the end all of their processes are stopped, and what they leave in shared memory is removed.
    """
    made: list[Job] = []

    def make(**settings: Any) -> Job:
        made.append(Job(folder / f"job{len(made)}", **settings))
        return made[-1]

    yield make
    for job in made:
        job.stop()
        shutil.rmtree(Held.of(job.directory / "checkpoints").root, ignore_errors=True)  # its launcher was killed
