"""Fixtures: real launchers with fake ranks."""

from __future__ import annotations

import errno
import importlib.metadata
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.forking import ForkedPython
from tests.ports import free_port
from tests.waiting import until

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
PATIENCE_S = 150.0
"""Bounds a wait; no test passes or fails by how long something took within it."""

LAUNCHERS = {"ttp-run": "ttp.launch.run", "torchrun": "torch.distributed.run"}
OF_MINDSPORE = "ttp-run-mindspore"
FRESH = "in a Python of its own: "
"""Before the name of a launcher, that is not forked then."""


class Unread(io.StringIO):
    """A pipe whose reader has gone; a file on a full disk fails in the same way."""

    def write(self, _: str) -> int:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    def fileno(self) -> int:  # for faulthandler
        return 2


class Job:
    """One launcher process and its workers. Workers leave files in ``out``."""

    def __init__(self, launcher: str, arguments: list[str], env: dict[str, str], out: Path, name: str) -> None:
        self.out, self.patience_s = out, PATIENCE_S
        self.log_path = out / f"{name}.log"
        self.process = self._start(launcher, arguments, env)

    def _start(
        self, launcher: str, arguments: list[str], env: dict[str, str]
    ) -> subprocess.Popen[bytes] | ForkedPython:
        fresh, name = launcher.startswith(FRESH), launcher.removeprefix(FRESH)
        if name == OF_MINDSPORE:
            name, arguments = "ttp-run", ["--mindspore", *arguments]
        if not fresh:
            return ForkedPython(LAUNCHERS[name], arguments, env, self.log_path, cwd=self.out)
        command = [sys.executable, "-m", LAUNCHERS[name], *arguments]
        with self.log_path.open("w") as log:
            return subprocess.Popen(
                command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, cwd=self.out
            )

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def wait_for(self, name: str) -> str:
        """Wait for a file that a worker writes, and return its contents."""
        deadline_s = time.monotonic() + self.patience_s
        while not (self.out / name).exists():
            assert time.monotonic() < deadline_s, f"{name} did not appear\n{self.log}"
            assert self.process.poll() is None, f"{name} was not written before the launcher ended\n{self.log}"
            time.sleep(0.01)
        return (self.out / name).read_text()

    def wait_for_log(self, text: str) -> None:
        until(lambda: text in self.log, PATIENCE_S, lambda: f"{text!r} is not in\n{self.log}")

    def pids(self, count: int, attempt: int = 0) -> list[int]:
        """Wait for ranks 0..count-1 to start, and return their pids."""
        return [int(self.wait_for(f"pid-{rank}-{attempt}")) for rank in range(count)]

    def has(self, name: str) -> bool:
        return (self.out / name).exists()

    def rescue(self) -> None:
        """Tell the workers that it is time to save."""
        (self.out / "rescue").touch()

    def finish(self, timeout_s: float = PATIENCE_S) -> int:
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"the launcher still runs after {timeout_s} s\n{self.log}")

    def end(self) -> None:
        """Kill the launcher and its workers if they still run."""
        pids = {int(path.read_text()) for path in self.out.glob("pid-*")}
        if self.process.poll() is None:
            pids |= {child.pid for child in psutil.Process(self.process.pid).children(recursive=True)}
            self.process.kill()
            self.process.wait()
        for pid in pids:
            if "worker.py" in _command(pid):
                os.kill(pid, signal.SIGKILL)


Start = Callable[..., Job]


def _command(pid: int) -> str:
    try:
        return " ".join(psutil.Process(pid).cmdline())
    except psutil.Error:
        return ""


def plan(**changes: Any) -> str:
    """Return what ``fake_worker.py`` is to do."""
    return json.dumps(changes)


class Controller:
    """The stub controller in a process of its own."""

    def __init__(self, port: int, run_dir: Path, env: dict[str, str]) -> None:
        self.port, self.run_dir = port, run_dir
        run_dir.mkdir(mode=0o700, exist_ok=True)
        arguments = ["--port", port, "--run-dir", run_dir]
        self.process = ForkedPython(HERE / "stub_controller.py", arguments, env, run_dir / "stub.log")
        until(lambda: (run_dir / "started").exists() or self.process.poll() is not None, PATIENCE_S)
        assert self.process.poll() is None

    @property
    def faults(self) -> list[dict[str, Any]]:
        path = self.run_dir / "faults.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="session")
def plugin_path(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return what PYTHONPATH needs so that a stock torchrun finds the entry point: nothing where ttp is installed."""
    found = importlib.metadata.entry_points(group="torchrun.handlers")
    if any(entry.value == "ttp.launch.plugin:handler" for entry in found):
        return []
    site = tmp_path_factory.mktemp("site")
    info = site / "ttp_ft-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ttp-ft\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[torchrun.handlers]\nttp = ttp.launch.plugin:handler\n")
    return [str(site)]


@pytest.fixture
def environ(plugin_path: list[str], tmp_path: Path) -> dict[str, str]:
    """Return an environment without settings of ttp or of an outer launcher, except for the run directory."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("TTP_", "TORCH", "MASTER_", "PET_", "MS_"))}
    clean["PYTHONPATH"] = os.pathsep.join([str(ROOT), *plugin_path, *filter(None, [clean.get("PYTHONPATH")])])
    return clean | {"TTP_RUN_DIR": str(tmp_path / "run")}


@pytest.fixture
def out(tmp_path: Path) -> Path:
    directory = tmp_path / "out"
    directory.mkdir()
    return directory


@pytest.fixture
def controller(environ: dict[str, str], tmp_path: Path) -> Iterator[Controller]:
    """Return a stub controller that runs; its port and token are in ``environ``."""
    environ.update(TTP_PORT=str(free_port()), TTP_TOKEN="sesame")
    running = Controller(int(environ["TTP_PORT"]), tmp_path / "run", environ)
    yield running
    running.end()


@pytest.fixture(params=["ttp-run", pytest.param("torchrun", marks=pytest.mark.slow)])
def launcher(request: pytest.FixtureRequest) -> str:
    """Each of the two launchers. Both have the same agent, so by default few tests start stock torchrun."""
    return str(request.param)


@pytest.fixture
def start(environ: dict[str, str], out: Path) -> Iterator[Start]:
    """Return ``start(launcher, flags, script, *args, name=...)``, which starts a job. The fixture ends the jobs."""
    jobs: list[Job] = []

    def launch(launcher: str, flags: list[str], script: str, *args: str, name: str = "launcher") -> Job:
        program = script if "-m" in flags else str(HERE / script)
        jobs.append(Job(launcher, [*flags, program, str(out), *args], environ, out, name))
        return jobs[-1]

    yield launch
    for job in jobs:
        job.end()
    for process in psutil.process_iter(["pid", "cmdline"]):  # a controller has its own session
        if "ttp.controller" in (process.info["cmdline"] or []) and environ["TTP_RUN_DIR"] in process.info["cmdline"]:
            process.kill()


@pytest.fixture
def unused_port() -> int:
    """Return a free port for a rendezvous."""
    return free_port()
