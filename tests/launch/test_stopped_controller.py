"""A controller that is stopped (SIGSTOP) before it serves."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

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
    monkeypatch.setattr(controller_process, "LOOK_S", 0.0)  # as if the patience ended when it is killed
    serving = ensure(prepare_run_dir(tmp_path / "run"), unused_port, patience_s=0.0)
    assert serving is begun[1] and begun[0].returncode == -signal.SIGKILL
    controller_process.stop_controller(serving)


def test_the_time_in_which_the_launcher_was_stopped_too_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """If both are told to go on, the launcher may do so a moment before the controller."""
    child, clock = Mock(pid=1), [0.0]
    monkeypatch.setattr(controller_process, "is_stopped", lambda _: True)
    monkeypatch.setattr(controller_process, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    stopped = controller_process.EndsStopped()
    for clock[0] in (10.0, 10.2, 10.4, 10.6, 3600.0, 3600.2, 3601.0, 3602.0):
        assert not stopped.look(child)
    clock[0] = 3603.0
    assert stopped.look(child) and child.kill.call_count == 1
