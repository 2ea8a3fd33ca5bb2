"""A rank that stands between two steps of one version (a GAN), or inside a step, goes back to the last version, bit for
bit.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.adapters.torch.checkpoints import digest
from tests.adapters.torch.stub_processor import Loop, starting
from tests.adapters.torch.wrappers import Sam
from tests.waiting import until
from ttp.core.decide import How
from ttp.core.messages import Phase
from ttp.errors import UsageError

RMSprop: Any = torch.optim.RMSprop


def network(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, outputs))


class Gan(Loop):
    """Two networks, their optimizers and schedules, under a stub processor. Remembers the state of each version."""

    def __init__(self, directory: Path, scaler: Any = None, second: Any = RMSprop, frozen: bool = False) -> None:
        torch.manual_seed(5)
        self.critic, self.generator = network(4, 1), network(3, 4)
        self.generator.requires_grad_(not frozen)
        model = nn.ModuleDict({"critic": self.critic, "generator": self.generator})
        self.of_critic = torch.optim.Adam(self.critic.parameters(), lr=1e-2)
        self.of_generator = second(self.generator.parameters(), lr=1e-2)
        self.schedulers = [torch.optim.lr_scheduler.StepLR(o, 1, 0.9) for o in (self.of_critic, self.of_generator)]
        both = [self.of_critic, self.of_generator]
        super().__init__(directory, model, both, scheduler=self.schedulers, scaler=scaler)

    def facts(self) -> Any:
        both = [digest(self.model.state_dict(), each) for each in (self.of_critic, self.of_generator)]
        return both, [each.state_dict() for each in self.schedulers], torch.get_rng_state().sum().item()

    def step_critic(self) -> None:
        self.of_critic.zero_grad()
        fake = self.generator(torch.randn(6, 3)).detach()
        (self.critic(fake) - self.critic(torch.randn(6, 4))).mean().backward()
        self.of_critic.step()

    def learn_generator(self) -> None:
        self.of_generator.zero_grad()
        (-self.critic(self.generator(torch.randn(6, 3))).mean()).backward()

    def step_generator(self) -> None:
        self.learn_generator()
        self.of_generator.step()

    def train(self, iterations: int, critic_steps: int = 1, done: bool = False) -> None:
        for _ in range(iterations):
            for _ in range(critic_steps):
                self.step_critic()
            self.step_generator()
            for scheduler in self.schedulers:
                scheduler.step()
            if done:
                self.adapter.step_done()
            self.seen.append(self.facts())

    @property
    def phase(self) -> Any:
        return self.processor.gate.state().phase


@pytest.fixture
def gan(tmp_path: Path) -> Iterator[Callable[..., Gan]]:
    with starting(Gan, tmp_path) as gan:
        yield gan


def restored(path: Path, version: int) -> Any:
    job = Gan(path.parent)
    assert job.load(path) == version
    return job.facts()


def comes_back(job: Gan, version: int) -> bool:
    """Stop a job within a version, save the last one, and return whether all of its state comes back."""
    job.gate.close()
    return bool(restored(job.save(version, How.UNDO), version) == job.seen[version])


@pytest.mark.parametrize("finished", [0, 1, 3], ids=["in the first iteration", "in the second", "later"])
def test_between_the_steps_the_last_version_is_saved(
    gan: Callable[..., Gan], finished: int, caplog: pytest.LogCaptureFixture
) -> None:
    job = gan()
    with caplog.at_level(logging.INFO):
        job.train(finished)
    told = [record for record in caplog.records if "backward pass between the optimizer steps" in record.message]
    assert len(told) == bool(finished), "how many bytes are copied is told once"
    job.step_critic()
    job.learn_generator()
    job.gate.close()
    now = job.facts()
    assert job.phase is Phase.TORN and job.gate.version == finished
    assert job.source.has_preimage and not job.source.gradient_ready()
    assert comes_back(job, finished)
    assert job.facts()[:2] == now[:2], "nobody writes to the state of a frozen rank"


def test_a_network_that_was_frozen_when_it_was_registered(gan: Callable[..., Gan]) -> None:
    """As in loops that freeze each network while the other one is trained."""
    job = gan(frozen=True)

    def train_generator(trains: bool) -> None:
        job.critic.requires_grad_(not trains)
        job.generator.requires_grad_(trains)

    for _ in range(3):
        train_generator(False)
        job.step_critic()
        train_generator(True)
        job.step_generator()
        job.seen.append(job.facts())
    train_generator(False)
    job.step_critic()
    train_generator(True)
    job.learn_generator()
    assert comes_back(job, 3)


def test_a_schedule_stepped_between_the_steps_is_of_the_version_to_come(gan: Callable[..., Gan]) -> None:
    job = gan()
    for _ in range(3):
        job.step_critic()
        job.schedulers[0].step()
        job.step_generator()
        job.schedulers[1].step()
        job.seen.append(job.facts())
    job.step_critic()
    job.schedulers[0].step()
    job.learn_generator()
    assert comes_back(job, 3)


def test_a_false_alarm_between_the_steps_changes_nothing(gan: Callable[..., Gan]) -> None:
    unbroken = gan()
    unbroken.train(3)
    job = gan()
    job.train(1)
    job.step_critic()
    job.gate.close()
    waits = threading.Thread(target=job.step_generator)
    waits.start()
    until(lambda: job.gate.state().parked)
    assert job.phase is Phase.TORN, "it stands at the gate with one network ahead"
    assert not job.gate.admit(), "nobody is let through to a half of a version"
    job.gate.open()
    waits.join()
    assert job.gate.version == 2
    for scheduler in job.schedulers:
        scheduler.step()
    job.train(1)
    assert job.facts() == unbroken.facts()


def test_a_critic_that_breaks_off_is_undone_a_generator_is_not(gan: Callable[..., Gan]) -> None:
    job = gan()
    job.train(2)
    assert job.gate.state().phase is Phase.IDLE and not job.source.has_preimage

    def fail(*_: Any) -> None:
        raise RuntimeError("in mid-update")

    for optimizer, undone in ((job.of_critic, True), (job.of_generator, False)):
        handle = optimizer.register_step_post_hook(fail)
        hooks: Any = optimizer._optimizer_step_post_hooks
        hooks.move_to_end(handle.id, last=False)
        with pytest.raises(RuntimeError, match="in mid-update"):
            (job.step_critic if optimizer is job.of_critic else job.step_generator)()
        handle.remove()
        job.gate.close()
        job.gate.mark_torn()
        assert job.phase is Phase.TORN and job.source.has_preimage is undone
        job.gate.open()
        job.gate._torn = False
        if undone:
            job.step_critic()


def test_steps_without_learning_in_between_cost_no_copies(gan: Callable[..., Gan]) -> None:
    job = gan()
    for _ in range(3):
        job.of_critic.zero_grad()
        job.learn_generator()
        job.of_critic.step()
        job.of_generator.step()
    assert job.gate.version == 3 and job.source.between.preimage is None
    job.of_critic.step()
    assert job.source.between.preimage is None and job.phase is Phase.UPDATING


@pytest.mark.parametrize("steps", [1, 3])
def test_between_any_steps_of_a_loop_that_says_when_it_is_done(gan: Callable[..., Gan], steps: int) -> None:
    job = gan()
    job.train(2, critic_steps=3, done=True)
    assert job.gate.version == 2
    for _ in range(steps):
        job.step_critic()
    job.step_generator()
    job.gate.close()
    assert job.phase is Phase.TORN and job.source.has_preimage, "not done yet"
    assert comes_back(job, 2)


def test_done_is_not_done_while_the_gate_is_closed(gan: Callable[..., Gan]) -> None:
    job = gan()
    job.train(1, critic_steps=2, done=True)
    job.step_critic()
    job.gate.close()
    waits = threading.Thread(target=job.adapter.step_done)
    waits.start()
    until(lambda: job.gate.state().parked)
    assert job.gate.version == 1 and job.phase is Phase.TORN, "an answer that was given stays true"
    job.gate.open()
    waits.join()
    assert job.gate.version == 2


def test_a_critic_that_steps_more_often_is_refused_with_the_way_out(gan: Callable[..., Gan]) -> None:
    job = gan()
    job.train(1, critic_steps=3)
    assert job.gate.version == 0, "where the version ends is not known"
    with pytest.raises(UsageError, match=r"optimizer 1 \(Adam\) steps again.*call ttp\.step_done\(\)"):
        job.train(1, critic_steps=3)
    assert comes_back(job, 0)


def test_where_shards_may_differ_the_finished_version_can_be_undone_too(gan: Callable[..., Gan]) -> None:
    job = gan()
    job.source.between._whole = True  # as the adapter says for several shards
    job.train(2)
    assert job.source.has_preimage
    path = job.save(1, How.UNDO)
    assert restored(path, 1)[:2] == job.seen[1][:2]


def test_a_step_that_the_scaler_leaves_out(gan: Callable[..., Gan]) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    job = gan(scaler=scaler)
    versions = []
    for overflow in ((), (job.generator,), (job.critic,), (job.critic, job.generator), ()):
        for optimizer, network in ((job.of_critic, job.critic), (job.of_generator, job.generator)):
            optimizer.zero_grad()
            loss = job.critic(job.generator(torch.randn(6, 3))).mean()
            scaler.scale(loss).backward()
            if network in overflow:
                first: Any = next(network.parameters())
                first.grad.fill_(float("nan"))
            scaler.step(optimizer)
        scaler.update()
        versions.append(job.gate.version)
    assert versions == [1, 1, 2, 2, 3], "an iteration without the generator ends with its next step"


class Evaluating(Loop):
    """A loop whose optimizer may evaluate the closure after a write; ``asked`` is called in each evaluation."""

    def __init__(self, directory: Path, kind: str, **given: Any) -> None:
        torch.manual_seed(7)
        model, self.kind = network(4, 2), kind
        optimizer: Any = (
            torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4, history_size=3)
            if kind == "LBFGS"
            else Sam(model.parameters())
        )
        super().__init__(directory, model, optimizer, **given)
        self.asked: Callable[[], None] = lambda: None

    def facts(self) -> Any:
        owner = getattr(self.optimizer, "base_optimizer", self.optimizer)
        return digest(self.model.state_dict(), owner), torch.get_rng_state().sum().item()

    def closure(self) -> Any:
        self.optimizer.zero_grad()
        loss = self.model(torch.randn(6, 4)).square().mean()
        loss.backward()
        self.asked()
        return loss

    def train(self, steps: int) -> None:
        for _ in range(steps):
            if self.kind == "SAM":
                self.closure()
            self.optimizer.step(self.closure)


@pytest.fixture
def evaluating(tmp_path: Path) -> Iterator[Callable[..., Evaluating]]:
    with starting(Evaluating, tmp_path) as started:
        yield started


@pytest.mark.supports("LBFGS")
@pytest.mark.supports("optimizer containers and wrappers")
@pytest.mark.parametrize("undo", [None, "preimage"])
@pytest.mark.parametrize(("kind", "number"), [("LBFGS", 1), ("LBFGS", 3), ("SAM", 2)])
def test_who_is_stopped_in_a_closure_saves_where_the_step_began(
    evaluating: Callable[..., Evaluating], kind: str, number: int, undo: Any
) -> None:
    """The weights had changed before, and the save does not wait for the step. After a false alarm the step goes on."""
    unbroken = evaluating(kind)
    unbroken.train(5)
    job = evaluating(kind, undo=undo)
    job.train(3)
    before, evaluations, saved = job.facts(), [0], []

    def asked() -> None:
        evaluations[0] += 1
        if evaluations[0] != number:
            return
        gate, now = job.gate, job.facts()[0]
        assert gate.state().phase is Phase.UPDATING
        gate.close()
        assert gate.state().phase is Phase.TORN and job.source.has_preimage
        saved.append(job.save(3, How.UNDO))
        assert job.facts()[0] == now, "nobody writes to the state of a frozen rank"
        gate.open()

    job.asked = asked
    job.train(2)
    assert job.facts() == unbroken.facts() and job.gate.version == 5
    other = Evaluating(saved[0].parent, kind)
    assert other.load(saved[0]) == 3
    assert other.facts() == before


def test_who_is_frozen_in_a_closure_stands_at_its_end(evaluating: Callable[..., Evaluating]) -> None:
    job = evaluating("LBFGS")
    job.train(1)
    job.asked = lambda: (job.gate.close(), None)[1]
    waits = threading.Thread(target=job.train, args=(1,))
    waits.start()
    until(lambda: job.gate.state().parked)
    assert job.gate.state().phase is Phase.TORN
    job.asked = lambda: None
    job.gate.open()
    waits.join()
    assert job.gate.version == 2 and job.gate.state().phase is Phase.IDLE


def test_in_a_closure_behind_a_step_that_was_not_copied_there_is_no_way_back(gan: Callable[..., Gan]) -> None:
    """The optimizers were known to step one right after the other, so nothing was copied between them."""
    job = gan(second=Twice)
    for _ in range(2):
        job.learn_generator()
        job.of_critic.step()
        job.of_generator.step()
    job.learn_generator()
    job.of_critic.step()
    phases: list[Any] = []

    def closure() -> None:
        job.gate.close()
        phases.append((job.phase, job.source.has_preimage))
        job.gate.open()

    job.of_generator.step(closure)
    assert phases == [(Phase.UPDATING, False)] * 2
    assert job.gate.version == 3


class Twice(RMSprop):
    def step(self, closure: Any = None) -> Any:
        if closure is not None:
            closure()
            closure()
        super().step()
