"""Several optimizers and schedulers of one training: one checkpoint, in torch's own form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.optim.lr_scheduler import ExponentialLR, StepLR
from typing_extensions import assert_type

import ttp
from tests.adapters.torch.checkpoints import Net, digest
from tests.adapters.torch.stub_processor import Loop, registered
from ttp import session
from ttp.errors import ConfigError, UsageError


def two(model: nn.Module) -> list[Any]:
    """Make one optimizer for matrices and one for the rest, like Muon beside AdamW."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1 and p.requires_grad]
    first: Any = torch.optim.SGD
    return [first(matrices, lr=0.1, momentum=0.9), torch.optim.AdamW(vectors, lr=1e-2)]


class Job(Loop):
    """A loop with two optimizers that step after one backward pass, and their schedulers, under a stub processor."""

    def __init__(self, directory: Path, optimizers: Any = None, **given: Any) -> None:
        torch.manual_seed(5)
        model = Net()
        self.optimizers = two(model) if optimizers is None else optimizers(model)
        kinds: Any = (
            lambda optimizer: StepLR(optimizer, 2, gamma=0.5),
            lambda optimizer: ExponentialLR(optimizer, 0.9),
        )
        self.schedulers: list[Any] = [make(each) for make, each in zip(kinds, self.optimizers, strict=False)]
        super().__init__(directory, model, self.optimizers, scheduler=self.schedulers, **given)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.backward()
            for optimizer in self.optimizers:
                optimizer.step()
            for scheduler in self.schedulers:
                scheduler.step()

    def facts(self) -> Any:
        return (
            [digest(self.model.state_dict(), optimizer) for optimizer in self.optimizers],
            [scheduler.state_dict() for scheduler in self.schedulers],
            torch.get_rng_state().sum().item(),
        )


@pytest.fixture
def job(start: Any) -> Any:
    return start()


def test_a_step_of_a_scheduler_that_was_due_is_made(job: Job, tmp_path: Path) -> None:
    job.train(3)
    last = job.schedulers.pop()
    job.train(1)
    job.schedulers.append(last)
    path = job.save(4)
    last.step()
    other = Job(tmp_path / "checkpoints")
    other.load(path)
    assert other.facts()[:2] == job.facts()[:2]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_stock_torch_reads_it_into_both(job: Job) -> None:
    job.train(2)
    path = job.save(2)
    model = Net()
    optimizers = two(model)
    model_state, optimizer_state = get_state_dict(model, optimizers)
    state: dict[str, Any] = {"model": model_state, "optim": optimizer_state}
    dcp_load(state, checkpoint_id=path, no_dist=True)
    set_state_dict(model, optimizers, model_state_dict=state["model"], optim_state_dict=state["optim"])
    for one, other in zip(job.optimizers, optimizers, strict=True):
        for group in one.param_groups:
            group.pop("initial_lr")
        assert digest(job.model.state_dict(), one) == digest(model.state_dict(), other)


def test_a_checkpoint_of_one_optimizer_is_not_one_of_two(start: Any, tmp_path: Path) -> None:
    one = start(lambda model: [torch.optim.AdamW(model.parameters())])
    one.train(1)
    path = one.save(1)
    with pytest.raises(ttp.errors.OtherModelError, match="belongs to another model"):
        Job(tmp_path / "checkpoints").load(path)


def test_a_parameter_in_two_optimizers_is_refused_by_name(tmp_path: Path) -> None:
    def shared(model: Net) -> list[Any]:
        return [torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD([model.second.weight], lr=0.1)]

    with pytest.raises(ConfigError, match=r"second\.weight is in optimizers 1 and 2"):
        Job(tmp_path, shared)


def test_a_parameter_in_no_optimizer_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Job(tmp_path, lambda model: [torch.optim.SGD(model.first.parameters(), lr=0.1)])
    assert "give wrap_optimizer() all optimizers" in caplog.text and "second.weight" in caplog.text


def test_wrap_optimizer_gives_back_the_list_it_was_given(tmp_path: Path) -> None:
    model = Net()
    optimizers = two(model)
    session.reset()
    try:
        given = ttp.wrap_optimizer(optimizers, model=model, scheduler=[None], save_dir=tmp_path)
        assert assert_type(given, list[Any]) is optimizers
    finally:
        session.reset()
    for wrong in ([], [optimizers[0], object()]):
        with pytest.raises(UsageError, match="or a list of them"):
            ttp.wrap_optimizer(wrong, model=model, save_dir=tmp_path)


def test_what_belongs_to_no_parameter_cannot_be_told_apart(job: Job) -> None:
    job.optimizers[1].state["count"] = {"steps": 0}
    with pytest.raises(UsageError, match=r"AdamW keeps 'count' in \.state, which is no parameter"):
        job.train(1)


def test_an_optimizer_that_shards_its_state_stands_alone(tmp_path: Path) -> None:
    from ttp.adapters.torch import ReplicatedOptimizer

    def sharded(model: nn.Module) -> list[Any]:
        first, second = two(model)
        shards: Any = object.__new__(ReplicatedOptimizer)
        shards.__dict__.update(first.__dict__)
        return [shards, second]

    with pytest.raises(ConfigError, match="ReplicatedOptimizer shards its state"):
        Job(tmp_path, sharded)


def test_none_at_all_is_refused() -> None:
    """A list that a program builds may be empty: nothing would ever be an update, and nothing saved."""
    with pytest.raises(UsageError, match="was given no optimizer: give it those that update the model, one or a list"):
        registered(nn.Linear(2, 2), [])


def test_a_misspelled_name_is_an_error_to_a_type_checker_too() -> None:
    with pytest.raises(AttributeError, match="no attribute 'wrap_optimiser'"):
        ttp.wrap_optimiser(None)  # type: ignore[attr-defined]  # tested too: needless, it fails mypy
