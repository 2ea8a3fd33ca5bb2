"""What follows an update belongs to its version, whenever the save comes."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.optim import lr_scheduler as lr  # noqa: E402

from tests.adapters.torch.fake_device import FakeRuntime, Watching  # noqa: E402
from ttp.adapters.torch.device import accelerator  # noqa: E402
from ttp.adapters.torch.device.accelerator import AHEAD_MAX  # noqa: E402
from ttp.adapters.torch.loop import schedules  # noqa: E402
from ttp.adapters.torch.loop.post_step_state import PostStepState  # noqa: E402
from ttp.adapters.torch.saving.job_state import JobState  # noqa: E402
from ttp.errors import CheckpointError, UsageError  # noqa: E402


class Loop:
    """A training loop in its parts, with the calls that the hooks would make."""

    def __init__(self, make: Any = None, *, scaler: Any = None, averages: bool = False, runtimes: Any = ()) -> None:
        self.model = nn.Linear(2, 2)
        self.optimizer: Any = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.scheduler: Any = make(self.optimizer) if make else None
        self.scaler = scaler
        self.version = 0
        self.tail = PostStepState(
            [self.optimizer], scheduler=self.scheduler, scaler=scaler, averages=averages, runtimes=runtimes
        )

    def forward(self, training: bool = True) -> None:
        self.tail.forward_entered(training)
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)

    def update(self) -> None:
        self.tail.at_gate()
        self.optimizer.step()
        self.version += 1
        self.tail.update_finished(self.version)

    def step(self, *args: Any) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.scheduler.step(*args)

    def iterations(self, count: int) -> None:
        for _ in range(count):
            self.forward()
            self.update()
            self.step()

    def state(self, version: int | None = None) -> Any:
        return self.tail.job_state(self.version if version is None else version)

    @property
    def rate(self) -> float:
        return float(self.tail.param_groups(self.version)[0][0]["lr"])


def exponential(optimizer: Any) -> Any:
    return lr.ExponentialLR(optimizer, 0.5)


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
        loop = Loop(exponential)
        loop.iterations(2)
        loop.forward()
        loop.update()
        assert not loop.tail.done()
        loop.step()
        assert loop.tail.done()
        assert loop.state().scheduler["last_epoch"] == 3
        assert loop.rate == pytest.approx(0.1 * 0.5**3)

    def test_the_first_version_settles_with_the_next_forward_pass(self) -> None:
        loop = Loop(exponential)
        assert loop.tail.done(), "before any update"
        loop.forward()
        loop.update()
        assert not loop.tail.done(), "nothing is known yet"
        loop.step()
        assert not loop.tail.done()
        loop.forward()
        assert loop.tail.done()
        assert loop.state().scheduler["last_epoch"] == 1

    def test_standing_at_the_gate_settles_too(self) -> None:
        loop = Loop(exponential)
        loop.update()
        loop.tail.at_gate()
        assert loop.tail.done()

    def test_a_step_that_is_due_is_said_to_be(self) -> None:
        loop = Loop(exponential)
        loop.iterations(3)
        loop.forward()
        loop.update()
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

        loop = Loop(lambda o: Broken(o, 0.5))
        loop.forward()
        loop.update()
        loop.scheduler.broken = True
        assert not loop.state().scheduler_pending, "nobody knows yet"
        with pytest.raises(RuntimeError):
            loop.step()
        assert not loop.tail.done()
        assert loop.state().scheduler_pending
        assert loop.state().scheduler["last_epoch"] == 0, "half a step must not be saved"
        assert loop.rate == 0.1

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
        groups = unbroken.tail.param_groups(5)[0]
        if not settled:
            unbroken.step()
        resumed = Loop(make)
        resumed.optimizer.param_groups[0].update(groups[0])
        assert schedules.load_scheduler(resumed.scheduler, saved) == []
        resumed.tail.restored(5)
        resumed.version = 5
        for _ in range(6):
            unbroken.iterations(1)
            resumed.iterations(1)
            assert resumed.state() == unbroken.state()
            assert resumed.tail.param_groups(resumed.version) == unbroken.tail.param_groups(unbroken.version)


class TestOtherLoops:
    def test_leading_the_step_belongs_to_the_next_version(self) -> None:
        loop = Loop(exponential)
        for _ in range(3):
            loop.forward()
            loop.step()
            loop.update()
            assert loop.tail.done()
            assert not loop.state().scheduler_pending
        loop.forward()
        loop.step()  # for version 4, which may never come
        assert loop.state().scheduler["last_epoch"] == 3
        assert loop.rate == pytest.approx(0.1 * 0.5**3)
        loop.update()
        assert loop.state().scheduler["last_epoch"] == 4

    def test_leading_and_now_in_the_tail(self) -> None:
        """Half a step is never settled, whatever was learned."""
        loop = Loop(exponential)
        loop.step()
        loop.update()
        assert loop.tail.done()
        vars(loop.scheduler)["get_lr"] = None
        with pytest.raises(TypeError):
            loop.step()
        assert not loop.tail.done()

    def test_once_per_epoch(self) -> None:
        """Nothing to learn: the next forward pass settles, and nothing is said to be due."""
        loop = Loop(exponential)
        for number in range(1, 13):
            loop.forward()
            loop.update()
            assert not loop.tail.done()
            assert not loop.state().scheduler_pending
            if number % 4 == 0:
                loop.step()
            loop.forward()
            assert loop.tail.done()
            assert loop.state().scheduler["last_epoch"] == number // 4

    def test_validation_between_update_and_step(self) -> None:
        loop = Loop(lambda o: lr.ReduceLROnPlateau(o, patience=0, factor=0.5))
        loop.forward()
        loop.update()
        loop.forward(training=False)
        assert loop.tail.done(), "a save does not wait for an evaluation to end"
        loop.step(1.0)
        loop.step(2.0)
        assert loop.state().scheduler["num_bad_epochs"] == 0 and loop.rate == 0.05

    def test_skipped_iterations_leave_the_version_as_it_was(self) -> None:
        """They are repeated after a restore: a second step would be made twice."""
        loop = Loop(exponential)
        loop.iterations(2)
        loop.forward()  # the scaler skips the update; the loop steps the scheduler all the same
        loop.step()
        assert loop.scheduler.last_epoch == 3
        assert loop.state().scheduler["last_epoch"] == 2
        assert loop.tail.done()

    def test_without_anything_every_moment_is_settled(self) -> None:
        loop = Loop()
        loop.update()
        assert loop.tail.done()
        assert not loop.tail.wants_forward
        assert loop.state() == JobState(1)

    def test_averages_settle_with_the_next_forward_pass(self) -> None:
        loop = Loop(averages=True)
        loop.forward()
        loop.update()
        assert not loop.tail.done()
        loop.forward(training=False)
        assert loop.tail.done()

    @pytest.mark.supports("rates set by hand")
    def test_rates_set_by_hand(self) -> None:
        loop = Loop()
        for version in (1, 2):
            loop.forward()
            loop.optimizer.param_groups[0]["lr"] = 1.0 / version
            loop.update()
        loop.optimizer.param_groups[0]["lr"] = 9.0
        assert loop.rate == 0.5
        assert "params" not in loop.tail.param_groups(2)[0][0]

    def test_the_version_before_is_known_too(self) -> None:
        loop = Loop(exponential)
        loop.iterations(3)
        assert loop.state(2).scheduler["last_epoch"] == 2
        assert loop.state(3).scheduler["last_epoch"] == 3

    def test_so_are_those_that_a_device_may_be_behind(self) -> None:
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
        loop = Loop(exponential)
        loop.forward()
        loop.update()
        loop.step()
        assert not loop.tail.done()
        loop.tail.step_done()
        assert loop.tail.done() and loop.state().scheduler["last_epoch"] == 1
        loop.forward()
        loop.optimizer.step()
        loop.step()
        loop.tail.update_finished(2, whole=True)
        assert loop.tail.done() and loop.state(2).scheduler["last_epoch"] == 2
        assert not loop.state(2).scheduler_pending
        loop.step()
        assert loop.state(2).scheduler["last_epoch"] == 2, "what follows belongs to the next step"


def to_the_gate(loop: Loop, overflow: bool) -> None:
    """An iteration up to the optimizer's step, with a scaler; with ``overflow`` that step will be left out."""
    loop.forward()
    weight: Any = next(loop.model.parameters())
    loop.scaler.scale(weight.sum() * 0)
    if overflow:
        weight.grad.fill_(float("inf"))
    loop.tail.at_gate()


