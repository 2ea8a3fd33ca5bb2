"""The state of a gradient scaler belongs to the version, whenever it is saved and on whichever device its
numbers are. So do a learning rate that is a tensor on a device, and an average of the weights there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest

torch = pytest.importorskip("torch")

from tests.adapters.torch.fake_device import Watching
from tests.adapters.torch.fake_runtime import FakeRuntime
from tests.adapters.torch.hooked import exponential
from tests.adapters.torch.loops import Loop
from ttp.adapters.torch.device import accelerator
from ttp.adapters.torch.device.accelerator import Fence
from ttp.adapters.torch.device.to_host import HostCopier
from ttp.adapters.torch.loop import post_step_state
from ttp.adapters.torch.loop.post_step_state import PostStepState
from ttp.adapters.torch.restoring import schedules
from ttp.adapters.torch.saving.job_state import JobState
from ttp.errors import CheckpointError


def scaled(make: Any = None, *, fused: bool = False) -> Loop:
    """Return the parts of a loop with a scaler; ``fused``: its optimizer applies the scale itself."""
    loop = Loop(make, scaler=torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2, growth_factor=1.7))
    if fused:
        loop.optimizer = torch.optim.Adam(loop.model.parameters(), fused=True)
        loop.post_step = PostStepState([loop.optimizer], scaler=loop.scaler)

    def finished(*_: Any) -> None:
        loop.version += 1
        loop.post_step.update_finished(loop.version)

    loop.optimizer.register_step_post_hook(finished)  # where the real hook is
    return loop


def iterate(loop: Loop, *, overflow: bool = False, update: bool = True) -> None:
    """Run an iteration; ``overflow`` makes the scaler, or the device of a fused optimizer, skip its step."""
    loop.forward()
    weight: Any = next(loop.model.parameters())
    loop.scaler.scale(weight.sum() * 0)
    if overflow:
        weight.grad.fill_(float("inf"))
    loop.post_step.at_gate()
    loop.scaler.step(loop.optimizer)
    if update:
        loop.scaler.update()


@pytest.mark.supports("AMP and GradScaler")
class TestScaler:
    def test_it_settles_with_the_update(self) -> None:
        loop = scaled()
        iterate(loop, update=False)
        assert not loop.post_step.done()
        assert loop.state().scaler_pending
        loop.scaler.update()
        assert loop.post_step.done()
        assert not loop.state().scaler_pending
        assert loop.state().scaler == loop.scaler.state_dict()

    def test_a_skipped_step_is_no_version_and_is_repeated(self) -> None:
        loop = scaled()
        iterate(loop)
        before = loop.scaler.state_dict()
        iterate(loop, overflow=True)
        assert loop.version == 1
        assert loop.scaler.get_scale() == 4.0
        assert loop.state().scaler == before
        iterate(loop)
        assert loop.state().scaler == loop.scaler.state_dict()

    def test_of_a_fused_optimizer_it_is_a_version_with_a_new_scale(self) -> None:
        """Such an optimizer always steps; its device decides that nothing is written."""
        loop = scaled(fused=True)
        iterate(loop)
        before = [p.clone() for p in loop.model.parameters()]
        iterate(loop, overflow=True)
        assert loop.version == 2 and all(map(torch.equal, before, loop.model.parameters()))
        assert loop.state().scaler == loop.scaler.state_dict() and loop.scaler.get_scale() == 4.0
        assert not loop.state().scaler_pending

    @pytest.mark.parametrize(("fused", "overflow"), [(False, False), (True, False), (True, True)])
    @pytest.mark.parametrize("count", [1, 2, 3, 4])
    def test_a_resumed_scaler_goes_on_as_the_unbroken_one(self, count: int, fused: bool, overflow: bool) -> None:
        """Saved between the step and ``update()``, it is known what is due."""
        unbroken = scaled(fused=fused)
        for _ in range(count):
            iterate(unbroken)
        iterate(unbroken, overflow=overflow, update=False)
        assert not unbroken.post_step.done()
        saved = JobState.decode(unbroken.state().encode())
        assert saved.scaler_pending and saved.scaler_skipped == overflow
        unbroken.scaler.update()
        assert unbroken.post_step.done() and not unbroken.state().scaler_skipped
        resumed = scaled(fused=fused)
        schedules.load_scaler(resumed.scaler, saved)
        assert resumed.scaler.state_dict() == unbroken.scaler.state_dict()

    def test_a_disabled_one_is_nothing(self) -> None:
        loop = Loop(scaler=torch.amp.GradScaler("cpu", enabled=False))
        loop.update()
        assert loop.post_step.done() and loop.state().scaler is None

    def test_both(self) -> None:
        loop = scaled(exponential)
        for _ in range(2):
            iterate(loop)
            loop.step()
        iterate(loop)
        assert not loop.post_step.done()
        assert loop.state().scheduler_pending and not loop.state().scaler_pending
        loop.step()
        assert loop.post_step.done()


@pytest.fixture
def runtime() -> Iterator[Any]:
    """A device that is never waited for."""
    runtime: Any = FakeRuntime()
    with Watching(runtime.device):
        yield runtime
    assert not runtime.device.sins


class TestScaleOnADevice:
    """Its values belong to the version in the order of the training's work, and no thread waits for them."""

    @pytest.fixture
    def loop(self, runtime: Any) -> Loop:
        scaler: Any = torch.amp.GradScaler("cpu", init_scale=1024.0)
        scaler._lazy_init_scale_growth_tracker(torch.device("cpu"))
        for tensor in (scaler._scale, scaler._growth_tracker):
            runtime.device.put(tensor)
        return Loop(scaler=scaler, runtimes=[runtime])

    @staticmethod
    def scaler_update(loop: Loop) -> None:
        """Do what ``update()`` queues, and what it does on the host."""
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
            loop.post_step.at_gate()
            assert [loop.state(v).scaler["scale"] for v in (1, 2, 5)] == [2048.0, 4096.0, 1024.0 * 2**5]
            assert not loop.state(5).scaler_pending

    def test_behind_a_hang_too(self, loop: Loop, runtime: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(accelerator, "NUMBER_S", 0.01)
        self.iteration(loop)
        loop.post_step.forward_entered(True)
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
        loop.post_step.at_gate()
        state = loop.state(1)
        assert state.scaler["scale"] == 2048.0 and not state.scaler_pending

    def test_while_a_graph_is_captured_its_update_stays_due(self, loop: Loop, runtime: Any) -> None:
        self.iteration(loop)
        runtime.device.capturing = True
        loop.post_step.forward_entered(True)
        runtime.device.capturing = False
        state = loop.state(1)
        assert state.scaler["scale"] == 1024.0 and state.scaler_pending
        loop.post_step.at_gate()
        state = loop.state(1)
        assert state.scaler["scale"] == 2048.0 and not state.scaler_pending

    def test_a_number_that_was_written_over_is_an_error(self, loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(accelerator, "_NUMBERS", 8)
        loop.post_step._numbers = accelerator.Numbers(loop.post_step._numbers._runtimes)
        for _ in range(4):
            self.iteration(loop)
        assert loop.state(4).scaler["scale"] == 1024.0 * 2**3
        with pytest.raises(CheckpointError, match="too far ahead"):
            loop.state(1)


class TestRateOnADevice:
    """It is a tensor, as compiled optimizers want it. A schedule has tensors in its state then, too."""

    @pytest.fixture
    def loop(self, runtime: Any) -> Loop:
        loop = Loop()
        rate = runtime.device.put(torch.tensor(0.5))
        loop.optimizer = torch.optim.Adam(loop.model.parameters(), lr=rate, fused=True)
        loop.scheduler = exponential(loop.optimizer)
        loop.post_step = PostStepState([loop.optimizer], scheduler=loop.scheduler, runtimes=[runtime])
        return loop

    def test_what_is_written_waits_for_no_stream_that_hangs(self, loop: Loop, runtime: Any) -> None:
        copier = HostCopier([runtime], buffer_bytes=64)
        loop.to_update(2)
        runtime.device.run()
        runtime.device.hang()
        runtime.device.seal()
        saved = JobState.decode(loop.state().encode(lambda tensor: next(copier.copy_to_host([tensor]))))
        assert saved.scheduler is not None and saved.scheduler["_last_lr"] == [0.5**3]
        assert saved.scheduler_pending

    def test_a_step_is_due_until_the_training_thread_has_copied_what_it_sets(self, loop: Loop, runtime: Any) -> None:
        loop.to_update(2)
        loop.step()
        allocated = runtime.device.allocated
        assert loop.post_step.done() and loop.state().scheduler_pending
        assert runtime.device.allocated == allocated
        loop.forward()
        assert not loop.state().scheduler_pending and loop.rate == 0.5**4

    @pytest.mark.parametrize("only_schedule", [False, True], ids=["a rate", "a tensor that only the schedule has"])
    def test_a_copy_behind_a_hang_is_not_read(
        self, loop: Loop, runtime: Any, monkeypatch: pytest.MonkeyPatch, only_schedule: bool
    ) -> None:
        monkeypatch.setattr(post_step_state, "NUMBER_S", 0.01)
        if only_schedule:
            loop = Loop(exponential)
            loop.scheduler.best = runtime.device.put(torch.tensor(0.5))
            loop.post_step = PostStepState([loop.optimizer], scheduler=loop.scheduler, runtimes=[runtime])
        loop.to_update(2)
        runtime.device.run()
        runtime.device.hang()
        loop.step()
        loop.forward()
        for read in (loop.state, lambda: loop.post_step.param_groups(loop.version)):
            with pytest.raises(CheckpointError, match="was not set on the device"):
                read()

    def test_while_a_graph_is_captured_nothing_is_copied(self, loop: Loop, runtime: Any) -> None:
        loop.to_update(2)
        loop.step()
        runtime.device.capturing = True
        loop.post_step.forward_entered(True)
        runtime.device.capturing = False
        assert loop.state().scheduler_pending
        loop.post_step.at_gate()
        assert not loop.state().scheduler_pending and loop.rate == 0.5**4


class TestAverageOnADevice:
    """The device does what the host has queued behind an update only after the event of its version."""

    @pytest.mark.parametrize(
        "ends",
        [
            lambda loop: loop.forward(),
            lambda loop: loop.forward(training=False),
            lambda loop: loop.post_step.at_gate(),
            lambda loop: loop.post_step.step_done(),
        ],
        ids=["forward pass", "evaluation", "gate", "by hand"],
    )
    def test_it_belongs_to_the_version_when_the_device_has_it(
        self, runtime: Any, ends: Callable[[Loop], object]
    ) -> None:
        loop, finished = Loop(averages=True, runtimes=[runtime]), Fence([runtime])
        average = runtime.device.put(torch.zeros(2)).add_(1)
        loop.forward()
        loop.update()
        finished.record(1)
        assert not loop.post_step.done() and loop.post_step.done_on_devices(1), "the host has not queued it"
        runtime.device.hang()
        average.add_(1)
        ends(loop)
        assert finished.finished_version() == 1 and loop.post_step.done()
        assert not loop.post_step.done_on_devices(1)
        runtime.device.release()
        assert loop.post_step.done_on_devices(1)

    def test_of_an_older_version_which_the_device_holds_behind_a_hang(self, runtime: Any) -> None:
        loop = Loop(averages=True, runtimes=[runtime])
        for hangs in (False, True):
            loop.forward()
            if hangs:
                runtime.device.hang()
            loop.update()
        loop.forward()
        assert loop.post_step.done_on_devices(1) and not loop.post_step.done_on_devices(2)

    def test_a_hang_behind_an_update_that_nothing_follows_is_not_waited_for(self, runtime: Any) -> None:
        """As in an exchange of weights behind the update, or in an all-reduce of the loss that the loop makes there."""
        loop = Loop(runtimes=[runtime])
        loop.to_update(0)
        runtime.device.hang()
        loop.forward()
        assert loop.post_step.done() and loop.post_step.done_on_devices(1)

    def test_a_long_evaluation_queues_one_event(self, runtime: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        loop = Loop(averages=True, runtimes=[runtime]).to_update(0)
        event = mock.Mock(side_effect=runtime.event)
        monkeypatch.setattr(runtime, "event", event)
        for _ in range(3):
            loop.forward(training=False)
        event.assert_called_once_with(side=False)
