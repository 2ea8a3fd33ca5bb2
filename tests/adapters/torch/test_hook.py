"""Copies and pickles of the trained objects are not connected to the job."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.swa_utils import AveragedModel

from tests.adapters.torch.hooked import Job, exponential
from tests.adapters.torch.stub_processor import save
from tests.adapters.torch.test_trial import Job as Checked
from tests.processor.fake_source import no_thread
from ttp.adapters.torch.loop.hook import Hook


def by_torch(thing: Any) -> Any:
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS: list[Any] = [copy.deepcopy, lambda thing: pickle.loads(pickle.dumps(thing)), by_torch]


@pytest.mark.supports("model deepcopy and pickling")
class TestCopies:
    @pytest.mark.parametrize("way", [*WAYS, lambda model: AveragedModel(model).module])
    def test_a_copy_of_the_model_does_not_report(self, way: Any) -> None:
        job = Job(scheduler=exponential)
        job.lock = threading.Lock()  # type: ignore[attr-defined]  # as the processor has: nothing copies it
        twin = way(job.model)
        twin(torch.ones(4, 3)).sum().backward()
        assert job.mark == 0 and job.taken() == []
        job.backward()
        assert job.mark == 2 and job.taken() == [(1, "early")], "the model still does"
        assert type(way(twin)) is type(twin), "and so on"

    @pytest.mark.parametrize("way", WAYS)
    def test_copies_of_the_optimizer_and_of_the_scheduler_do_not_report(self, way: Any) -> None:
        job = Job(scheduler=exponential)
        way(job.optimizer).step()
        assert job.gate.version == 0 and job.taken() == []
        assert type(way(job.scheduler)) is torch.optim.lr_scheduler.ExponentialLR

    def test_what_was_pickled_is_read_without_ttp(self, tmp_path: Path) -> None:
        (tmp_path / "hook").write_bytes(pickle.dumps(Hook(print)))
        program = (
            "import pickle, sys; hook = pickle.load(open('hook', 'rb')); "
            "print(hook(1, 2), hook(1, 2, 3), any(name.startswith('ttp') for name in sys.modules))"
        )
        ran = subprocess.run([sys.executable, "-Ic", program], cwd=tmp_path, capture_output=True, text=True, check=True)
        assert ran.stdout.split() == ["None", "None", "False"]


def test_a_hook_frees_nothing_that_it_does_not_own() -> None:
    """In torch 2.7 the question whether this thread compiles frees a reference to None, until the interpreter dies."""
    hook = Hook(lambda: True, traced=False)
    before = sys.getrefcount(None)
    for _ in range(10_000):
        hook()
    assert abs(sys.getrefcount(None) - before) < 5_000


def test_without_room_for_another_thread_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The first update begins a check on a thread of its own, for which the hook of the next one waits."""
    job = Checked(tmp_path).wrap()
    with monkeypatch.context() as crowded:
        crowded.setattr(threading.Thread, "start", no_thread)
        job.step()
    job.step()
    assert save(job.adapter, job.processor, 2).is_dir()
    assert "it is not checked whether" in caplog.text and "ttp had an error" not in caplog.text, "what follows is done"
