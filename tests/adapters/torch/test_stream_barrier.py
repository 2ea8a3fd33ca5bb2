"""The device waits in the barrier before its update while the host runs ahead: never too early, and released by
order.
"""

from __future__ import annotations

import multiprocessing
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.adapters.torch import stream_rank
from tests.adapters.torch.fake_device import SIDE, TRAINING
from tests.adapters.torch.fake_runtime import FakeHold, FakeRuntime
from tests.adapters.torch.stream_rank import PATIENCE_S, Rank
from tests.adapters.torch.stub_processor import StubProcessor, registered
from tests.forking import fork
from tests.gpu.made_up import MadeUp
from tests.waiting import until
from ttp.adapters.torch.loop import stream_barrier
from ttp.adapters.torch.loop.barrier import UpdateBarrier
from ttp.adapters.torch.loop.stream_barrier import LEAD_MAX
from ttp.core.layout import Version
from ttp.processor.gate.meeting import Meeting, OwnWords, run


async def nobody(_place: int) -> bool:
    return False


def ranks(count: int, gone: Any = None, **settings: Any) -> list[Rank]:
    words, held = OwnWords(), [0] * count
    return [
        Rank(Meeting(words, place, count, wide=False, gone=gone or nobody), held, place, count, **settings)
        for place in range(count)
    ]


def warm(*those: Rank, wait: bool = False) -> tuple[Rank, ...]:
    """Make the first updates, in which hosts wait; here one rank after the other."""
    for _ in range(3):
        for rank in those:
            assert not rank.step(lambda turn, meeting=rank.barrier._meeting: run(meeting.come(turn)), wait)  # type: ignore[misc]
    for rank in those:
        rank.device.run()
        rank.early = 0
    return those


def test_the_device_waits_for_the_gradients_of_others_and_its_host_does_not() -> None:
    first, second = warm(*ranks(2))
    for _ in range(LEAD_MAX):
        assert first.step(), "the host does not wait"
    assert first.wait_held(4) and first.wait_version(3)
    assert not first.barrier.held(5)
    for version in (4, 5):
        second.step()
        assert first.wait_version(version) and second.wait_version(version)
    assert (first.early, second.early) == (0, 0)


def test_nobody_goes_on_before_a_device_whose_host_is_far_ahead_has_its_gradient() -> None:
    first, second = warm(*ranks(2))
    first.device.hang()  # in front of its backward pass
    first.step()
    first.step()
    second.step()
    assert second.wait_held(4)
    time.sleep(0.05)
    assert not first.barrier.held(4) and second.wait_version(3)
    first.device.release()
    assert second.wait_version(4) and first.wait_version(4) and not second.early


def test_a_host_is_only_so_far_ahead() -> None:
    first, second = warm(*ranks(2))

    def go_on() -> None:
        while first.host < 20:
            first.step()

    training = threading.Thread(target=go_on, daemon=True)
    training.start()
    for version in range(4, 21):
        assert first.wait_held(version)
        assert first.host <= version - 1 + LEAD_MAX
        second.step()
    training.join(PATIENCE_S)
    assert first.host == 20 and first.wait_version(20) and first.early == 0


def test_whoever_is_told_to_makes_that_update_without_the_others_and_no_other() -> None:
    first, second = warm(*ranks(2))
    first.step()
    first.step()
    assert first.wait_held(4) and not first.barrier.admit(5)
    assert first.barrier.admit(4)
    assert first.wait_held(5) and first.wait_version(4)
    assert not first.barrier.admit(4), "it is made"
    second.step()
    assert second.wait_version(4), "it comes to a meeting that another has left"
    second.step()
    assert first.wait_version(5)


def test_a_death_holds_the_device_for_good_and_it_can_be_let_go(caplog: pytest.LogCaptureFixture) -> None:
    dead = threading.Event()

    async def gone(_place: int) -> bool:
        return dead.is_set()

    first, _ = warm(*ranks(2, gone))
    first.step()
    assert first.wait_held(4)
    dead.set()
    run(first.barrier._meeting.warn())
    until(lambda: "makes the update to version 4 only by order" in caplog.text, PATIENCE_S)
    assert first.wait_version(3) and first.barrier.held(4)
    assert first.barrier.admit(4) and first.wait_version(4)


