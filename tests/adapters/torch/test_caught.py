"""Exceptions of ``step()`` that the program catches: half an update is never saved as a whole one."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest
import torch

from tests.adapters.torch.hooked import Job
from tests.adapters.torch.test_closures import Lightning, Perturbing
from tests.waiting import until
from ttp.adapters.torch.loop.turns import Turns
from ttp.core.messages import Phase


class Failing(torch.optim.SGD):
    """An optimizer that runs out of memory on request, after some of the parameters."""

    fails = False

    def step(self, closure: Any = None) -> Any:
        if self.fails:
            self.fails = False
            with torch.no_grad():
                self.param_groups[0]["params"][0].add_(1.0)
            raise torch.OutOfMemoryError("half way")
        return super().step(closure)


class Outer(Failing):
    """An optimizer whose hooks run twice."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def loop(kind: Any = Failing, **parts: Any) -> Any:
    return Job(lambda parameters: kind(parameters, lr=0.1), **parts)


def failed(job: Any, again: bool = False) -> None:
    """Make one step that fails, and catch the exception as the program would. ``again``: repeat the step there."""
    job.optimizer.fails = True
    try:
        job.optimizer.step()
    except torch.OutOfMemoryError:
        if again:
            job.optimizer.step()
        return
    raise AssertionError("it did not fail")