class TestScaler:
    def loop(self, make: Any = None) -> Loop:
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        return Loop(make, scaler=scaler)

    def iteration(self, loop: Loop, *, overflow: bool = False, update: bool = True) -> None:
        to_the_gate(loop, overflow)
        if not overflow:
            loop.version += 1
        loop.scaler.step(loop.optimizer)
        if not overflow:
            loop.tail.update_finished(loop.version)
        if update:
            loop.scaler.update()

    def test_it_settles_with_the_update(self) -> None:
        loop = self.loop()
        self.iteration(loop, update=False)
        assert not loop.tail.done()
        assert loop.state().scaler_pending
        loop.scaler.update()
        assert loop.tail.done()
        assert not loop.state().scaler_pending
        assert loop.state().scaler == loop.scaler.state_dict()

    def test_a_skipped_step_is_no_version_and_is_repeated(self) -> None:
        loop = self.loop()
        self.iteration(loop)
        before = loop.scaler.state_dict()
        self.iteration(loop, overflow=True)
        assert loop.version == 1
        assert loop.scaler.get_scale() == 4.0
        assert loop.state().scaler == before
        self.iteration(loop)
        assert loop.state().scaler == loop.scaler.state_dict()

    @pytest.mark.parametrize("count", [1, 2, 3, 4])
    def test_a_resumed_scaler_goes_on_as_the_unbroken_one(self, count: int) -> None:
        unbroken = self.loop()
        for _ in range(count):
            self.iteration(unbroken)
        self.iteration(unbroken, update=False)
        saved = JobState.decode(unbroken.state().encode())
        unbroken.scaler.update()
        resumed = self.loop()
        assert saved.scaler_pending
        schedules.load_scaler(resumed.scaler, saved)
        assert resumed.scaler.state_dict() == unbroken.scaler.state_dict()

    def test_a_disabled_one_is_nothing(self) -> None:
        loop = Loop(scaler=torch.amp.GradScaler("cpu", enabled=False))
        loop.update()
        assert loop.tail.done() and loop.state().scaler is None

    def test_both(self) -> None:
        loop = self.loop(exponential)
        for _ in range(2):
            self.iteration(loop)
            loop.step()
        self.iteration(loop)
        assert not loop.tail.done()
        assert loop.state().scheduler_pending and not loop.state().scaler_pending
        loop.step()
        assert loop.tail.done()


