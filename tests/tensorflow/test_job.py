"""``examples/tensorflow_job``: restarted as a job from TensorFlow's own checkpoints (docs/mindx.md)."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from tests.making import making
from tests.ports import free_port
from tests.waiting import until

pytestmark = [
    pytest.mark.skipif(find_spec("tensorflow") is None, reason="pip install tensorflow-cpu: nox -s tensorflow does"),
    pytest.mark.timeout(300),
]
JOB = Path(__file__).parents[2] / "examples" / "tensorflow_job" / "job.sh"
STEPS = 600


class Run:
    """Two workers on this host with a common ``save_dir``."""

    def __init__(self, folder: Path, save_dir: Path) -> None:
        self._log = folder / f"log{time.monotonic_ns()}"
        env = os.environ | {"PYTHON": sys.executable, "PORT": str(free_port()), "TF_CPP_MIN_LOG_LEVEL": "2"}
        with self._log.open("w") as log:
            command = ["bash", str(JOB), "2", str(save_dir), str(STEPS)]
            self.process = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)

    @property
    def text(self) -> str:
        return self._log.read_text()

    def wait_for(self, text: str) -> None:
        until(lambda: text in self.text or self.process.poll() is not None, 120, lambda: self.text, 0.05)
        assert text in self.text, self.text

    def worker(self, number: int) -> psutil.Process:
        said = f'"index": {number}'
        return next(p for p in psutil.Process(self.process.pid).children() if said in p.environ().get("TF_CONFIG", ""))

    def ended(self) -> int:
        return self.process.wait(200)

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def begins(self) -> list[int]:
        """Return the steps at which worker 0 has begun."""
        return [int(step) for step in re.findall(r"worker 0: begins at step (\d+)", self.text)]

    def loss(self) -> str:
        """Return the loss of the last step."""
        return str(re.findall(rf"worker 0: step {STEPS} saved, loss (\S+)", self.text)[-1])


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[Path], Run]]:
    with making(lambda save_dir: Run(tmp_path, save_dir), Run.kill) as make:
        yield make


def test_a_worker_that_is_killed_and_a_job_that_is_stopped_go_on_from_a_checkpoint(
    start: Callable[[Path], Run], tmp_path: Path
) -> None:
    whole = start(tmp_path / "whole")
    assert whole.ended() == 0, whole.text

    save_dir = tmp_path / "hurt"
    killed = start(save_dir)
    killed.wait_for("worker 0: step 100 saved")
    killed.worker(1).kill()
    killed.wait_for("start 0 ended with")
    killed.wait_for("worker 0: begins at step 1")  # 100 or later, not 0
    assert len(killed.begins()) == 2 and killed.begins()[1] >= 100
    began = killed.begins()[1]
    killed.wait_for(f"worker 0: step {began + 40} saved")
    killed.process.terminate()
    assert killed.ended() == 75, killed.text

    newest = max(save_dir.glob("ckpt-*.data-*"), key=lambda path: path.stat().st_mtime)
    newest.write_bytes(newest.read_bytes()[:100])
    resumed = start(save_dir)
    assert resumed.ended() == 0, resumed.text
    assert "is passed over" in resumed.text and resumed.begins()[0] >= began + 20
    assert resumed.loss() == whole.loss()
