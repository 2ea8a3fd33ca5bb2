"""One optimizer that steps several times in one version (PPO's epochs over its buffer)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.adapters.torch.checkpoints import digest
from tests.adapters.torch.going_on import data
from tests.adapters.torch.stub_processor import Loop
from tests.adapters.torch.test_between import network
from tests.adapters.torch.test_followers import in_place, taught
from ttp.adapters.torch.loop import followers
from ttp.core.decide import How
from ttp.errors import UsageError


class Job(Loop):
    """The loop of this module, under a stub processor."""

    def __init__(self, directory: Path, **settings: Any) -> None:
        torch.manual_seed(7)
        model = network(4, 2)
        kind = settings.pop("kind", torch.optim.Adam)
        super().__init__(directory, model, kind(model.parameters(), lr=0.1), **settings)

    def facts(self) -> Any:
        return digest(self.model.state_dict(), self.optimizer), torch.get_rng_state().sum().item()

    def step(self) -> None:
        self.backward()
        self.optimizer.step()

    def iteration(self, steps: int = 3) -> None:
        for _ in range(steps):
            self.step()
        self.adapter.step_done()


@pytest.fixture
def rounds(start: Callable[..., Job]) -> Job:
    return start()


@pytest.mark.supports("several steps in an iteration")
@pytest.mark.parametrize("made", [1, 2])
def test_who_stands_between_the_steps_of_one_optimizer_saves_the_last_version(rounds: Job, made: int) -> None:
    rounds.adapter.step_done()  # in front of the loop: no step is a version by itself
    for _ in range(3):
        rounds.iteration()
    assert rounds.processor.gate.version == 3
    before = rounds.facts()
    for _ in range(made):
        rounds.step()
    rounds.processor.gate.close()
    path = rounds.save(3, How.UNDO)
    again = Job(path.parent)
    assert again.load(path) == 3
    assert again.facts() == before


@pytest.mark.supports("several steps in an iteration")
def test_steps_that_were_counted_before_the_first_step_done_are_refused_at_the_second(rounds: Job) -> None:
    rounds.iteration()
    assert rounds.processor.gate.version == 3, "three for one iteration"
    rounds.step()
    with pytest.raises(UsageError, match=r"only after 3 updates.*Call ttp\.step_done\(\) once before the loop"):
        rounds.step()


def test_step_done_that_comes_late_and_counts_as_before_is_fine(rounds: Job) -> None:
    for _ in range(3):
        rounds.step()
    for steps in (1, 1, 3):
        rounds.iteration(steps)
    assert rounds.processor.gate.version == 6


class Exchanging(torch.optim.SGD):
    """Communicates in so many of its first steps."""

    often = 9

    def step(self, closure: Any = None) -> Any:
        self.often -= 1
        if self.often >= 0:
            dist.barrier()
        return super().step(closure)


class OnceExchanging(Exchanging):
    """As it looks if another thread writes a checkpoint meanwhile."""

    often = 2


class TestCommunicationInUpdates:
    """Ranks that wait for a lost one there hold no version, so that nothing could be saved."""

    @pytest.fixture(autouse=True)
    def first_of_two_ranks(self, world_of_one: None, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(dist, "get_world_size", lambda: 2)

    @pytest.mark.parametrize("undo", [None, "preimage"])
    def test_it_is_told_once_if_they_cannot_go_back(
        self, start: Callable[..., Job], caplog: pytest.LogCaptureFixture, undo: str | None
    ) -> None:
        rounds = start(undo=undo)
        rounds.adapter.step_done()
        for _ in range(4):
            rounds.step()
            dist.barrier()
            rounds.adapter.step_done()
        assert caplog.text.count("communicates with other ranks between optimizer.step() and") == (undo is None)

    def test_a_rare_evaluation_is_told_at_its_second_time(self, rounds: Job, caplog: pytest.LogCaptureFixture) -> None:
        """The first time may be another thread that writes a checkpoint."""
        rounds.adapter.step_done()
        for told in (0, 1, 1):
            for _ in range(8):
                rounds.step()
                if rounds.processor.gate.version % 8 == 7:
                    dist.barrier()
                rounds.adapter.step_done()
            assert caplog.text.count("communicates with other ranks between optimizer.step() and") == told

    @pytest.mark.supports("optimizers that communicate")
    @pytest.mark.parametrize(
        ("kind", "undo", "told"),
        [(Exchanging, None, 1), (Exchanging, "preimage", 0), (OnceExchanging, None, 0), (torch.optim.SGD, None, 0)],
    )
    def test_in_a_step_it_is_told_once_if_they_cannot_go_back(
        self, start: Callable[..., Job], caplog: pytest.LogCaptureFixture, kind: Any, undo: str | None, told: int
    ) -> None:
        rounds = start(undo=undo, kind=kind)
        for _ in range(7):
            rounds.step()
            dist.barrier()
        assert caplog.text.count(".step() communicates with other ranks: if a rank is lost") == told

    def test_communication_elsewhere_is_not(self, rounds: Job, caplog: pytest.LogCaptureFixture) -> None:
        rounds.adapter.step_done()
        for _ in range(4):
            dist.barrier()
            rounds.iteration(1)
            dist.barrier()
        assert "communicates with other ranks" not in caplog.text

    def test_nor_is_it_where_steps_are_copied_because_others_follow(
        self, rounds: Job, caplog: pytest.LogCaptureFixture
    ) -> None:
        rounds.adapter.step_done()
        for _ in range(4):
            for _ in range(3):
                rounds.step()
                dist.barrier()
            rounds.adapter.step_done()
        assert "communicates with other ranks" not in caplog.text


@pytest.mark.parametrize("late", [False, True], ids=["in front of it", "behind it"])
def test_what_the_loop_changes_in_the_optimizer_before_step_done_is_of_the_version(rounds: Job, late: bool) -> None:
    """Sophia's ``update_hessian()``: a backward pass behind the step, and a write to the optimizer's state."""

    def second_half() -> None:
        rounds.model(torch.randn(6, 4)).square().mean().backward()
        for state in rounds.optimizer.state.values():
            state["exp_avg_sq"].mul_(2)

    rounds.adapter.step_done()
    for _ in range(3):
        rounds.step()
        second_half()
        rounds.adapter.step_done()
    before = rounds.facts()
    rounds.step()
    if late:
        second_half()
    rounds.processor.gate.close()
    path = rounds.save(3, How.UNDO)
    again = Job(path.parent)
    assert again.load(path) == 3
    assert again.facts() == before


def test_a_target_that_is_written_to_with_its_own_values_is_no_news(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights may be merged for an evaluation and taken apart again. Of large ones only writes are seen."""
    monkeypatch.setattr(followers, "_COPIED_BYTES_MAX", 0)
    job = taught(tmp_path, in_place, inside=False)
    job.adapter.step_done()
    for _ in range(7):
        job.step()
        job.adapter.step_done()
        with torch.no_grad():
            job.model.teacher[0].weight.mul_(1)
    assert "between ttp.step_done() and" not in caplog.text


@pytest.mark.parametrize("where", ["top", "top of rank 1", "before step_done", "after a skipped update", "without it"])
def test_a_target_that_moves_between_two_versions_is_told(
    where: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """DreamerV3 moves its target network at the top of an iteration."""
    job = taught(tmp_path, in_place, inside=False)
    job.processor.env = replace(job.processor.env, rank=int(where == "top of rank 1"))
    declare = (lambda: None) if where == "without it" else job.adapter.step_done
    declare()
    for _ in range(7):
        job.step(job.model.follow if where == "before step_done" else lambda: None)
        declare()
        if where == "after a skipped update":
            job.model(data())
        if where != "before step_done":
            job.model.follow()
    said = [text for text in caplog.messages if "between ttp.step_done() and the next forward pass" in text]
    assert len(said) == (where == "top") and all("teacher.0.weight" in text for text in said)
