"""``step(closure)``: the update begins when the closure has run, for optimizers that evaluate it first."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from tests.adapters.torch.hooked import Job
from ttp.adapters.torch.loop import bracket
from ttp.adapters.torch.loop.closures import evaluates_first
from ttp.adapters.torch.loop.untouched import Untouched
from ttp.core.messages import Phase

SGD: Any = torch.optim.SGD


class AsInTheDocs(SGD):
    """An optimizer written like most optimizers outside of torch."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Performs a single optimization step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(group["lr"])
        return loss


class Passing(AsInTheDocs):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class Wrapping(SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        assert closure is not None
        closure = torch.enable_grad()(closure)
        return closure()


class InOneLine(SGD):
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        super().step()
        return loss


class Perturbing(SGD):
    """A sharpness-aware optimizer: it writes, and evaluates the closure afterwards."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        closure = torch.enable_grad()(closure)
        self.climb()
        closure()

    def climb(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(1.0)


class InPlace(SGD):
    def step(self, closure: Any = None) -> Any:
        self.param_groups[0]["params"][0].data[:] = 0
        return closure()


class Twice(SGD):
    def step(self, closure: Any = None) -> Any:
        closure()
        super().step()
        return closure()


class Repeating(SGD):
    def step(self, closure: Any = None) -> Any:
        for _ in range(3):
            closure()


class Now(SGD):
    """An optimizer that evaluates the closure in some steps."""

    number = 0

    def step(self, closure: Any = None) -> Any:
        if closure is not None and self.number % 2:
            closure()
        super().step()


class HandingOn(SGD):
    other: Any = None

    def step(self, closure: Any = None) -> Any:
        return self.other.step(closure)


class Noted(SGD):
    """One with types, and a condition on the closure alone."""

    def step(self, closure: Any = None) -> Any:
        if not closure:
            raise ValueError("it needs one")
        loss: Any = closure()
        self.climb(loss)
        return loss

    def climb(self, by: Any) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.add_(by)


class WithoutOne(SGD):
    def step(self) -> Any:
        """It cannot be given a closure."""


MADE = type("Made", (SGD,), {"step": eval("lambda self, closure=None: closure()")})

KNOWN = [SGD, torch.optim.AdamW, torch.optim.NAdam, AsInTheDocs, Passing, Wrapping, InOneLine, Noted]
UNKNOWN = [torch.optim.LBFGS, Perturbing, InPlace, Twice, Repeating, Now, HandingOn, WithoutOne, MADE]


@pytest.mark.parametrize("kind", [*KNOWN, *UNKNOWN])
def test_whether_the_closure_is_the_first_thing_or_nobody_can_tell(kind: type) -> None:
    assert evaluates_first(kind) is (kind in KNOWN)


class Lightning(Job):
    """A loop that runs zero_grad, forward and backward inside of step()."""

    def closure(self) -> Any:
        self.log.append(self.gate.state().phase)
        self.optimizer.zero_grad()
        loss = (self.model(torch.ones(4, 3)) ** 2).sum()
        loss.backward()
        self.log.append("gradient")
        return loss


def with_optimizer(kind: Any, **parts: Any) -> Lightning:
    return Lightning(lambda parameters: kind(parameters, lr=0.1), **parts)


AFTER = [Phase.IDLE, (1, "early"), "gradient", (1, "again"), "begin", (1, "final"), "after", "end"]
WHOLE = [(1, "again"), "begin", Phase.UPDATING, (1, "early"), "gradient"]


@pytest.mark.supports("closures")
class TestUpdate:
    @pytest.mark.parametrize("kind", [SGD, torch.optim.Adam, AsInTheDocs, Passing])
    @pytest.mark.parametrize("named", [True, False])
    def test_it_begins_when_the_closure_has_run(self, kind: Any, named: bool) -> None:
        job = with_optimizer(kind)
        loss = job.optimizer.step(closure=job.closure) if named else job.optimizer.step(job.closure)
        assert loss.requires_grad, "what the closure returns comes back"
        assert job.taken() == AFTER
        assert job.gate.version == 1 and job.detach.redoable

    def test_gradients_are_as_the_optimizer_wants_them(self) -> None:
        """The optimizer enables gradients for the closure; ttp's own work runs without them, as everywhere."""
        job = with_optimizer(SGD)
        seen: list[bool] = []
        job.detach._calls = job.detach._calls._replace(before_gate=lambda: seen.append(torch.is_grad_enabled()))
        with torch.no_grad():
            job.optimizer.step(job.closure)
            assert job.optimizer.step(lambda: None) is None, "as Lightning's, when a training_step() returns None"
        assert seen == [False] * 2 and job.gate.version == 2

    def test_a_closed_gate_stops_it_with_the_gradient_at_hand(self) -> None:
        job = with_optimizer(SGD)
        seen: list[Any] = []

        def at_the_gate(_again: bool) -> None:
            seen.append((job.detach.redoable, job.gate.state().phase, job.model[0].weight.grad is not None))

        job.begin_update = at_the_gate  # type: ignore[method-assign,assignment]
        job.optimizer.step(job.closure)
        assert seen == [(True, Phase.IDLE, True)]

    def test_an_exception_in_the_closure_leaves_nothing(self, caplog: pytest.LogCaptureFixture) -> None:
        job = with_optimizer(SGD)

        def closure() -> Any:
            raise MemoryError("forward")

        with pytest.raises(MemoryError):
            job.optimizer.step(closure)
        assert job.gate.state().phase is Phase.IDLE
        job.optimizer.step(job.closure)
        assert job.gate.version == 1 and job.taken() == AFTER and not caplog.records

    @pytest.mark.supports("LBFGS")
    def test_several_evaluations_are_one_update(self, caplog: pytest.LogCaptureFixture) -> None:
        job = Lightning(lambda parameters: torch.optim.LBFGS(parameters, max_iter=3))
        for _ in range(2):
            job.optimizer.step(job.closure)
        log = job.taken()
        assert log[: len(WHOLE)] == WHOLE and log.count("begin") == log.count("end") == 2
        assert log[-3:] == [(2, "final"), "after", "end"]
        assert log.count("gradient") > 2, "otherwise this test shows nothing"
        assert job.gate.version == 2 and not job.detach.redoable
        (record,) = caplog.records
        assert record.levelno == logging.WARNING and "LBFGS.step(closure) may write before" in record.getMessage()

    def test_a_closure_that_is_not_called_is_said(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        class Lazy(SGD):
            def step(self, closure: Any = None) -> Any:
                """Ignore the closure."""
                return super().step()

        monkeypatch.setattr(bracket, "evaluates_first", lambda kind: True)
        job = with_optimizer(Lazy)
        job.detach._untouched = Untouched([job.optimizer], lambda _: True)
        job.optimizer.step(job.closure)
        assert job.gate.version == 1
        assert job.taken() == [(1, "again"), "begin", (1, "final"), "after", "end"]
        assert "has not called its closure" in caplog.text
        job.backward()
        job.optimizer.step(job.closure)
        assert job.gate.version == 2, "what the step itself has written is not taken for the loop's"

    def test_other_arguments_stay(self) -> None:
        seen: list[Any] = []

        class Sophia(SGD):
            def step(self, closure: Any = None, bs: int = 5120) -> Any:
                seen.append((closure, bs))

        optimizer: Any = with_optimizer(Sophia).optimizer
        optimizer.step(bs=7)
        optimizer.step(None, 8)
        assert seen == [(None, 7), (None, 8)]