def test_an_optimizer_that_waits_for_the_device_keeps_the_host_in_the_barrier(caplog: pytest.LogCaptureFixture) -> None:
    (rank,) = ranks(1)
    warm(rank, wait=True)
    assert not rank.step()
    assert "optimizer.step() waits for the device (somewhere)" in caplog.text


def test_why_not_is_asked_once_and_said(caplog: pytest.LogCaptureFixture) -> None:
    (rank,) = ranks(1, why_not=lambda: "the state is elsewhere")
    warm(rank)
    assert not rank.step() and not rank.step()
    assert caplog.text.count("the state is elsewhere") == 1


class HoldsNothing(FakeHold):
    def queue(self, number: int) -> None:
        pass


class NeverLetsGo(FakeHold):
    def release(self, number: int) -> None:
        pass


@pytest.mark.parametrize(
    ("hold", "text"), [(HoldsNothing, "did not wait"), (NeverLetsGo, "hangs"), (None, "no driver")]
)
def test_what_cannot_hold_a_stream_is_found_out_and_the_host_waits(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, hold: Any, text: str
) -> None:
    def make(runtime: FakeRuntime) -> Any:
        if hold is None:
            raise OSError("no driver")
        return hold(runtime.device)

    monkeypatch.setattr(stream_barrier, "_PROBE_S", 0.01)
    monkeypatch.setattr(FakeRuntime, "hold", make)
    barrier: Any = UpdateBarrier.__new__(UpdateBarrier)
    barrier.meeting = barrier.stream = None
    barrier._processor = type("Processor", (), {"gate": None})
    assert barrier.let_device_wait(FakeRuntime, lambda: "") is None
    assert "the host waits for its device" in caplog.text and text in caplog.text


def test_without_a_driver_there_is_no_hold() -> None:
    from ttp.adapters.torch.device.cuda import CudaRuntime

    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises((OSError, AttributeError, RuntimeError, AssertionError)):
        CudaRuntime(torch.device("cuda", 0)).hold()


@pytest.mark.parametrize("order", [TRAINING, SIDE])
def test_the_rescue_does_not_wait_for_a_device_that_is_held(order: str) -> None:
    (first, _) = ranks(2)
    first.device.order = order
    other = FakeRuntime(first.device)
    warm_up = FakeRuntime(first.device)
    hold = warm_up.hold()
    hold.queue(1)
    first.device.launch(lambda: None)
    event = other.event(side=True)
    assert event.query()
    assert not first.runtime.event(side=False).query()
    hold.release(1)
    assert first.runtime.event(side=False).query()