@pytest.mark.supports("AMP and GradScaler")
class TestFused:
    """An optimizer that takes the scale itself is always stepped; its device decides that nothing is written."""

    def loop(self) -> Loop:
        loop = Loop(scaler=torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2))
        loop.optimizer = torch.optim.Adam(loop.model.parameters(), fused=True)
        loop.optimizer.register_step_post_hook(lambda *_: self.finished(loop))  # where the real hook is
        loop.tail = PostStepState([loop.optimizer], scaler=loop.scaler)
        return loop

    def finished(self, loop: Loop) -> None:
        loop.version += 1
        loop.tail.update_finished(loop.version)

    def iteration(self, loop: Loop, *, overflow: bool = False, update: bool = True) -> None:
        to_the_gate(loop, overflow)
        loop.scaler.step(loop.optimizer)
        if update:
            loop.scaler.update()

    def test_a_skipped_step_is_a_version_with_a_new_scale(self) -> None:
        loop = self.loop()
        self.iteration(loop)
        before = [p.clone() for p in loop.model.parameters()]
        self.iteration(loop, overflow=True)
        assert loop.version == 2 and all(map(torch.equal, before, loop.model.parameters()))
        assert loop.state().scaler == loop.scaler.state_dict() and loop.scaler.get_scale() == 4.0
        assert not loop.state().scaler_pending

    @pytest.mark.parametrize("overflow", [True, False])
    @pytest.mark.parametrize("count", [1, 2, 3])
    def test_between_the_step_and_the_update_it_is_known_what_is_due(self, count: int, overflow: bool) -> None:
        unbroken = self.loop()
        for _ in range(count):
            self.iteration(unbroken)
        self.iteration(unbroken, overflow=overflow, update=False)
        assert not unbroken.tail.done()
        saved = JobState.decode(unbroken.state().encode())
        assert saved.scaler_pending and saved.scaler_skipped == overflow
        unbroken.scaler.update()
        assert unbroken.tail.done() and not unbroken.state().scaler_skipped
        resumed = self.loop()
        schedules.load_scaler(resumed.scaler, saved)
        assert resumed.scaler.state_dict() == unbroken.scaler.state_dict()


