"""A restored program trains on with the same bits; checkpoints that do not fit are refused with names and shapes."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.adapters.torch.checkpoints import Net, adamw, digest, train, write_checkpoint
from ttp.adapters.torch.restoring.compare import hand_to
from ttp.adapters.torch.restoring.reader import read_values
from ttp.adapters.torch.restoring.restore import restore_into
from ttp.adapters.torch.saving.checkpoint import write_shard
from ttp.adapters.torch.saving.job_state import JobState
from ttp.adapters.torch.saving.piece_index import items_of
from ttp.core.layout import Rank, Shard
from ttp.errors import CheckpointError, OtherModelError

Make = Callable[[nn.Module], torch.optim.Optimizer]


class Rotating(torch.optim.Optimizer):
    """An optimizer with odd state: numbers, mappings with integer keys, lists of tensors, other dtypes and shapes.

    Some tensors lie column by column in memory, as the results of ``torch.linalg.qr`` and ``svd`` do.
    """

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
                    columns = parameter.detach().t().clone(memory_format=torch.contiguous_format).t()
                    state["axes"] = [columns, torch.arange(12.0).view(3, 4).t()[:, :2]]
                state["count"] += 1
                state["past"][0] = state["past"][0] + 1
                state["half"] += parameter.grad.bfloat16()
                parameter.sub_(group["lr"] * state["half"].to(parameter.dtype) * 0.01)


OPTIMIZERS: dict[str, Make] = {
    "adamw with two groups": adamw,
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    "sgd with momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "adam with a tensor lr": lambda model: torch.optim.Adam(model.parameters(), lr=torch.tensor(0.01), foreach=False),
    "a rate that is learned": lambda model: torch.optim.SGD(model.parameters(), torch.tensor(0.1, requires_grad=True)),
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
    job, notes = restore_into(tmp_path / "c", manifest, model=other, optimizer=again)
    assert torch.equal(torch.get_rng_state(), random)
    assert (job.version, notes) == (steps, [])
    assert facts(other, again) == facts(model, optimizer)
    assert state_kinds(again) == state_kinds(optimizer)
    for one, two in ((model, optimizer), (other, again)):
        torch.manual_seed(11)
        train(one, two, None, 3)
    assert facts(other, again) == facts(model, optimizer)


def test_of_a_value_that_two_ranks_wrote_the_first_counts_as_for_torch(tmp_path: Path) -> None:
    model, optimizer = fresh(OPTIMIZERS["odd"], seed=3)
    train(model, optimizer, None, 1)
    path = tmp_path / "c"
    manifest = write_checkpoint(path, model, optimizer, JobState(version=1))
    state = {"optim": {"state": {"first.weight": {"count": 9}}}}
    second = write_shard(path, "__1_0.distcp", state, shard=Shard("model"), writer=Rank(1))
    manifest = replace(manifest, pieces=(*manifest.pieces, second))
    assert read_values(path, items_of(manifest.pieces))["optim"]["state"]["first.weight"]["count"] == 1
    other, again = fresh(OPTIMIZERS["odd"])
    restore_into(path, manifest, model=other, optimizer=again)
    assert again.state[other.first.weight]["count"] == 1


def test_state_that_the_optimizer_already_has_is_replaced(tmp_path: Path) -> None:
    manifest = write_checkpoint(tmp_path / "c", *fresh(seed=3), JobState(version=0))
    model, optimizer = fresh()
    train(model, optimizer, None, 2)
    restore_into(tmp_path / "c", manifest, model=model, optimizer=optimizer)
    assert facts(model, optimizer) == facts(*fresh(seed=3))


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


def test_what_only_one_side_has_is_noted(tmp_path: Path) -> None:
    model, optimizer = fresh()
    job = JobState(version=1, scheduler={"last_epoch": 1}, extra={"epoch": 4})
    manifest = write_checkpoint(tmp_path / "c", model, optimizer, job)
    scaler = torch.amp.GradScaler("cpu")
    job, notes = restore_into(tmp_path / "c", manifest, model=model, optimizer=optimizer, scaler=scaler)
    assert job.extra == {"epoch": 4}
    assert [note[:30] for note in notes] == [
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


def other_layers() -> Any:
    model, _ = fresh()
    model.third = nn.Linear(1, 1)
    del model.norm
    return model, adamw(model)


def other_precision() -> Any:
    model = fresh()[0].bfloat16()
    return model, adamw(model)


def swapped(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = adamw(model)
    first, second = optimizer.param_groups
    first["params"], second["params"] = second["params"], first["params"]
    return optimizer


NORM = "norm.bias, norm.num_batches_tracked, norm.running_mean, norm.running_var, norm.weight"


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: fresh(width=9), "different: first.bias (float32 [9] here, float32 [8] in the checkpoint)"),
        (lambda: fresh(width=9), "and 1 more"),
        (other_layers, "not in the checkpoint: third.bias, third.weight"),
        (other_layers, f"not in this model: {NORM}"),
        (other_precision, "(bfloat16 [8] here, float32 [8] in the checkpoint)"),
        (lambda: fresh(OPTIMIZERS["sgd"]), "optim.sgd.SGD here and torch.optim.adamw.AdamW in the checkpoint"),
        (lambda: fresh(OPTIMIZERS["named"]), "the optimizer has 1 param groups here and 2 in the checkpoint"),
        (lambda: fresh(swapped), "only here in param group 0: first.bias"),
        (lambda: fresh(swapped), "only in the checkpoint in param group 1: first.bias"),
    ],
)
def test_what_belongs_to_another_program_is_refused(tmp_path: Path, manifest: Any, make: Any, said: str) -> None:
    model, optimizer = make()
    text = refused(tmp_path, model, optimizer, manifest)
    assert said in text and "belongs to another model" in text and "Nothing was loaded" in text


def test_a_job_state_of_another_version_is_refused(tmp_path: Path, manifest: Any) -> None:
    (tmp_path / "c" / "job_0.msgpack").write_bytes(JobState(version=3).encode())
    assert "is of version 2, but its job state of version 3" in refused(tmp_path, *fresh(), manifest)


@pytest.mark.parametrize("data", [b"", b"garbage" * 10, JobState(version=2).encode()[:-1]])
def test_a_damaged_job_state_is_refused(tmp_path: Path, manifest: Any, data: bytes) -> None:
    (tmp_path / "c" / "job_0.msgpack").write_bytes(data)
    assert "job state cannot be read" in refused(tmp_path, *fresh(), manifest)
    (tmp_path / "c" / "job_0.msgpack").unlink()
    assert "No such file" in refused(tmp_path, *fresh(), manifest)


def test_a_schedule_of_another_form_is_refused(tmp_path: Path, manifest: Any) -> None:
    garbled: Any = [[{"last_epoch": 1}, "pending"]]
    (tmp_path / "c" / "job_0.msgpack").write_bytes(JobState(version=2, several=garbled).encode())
    assert "an entry of `several` is not the state of an LR scheduler" in refused(tmp_path, *fresh(), manifest)


def test_a_checkpoint_with_two_job_states_is_refused(tmp_path: Path, manifest: Any) -> None:
    """They may be of two versions, and nothing tells which of them counts."""
    twice = replace(manifest, pieces=(*manifest.pieces, *(each for each in manifest.pieces if each.kind == "job")))
    assert "has 2 job states instead of 1" in refused(tmp_path, *fresh(), twice)


def test_a_job_with_another_number_of_schedules_keeps_its_own(tmp_path: Path) -> None:
    """Which of the saved ones belongs to which is not guessed."""
    model, optimizer = fresh(seed=3)
    states = [[{"last_epoch": 5}, False]] * 2
    manifest = write_checkpoint(tmp_path / "c", model, optimizer, JobState(version=2, several=states))
    model, optimizer = fresh()
    own = [torch.optim.lr_scheduler.StepLR(optimizer, 2) for _ in range(3)]
    _, notes = restore_into(tmp_path / "c", manifest, model=model, optimizer=optimizer, scheduler=own)
    assert "the checkpoint has 2 LR schedulers and this job 3: they were not restored" in notes
    assert [each.last_epoch for each in own] == [0, 0, 0]


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


def through_a_checkpoint(path: Path, model: nn.Module, other: nn.Module) -> list[str]:
    """Save one and restore the other from it. Return what is noted."""
    one, two = (torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.1) for m in (model, other))
    manifest = write_checkpoint(path, model, one, JobState(version=1))
    return restore_into(path, manifest, model=other, optimizer=two)[1]


@pytest.mark.parametrize(
    "kept",
    [
        torch.arange(2.0),
        7,
        (1, "x"),
        {},
        [{}],
        {"a": {}, "b": 1},
        {"list": [{}, torch.ones(1)]},
        {"blocks": {(0, 1): torch.ones(1), None: 2, True: 3}},
        {"blocks": {1: torch.ones(1), "1": torch.zeros(1)}},
        Counter(a=1),
        Counter(),
        OrderedDict({"b": 1, "a": 2.5}),
        OrderedDict({(0, 1): "x"}),
        {"c": Counter(d=2)},
    ],
    ids=repr,
)
def test_state_of_any_form_comes_back(tmp_path: Path, kept: Any) -> None:
    """Of the optimizer and of a module. A Counter that came back as a dict would raise KeyError in the next step."""
    model, other = Counting(5.0), Counting(1.0)
    model.seen, other.seen = kept, "mine"
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, other)]
    states: list[Any] = [each.state for each in optimizers]
    states[0][model.weight] = {"kept": kept} if isinstance(kept, (Counter, OrderedDict)) else kept
    manifest = write_checkpoint(tmp_path / "c", model, optimizers[0], JobState(version=1))
    restore_into(tmp_path / "c", manifest, model=other, optimizer=optimizers[1])
    assert repr(other.seen) == repr(kept) and repr(states[1][other.weight]) == repr(states[0][model.weight])
    assert torch.equal(other.get_buffer("wide"), torch.full((4,), 5.0))


def odd_views(value: float) -> nn.Module:
    """Return a model with a frozen parameter that cannot be written, and with views of one buffer."""
    model = nn.Linear(2, 2)
    model.wide = nn.Parameter(torch.tensor([value]).expand(4), requires_grad=False)
    pair = torch.tensor([complex(1, value), 3j])
    for name, view in {"pair": pair, "other": pair.conj(), "part": pair.imag, "negated": pair.conj().imag}.items():
        model.register_buffer(name, view)
    return model


def test_what_shares_its_memory_with_others(tmp_path: Path) -> None:
    model, other = odd_views(5.0), odd_views(1.0)
    through_a_checkpoint(tmp_path / "c", model, other)
    assert all(torch.equal(tensor, other.state_dict()[name]) for name, tensor in model.state_dict().items())


def test_objects_that_refuse_what_was_saved_are_named(tmp_path: Path) -> None:
    """A restart would not help, so it is no error that only this launch has."""
    model = Counting(5.0)
    other: Any = Counting(1.0)
    model.seen = {}
    other.set_extra_state = lambda state: state["none"]["such"]
    with pytest.raises(OtherModelError, match=r"set_extra_state\(\) of _extra_state refused .*KeyError: 'none'"):
        through_a_checkpoint(tmp_path / "c", model, other)


def test_a_schedule_of_another_class_is_named(tmp_path: Path) -> None:
    model, optimizer = fresh()
    step, other = torch.optim.lr_scheduler.StepLR, torch.optim.lr_scheduler.SequentialLR
    job = JobState(version=1, scheduler=step(optimizer, 1).state_dict())
    manifest = write_checkpoint(tmp_path / "c", model, optimizer, job)
    mine = other(optimizer, [step(optimizer, 1), step(optimizer, 1)], [1])
    with pytest.raises(OtherModelError, match=r"load_state_dict\(\) of the LR scheduler \(SequentialLR\) refused"):
        restore_into(tmp_path / "c", manifest, model=model, optimizer=optimizer, scheduler=mine)


def test_an_extra_state_that_could_not_be_stored_is_noted_and_left_alone(tmp_path: Path) -> None:
    model, other = Counting(5.0), Counting(1.0)
    model.seen, other.seen = (lambda: 1), "mine"
    notes = through_a_checkpoint(tmp_path / "c", model, other)
    assert other.seen == "mine"
    assert notes == ["model._extra_state.seen could not be saved: it keeps the value that this program gave it"]


@pytest.mark.parametrize(
    ("problem", "seen"),
    [
        (KeyError("other"), OtherModelError),
        (OSError(28, "no space"), OSError),
        (MemoryError(), MemoryError),
        (torch.cuda.OutOfMemoryError("CUDA out of memory"), torch.cuda.OutOfMemoryError),
    ],
)
def test_an_object_that_lacks_memory_or_storage_does_not_end_the_job(problem: Exception, seen: type[Exception]) -> None:
    """A restart may help then; it does not if the object refuses its state."""

    def load(_: object) -> None:
        raise problem

    with pytest.raises(seen) as raised:
        hand_to("load()", load, {})
    assert raised.type is seen
