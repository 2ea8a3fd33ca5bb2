"""Wrappers and containers of optimizers in the style of other projects are refused if their state would be lost."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import Adam
from torch.optim.lr_scheduler import ChainedScheduler, SequentialLR, StepLR

from tests.adapters.torch.checkpoints import Net
from tests.adapters.torch.stub_processor import Loop, registered
from tests.adapters.torch.wrappers import Base, Container, Lookahead, LookaheadInside, Sam, no_grad
from ttp.adapters.torch.loop.unwrap_optimizer import owners_of
from ttp.errors import UsageError


class Sign(Base):
    """An optimizer without state."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})

    def direction(self, _number: int, p: Any) -> Any:
        return p.grad.sign()

    @no_grad()
    def step(self, closure: Any = None) -> None:
        for number, p in enumerate(p for group in self.param_groups for p in group["params"] if p.grad is not None):
            p.sub_(self.direction(number, p), alpha=0.01)


class Hiding(Sign):
    """An optimizer that keeps its momentum in an attribute."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.momenta: dict[int, Any] = {}

    def direction(self, number: int, p: Any) -> Any:
        return self.momenta.setdefault(number, torch.zeros_like(p)).mul_(0.9).add_(p.grad)


class Sharing(Sign):
    """Like fairscale's ``OSS``: an optimizer inside has the share of the parameters that this rank updates."""

    def __init__(self, parameters: Any) -> None:
        given = [*parameters]
        super().__init__(given)
        self.optim = Adam(given[:1])

    @no_grad()
    def step(self, closure: Any = None) -> None:
        self.optim.step()


class WithMode(LookaheadInside):
    """Like ``schedulefree.ScheduleFreeWrapper``."""

    train_mode = False


Make = Callable[[nn.Module], Any]


class Job(Loop):
    """A loop with one optimizer of these; ``more`` returns further arguments for it."""

    def __init__(self, directory: Path, make: Make, done: bool = False, more: Make = lambda _: {}) -> None:
        model, self.done = Net(), done
        optimizer = make(model)
        super().__init__(directory, model, optimizer, **more(optimizer))

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.backward()
            self.optimizer.step()
            if self.done:
                self.adapter.step_done()


