"""A controller that is stopped (SIGSTOP) before it serves."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.launch.test_controller_process import HERE, ensure
from ttp.launch import controller_process
from ttp.launch.run_dir import prepare_run_dir


def test_one_that_is_stopped_while_it_starts_is_replaced(
    tmp_path: Path, unused_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was taken for one that loads slowly: five minutes later the job was refused, with 64."""
    begun: list[subprocess.Popen[bytes]] = []
    start = controller_process.start_controller

    def start_stopped(*arguments: Any, **more: Any) -> subprocess.Popen[bytes]:
        begun.append(start(*arguments, **more))
        if len(begun) == 1:
            begun[0].send_signal(signal.SIGSTOP)
        return begun[-1]

    monkeypatch.setattr(controller_process, "COMMAND", (sys.executable, str(HERE / "stub_controller.py")))
    monkeypatch.setattr(controller_process, "start_controller", start_stopped)
    monkeypatch.setattr(controller_process, "STOPPED_S", 0.0)
    serving = ensure(prepare_run_dir(tmp_path / "run"), unused_port)
    assert serving is begun[1] and begun[0].returncode == -signal.SIGKILL
    controller_process.stop_controller(serving)