@pytest.mark.supports("optimizer exceptions that the loop catches")
class TestCaught:
    @pytest.mark.parametrize("kind", [Failing, Outer])
    def test_the_next_whole_step_mends_it(self, kind: Any, caplog: pytest.LogCaptureFixture) -> None:
        torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)  # see test_hooks: hooks fire twice from now on
        job = loop(kind)
        for number in (1, 2):
            job.step()
            assert job.gate.version == number
        job.backward()
        failed(job)
        job.backward()
        assert job.gate.state().phase is Phase.TORN, "told as soon as the program is seen to go on"
        (record,) = caplog.records
        assert record.levelno == logging.ERROR and "in the update after version 2" in record.getMessage()
        job.optimizer.step()
        assert job.gate.state().phase is Phase.IDLE and job.gate.version == 4, "the loop has counted on as well"
        job.step()
        assert job.gate.version == 5 and len(caplog.records) == 1

    def test_what_is_kept_for_others_has_the_right_number(self) -> None:
        """A neighbour that reaches the version needs the rank-local state of this rank."""
        job = loop()
        job.backward()
        failed(job)
        job.taken()
        job.step()
        assert job.taken() == ["left", (2, "early"), (2, "again"), "begin", (2, "final"), "after", "end"]

    @pytest.mark.parametrize("handled", [True, False])
    def test_made_again_it_is_the_same_update(self, handled: bool) -> None:
        """The program frees memory and repeats the step, which no other rank has made meanwhile."""
        job = loop()
        barriers: list[int] = []
        job.detach._calls = job.detach._calls._replace(before_gate=lambda: barriers.append(1))
        job.backward()
        failed(job, again=handled)
        if not handled:
            job.optimizer.step()
        assert job.gate.version == 1 and job.gate.state().phase is Phase.IDLE
        assert barriers == [1], "the other ranks pass it once"
        job.step()
        assert job.gate.version == 2

    def test_no_update_follows_a_collective_that_failed(self) -> None:
        """A step in a ``finally`` block would count an update with a gradient that was not reduced."""
        job = loop()
        job.backward()
        before = job.model[0].weight.detach().clone()
        job.taken()
        with pytest.raises(RuntimeError, match="Connection closed by peer"):
            try:
                raise RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:35529")
            finally:
                job.optimizer.step()
        assert job.taken() == [] and job.gate.version == 0 and torch.equal(job.model[0].weight, before)

    @pytest.mark.parametrize("closure", [True, False])
    def test_a_loop_that_goes_on_while_it_handles_one_steps(self, closure: bool) -> None:
        job = loop()
        try:
            raise RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:35529")
        except RuntimeError:
            for _ in range(2):
                if not closure:
                    job.backward()
                job.optimizer.step(*[job.backward] * closure)
        assert job.gate.version == 2

    def test_a_closed_gate_holds_it(self) -> None:
        job = loop()
        job.backward()
        failed(job)
        job.gate.close()
        thread = threading.Thread(target=lambda: (job.backward(), job.optimizer.step()), daemon=True)
        thread.start()
        until(lambda: job.gate.state().parked)
        assert job.gate.state().phase is Phase.TORN and job.gate.version == 0
        job.gate.open()
        thread.join(10)
        assert job.gate.state().phase is Phase.IDLE and job.gate.version == 2

    def test_nothing_is_copied_from_half_an_update(self) -> None:
        """Undo needs the copy of the version before. A copy of half an update belongs to no version."""
        job = loop()
        copies: list[int] = []
        job.detach._calls = job.detach._calls._replace(
            before_update=lambda version, fresh: copies.append(version) if fresh else None
        )
        job.step()
        job.backward()
        failed(job)
        job.step()
        assert copies == [0, 1], "of version 1 there is one still"
        job.step()
        assert copies == [0, 1, 3]

    def test_without_a_new_step_it_stays_torn(self) -> None:
        job = loop()
        job.backward()
        failed(job)
        for _ in range(3):
            job.backward()
        job.detach.step_done()
        assert job.gate.state().phase is Phase.TORN

    def test_with_a_closure(self) -> None:
        """The next call has another gradient, so it is another update."""
        job: Any = Lightning(lambda parameters: Perturbing(parameters, lr=0.1))
        number = 0

        def closure() -> Any:
            nonlocal number
            number += 1
            if number == 1:
                raise torch.OutOfMemoryError("in the closure, which the optimizer evaluates in the middle")
            return job.closure()

        with pytest.raises(torch.OutOfMemoryError):
            job.optimizer.step(closure)
        assert job.gate.state().phase is Phase.UPDATING
        job.optimizer.step(closure)
        assert job.gate.state().phase is Phase.IDLE and job.gate.version == 2

    def test_between_the_steps_of_two_optimizers(self) -> None:
        """The first optimizer has stepped when the closure of the second raises, so the version is half made."""
        job = loop(optimizers=2)

        def closure() -> Any:
            raise torch.OutOfMemoryError("before the second of them has written anything")

        job.backward()
        job.optimizers[0].step()
        with pytest.raises(torch.OutOfMemoryError):
            job.optimizers[1].step(closure)
        for version in (2, 3):
            job.taken()
            job.backward()
            assert job.gate.state().phase is (Phase.TORN if version == 2 else Phase.IDLE)
            job.optimizers[0].step()
            job.optimizers[1].step()
            assert job.gate.version == version and (version, "early") in job.taken()

    @pytest.mark.parametrize("scaled", [False, True])
    @pytest.mark.parametrize("closure", [False, True])
    def test_the_steps_of_two_optimizers_made_again(self, scaled: bool, closure: bool) -> None:
        """The step of the first one ended no version, and is no step out of turn: the program begins anew."""
        job = loop(optimizers=2, scaler=torch.amp.GradScaler("cpu") if scaled else None)
        job.detach._turns = Turns(["one", "other"], skipped=job.tail.skipped, scaled=scaled)
        one, other = job.optimizers
        for number in (1, 2):
            job.backward()
            one.step()
            if number == 2:
                job.optimizer = other
                failed(job)
                job.taken()
                one.step(*[job.backward] * closure)
            other.step()
        assert job.gate.version == 2 + closure and job.gate.state().phase is Phase.IDLE
        assert [each for each in job.taken() if each in ("begin", "end")] == ["begin", "end"]

    def test_a_gradient_inside_of_a_step_is_none(self, caplog: pytest.LogCaptureFixture) -> None:
        """An optimizer may run a backward pass in its step; that is not the next iteration."""

        class Own(torch.optim.SGD):
            def step(self, closure: Any = None) -> Any:
                with torch.enable_grad():
                    job.backward()
                return super().step()

        job = loop(Own)
        for _ in range(2):
            job.optimizer.step()
        assert job.gate.version == 2 and not caplog.records and "left" not in job.log
