"""The calls that follow an update belong to its version, at whatever moment it is saved."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import nn
from torch.optim import lr_scheduler as lr

from tests.adapters.torch.hooked import exponential
from tests.adapters.torch.loops import Loop
from ttp.adapters.torch.device.accelerator import AHEAD_MAX
from ttp.adapters.torch.loop.post_step_state import PostStepState
from ttp.adapters.torch.restoring import schedules
from ttp.adapters.torch.saving.job_state import JobState
from ttp.errors import CheckpointError, UsageError

SCHEDULERS = [
    exponential,
    lambda o: lr.LambdaLR(o, lambda n: 1 / (1 + n)),
    lambda o: lr.CosineAnnealingLR(o, 100),
    lambda o: lr.SequentialLR(o, [lr.LinearLR(o, 0.1, total_iters=2), lr.CosineAnnealingLR(o, 50)], [2]),
    lambda o: lr.MultiStepLR(o, [2, 5, 5, 8]),
    lambda o: lr.OneCycleLR(o, 0.3, total_steps=50),
    lambda o: lr.CyclicLR(o, 0.01, 0.1),
    lambda o: lr.CosineAnnealingWarmRestarts(o, 5),
]


class TestStepAfterTheUpdate:
    def test_settled_with_the_step_once_that_is_known(self) -> None:
        loop = Loop(exponential).to_update(2)
        assert not loop.post_step.done()
        loop.step()
        assert loop.post_step.done()
        assert loop.state().scheduler["last_epoch"] == 3
        assert loop.rate == pytest.approx(0.1 * 0.5**3)

    def test_the_first_version_settles_with_the_next_forward_pass(self) -> None:
        loop = Loop(exponential)
        assert loop.post_step.done(), "before any update"
        loop.forward()
        loop.update()
        assert not loop.post_step.done(), "nothing is known yet"
        loop.step()
        assert not loop.post_step.done()
        loop.forward()
        assert loop.post_step.done()
        assert loop.state().scheduler["last_epoch"] == 1

    def test_standing_at_the_gate_settles_too(self) -> None:
        loop = Loop(exponential)
        loop.update()
        loop.post_step.at_gate()
        assert loop.post_step.done()

    def test_a_step_that_is_due_is_said_to_be(self) -> None:
        loop = Loop(exponential).to_update(3)
        state = loop.state()
        assert state.scheduler_pending
        assert state.scheduler["last_epoch"] == 3
        loop.step()
        assert not loop.state().scheduler_pending

    def test_a_step_that_raised_is_due_even_the_first_time(self) -> None:
        class Broken(lr.ExponentialLR):
            broken = False

            def get_lr(self) -> Any:
                if self.broken:
                    raise RuntimeError("inside scheduler.step()")
                return super().get_lr()

        loop = Loop(lambda o: Broken(o, 0.5)).to_update(0)
        loop.scheduler.broken = True
        assert not loop.state().scheduler_pending, "nobody knows yet"
        with pytest.raises(RuntimeError):
            loop.step()
        assert not loop.post_step.done()
        assert loop.state().scheduler_pending
        assert loop.state().scheduler["last_epoch"] == 0, "half a step must not be saved"
        assert loop.rate == 0.1

    def test_a_step_that_can_never_be_made_is_told(self) -> None:
        """The program steps a schedule that is over, and raises. So would the restore, in each launch."""

        def make(optimizer: Any) -> Any:
            return lr.OneCycleLR(optimizer, 0.1, total_steps=3)

        loop = Loop(make).to_update(3)
        with pytest.raises(ValueError, match="Tried to step"):
            loop.step()
        saved, resumed = loop.state(), Loop(make)
        assert saved.scheduler_pending
        (note,) = schedules.load_scheduler(resumed.scheduler, saved)
        assert "could not make the step that was due (Tried to step" in note
        assert resumed.scheduler.last_epoch == 3

    @pytest.mark.parametrize("make", SCHEDULERS)
    @pytest.mark.parametrize("settled", [True, False])
    def test_a_resumed_schedule_goes_on_as_the_unbroken_one(self, make: Any, settled: bool) -> None:
        unbroken = Loop(make)
        unbroken.iterations(4)
        unbroken.forward()
        unbroken.update()
        if settled:
            unbroken.step()
        saved = JobState.decode(unbroken.state().encode())
        groups = unbroken.post_step.param_groups(5)[0]
        if not settled:
            unbroken.step()
        resumed = Loop(make)
        resumed.optimizer.param_groups[0].update(groups[0])
        assert schedules.load_scheduler(resumed.scheduler, saved) == []
        resumed.post_step.restored(5)
        resumed.version = 5
        for _ in range(6):
            unbroken.iterations(1)
            resumed.iterations(1)
            assert resumed.state() == unbroken.state()
            assert resumed.post_step.param_groups(resumed.version) == unbroken.post_step.param_groups(unbroken.version)


class TestOtherLoops:
    def test_leading_the_step_belongs_to_the_next_version(self) -> None:
        loop = Loop(exponential)
        for _ in range(3):
            loop.forward()
            loop.step()
            loop.update()
            assert loop.post_step.done()
            assert not loop.state().scheduler_pending
        loop.forward()
        loop.step()  # for version 4, which may never come
        assert loop.state().scheduler["last_epoch"] == 3
        assert loop.rate == pytest.approx(0.1 * 0.5**3)
        loop.update()
        assert loop.state().scheduler["last_epoch"] == 4

    def test_leading_and_now_behind_the_update(self) -> None:
        """Half a step is never settled, whatever was learned."""
        loop = Loop(exponential)
        loop.step()
        loop.update()
        assert loop.post_step.done()
        vars(loop.scheduler)["get_lr"] = None
        with pytest.raises(TypeError):
            loop.step()
        assert not loop.post_step.done()

    def test_once_per_epoch(self) -> None:
        """There is nothing to learn: the next forward pass settles, and no step counts as due."""
        loop = Loop(exponential)
        for number in range(1, 13):
            loop.forward()
            loop.update()
            assert not loop.post_step.done()
            assert not loop.state().scheduler_pending
            if number % 4 == 0:
                loop.step()
            loop.forward()
            assert loop.post_step.done()
            assert loop.state().scheduler["last_epoch"] == number // 4

    def test_validation_between_update_and_step(self) -> None:
        loop = Loop(lambda o: lr.ReduceLROnPlateau(o, patience=0, factor=0.5)).to_update(0)
        loop.forward(training=False)
        assert loop.post_step.done(), "a save does not wait for an evaluation to end"
        loop.step(1.0)
        loop.step(2.0)
        assert loop.state().scheduler["num_bad_epochs"] == 0 and loop.rate == 0.05

    def test_skipped_iterations_leave_the_version_as_it_was(self) -> None:
        """They are repeated after a restore, so a scheduler step in the version would be made twice."""
        loop = Loop(exponential)
        loop.iterations(2)
        loop.forward()  # the scaler skips the update; the loop steps the scheduler all the same
        loop.step()
        assert loop.scheduler.last_epoch == 3
        assert loop.state().scheduler["last_epoch"] == 2
        assert loop.post_step.done()

    def test_without_anything_every_moment_is_settled(self) -> None:
        loop = Loop()
        loop.update()
        assert loop.post_step.done()
        assert loop.state() == JobState(1)

    def test_averages_settle_with_the_next_forward_pass(self) -> None:
        loop = Loop(averages=True).to_update(0)
        assert not loop.post_step.done()
        loop.forward(training=False)
        assert loop.post_step.done()

    @pytest.mark.supports("rates set by hand")
    def test_rates_set_by_hand(self) -> None:
        loop = Loop()
        for version in (1, 2):
            loop.forward()
            loop.optimizer.param_groups[0]["lr"] = 1.0 / version
            loop.update()
        loop.optimizer.param_groups[0]["lr"] = 9.0
        assert loop.rate == 0.5
        assert "params" not in loop.post_step.param_groups(2)[0][0]

    def test_rates_that_only_the_step_has(self) -> None:
        loop = Loop()
        for version in range(1, 4):
            loop.optimizer.param_groups[0]["momentum"] = 0.5 + version / 10
            loop.forward()
            loop.optimizer.param_groups[0]["lr"] = 0.0
            loop.update()
            assert loop.post_step.done() is loop.post_step.foreseen() is (version > 1), "the first may be put back"
            loop.optimizer.param_groups[0]["lr"] = 0.1
            assert loop.rate == (0.1 if version > 1 else 0.0)
            assert loop.post_step.param_groups(version)[0][0]["momentum"] == 0.5 + version / 10
            loop.forward()
            assert loop.post_step.done()
            assert loop.rate == 0.1

    def test_rates_that_only_the_step_has_in_a_schedule(self) -> None:
        loop = Loop()
        for rate in (0.1, 0.1, 0.2, 0.3):
            loop.forward()
            loop.optimizer.param_groups[0]["lr"] = 0.0
            loop.update()
            loop.optimizer.param_groups[0]["lr"] = rate
        loop.forward()
        assert loop.rate == 0.3

    def test_a_schedule_by_the_half_of_a_batch_that_returns_by_chance(self) -> None:
        rates = [1.0, 2.0, 1.0, 3.0, 4.0, 5.0, 6.0]
        loop = Loop(lambda o: lr.LambdaLR(o, lambda n: rates[n]))
        for _ in range(3):
            loop.forward()
            loop.step()
            loop.update()
            loop.step()
        loop.forward()
        assert loop.rate == loop.scheduler.get_last_lr()[0] == pytest.approx(0.6)

    def test_a_loop_that_says_when_a_step_is_done_has_put_everything_back(self) -> None:
        loop = Loop()
        for version in (1, 2, 3):
            loop.optimizer.param_groups[0]["lr"] = 0.1
            loop.forward()
            loop.post_step.at_gate()
            loop.optimizer.param_groups[0]["lr"] = 0.5
            loop.post_step.update_finished(version, whole=True)
            assert loop.post_step.param_groups(version)[0][0]["lr"] == 0.5
            assert loop.post_step.foreseen()

    def test_the_versions_that_a_device_may_be_behind_are_known_too(self) -> None:
        loop = Loop(exponential)
        loop.iterations(AHEAD_MAX)
        assert [loop.state(v).scheduler["last_epoch"] for v in range(1, AHEAD_MAX + 1)] == [*range(1, AHEAD_MAX + 1)]

    @pytest.mark.parametrize("version", [0, 30])
    def test_of_another_version_nothing_is_made_up(self, version: int) -> None:
        loop = Loop(exponential)
        loop.iterations(20)
        with pytest.raises(CheckpointError, match=f"schedule of version {version} is not kept: this rank is at 20"):
            loop.state(version)

    def test_a_tensor_as_rate_is_copied(self) -> None:
        loop = Loop()
        rate = torch.tensor(0.5)
        loop.optimizer.param_groups[0]["lr"] = rate
        loop.update()
        rate.fill_(7.0)
        assert loop.rate == 0.5


class TestByHand:
    def test_the_user_says_when(self) -> None:
        loop = Loop(exponential).to_update(0)
        loop.step()
        assert not loop.post_step.done()
        loop.post_step.step_done()
        assert loop.post_step.done() and loop.state().scheduler["last_epoch"] == 1
        loop.forward()
        loop.optimizer.step()
        loop.step()
        loop.post_step.update_finished(2, whole=True)
        assert loop.post_step.done() and loop.state(2).scheduler["last_epoch"] == 2
        assert not loop.state(2).scheduler_pending
        loop.step()
        assert loop.state(2).scheduler["last_epoch"] == 2, "what follows belongs to the next step"

    def test_a_schedule_stepped_at_the_top_of_an_iteration_belongs_to_it(self) -> None:
        loop = Loop(exponential)
        for number in range(1, 4):
            loop.step()
            loop.forward()
            assert loop.state(number - 1).scheduler["last_epoch"] == number - 1
            loop.optimizer.step()
            loop.post_step.update_finished(number, whole=True)
            assert loop.state(number).scheduler["last_epoch"] == number


class TestLooking:
    def test_nothing_of_the_scheduler_is_another(self) -> None:
        """Other libraries check ``type(scheduler) is LambdaLR``."""
        scheduler = lr.ExponentialLR(torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1), 0.5)
        before = dict(vars(scheduler))
        PostStepState([scheduler.optimizer], scheduler=scheduler, scaler=torch.amp.GradScaler("cpu"))
        assert type(scheduler) is lr.ExponentialLR and vars(scheduler) == before

    def test_a_state_that_cannot_be_stored_is_said_at_start(self) -> None:
        class Odd(lr.ExponentialLR):
            def state_dict(self) -> dict[str, Any]:
                return {"curve": [object()]}

        with pytest.raises(UsageError, match=r"scheduler.state_dict\(\)\['curve'\]\[0\]"):
            Loop(lambda o: Odd(o, 0.5))

    def test_what_does_not_count_its_steps_settles_with_the_forward_pass(self) -> None:
        loop = Loop(exponential)
        post_step = PostStepState([loop.optimizer], scheduler=_Plain(loop.scheduler))
        loop.optimizer.step()
        post_step.update_finished(1)
        loop.step()
        assert not post_step.done()
        post_step.forward_entered(training=True)
        assert post_step.done()
        loop.step()
        state: Any = post_step.job_state(1).scheduler
        assert state["last_epoch"] == 1 and post_step.param_groups(1)[0][0]["lr"] == 0.05

    @pytest.mark.parametrize("make", [*SCHEDULERS, lambda o: lr.ChainedScheduler([lr.LinearLR(o), exponential(o)])])
    def test_a_step_that_is_being_made_is_told_from_one_that_is_over(self, make: Any) -> None:
        """A save may look at any moment: here at every line of a step."""
        loop = Loop(make).to_update(2)
        before = loop.state().scheduler, loop.post_step.param_groups(3)
        seen: list[Any] = []

        def look(frame: Any, event: str, _argument: Any) -> Any:
            if frame.f_code.co_filename == lr.__file__:
                sys.settrace(None)
                state = loop.state()
                seen.append((state.scheduler_pending, (state.scheduler, loop.post_step.param_groups(3, state))))
                sys.settrace(look)
            return look

        before_test = sys.gettrace()  # a debugger's, or that of a measurement of coverage
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            sys.settrace(look)
            try:
                loop.scheduler.step()
            finally:
                sys.settrace(before_test)
        after = loop.scheduler.state_dict(), loop.post_step.param_groups(3)
        assert len(seen) > 5 and not loop.state().scheduler_pending
        for pending, found in seen:
            assert found == (before if pending else after)

    def test_groups_and_schedule_are_of_one_moment(self) -> None:
        loop = Loop(exponential).to_update(2)
        job = loop.state()
        loop.step()
        assert job.scheduler_pending and loop.post_step.param_groups(3, job)[0][0]["lr"] == pytest.approx(0.1 * 0.5**2)
        assert loop.rate == pytest.approx(0.1 * 0.5**3)


class _Plain:
    """A scheduler with nothing but its state."""

    __slots__ = ("scheduler",)

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler

    def step(self) -> None:
        self.scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        return {"last_epoch": self.scheduler.last_epoch}
