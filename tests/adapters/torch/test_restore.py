"""A restored program trains on with the same bits; checkpoints that do not fit are refused with names and shapes."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import Tensor, nn

from tests.adapters.torch.checkpoints import Net, adamw, digest, train, write_checkpoint
from ttp.adapters.torch.restoring.restore import restore_into
from ttp.adapters.torch.saving.job_state import JobState
from ttp.errors import CheckpointError

Make = Callable[[nn.Module], torch.optim.Optimizer]


class Rotating(torch.optim.Optimizer):
    """An optimizer with odd state: numbers, mappings with integer keys, lists of tensors, other dtypes and shapes."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": torch.tensor(0.1), "note": ["a", 1]})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["count"] = 0
                    state["past"] = [torch.zeros(2), None]
                    state["blocks"] = {0: {"mean": parameter.double().mean()}, 1: {"mean": torch.zeros(())}}
                    state["half"] = torch.zeros_like(parameter, dtype=torch.bfloat16)
                state["count"] += 1
                state["past"][0] = state["past"][0] + 1
                state["half"] += parameter.grad.bfloat16()
                parameter.sub_(group["lr"] * state["half"].to(parameter.dtype) * 0.01)


OPTIMIZERS: dict[str, Make] = {
    "adamw with two groups": adamw,
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    "sgd with momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "adam with a tensor lr": lambda model: torch.optim.Adam(model.parameters(), lr=torch.tensor(0.01), foreach=False),
    "fused adam": lambda model: torch.optim.Adam(model.parameters(), fused=True),
    "amsgrad": lambda model: torch.optim.Adam(model.parameters(), amsgrad=True),
    "adagrad": lambda model: torch.optim.Adagrad(model.parameters()),
    "adafactor": lambda model: torch.optim.Adafactor(model.parameters()),
    "named": lambda model: torch.optim.AdamW(model.named_parameters()),
    "odd": lambda model: Rotating(model.parameters()),
}


def facts(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    return digest(model.state_dict(), optimizer)


def fresh(make: Make = adamw, seed: int = 77, **net: Any) -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Net(**net)
    return model, make(model)


def state_kinds(optimizer: torch.optim.Optimizer) -> list[Any]:
    def kind(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.dtype, value.device, value.stride(), value.shape
        if isinstance(value, dict):
            return {key: kind(inner) for key, inner in value.items()}
        return [kind(inner) for inner in value] if isinstance(value, list) else value

    return [kind(optimizer.state.get(p)) for group in optimizer.param_groups for p in group["params"]]


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_bit_comes_back_and_training_goes_on_as_before(tmp_path: Path, name: str, steps: int) -> None:
    model, optimizer = fresh(OPTIMIZERS[name], seed=3)
    train(model, optimizer, None, steps)
    manifest = write_checkpoint(tmp_path / "c", model, optimizer, JobState(version=steps))
    other, again = fresh(OPTIMIZERS[name])
    random = torch.get_rng_state()
    restored = restore_into(tmp_path / "c", manifest, model=other, optimizer=again)
    assert torch.equal(torch.get_rng_state(), random)
    assert (restored.version, restored.notes) == (steps, ())
    assert facts(other, again) == facts(model, optimizer)
    assert state_kinds(again) == state_kinds(optimizer)
    for one, two in ((model, optimizer), (other, again)):
        torch.manual_seed(11)
        train(one, two, None, 3)
    assert facts(other, again) == facts(model, optimizer)


def test_state_that_the_optimizer_already_has_is_replaced(tmp_path: Path) -> None:
    manifest = write_checkpoint(tmp_path / "c", *fresh(seed=3), JobState(version=0))
    model, optimizer = fresh()
    train(model, optimizer, None, 2)
    restore_into(tmp_path / "c", manifest, model=model, optimizer=optimizer)
    assert facts(model, optimizer) == facts(*fresh(seed=3))


def test_lbfgs_which_keeps_lists_of_directions(tmp_path: Path) -> None:
    def step(model: nn.Module, optimizer: Any) -> None:
        def closure() -> Any:
            optimizer.zero_grad()
            loss = (model(torch.ones(1, 4)) - 3).square().sum()
            loss.backward()
            return loss

        optimizer.step(closure)

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(4, 4)
        return model, torch.optim.LBFGS(model.parameters(), max_iter=3)

    model, optimizer = make()
    for _ in range(3):
        step(model, optimizer)
    manifest = write_checkpoint(tmp_path / "c", model, optimizer, JobState(version=3))
    other, again = make()
    restore_into(tmp_path / "c", manifest, model=other, optimizer=again)
    step(model, optimizer)
    step(other, again)
    assert facts(other, again) == facts(model, optimizer)


def test_moments_of_a_bfloat16_model_keep_their_own_precision(tmp_path: Path) -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(3, 3).bfloat16()
        return model, torch.optim.SGD(model.parameters(), momentum=0.9)

    model, optimizer = make()
    for parameter in model.parameters():
        optimizer.state[parameter]["momentum_buffer"] = torch.rand(parameter.shape)
    manifest = write_checkpoint(tmp_path / "c", model, optimizer, JobState(version=1))
    other, again = make()
    restore_into(tmp_path / "c", manifest, model=other, optimizer=again)
    assert state_kinds(again) == state_kinds(optimizer) != []
    assert facts(other, again) == facts(model, optimizer)


def test_param_groups_and_tensors_stay_the_same_objects(tmp_path: Path) -> None:
    make = OPTIMIZERS["adam with a tensor lr"]
    model, optimizer = fresh(make)
    optimizer.param_groups[0]["lr"].fill_(0.5)
    manifest = write_checkpoint(tmp_path / "c", model, optimizer, JobState(version=1))
    other, again = fresh(make)
    group, rate, weight = again.param_groups[0], again.param_groups[0]["lr"], other.first.weight
    restore_into(tmp_path / "c", manifest, model=other, optimizer=again)
    assert again.param_groups[0] is group and group["lr"] is rate and other.first.weight is weight
    assert rate == 0.5


# ------------------------------------------------------------------------------------------------- schedules and scales


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 20),
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda n: 0.9**n),
    "warm-up": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [torch.optim.lr_scheduler.LinearLR(o, 0.1, total_iters=2), torch.optim.lr_scheduler.CosineAnnealingLR(o, 9)],
        milestones=[2],
    ),
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
}


