"""Undo: the state from before an update is saved bit for bit, and the live state does not change."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import nn
from torch.optim import SGD
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import ttp
from tests.adapters.torch.checkpoints import Net, digest
from tests.adapters.torch.fake_runtime import FakeRuntime
from tests.adapters.torch.stub_processor import Loop
from tests.adapters.torch.test_restore import OPTIMIZERS
from ttp.adapters.torch.loop.unwrap_optimizer import combined
from ttp.adapters.torch.saving.piece_index import items_of
from ttp.adapters.torch.saving.preimage import PreImage
from ttp.core.decide import How
from ttp.core.messages import Phase
from ttp.errors import CheckpointError, ConfigError
from ttp.store.manifest import Manifest

Make = Callable[[nn.Module], Any]


class Job(Loop):
    """A training loop under a stub processor; remembers the state of every version."""

    def __init__(
        self, directory: Path, make: Make = OPTIMIZERS["adamw with two groups"], undo: str | None = "preimage"
    ) -> None:
        torch.manual_seed(5)
        model = Net()
        optimizer = make(model)
        self.scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
        average: Any = get_ema_multi_avg_fn(0.9)
        self.average = AveragedModel(model, multi_avg_fn=average)
        more = {"scheduler": self.scheduler, "extra_state": {"ema": self.average}, "undo": undo}
        super().__init__(directory, model, optimizer, **more)

    def facts(self) -> Any:
        weights = digest(self.model.state_dict(), self.optimizer)
        average = digest(self.average.state_dict(), torch.optim.SGD([torch.zeros(1)]))
        return weights, average, copy.deepcopy(self.scheduler.state_dict()), torch.get_rng_state().sum().item()

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.backward()
            self.optimizer.step()
            self.scheduler.step()
            self.average.update_parameters(self.model)
            self.seen.append(self.facts())
        self.model(torch.randn(6, 4))  # the next step has begun: buffers and random streams have moved on

    def break_in_update(self) -> None:
        """Leave the next update after a part of it is written."""

        def fail(*_: Any) -> None:
            with torch.no_grad():
                self.model.second.weight.mul_(2)
                for state in self.optimizer.state.values():
                    state["invented"] = torch.ones(2)
            raise RuntimeError("in mid-update")

        self.backward()
        handle = self.optimizer.register_step_post_hook(fail)
        self.adapter._attachment._handles[1].remove()  # the end of the update is not reached
        with pytest.raises(RuntimeError, match="in mid-update"):
            self.optimizer.step()
        handle.remove()
        self.gate.mark_torn()


def restored(path: Path, make: Make, version: int) -> Any:
    job = Job(path.parent, make)
    assert job.load(path) == version
    return job.facts()


@pytest.mark.parametrize("kind", sorted(OPTIMIZERS.keys() - {"a rate that is learned"}))  # no schedule can set it
def test_a_finished_update_is_undone(start: Callable[..., Job], kind: str) -> None:
    job = start(OPTIMIZERS[kind])
    job.train(3)
    now = job.facts()
    assert job.source.has_preimage
    path = job.save(2, How.UNDO)
    assert restored(path, OPTIMIZERS[kind], 2) == job.seen[2]
    assert job.facts()[:3] == now[:3], "nobody writes to the state of a frozen rank"


@pytest.mark.parametrize("kind", ["adamw with two groups", "sgd", "odd"])
def test_a_torn_update_is_undone(start: Callable[..., Job], kind: str) -> None:
    job = start(OPTIMIZERS[kind])
    job.train(2)
    job.break_in_update()
    assert job.gate.state().phase is Phase.TORN and job.source.has_preimage
    path = job.save(2, How.UNDO)
    assert restored(path, OPTIMIZERS[kind], 2) == job.seen[2]


def test_an_average_whose_state_dict_takes_no_arguments(start: Callable[..., Job]) -> None:
    """Like that of torchrl's environments, which are modules."""
    job = start(OPTIMIZERS["sgd"])
    whole = job.average.state_dict

    def state_dict() -> Any:
        return whole()

    vars(job.average)["state_dict"] = state_dict
    job.train(2)
    job.break_in_update()
    path = job.save(2, How.UNDO)
    assert restored(path, OPTIMIZERS["sgd"], 2) == job.seen[2]


