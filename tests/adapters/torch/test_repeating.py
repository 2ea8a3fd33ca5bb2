"""A call of the one-update function is repeated from its initial state, or the reason is given why it cannot be."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.adapters.torch.going_on import seed
from tests.adapters.torch.stub_processor import Loop, Stateful, leave, two_shards
from tests.making import making
from ttp import session
from ttp.adapters.torch.loop.repeating import TRIALS
from ttp.testing.digests import digest
from ttp.update_function import _Given

Ddp: Any = DistributedDataParallel


class Loader(Stateful):
    def __iter__(self) -> Iterator[int]:
        yield from ()


class Job(Loop):
    """A program whose function of one update is ``update``."""

    def __init__(self, directory: Path, model: nn.Module | None = None) -> None:
        seed(1)
        model = model or nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))
        self.counts = {"changes": Stateful(n=0), "stays": Stateful(), "loader": Loader(n=0)}
        super().__init__(directory, model, torch.optim.AdamW(model.parameters()), extra_state=self.counts)
        self.start(directory / "pages")

    @property
    def repeating(self) -> Any:
        return self.adapter.repeating

    def backward(self, *, drop: bool = True) -> None:
        if drop:
            self.optimizer.zero_grad()
        self.counts["changes"].state["n"] += 1
        self.model(torch.randn(8, 3) + random.random()).square().sum().backward()

    def update(self, *, drop: bool = True, after: Callable[[], Any] = lambda: None) -> None:
        self.backward(drop=drop)
        self.optimizer.step()
        after()

    def calls(self, count: int = TRIALS, **how: Any) -> None:
        for _ in range(count):
            self.repeating.begin(self.gate.version, lambda: "")
            self.update(**how)
            self.repeating.end(self.gate.version)

    def calls_without_update(self) -> None:
        self.repeating.begin(self.gate.version, lambda: "")
        self.repeating.end(self.gate.version)

    def broken(self, *, drop: bool = True) -> None:
        self.repeating.begin(self.gate.version, lambda: "")
        self.backward(drop=drop)

    def local(self) -> str:
        return digest((torch.get_rng_state(), random.getstate(), dict(self.model.named_buffers())))

    def gradients(self) -> list[Tensor | None]:
        return [parameter.grad for parameter in self.model.parameters()]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    with making(partial(Job, tmp_path), lambda job: leave(job.adapter)) as make:
        yield make


def test_what_a_call_has_begun_with_is_put_back(make: Callable[..., Job]) -> None:
    job = make()
    job.calls()
    random.random()
    torch.randn(3)  # the loop draws a batch
    before = job.local()
    job.broken()
    assert job.local() != before and job.repeating.refusal() == ""
    job.repeating.reset()
    job.repeating.put_back(job.adapter.capture)
    assert job.local() == before and job.gradients() == [None] * 6
    assert (job.counts["changes"].state["n"], job.counts["changes"].loaded) == (TRIALS, 1)
    assert job.counts["stays"].loaded == 0, "what did not change is left alone: a loader would begin anew"


@pytest.mark.parametrize("drop", [False, True])
def test_gradients_that_were_zeros_are_zeros_again(make: Callable[..., Job], drop: bool) -> None:
    """Also if the broken call has dropped them. With None the optimizer would skip a parameter that it does not use."""
    job = make()
    job.calls(drop=False, after=lambda: job.optimizer.zero_grad(set_to_none=False))
    job.broken(drop=drop)
    if drop:
        job.model[0].weight.grad = None  # it has computed others for a part of the model only
    assert job.repeating.refusal() == ""
    job.repeating.reset()
    assert all(grad is not None and not grad.any() for grad in job.gradients())


@pytest.mark.usefixtures("world_of_one")
def test_a_reducer_has_reduced_nothing_when_the_call_begins_again(make: Callable[..., Job]) -> None:
    """Half of the gradients of the broken call may be in its buckets, and a scaler may have looked at some."""
    job = make(Ddp(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))))
    scaler = job.repeating._scaler = torch.amp.GradScaler("cpu")
    job.calls()
    job.broken()
    scaler._per_optimizer_states[id(job.optimizer)] = {"stage": "unscaled"}
    before = job.model.reducer
    assert job.repeating.refusal() == ""
    job.repeating.reset()
    assert job.model.reducer is not before and not scaler._per_optimizer_states
    job.calls()
    assert all(gradient is not None for gradient in job.gradients()), "it reduces as before"


def made_late(job: Job) -> None:
    job.seen.append(Ddp(job.model[0]))


def compiled(job: Job) -> None:
    job.model.append(type("OptimizedModule", (nn.Identity,), {})())  # as torch.compile(), whose import takes seconds


def static(job: Job) -> None:
    job.repeating._ddps = [Ddp(nn.Linear(2, 2), static_graph=True)]


def sharded(job: Job) -> None:
    job.repeating._layout = two_shards()


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize(
    ("change", "why"),
    [
        (made_late, "a DistributedDataParallel was made after wrap_optimizer(): a newcomer would make it alone"),
        (compiled, "the model is compiled"),
        (static, "the reducer of DistributedDataParallel with static_graph cannot be reset"),
        (sharded, "only DistributedDataParallel and plain data parallelism can stay in their loops so far"),
    ],
)
def test_a_model_whose_calls_are_never_made_again(
    make: Callable[..., Job], change: Callable[[Job], None], why: str
) -> None:
    """It is known at the first call, long before a failure: the survivors then leave ``train()``."""
    job = make()
    change(job)
    job.calls()
    job.broken()
    assert job.repeating.why_not == job.repeating.refusal() == why


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ("uses old gradients", "gradients exist when the function begins, and the function does not drop them"),
        ("makes two updates", "a call of the function has made 2 updates"),
        ("makes none", "a call of the function has made 0 updates"),
        ("draws from a loader", "the function draws from loader, which is in extra_state"),
        ("once", "the function had not been called 2 times"),
        ("with gradients now", "the function begins with gradients at some calls and without at others"),
        ("large buffers", "not all of the state of this rank is captured, or some buffers"),
    ],
)
def test_why_a_call_is_not_made_again(make: Callable[..., Job], wrong: str, why: str) -> None:
    class Large(nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 2)
            self.register_buffer("seen", torch.zeros(1 << 18))

    job = make(Large()) if wrong == "large buffers" else make()
    if wrong == "uses old gradients":
        job.calls(drop=False)
    elif wrong == "makes two updates":
        job.calls(after=job.update)
    elif wrong == "makes none":
        job.calls_without_update()
    else:
        job.calls(TRIALS - (wrong == "once"))
    if wrong == "with gradients now":
        job.optimizer.zero_grad()
    job.broken()
    job.counts["loader"].state["n"] += wrong == "draws from a loader"
    assert job.repeating.refusal().startswith(why)


def test_behind_a_call_that_the_scaler_has_left_out_all_leave(make: Callable[..., Job]) -> None:
    """A replacement starts after the last update, with the call that was left out."""
    job = make()
    job.repeating._scaler = torch.amp.GradScaler("cpu")
    job.calls()
    job.calls_without_update()
    job.broken()
    assert job.repeating.refusal().startswith("the call before the broken one made no update")
    job.calls(1)
    job.broken()
    assert job.repeating.refusal() == ""


@pytest.fixture
def given(make: Callable[..., Job]) -> Iterator[Callable[..., _Given]]:
    job: Any = make()
    session.reset()
    session.current().adapter = job.adapter
    yield lambda *args, **kwargs: _Given(args, kwargs, session.current())
    session.reset()


def test_an_iterator_gives_the_same_items_and_streams_again(given: Callable[..., _Given]) -> None:
    drawn: list[float] = []

    def batches() -> Iterator[int]:
        for number in range(9):
            drawn.append(random.random())  # an augmentation
            yield number

    source = batches()
    call = given(source, rest=7)
    assert call.kwargs == {"rest": 7}
    start = random.getstate()
    first = [next(call.args[0]), next(call.args[0]), random.random()]
    call.rewind()
    random.setstate(start)
    assert [next(call.args[0]), next(call.args[0]), random.random()] == first
    assert next(call.args[0]) == 2 and len(drawn) == 3 and next(source) == 3


def test_a_call_that_writes_to_its_arguments_is_not_made_again(given: Callable[..., _Given]) -> None:
    data, weight = torch.ones(2), nn.Parameter(torch.ones(2))
    call = given(data, weight=weight)
    with torch.no_grad():
        weight.add_(1)
    assert call.refusal() == ""
    data.add_(1)
    assert call.refusal() == "the function writes to its arguments"
