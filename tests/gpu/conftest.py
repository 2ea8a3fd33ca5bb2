"""Runs each case in a process of its own on the device, because a hang would disturb the others; see docs/gpu.md."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.gpu.needs import missing

ROOT = Path(__file__).parents[2]
DEADLINE_S = 150.0

_NUMBERS = "gpu"
"""Name of the tests' property with their numbers, which pytest-xdist brings from its workers."""


@dataclass
class Done:
    """How the process of a case has ended."""

    code: int
    out: str
    err: str
    took_s: float
    died_at: float
    numbers: dict[str, object] = field(default_factory=dict)

    @property
    def story(self) -> str:
        return f"exit {self.code} after {self.took_s:.1f} s\n{self.out[-3000:]}\n{self.err[-8000:]}"


RunCase = Callable[..., Done]


@pytest.fixture
def run_case(request: pytest.FixtureRequest) -> RunCase:
    """Return ``run_case(case, *more, device, deadline_s, check, **env)``; with ``check`` the case must pass."""

    def run(*cases: str, device: str = "cuda", deadline_s: float = DEADLINE_S, check: bool = True, **env: str) -> Done:
        command = [sys.executable, "-m", "tests.gpu.run_case", device, str(deadline_s), *cases]
        with tempfile.TemporaryDirectory(prefix="ttp-gpu-", ignore_cleanup_errors=True) as directory:
            done = _run(command, deadline_s, {"TMPDIR": directory} | env)  # some are made to abort, and tidy nothing
        lines = [line for line in done.out.splitlines() if line.startswith('{"case"')]
        for line in lines:
            done.numbers |= json.loads(line)
        done.numbers["took_s"] = round(done.took_s, 1)
        note(request.node, done.numbers)
        assert not check or done.code == 0, done.story
        return done

    return run


def note(test: pytest.Item, numbers: dict[str, object]) -> None:
    """Add these numbers to those that are printed for the test at the end; they may still change meanwhile."""
    test.user_properties.append((_NUMBERS, numbers))


@pytest.fixture(autouse=True)
def _the_device_is_free_again(request: pytest.FixtureRequest) -> Iterator[None]:
    """Wait until the driver has freed ended processes, so that the next test does not measure it."""
    yield
    if request.node.get_closest_marker("gpu"):
        time.sleep(0.5)


def environment() -> dict[str, str]:
    """Return the environment of this folder's processes: without an outer job, and with ``ttp`` of this checkout."""
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("TTP_", "TORCHELASTIC", "PET_", "TORCH_NCCL_"))
    }
    path = os.pathsep.join([str(ROOT), *filter(None, [clean.get("PYTHONPATH")])])
    return clean | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}


def _run(command: list[str], deadline_s: float, env: dict[str, str]) -> Done:
    began = time.monotonic()
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment() | env, text=True, start_new_session=True, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    died: list[float] = []

    def wait() -> None:
        process.wait()
        died.append(time.monotonic())

    waiter = threading.Thread(target=wait, daemon=True)
    waiter.start()  # pipes may be held open by what it has started
    try:
        out, err = process.communicate(timeout=deadline_s + 20)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate(timeout=60)
    waiter.join(60)
    return Done(process.returncode, out, err, time.monotonic() - began, died[0] if died else time.monotonic())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests of the device, with the reason, if there is none, even if they are asked for by name."""
    ours = [item for item in items if item.get_closest_marker("gpu")]
    if ours and (reason := missing()):
        for item in ours:
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the numbers for docs/gpu.md."""
    found = [
        (report.nodeid.rpartition("::")[2], numbers)
        for kind in ("passed", "failed")
        for report in terminalreporter.stats.get(kind, [])
        for name, numbers in report.user_properties
        if name == _NUMBERS
    ]
    if os.environ.get("TTP_GPU_REPORT"):
        Path(os.environ["TTP_GPU_REPORT"]).write_text("".join(json.dumps({n: v}) + "\n" for n, v in found))
    for name, numbers in found if config.getoption("-m") == "gpu" else ():
        shown = ", ".join(f"{key} {value}" for key, value in numbers.items() if key not in ("case", "spin"))
        terminalreporter.write_line(f"{name}: {shown}")