@pytest.mark.supports("schedule-free optimizers")
@pytest.mark.supports("state spread by the optimizer itself")
@pytest.mark.parametrize(
    ("make", "options", "said"),
    [
        (
            lambda model: Lookahead(Adam(model.parameters())),
            {"done": True},
            r"Lookahead keeps tensors of its own \(\.state\), and a checkpoint holds only.* of Adam.*extra_state=",
        ),
        (
            lambda model: WithMode(Adam(model.parameters())),
            {"done": True},
            r"WithMode\.train_mode tells which weights are in the model, and is in no checkpoint.*param groups",
        ),
        (
            lambda model: Hiding(model.parameters()),
            {},
            r"Hiding has stepped, its \.state is empty, and it keeps tensors in \.momenta.*self\.state\[parameter\]",
        ),
        (
            lambda model: Sharing(model.parameters()),
            {},
            r"Sharing has stepped, its \.state is empty, and the Adam inside .*ReplicatedOptimizer instead",
        ),
        (
            lambda model: LookaheadInside(Adam(model.parameters())),
            {},
            r"LookaheadInside wraps another optimizer.*give ttp the inner.*call ttp\.step_done\(\) at the end",
        ),
    ],
    ids=["slow weights", "a mode", "hidden moments", "a share", "a step that cannot be seen"],
)
def test_what_would_be_forgotten_is_refused_right_away(
    start: Callable[..., Job], make: Make, options: dict[str, bool], said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        start(make, **options).train(2)


def test_who_has_no_state_is_not(start: Callable[..., Job]) -> None:
    job = start(lambda model: Sign(model.parameters()))
    job.optimizer.other = Adam([nn.Parameter(torch.ones(1))])  # two of a GAN may know each other
    job.optimizer.other.state["steps"] = 1
    job.train(2)


class Counting(Sign):
    """Counts its steps itself. ``state_dict()`` has the count, as torch's own checkpoints need it."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.norms: list[float] = []
        self.count, self.warm_up, self.told = 0, 10, True
        self.cycle: list[Any] = [0]
        self.cycle.append(self.cycle)
        self.scales = {id(p): {"scale": torch.ones(())} for group in self.param_groups for p in group["params"]}
        self.kinds = [torch.empty(1, dtype=torch.bits8)]  # it has no item()
        self.rates = {p: 1.0 for group in self.param_groups for p in group["params"]}

    def direction(self, number: int, p: Any) -> Any:
        self.size = 4  # made by the first update, and the same from then on, in each launch
        self.count += 1
        self.norms.append(float(p.grad.norm()))
        self.scales[id(p)]["scale"].mul_(0.5)
        return super().direction(number, p) / self.count

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "count": self.count, "norms": self.norms}


@pytest.mark.supports("numbers in attributes of an optimizer")
@pytest.mark.parametrize("as_extra", [False, True])
def test_numbers_that_are_in_no_checkpoint_are_told_once(
    as_extra: bool, start: Callable[..., Job], caplog: pytest.LogCaptureFixture
) -> None:
    more = (lambda optimizer: {"extra_state": {"optimizer": optimizer}}) if as_extra else (lambda _: {})
    start(lambda model: Counting(model.parameters()), more=more).train(3)
    said = [text for text in caplog.messages if "is in no checkpoint" in text]
    assert [text.split(" changes")[0] for text in said] == (
        [] if as_extra else ["Counting.count, Counting.norms, Counting.scales"]
    )


class Rounding(Sign):
    """It rounds its updates by random streams of its own."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.ours, self.theirs, self.python = torch.Generator(), np.random.default_rng(1), random.Random(1)

    def direction(self, number: int, p: Any) -> Any:
        noise = torch.rand((), generator=self.ours) + self.theirs.random() + self.python.random()
        return super().direction(number, p) * noise


class Borrowed(Sign):
    """It draws from the streams of the process, which are saved, and of the system, which have no state."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.torch, self.system = torch.default_generator, random.SystemRandom()

    def direction(self, number: int, p: Any) -> Any:
        noise = torch.rand((), generator=self.torch) + self.system.random()
        return super().direction(number, p) * noise


class Stream:
    def __init__(self, generator: Any) -> None:
        self.generator = generator

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


@pytest.mark.supports("numbers in attributes of an optimizer")
@pytest.mark.parametrize("as_extra", [False, True])
def test_random_streams_of_an_optimizer_are_told(
    as_extra: bool, start: Callable[..., Job], caplog: pytest.LogCaptureFixture
) -> None:
    more = (lambda optimizer: {"extra_state": Stream(optimizer.ours)}) if as_extra else (lambda _: {})
    start(lambda model: Rounding(model.parameters()), more=more).train(3)
    (said,) = (text for text in caplog.messages if "is in no checkpoint" in text)
    names = ["Rounding.ours"] * (not as_extra) + ["Rounding.python", "Rounding.theirs"]
    assert said.split(" changes")[0] == ", ".join(names)


def test_random_streams_that_need_no_saving_are_no_news(
    start: Callable[..., Job], caplog: pytest.LogCaptureFixture
) -> None:
    start(lambda model: Borrowed(model.parameters())).train(3)
    assert "is in no checkpoint" not in caplog.text


def test_weights_moved_between_two_backward_passes_are_refused(start: Callable[..., Job]) -> None:
    job = start(lambda model: Sam(model.parameters()))
    job.backward()
    job.optimizer.first_step()
    with pytest.raises(UsageError, match=r"optimizer\.step\(closure\).*right after the step\(\)"):
        job.backward()
    assert job.gate.version == 0


@pytest.mark.supports("weights changed for a forward and a backward pass")
@pytest.mark.parametrize("closure", [False, True])
def test_weights_moved_for_a_forward_and_a_backward_pass_are_refused(start: Callable[..., Job], closure: bool) -> None:
    """As adversarial trainings and binary networks do; here one element, as of a row of an embedding."""
    job = start(lambda model: Adam(model.parameters()))
    weight = job.model.second.weight.data
    kept = weight.clone()

    def moved() -> None:
        kept.copy_(weight)
        weight[0, 0] += 1
        job.backward()
        weight.copy_(kept)

    with pytest.raises(UsageError, match=r"between the backward pass and the step.*functional_call"):
        for _ in range(3):
            if closure:
                job.optimizer.step(moved)
            else:
                moved()
                job.optimizer.step()
    assert job.gate.version == 1


def test_weights_moved_between_backward_passes_of_a_closure_are_refused(start: Callable[..., Job]) -> None:
    job = start(lambda model: Adam(model.parameters()))

    def both() -> None:
        job.backward()
        job.model.second.weight.data.mul_(2)
        job.backward()

    with pytest.raises(UsageError, match="between two backward passes"):
        for _ in range(5):
            job.optimizer.step(both)
    assert job.gate.version == 3


def test_weights_moved_right_after_the_step_are_fine(start: Callable[..., Job]) -> None:
    job = start(lambda model: Adam(model.parameters()))
    for _ in range(3):
        job.train(1)
        with torch.no_grad():
            for weight in job.model.parameters():
                weight.mul_(2)
        job.backward()  # the first half of the gradient
    assert job.gate.version == 3


def test_a_schedule_of_groups_that_are_not_saved_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    container = Container(model)
    with pytest.raises(UsageError, match="make a scheduler for each optimizer inside"):
        registered(model, container, scheduler=StepLR(container, 1)).layout(1)


def test_a_schedule_without_a_state_is_refused() -> None:
    class Cycle:
        """A schedule of a program's own, as in trainers that set the rates of the param groups themselves."""

        def step(self) -> None:
            optimizer.param_groups[0]["lr"] *= 0.9

    model = nn.Linear(2, 2)
    optimizer = Adam(model.parameters())
    with pytest.raises(UsageError, match=r"Cycle without state_dict\(\) or load_state_dict\(\): .* as extra_state="):
        registered(model, optimizer, scheduler=Cycle()).layout(1)


@pytest.mark.parametrize(("given", "said"), [("nothing", 1), ("scheduler", 0), ("extra_state", 0)])
def test_a_schedule_that_is_not_given_is_told_once(
    given: str, said: int, start: Callable[..., Job], caplog: pytest.LogCaptureFixture
) -> None:
    made: list[StepLR] = []

    def more(optimizer: Any) -> dict[str, Any]:
        made.append(StepLR(optimizer, 2))
        return {} if given == "nothing" else {given: made[0]}

    job = start(lambda model: Adam(model.parameters()), more=more)
    for _ in range(3):
        job.train(1)
        made[0].step()
    assert sum("wrap_optimizer() was given none" in text for text in caplog.messages) == said


def _scheduled(optimizer: Any, schedules: Any) -> Any:
    """Return a schedule of ``optimizer`` that names ``schedules`` as its optimizer."""
    made: Any = StepLR(optimizer, 1)
    made.optimizer = schedules
    return made


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda own, other: StepLR(other, 1), 1),
        (lambda own, other: [StepLR(own, 1), SequentialLR(other, [StepLR(other, 1), StepLR(other, 1)], [2])], 1),
        (lambda own, other: StepLR(own, 1), 0),
        (lambda own, other: ChainedScheduler([StepLR(own, 1)]), 0),
        (lambda own, other: _scheduled(own, Lookahead(own)), 0),
        (lambda own, other: _scheduled(own, None), 0),
    ],
    ids=["another", "one of two", "own", "chained", "wrapper", "unknown"],
)
def test_a_schedule_of_another_optimizer_is_told(
    make: Callable[[Any, Any], Any], told: int, caplog: pytest.LogCaptureFixture
) -> None:
    """As when the optimizer was made anew after the schedule: the schedule then changes no rate of the training."""
    model = nn.Linear(2, 2)
    own, other = Adam(model.parameters()), Adam(model.parameters())
    registered(model, own, scheduler=make(own, other)).layout(1)
    warnings = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    said = [text for text in warnings if "belongs to an optimizer (Adam) that wrap_optimizer() was not given" in text]
    assert len(said) == told


@pytest.mark.parametrize("outer", [Container, Lookahead], ids=["container", "wrapper"])
def test_a_schedule_of_an_optimizer_inside_is_not_told(outer: Any, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    around = outer(model) if outer is Container else outer(Adam(model.parameters()))
    registered(model, around, scheduler=[StepLR(each, 1) for each in owners_of(around)]).layout(1)
    assert not [r for r in caplog.records if "was not given" in r.getMessage()]


def test_an_optimizer_of_whose_steps_nobody_is_told_is_refused(start: Callable[..., Job]) -> None:
    class Silent(Base):
        def __init__(self, parameters: Any) -> None:
            self.param_groups = [{"params": list(parameters)}]
            self.state: Any = {}

        def step(self, closure: Any = None) -> None:
            pass

    with pytest.raises(UsageError, match=r"Silent does not call torch\.optim\.Optimizer\.__init__\(\)"):
        start(lambda model: Silent(model.parameters()))
