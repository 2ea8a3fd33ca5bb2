"""Ray Train: workers save before Ray ends them. On a local cluster, which takes a minute to start."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.e2e.forked import Forked
from ttp.errors import EXIT_SAVED, ConfigError

pytestmark = [pytest.mark.needs("ray"), pytest.mark.timeout(1500)]
ROOT = Path(__file__).parents[2]
STEPS, KILLED_IN = 12, 5


def ray_train(folder: Path, *arguments: object) -> list[dict[str, Any]]:
    """Return the results of both ranks. Their checkpoint is large and Ray polls often, so it could end a save."""
    folder.mkdir()
    env = os.environ | {"PYTHONPATH": str(ROOT), "JOB_WIDE": "400000", "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.02"}
    command = [sys.executable, "-m", "tests.frameworks.ray_program", str(folder), str(STEPS), *map(str, arguments)]
    env |= {"RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S": "0.2"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
    return [json.loads((folder / f"end{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.slow
def test_a_killed_worker_costs_no_step(tmp_path: Path) -> None:
    hurt, whole = ray_train(tmp_path / "hurt", KILLED_IN), ray_train(tmp_path / "whole", -1, "plain")
    assert [end.pop("start") for end in hurt] in ([KILLED_IN] * 2, [KILLED_IN + 1] * 2)
    assert [end.pop("start") for end in whole] == [0, 0] and hurt == whole


@pytest.mark.slow
def test_a_node_that_is_drained_costs_no_step(tmp_path: Path) -> None:
    drained, whole = ray_train(tmp_path / "drained", 3, "drain"), ray_train(tmp_path / "whole", -1, "plain")
    assert all(end.pop("start") >= 3 for end in drained)
    assert [end.pop("start") for end in whole] == [0, 0] and drained == whole


@pytest.mark.slow
def test_launches_that_bring_nothing_are_not_repeated_for_ever(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="ttp: no further launch: no progress"):
        ray_train(tmp_path / "broken", -1, "broken")
    assert len((tmp_path / "broken" / "launches0").read_text().splitlines()) == 3


class OneWorker:
    """Stands for Ray's group of one worker, which is this process."""

    def __init__(self) -> None:
        self.words: dict[str, str] = {}

    def execute(self, function: Any, words: dict[str, str]) -> None:
        self.words = words


def test_workers_in_good_health_are_saved_before_they_end_and_drained_ones_too(tmp_path: Path) -> None:
    from ttp.ray import TtpCallback

    group: Any = OneWorker()
    callback = TtpCallback({"TTP_STANDBYS": "0", "TTP_RUN_DIR": str(tmp_path / "run"), "TTP_ABANDONED_S": "5"})
    callback.after_worker_group_start(group)
    env = {k: v for k, v in os.environ.items() if not k.startswith("TTP_")} | group.words
    env |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "SOLO_TELL": "1"}
    rank = Forked("tests.e2e.solo", env, tmp_path / "out", (tmp_path / "checkpoints", 100_000_000))
    try:
        rank.wait_for("trained")
        with callback.on_worker_group_shutdown():
            assert list((tmp_path / "checkpoints").glob("tft_saved_checkpoints-step_*"))
        drained = SimpleNamespace(preemption_info=SimpleNamespace(preempted_node_to_ranks={"a node": [0]}))
        callback.after_controller_state_update(SimpleNamespace(), drained)
        assert rank.wait(60) == EXIT_SAVED, rank.err
        with callback.on_worker_group_shutdown():
            pass  # nobody is left to be waited for
    finally:
        rank.kill()
        callback.after_controller_finish(None)


def test_each_group_of_workers_has_a_controller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A controller ends by itself when all ranks have left their loops, and workers may still fail later."""
    from ttp.launch.controller_keeper import ControllerKeeper
    from ttp.ray import TtpCallback

    started: list[str] = []
    monkeypatch.setattr(ControllerKeeper, "start", lambda keeper, address: started.append(address))
    group: Any = OneWorker()
    callback = TtpCallback({"TTP_RUN_DIR": str(tmp_path)})
    for _ in range(2):
        callback.after_worker_group_start(group)
    assert len(started) == 2 and len(set(started)) == 1
    with socket.socket() as other:
        with pytest.raises(OSError):  # no other program is given the port before the controller listens on it
            other.bind(("", int(group.words["TTP_PORT"])))
        callback.after_controller_finish(None)
        other.bind(("", int(group.words["TTP_PORT"])))


def test_the_next_training_of_a_program_gets_nothing_of_the_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The controller's process inherits the variables of the program."""
    from ttp.launch.controller_keeper import ControllerKeeper
    from ttp.ray import TtpCallback

    monkeypatch.setattr(ControllerKeeper, "start", lambda keeper, address: None)
    monkeypatch.setenv("TTP_OT", "500")
    group: Any = OneWorker()
    before = dict(os.environ)
    callback = TtpCallback({"TTP_RUN_DIR": str(tmp_path), "TTP_OT": "600", "TTP_METRICS_PORT": "9100"})
    callback.after_worker_group_start(group)
    assert os.environ["TTP_OT"] == "600" and os.environ["TTP_METRICS_PORT"] == "9100"
    callback.after_controller_finish(None)
    assert dict(os.environ) == before


def test_a_setting_of_something_else_is_refused() -> None:
    from ttp.ray import TtpCallback

    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES cannot be given here"):
        TtpCallback({"CUDA_VISIBLE_DEVICES": "0"})
