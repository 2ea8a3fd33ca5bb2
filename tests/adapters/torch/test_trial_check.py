"""The check whether the state can be saved runs beside training: how long an update waits for it, and what it says."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from tests.adapters.torch.test_trial import Job
from ttp.adapters.torch.saving import trial as trial_module
from ttp.errors import UsageError


def test_a_check_that_does_not_end_is_told_and_training_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ``state_dict()`` of the program may wait for something that only the next update brings."""
    job, ends = Job(tmp_path).wrap(), threading.Event()
    trial: Any = job.adapter._trial

    def check() -> str:
        ends.wait()
        return ""

    job.step(2)
    monkeypatch.setattr(trial_module, "_PATIENCE_S", 0.01)  # now, because the check of the first update takes longer
    trial.start(check)
    trial.start(lambda: "only one check runs at a time")
    running = trial._thread
    job.step(2)
    ends.set()
    running.join()
    said = [text for text in caplog.messages if "has not ended after 0.01 s" in text]
    assert len(said) == 1 and job.processor.gate.version == 4


def test_the_end_of_the_process_waits_for_a_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program may end right after its first update; it aborted (SIGABRT) while the check ran in torch's code."""
    at_end: list[Any] = []
    monkeypatch.setattr("atexit.register", lambda *call: at_end.append(call))  # also of what torch imports meanwhile
    monkeypatch.setattr("atexit.unregister", lambda call: at_end.remove((call, trial_module._END_S)))
    job = Job(tmp_path).wrap()
    job.step()
    trial: Any = job.adapter._trial
    joins = (trial._thread.join, trial_module._END_S)
    assert joins in at_end
    job.step()
    assert joins not in at_end


def test_an_update_waits_for_no_check_that_waits_for_a_device(tmp_path: Path) -> None:
    job, arrived = Job(tmp_path).wrap(), threading.Event()
    job.step(2)
    trial: Any = job.adapter._trial

    def check() -> str:
        arrived.wait()
        return "it is wrong"

    trial.start(check, waits=False)
    job.step()
    arrived.set()
    trial._thread.join()
    with pytest.raises(UsageError, match="it is wrong"):
        job.step()