@pytest.mark.parametrize("pending", [False, True])
@pytest.mark.parametrize(("name", "steps"), list(itertools.product(SCHEDULERS, [1, 4])))
def test_the_schedule_goes_on_where_it_was(tmp_path: Path, name: str, steps: int, pending: bool) -> None:
    model, optimizer = fresh(seed=3)
    scheduler = SCHEDULERS[name](optimizer)
    train(model, optimizer, scheduler, steps - 1)
    train(model, optimizer, None, 1)
    if not pending:
        scheduler.step()
    job = JobState(version=steps, scheduler=copy.deepcopy(scheduler.state_dict()), scheduler_pending=pending)
    manifest = write_checkpoint(tmp_path / "c", model, optimizer, job)
    if pending:
        scheduler.step()
    other, again = fresh()
    resumed = SCHEDULERS[name](again)
    assert restore_into(tmp_path / "c", manifest, model=other, optimizer=again, scheduler=resumed).notes == ()
    for one, two, three in ((model, optimizer, scheduler), (other, again, resumed)):
        torch.manual_seed(5)
        train(one, two, three, 3)
    assert facts(other, again) == facts(model, optimizer)
    assert resumed.get_last_lr() == scheduler.get_last_lr()


def scaler_with(**settings: Any) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=1024.0, **settings)


def scaled_step(model: nn.Module, optimizer: Any, scaler: Any) -> None:
    scaler.scale(model(torch.ones(6, 4)).square().sum()).backward()
    scaler.step(optimizer)
    optimizer.zero_grad()


@pytest.mark.parametrize("interval", [1, 2, 5])
@pytest.mark.parametrize("pending", [False, True])
def test_the_scale_goes_on_where_it_was(tmp_path: Path, pending: bool, interval: int) -> None:
    model, optimizer = fresh(seed=3)
    scaler = scaler_with(growth_interval=interval, growth_factor=1.7)
    for _ in range(3):
        scaled_step(model, optimizer, scaler)
        scaler.update()
    scaled_step(model, optimizer, scaler)
    if not pending:
        scaler.update()
    job = JobState(version=4, scaler=scaler.state_dict(), scaler_pending=pending)
    manifest = write_checkpoint(tmp_path / "c", model, optimizer, job)
    if pending:
        scaler.update()
    other, again = fresh()
    resumed = scaler_with(growth_interval=interval, growth_factor=1.7)
    restore_into(tmp_path / "c", manifest, model=other, optimizer=again, scaler=resumed)
    assert resumed.state_dict() == scaler.state_dict()
    assert resumed.get_scale() == scaler.get_scale()


def test_what_only_one_side_has_is_noted(tmp_path: Path) -> None:
    model, optimizer = fresh()
    job = JobState(version=1, scheduler={"last_epoch": 1}, extra={"epoch": 4})
    manifest = write_checkpoint(tmp_path / "c", model, optimizer, job)
    restored = restore_into(tmp_path / "c", manifest, model=model, optimizer=optimizer, scaler=scaler_with())
    assert restored.job.extra == {"epoch": 4}
    assert [note[:30] for note in restored.notes] == [
        "the checkpoint has the state o",
        "the checkpoint has no state of",
    ]


# -------------------------------------------------------------------------------------------------- another model's own


def refused(tmp_path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, manifest: Any) -> str:
    before = facts(model, optimizer)
    with pytest.raises(CheckpointError) as caught:
        restore_into(tmp_path / "c", manifest, model=model, optimizer=optimizer)
    assert facts(model, optimizer) == before
    return str(caught.value)


@pytest.fixture
def manifest(tmp_path: Path) -> Any:
    model, optimizer = fresh(seed=3)
    train(model, optimizer, None, 2)
    return write_checkpoint(tmp_path / "c", model, optimizer, JobState(version=2))