class TestLooking:
    def test_nothing_of_the_scheduler_is_another(self) -> None:
        """``type(scheduler) is LambdaLR`` is asked by other libraries."""
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
        tail = PostStepState([loop.optimizer], scheduler=_Plain(loop.scheduler))
        loop.optimizer.step()
        tail.update_finished(1)
        loop.step()
        assert not tail.done()
        tail.forward_entered(training=True)
        assert tail.done()
        loop.step()
        state: Any = tail.job_state(1).scheduler
        assert state["last_epoch"] == 1 and tail.param_groups(1)[0][0]["lr"] == 0.05

    @pytest.mark.parametrize("make", [*SCHEDULERS, lambda o: lr.ChainedScheduler([lr.LinearLR(o), exponential(o)])])
    def test_a_step_that_is_being_made_is_told_from_one_that_is_over(self, make: Any) -> None:
        """Whoever saves looks at any moment: here at every line of a step."""
        loop = Loop(make)
        loop.iterations(2)
        loop.forward()
        loop.update()
        before = loop.state().scheduler, loop.tail.param_groups(3)
        seen: list[Any] = []

        def look(frame: Any, event: str, _argument: Any) -> Any:
            if frame.f_code.co_filename == lr.__file__:
                sys.settrace(None)
                state = loop.state()
                seen.append((state.scheduler_pending, (state.scheduler, loop.tail.param_groups(3, state))))
                sys.settrace(look)
            return look

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            sys.settrace(look)
            try:
                loop.scheduler.step()
            finally:
                sys.settrace(None)
        after = loop.scheduler.state_dict(), loop.tail.param_groups(3)
        assert len(seen) > 5 and not loop.state().scheduler_pending
        for pending, found in seen:
            assert found == (before if pending else after)

    def test_groups_and_schedule_are_of_one_moment(self) -> None:
        loop = Loop(exponential)
        loop.iterations(2)
        loop.forward()
        loop.update()
        job = loop.state()
        loop.step()
        assert job.scheduler_pending and loop.tail.param_groups(3, job)[0][0]["lr"] == pytest.approx(0.1 * 0.5**2)
        assert loop.rate == pytest.approx(0.1 * 0.5**3)


class _Plain:
    """A scheduler that shows nothing but its state."""

    __slots__ = ("scheduler",)

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler

    def step(self) -> None:
        self.scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        return {"last_epoch": self.scheduler.last_epoch}


class TestScaleOnADevice:
    """Its numbers are those of the version in the order of the training's work, and nobody waits for them."""

    @pytest.fixture
    def runtime(self) -> Iterator[Any]:
        runtime: Any = FakeRuntime()
        with Watching(runtime.device):
            yield runtime
        assert not runtime.device.sins

    @pytest.fixture
    def loop(self, runtime: Any) -> Loop:
        scaler: Any = torch.amp.GradScaler("cpu", init_scale=1024.0)
        scaler._lazy_init_scale_growth_tracker(torch.device("cpu"))
        for tensor in (scaler._scale, scaler._growth_tracker):
            runtime.device.put(tensor)
        return Loop(scaler=scaler, runtimes=[runtime])

    @staticmethod
    def scaler_update(loop: Loop) -> None:
        """What ``update()`` queues, and what it does on the host."""
        loop.scaler._scale.mul_(2)
        loop.scaler._per_optimizer_states = type(loop.scaler._per_optimizer_states)(dict)

    def iteration(self, loop: Loop) -> None:
        loop.forward()
        loop.update()
        self.scaler_update(loop)

    def test_of_each_version_however_far_the_host_is(self, loop: Loop, runtime: Any) -> None:
        self.iteration(loop)
        runtime.device.run()
        runtime.device.seal()
        with runtime.device.no_waiting():
            for _ in range(4):
                self.iteration(loop)
            loop.tail.at_gate()
            assert [loop.state(v).scaler["scale"] for v in (1, 2, 5)] == [2048.0, 4096.0, 1024.0 * 2**5]
            assert not loop.state(5).scaler_pending

    def test_behind_a_hang_too(self, loop: Loop, runtime: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(accelerator, "_NUMBER_S", 0.01)
        self.iteration(loop)
        loop.tail.forward_entered(True)
        runtime.device.run()
        runtime.device.hang()
        self.iteration(loop)
        assert loop.state(1).scaler["scale"] == 2048.0
        with pytest.raises(CheckpointError, match="did not leave the device"):
            loop.state(2)

    def test_an_update_of_it_that_is_queued_is_due(self, loop: Loop) -> None:
        """A save reads on another thread, which cannot know how far the device is."""
        self.iteration(loop)
        state = loop.state(1)
        assert state.scaler["scale"] == 1024.0 and state.scaler_pending
        loop.tail.at_gate()
        state = loop.state(1)
        assert state.scaler["scale"] == 2048.0 and not state.scaler_pending

    def test_while_a_graph_is_captured_its_update_stays_due(self, loop: Loop, runtime: Any) -> None:
        self.iteration(loop)
        runtime.device.capturing = True
        with pytest.raises(CheckpointError, match="CUDA graph"):  # the hooks log it
            loop.tail.forward_entered(True)
        runtime.device.capturing = False
        state = loop.state(1)
        assert state.scaler["scale"] == 1024.0 and state.scaler_pending

    def test_a_number_that_was_written_over_is_an_error(self, loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(accelerator, "_NUMBERS", 8)
        loop.tail._numbers = accelerator.Numbers(loop.tail._numbers._runtimes)
        for _ in range(4):
            self.iteration(loop)
        assert loop.state(4).scaler["scale"] == 1024.0 * 2**3
        with pytest.raises(CheckpointError, match="too far ahead"):
            loop.state(1)
