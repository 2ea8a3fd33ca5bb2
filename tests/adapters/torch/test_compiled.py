"""Hooks in loops compiled by torch.compile: they are called, or the compilation is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo

from tests.adapters.torch.hooked import Job, exponential
from tests.adapters.torch.test_caught import Failing
from ttp.core.messages import Phase

dynamo: Any = torch._dynamo
pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture(autouse=True)
def afresh() -> Iterator[None]:
    dynamo.reset()
    dynamo.utils.counters.clear()
    yield
    dynamo.reset()


def adam(parameters: Any) -> Any:
    return torch.optim.Adam(parameters, lr=0.1)


def update(version: int) -> list[Any]:
    return [(version, "early"), (version, "again"), "begin", (version, "final"), "after", "end"]


@pytest.mark.supports("torch.compile")
@pytest.mark.parametrize("scheduled", [True, False])
def test_a_compiled_step_is_an_update(scheduled: bool) -> None:
    """With a scheduler torch does not compile the step, because the scheduler has wrapped ``step()``."""
    job = Job(adam, scheduler=exponential if scheduled else None)
    step = torch.compile(job.optimizer.step, backend="eager")
    for version in (1, 2, 3):
        job.backward()
        step()
        assert job.taken() == update(version) and job.gate.version == version
    assert scheduled or dynamo.utils.counters["stats"]["unique_graphs"] == 1, "compiled once, and none of ttp"


def test_what_may_not_be_broken_cannot_be_compiled() -> None:
    job = Job(adam)
    job.backward()
    job.taken()
    with pytest.raises(dynamo.exc.Unsupported, match=r"torch.compiler.disable"):
        torch.compile(job.optimizer.step, backend="eager", fullgraph=True)()
    assert job.taken() == [] and job.gate.state().phase is Phase.IDLE


def test_an_exception_in_a_compiled_step_is_noticed(caplog: pytest.LogCaptureFixture) -> None:
    job: Any = Job(lambda parameters: Failing(parameters, lr=0.1))
    job.optimizer.fails = True
    step: Any = torch.compile(job.optimizer.step, backend="eager")
    job.backward()
    with pytest.raises(torch.OutOfMemoryError):
        step()
    job.backward()
    assert job.gate.state().phase is Phase.TORN and "was left by an exception" in caplog.text
    step()
    assert job.gate.state().phase is Phase.IDLE and job.gate.version == 2


@pytest.mark.slow
@pytest.mark.supports("torch.compile")
def test_compiled_autograd() -> None:
    job = Job()
    with dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        for version in (1, 2, 3):
            job.backward()
            assert job.taken() == [(version, "early")]
            job.optimizer.step()
            assert job.taken() == update(version)[1:]
    assert dynamo.utils.counters["compiled_autograd"]["captures"] > 0, "otherwise this test shows nothing"