def test_another_width_is_refused_with_names_and_shapes(tmp_path: Path, manifest: Any) -> None:
    text = refused(tmp_path, *fresh(width=9), manifest)
    assert "belongs to another model" in text and "Nothing was loaded" in text
    assert "different: first.bias (float32 [9] here, float32 [8] in the checkpoint)" in text
    assert "and 1 more" in text


def test_missing_and_unexpected_names_are_listed(tmp_path: Path, manifest: Any) -> None:
    model, _ = fresh()
    model.third = nn.Linear(1, 1)
    del model.norm
    text = refused(tmp_path, model, adamw(model), manifest)
    assert "not in the checkpoint: third.bias, third.weight" in text
    assert (
        "not in this model: norm.bias, norm.num_batches_tracked, norm.running_mean, norm.running_var, norm.weight"
        in text
    )


def test_another_precision_is_refused(tmp_path: Path, manifest: Any) -> None:
    model, _ = fresh()
    text = refused(tmp_path, model.bfloat16(), adamw(model), manifest)
    assert "(bfloat16 [8] here, float32 [8] in the checkpoint)" in text


def test_another_optimizer_is_refused(tmp_path: Path, manifest: Any) -> None:
    text = refused(tmp_path, *fresh(OPTIMIZERS["sgd"]), manifest)
    assert "the optimizer is torch.optim.sgd.SGD here and torch.optim.adamw.AdamW in the checkpoint" in text


def test_other_param_groups_are_refused(tmp_path: Path, manifest: Any) -> None:
    text = refused(tmp_path, *fresh(lambda model: torch.optim.AdamW(model.parameters())), manifest)
    assert "the optimizer has 1 param groups here and 2 in the checkpoint" in text

    def swapped(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = adamw(model)
        first, second = optimizer.param_groups
        first["params"], second["params"] = second["params"], first["params"]
        return optimizer

    text = refused(tmp_path, *fresh(swapped), manifest)
    assert "only here in param group 0: first.bias" in text
    assert "only in the checkpoint in param group 1: first.bias" in text


def test_a_job_state_of_another_version_is_refused(tmp_path: Path, manifest: Any) -> None:
    (tmp_path / "c" / "job_0.msgpack").write_bytes(JobState(version=3).encode())
    assert "is of version 2, but its job state of version 3" in refused(tmp_path, *fresh(), manifest)


@pytest.mark.parametrize("data", [b"", b"garbage" * 10, JobState(version=2).encode()[:-1]])
def test_a_damaged_job_state_is_refused(tmp_path: Path, manifest: Any, data: bytes) -> None:
    (tmp_path / "c" / "job_0.msgpack").write_bytes(data)
    assert "job state cannot be read" in refused(tmp_path, *fresh(), manifest)
    (tmp_path / "c" / "job_0.msgpack").unlink()
    assert "No such file" in refused(tmp_path, *fresh(), manifest)


# ------------------------------------------------------------------------------------------------ buffers of all kinds


class Counting(nn.Module):
    """A module with an expanded buffer, which cannot be written, and an extra state."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("wide", torch.tensor([value]).expand(4))
        self.seen: Any = None

    def get_extra_state(self) -> Any:
        return {"seen": self.seen}

    def set_extra_state(self, state: Any) -> None:
        self.seen = state["seen"]


def test_expanded_buffers_and_extra_states(tmp_path: Path) -> None:
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    model = Counting(5.0)
    model.seen = (1, "x")
    manifest = write_checkpoint(tmp_path / "c", model, sgd(model.parameters()), JobState(version=1))
    other = Counting(1.0)
    restore_into(tmp_path / "c", manifest, model=other, optimizer=sgd(other.parameters()))
    assert torch.equal(cast_tensor(other.wide), torch.full((4,), 5.0))
    assert other.seen == (1, "x")


@pytest.mark.parametrize("seen", [{}, [{}], {"a": {}, "b": 1}])
def test_an_empty_dict_in_an_extra_state_comes_back(seen: Any, tmp_path: Path) -> None:
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    model, other = Counting(5.0), Counting(1.0)
    model.seen, other.seen = seen, "mine"
    manifest = write_checkpoint(tmp_path / "c", model, sgd(model.parameters()), JobState(version=1))
    restore_into(tmp_path / "c", manifest, model=other, optimizer=sgd(other.parameters()))
    assert other.seen == seen


def test_an_extra_state_that_could_not_be_stored_is_noted_and_left_alone(tmp_path: Path) -> None:
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    model, other = Counting(5.0), Counting(1.0)
    model.seen, other.seen = (lambda: 1), "mine"
    manifest = write_checkpoint(tmp_path / "c", model, sgd(model.parameters()), JobState(version=1))
    restored = restore_into(tmp_path / "c", manifest, model=other, optimizer=sgd(other.parameters()))
    assert other.seen == "mine"
    assert restored.notes == (
        "model._extra_state.seen could not be saved: it keeps the value that this program gave it",
    )


def cast_tensor(value: Any) -> Tensor:
    assert isinstance(value, Tensor)
    return value