def test_a_job_says_that_it_holds_the_gradient_and_makes_the_update_by_order(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With the whole adapter. The host is two updates ahead of a device that waits for a rank that never comes."""
    one = SimpleNamespace(is_available=lambda: True, is_initialized=lambda: True)
    one.get_world_size, one.get_rank = lambda: 1, lambda: 0
    monkeypatch.setattr("ttp.adapters.torch.loop.barrier.dist", one)
    monkeypatch.setattr("ttp.adapters.torch.loop.barrier.gather_bytes", lambda data: [data])
    monkeypatch.setattr("ttp.adapters.torch.adapter.needs_barrier", lambda _layout, _undo: True)
    made_up = MadeUp()
    with made_up.watched():
        model = nn.Linear(3, 1)
        made_up.put(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        adapter = registered(model, optimizer)
        processor: Any = StubProcessor(tmp_path, stream_barrier=True)
        adapter.attach(processor)

        def step() -> None:
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()

        for _ in range(3):
            step()
        source = adapter.source
        assert source.stream_barrier is not None and source.device_version(Version(3), 5.0) == 3
        source.stream_barrier._meeting = Meeting(OwnWords(), 0, 2, wide=False, gone=nobody)
        step()
        step()
        assert processor.gate.version == 5
        until(source.gradient_ready, PATIENCE_S)
        assert source.device_version(Version(5), 0.02) == 3
        assert not source.redo(Version(5)) and source.redo(Version(4))
        until(lambda: source.device_version(Version(5), 0.02) == 4, PATIENCE_S)
        assert not source.redo(Version(4))
        adapter.detach()


# -------------------------------------------------------------------------------------------------------- of processes


@pytest.mark.parametrize("campaign", [1, pytest.param(25, marks=pytest.mark.slow)])
@pytest.mark.timeout(1200)
def test_processes_that_are_killed_while_their_devices_meet(tmp_path: Path, campaign: int) -> None:
    """Survivors are at most one version apart; those behind make the update on request."""
    for number in range(campaign):
        directory = tmp_path / f"{number}"
        (directory / "pages").mkdir(mode=0o700, parents=True)
        (directory / "held").write_bytes(bytes(4096))
        ends = [multiprocessing.Pipe() for _ in range(3)]
        processes = [fork(stream_rank.main, (directory, rank, 3, theirs)) for rank, (_, theirs) in enumerate(ends)]
        for _, theirs in ends:
            theirs.close()  # so that the end of a rank is the end of its pipe
        try:
            _check(processes, [ours for ours, _ in ends], number)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _check(processes: list[Any], ranks: list[Any], number: int) -> None:
    assert [rank.recv() for rank in ranks] == ["ready"] * 3
    time.sleep(0.05 + 0.02 * number)
    processes[number % 3].kill()
    living = [rank for place, rank in enumerate(ranks) if place != number % 3]
    for rank in living:
        rank.send("frozen")
    at = [rank.recv() for rank in living]
    newest = max(at)
    assert newest - min(at) <= 1 and min(at) >= 3  # on a busy machine none may have gone on yet
    for rank in living:
        rank.send(newest)
    said = [rank.recv() for rank in living]
    assert all(one["then"] == newest and not one["early"] for one in said), said
    assert all(one["held"] and one["admitted"] for one in said if one["version"] < newest), said


class TestWhyTheHostWaits:
    """The device may only wait alone where nothing but the device takes part in an update."""

    @pytest.fixture
    def model(self, device: Any) -> nn.Linear:
        model = nn.Linear(2, 2)
        for parameter in model.parameters():
            device.device.put(parameter)
        return model

    @staticmethod
    def why(model: nn.Module, optimizer: Any, *runtimes: Any, survivor: Any = None) -> str:
        adapter: Any = registered(model, optimizer)
        adapter.source.runtimes = runtimes
        adapter._processor = SimpleNamespace(survivor=survivor)
        return str(adapter._why_wait())

    def test_not_if_all_is_on_one_device(self, model: nn.Linear, device: Any) -> None:
        assert self.why(model, torch.optim.SGD(model.parameters()), device) == ""

    def test_where_ranks_outlive_a_failure(self, model: nn.Linear, device: Any) -> None:
        why = self.why(model, torch.optim.SGD(model.parameters()), device, survivor=object())
        assert "TTP_CONTINUITY=keep" in why

    def test_on_two_devices(self, model: nn.Linear, device: Any) -> None:
        assert "on several devices" in self.why(model, torch.optim.SGD(model.parameters()), device, FakeRuntime())

    @pytest.mark.parametrize("form", [list, tuple, lambda each: {"last": each}], ids=["list", "tuple", "dict"])
    def test_with_moments_on_the_host_in_whatever_container(self, model: nn.Linear, device: Any, form: Any) -> None:
        optimizer = torch.optim.SGD(model.parameters())
        optimizer.state[model.weight] = {"step": torch.tensor(1.0), "name": "x", "history": form([])}
        assert self.why(model, optimizer, device) == "", "single numbers are kept for each version"
        optimizer.state[model.weight]["history"] = form([torch.ones(2)])
        assert "partly on the host" in self.why(model, optimizer, device)

    def test_with_two_optimizers(self, model: nn.Linear, device: Any) -> None:
        both = [torch.optim.SGD([model.weight]), torch.optim.SGD([model.bias])]
        assert "several optimizers" in self.why(model, both, device)


def test_a_framework_may_tell_of_settled_state_where_ttp_is_switched_off() -> None:
    """Its callback does not know: nothing is attached, so nothing is noted."""
    model = nn.Linear(2, 2)
    adapter = registered(model, torch.optim.SGD(model.parameters()))
    adapter.settled()
    adapter.step_done()
    assert adapter.source.post_step is None