class Turning(SGD):
    """Its state lies row by row after the first update and column by column after others (eigh and then QR: SOAP)."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                rows = torch.arange(6.0).view(2, 3)
                axes = rows.t() if self.state[parameter] else rows.t().contiguous()
                self.state[parameter] = {"axes": axes, "part": torch.arange(12.0).view(3, 4)[:, :2]}


def test_the_order_in_memory_is_that_before_the_update(start: Callable[..., Job]) -> None:
    job = start(lambda model: Turning(model.parameters()))
    job.train(3)
    path = job.save(2, How.UNDO)
    saved = {item.path[-1]: item.order for item in items_of(Manifest.load(path).pieces) if item.path[0] == "optim"}
    assert saved["axes"] == (1, 0) and saved["part"] in ((), (0, 1))


def test_the_first_update_leaves_no_moments_behind(start: Callable[..., Job]) -> None:
    job = start()
    job.train(1)
    assert job.optimizer.state
    path = job.save(0, How.UNDO)
    assert restored(path, OPTIMIZERS["adamw with two groups"], 0) == job.seen[0]


def test_training_goes_on_after_a_false_alarm(start: Callable[..., Job]) -> None:
    job = start()
    job.train(3)
    job.save(2, How.UNDO)
    job.gate.open()
    job.train(1)
    assert restored(job.save(4), OPTIMIZERS["adamw with two groups"], 4) == job.seen[4]


class TestWhatIsAtHand:
    def test_nothing_unless_asked_for(self, start: Callable[..., Job]) -> None:
        job = start(undo=None)
        job.train(2)
        assert not job.source.has_preimage
        with pytest.raises(CheckpointError, match='was not given undo="preimage"'):
            job.save(1, How.UNDO)

    def test_nothing_before_the_first_update_nor_in_one(self, start: Callable[..., Job]) -> None:
        job = start()
        assert not job.source.has_preimage
        job.train(1)
        assert job.source.has_preimage
        job.gate.begin_update()
        assert not job.source.has_preimage

    def test_nothing_of_what_was_there_before_a_restore(self, start: Callable[..., Job]) -> None:
        job = start()
        job.train(2)
        path = job.save(2)
        job.adapter.load(path, 0, 1, protected=True)
        assert not job.source.has_preimage

    def test_another_version_is_refused(self, start: Callable[..., Job]) -> None:
        job = start()
        job.train(3)
        with pytest.raises(CheckpointError, match="version 1 cannot be written by undo: the pre-image is of version 2"):
            job.save(1, How.UNDO)


class TestCost:
    def test_exactly_one_more_copy(self, start: Callable[..., Job]) -> None:
        job = start()
        job.train(2)
        kept = job.source.preimage
        assert kept is not None
        before = {place: memory.data_ptr() for place, memory in kept._memory.items()}
        job.train(2)
        assert {place: memory.data_ptr() for place, memory in kept._memory.items()} == before
        states = [value for state in job.optimizer.state.values() for value in state.values()]
        averages = [*job.average.parameters(), *job.average.buffers()]
        live = [*job.model.parameters(), *states, *averages]  # also small parameters that are frozen
        assert sum(memory.nbytes for memory in kept._memory.values()) == sum(tensor.nbytes for tensor in live)

    def test_memory_that_is_not_to_be_had_costs_the_pre_image_only(
        self, start: Callable[..., Job], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        job = start()
        job.train(1)

        def fail(*_: Any) -> Any:
            raise MemoryError("no room for moments")

        monkeypatch.setattr(torch, "empty_like", fail)
        job.train(2)
        assert not job.source.has_preimage and job.gate.version == 3
        assert [r.levelno for r in caplog.records if "cannot be undone" in r.message] == [logging.WARNING]


def test_on_a_device_the_copies_are_of_what_the_device_has_done() -> None:
    device: Any = FakeRuntime()
    parameter = device.device.put(nn.Parameter(torch.zeros(3)))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    count = torch.tensor(0.0)
    optimizer.state[parameter] = {"step": count}
    kept = PreImage(optimizer, runtimes=[device])
    assert kept.version is None
    kept.take(4)
    count += 1
    assert kept.version == 4
    device.moving.clear()
    kept.take(5)
    assert kept.version == 4, "the host is ahead: the device has not begun to copy"
    assert kept.image(4).state[parameter]["step"].item() == 0.0, "the host's own number as it was then"
    event: Any = kept._begun._devices[0]._pending[0][1]
    event.done = True
    assert kept.version is None, "some of it is overwritten"
    device.moving.set()
    assert kept.version == 5 and kept.image(5).state[parameter]["step"].item() == 1.0


def test_lists_of_tensors_come_and_go() -> None:
    parameter = nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    optimizer.state[parameter] = {
        "past": [torch.ones(2)],
        "pair": (torch.ones(1), "text"),
        "note": {"a": [1]},
        "ids": {7},
    }
    kept = PreImage(optimizer)
    for version in range(4):
        kept.take(version)
        state = optimizer.state[parameter]
        state["past"].append(torch.full((2,), float(version)))
        state["note"]["a"].append(version)
        state["ids"].add(version)
        image = kept.image(version).state[parameter]
        assert [t.tolist() for t in image["past"]] == [[1.0, 1.0], *([float(v)] * 2 for v in range(version))]
        assert image["note"] == {"a": [1, *range(version)]} and image["pair"][1] == "text"
        assert image["ids"] == {7, *range(version)}
    state["past"].clear()
    kept.take(5)
    assert not any("past" in place for place in kept._memory), "what is gone takes no memory"


def test_a_wrong_way_is_refused_and_the_choices_are_named(tmp_path: Path) -> None:
    model = Net()
    with pytest.raises(ConfigError, match=r"undo='checkpoint' is not .*'preimage', None"):
        ttp.wrap_optimizer(torch.optim.SGD(model.parameters()), model=model, save_dir=tmp_path, undo="checkpoint")


def test_copies_of_one_kind_are_made_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    copy = torch._foreach_copy_

    def count(targets: list[Any], sources: list[Any]) -> None:
        calls.append(len(targets))
        copy(targets, sources)

    monkeypatch.setattr(torch, "_foreach_copy_", count)
    PreImage(torch.optim.SGD([nn.Parameter(torch.zeros(n)) for n in (1, 2, 3)], lr=1.0)).take(0)
    assert calls == [3]


def test_the_first_copy_of_a_version_is_kept_whoever_steps_next() -> None:
    """A frozen parameter of one optimizer is copied before the step of another, after which the loop may move it."""
    first, second, frozen = (nn.Parameter(torch.zeros(2), requires_grad=number < 2) for number in range(3))
    critic, generator = SGD([first], lr=1.0), SGD([second, frozen], lr=1.0)
    kept = PreImage(combined([critic, generator]), followers=[frozen])
    for version in (3, 4):
        live = frozen.clone()
        kept.take(version, [critic])
        with torch.no_grad():
            frozen.add_(1)
        kept.take(version, [generator])
        kept.take(version, [critic])
        assert kept.whole and torch.equal(kept.image(version).of(frozen), live)
