"""Files that were saved without ttp become checkpoints or are refused; what a safetensors file cannot hold is told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn

from tests.adapters.torch.checkpoints import Counting, Net, adamw, train
from tests.adapters.torch.conversions import checkpoint_of, converted, facts, imported, restored, same
from ttp.adapters.torch.convert import safetensors_file
from ttp.adapters.torch.saving.job_state import read_job_state
from ttp.errors import CheckpointError, UsageError
from ttp.store.manifest import Manifest


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def named(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.named_parameters())


def plain_net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))


FORMS: dict[str, Callable[[nn.Module, Any], Any]] = {
    "model": lambda model, _: model.state_dict(),
    "a compiled model under DDP": lambda model, _: {
        "state_dict": {f"module._orig_mod.{name}": value for name, value in model.state_dict().items()}
    },
    "numbered": lambda model, optimizer: {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "step": 5,
    },
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("make", [sgd, named])
@pytest.mark.parametrize("old", [False, True], ids=["zip", "before zip"])
def test_what_people_save_becomes_a_checkpoint(tmp_path: Path, form: str, make: Any, old: bool) -> None:
    model = plain_net()
    optimizer = make(model)
    train(model, optimizer, None, 2)
    torch.save(FORMS[form](model, optimizer), tmp_path / "f.pt", _use_new_zipfile_serialization=not old)
    done = converted(tmp_path / "f.pt", tmp_path / "new", "dcp")
    other = plain_net()
    again = make(other)
    job, _ = restored(done.target, other, again)
    assert job.version == (5 if form == "numbered" else 0)
    if form == "numbered":
        assert facts(other, again) == facts(model, optimizer)
        assert bool(done.notes) is (make is sgd)  # that names were guessed is said
    else:
        assert same(other.parameters(), model.parameters())


def test_a_list_of_schedules_is_understood(tmp_path: Path) -> None:
    model, states = plain_net(), [{"last_epoch": 2}, {"last_epoch": 1}]
    both = {"model": model.state_dict(), "optimizer": sgd(model).state_dict()}
    path = imported(tmp_path, both | {"scheduler": states})
    job = read_job_state(path, Manifest.load(path).pieces)
    assert [(each.state, each.pending) for each in job.schedules] == [(state, False) for state in states]


def test_modules_beside_the_model_are_taken_along(tmp_path: Path) -> None:
    """An average of the weights stands beside them under ``extra``, in a file and in a checkpoint."""
    average = plain_net().state_dict()
    path = imported(tmp_path, {"model": plain_net().state_dict(), "extra": {"average": average}})
    back = torch.load(converted(path, tmp_path / "back.pt", "torch").target, weights_only=True)["extra"]
    assert same(back["average"].values(), average.values())


def test_names_are_also_guessed_beside_values_that_are_no_tensors(tmp_path: Path) -> None:
    """A module may keep plain values (``get_extra_state``): they are no parameters, and do not count as such."""
    models = [nn.Sequential(Counting(4, 4), nn.Linear(4, 4)) for _ in range(2)]
    optimizers = [sgd(model) for model in models]
    train(models[0], optimizers[0], None, 1)
    path = imported(tmp_path, {"model": models[0].state_dict(), "optimizer": optimizers[0].state_dict()})
    restored(path, models[1], optimizers[1])
    assert facts(models[1], optimizers[1]) == facts(models[0], optimizers[0])


def test_a_checkpoint_does_not_replace_a_file(tmp_path: Path) -> None:
    (tmp_path / "new").write_text("mine")
    with pytest.raises(UsageError, match="new is not a directory: --to dcp writes a directory"):
        imported(tmp_path, plain_net().state_dict(), force=True)
    assert (tmp_path / "new").read_text() == "mine"


def test_numbers_that_could_mean_anything_are_refused_unless_nobody_wants_them(tmp_path: Path) -> None:
    model, other = Net(), plain_net()
    turned = torch.optim.SGD(list(other.parameters())[::-1], lr=0.1, momentum=0.9)
    train(other, turned, None, 1)
    for net, optimizer in ((model, adamw(model)), (other, turned)):
        saved = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
        with pytest.raises(CheckpointError, match="numbers instead of parameter names"):
            imported(tmp_path, saved)
    assert not converted(tmp_path / "f.pt", tmp_path / "new", "dcp", optimizer=False).optimizer


class _Evil:
    def __reduce__(self) -> Any:
        return Path.touch, (Path(self.target),)

    def __init__(self, target: Path) -> None:
        self.target = str(target)


def test_a_file_that_would_run_code_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="without running code"):
        imported(tmp_path, {"model": {"w": torch.ones(1)}, "args": _Evil(tmp_path / "ran")})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["f.pt"]


WEIGHT = {"model": {"w": torch.ones(1)}}


@pytest.mark.parametrize(
    "state",
    [
        [torch.ones(1)],
        {"model": {}},
        {"w": torch.eye(3).to_sparse()},
        {**WEIGHT, "optim": {"state": {}}},
        {**WEIGHT, "optim": {"state": {}, "param_groups": [{}]}},
        {**WEIGHT, "optim": {"state": {5: {}}, "param_groups": [{"params": [0]}]}},
        {**WEIGHT, "optim": {"state": {0: None}, "param_groups": [{"params": [0]}]}},
        {**WEIGHT, "optim": {"state": {}, "param_groups": [{"params": ["w"]}]}, "ttp": {"job": {"scaler": 3}}},
    ],
)
def test_a_file_of_another_form_is_refused(tmp_path: Path, state: Any) -> None:
    with pytest.raises(CheckpointError):
        imported(tmp_path, state)
    assert not list(tmp_path.glob("new/tft*"))


@pytest.mark.parametrize("content", [b"", b"{}", b"\x00" * 64, b"\x02" + b"\0" * 7 + b"{}", b"\x10" + b"\0" * 7 + b"{"])
def test_a_file_that_is_nothing_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "f").write_bytes(content)
    with pytest.raises(CheckpointError):
        converted(tmp_path / "f", tmp_path / "new", "dcp")
    assert not (tmp_path / "new").exists()


def stepped(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return optimizer


@pytest.fixture
def model() -> nn.Linear:
    return nn.Linear(2, 2)


@pytest.fixture
def checkpoint(tmp_path: Path, model: nn.Linear) -> Path:
    return checkpoint_of(tmp_path, model, stepped(model))


def test_weights_without_a_number_of_updates_begin_at_none(tmp_path: Path, model: nn.Linear) -> None:
    """A file that somebody saved with torch alone tells no step: none is made up for it on the way."""
    torch.save(model.state_dict(), tmp_path / "w.pt")
    done = converted(tmp_path / "w.pt", tmp_path / "w.safetensors", "safetensors")
    with safe_open(done.target, framework="pt") as file:
        assert done.version is None and file.metadata() == {"format": "pt", "ttp.source": "w.pt"}
    assert Manifest.load(converted(done.target, tmp_path / "new", "dcp").target).version == 0


def test_values_of_a_model_that_are_no_tensors_are_left_out_and_named(tmp_path: Path) -> None:
    model = Counting(2, 2)
    done = converted(checkpoint_of(tmp_path, model, stepped(model)), tmp_path / "w", "safetensors")
    assert done.left_out == ("model._extra_state.steps",) and done.tensors == 2


@pytest.mark.parametrize("kept", [{"inner": {"m": torch.ones(2)}}, {"a.b": torch.ones(2)}])
def test_a_moment_whose_name_could_not_be_read_back_is_refused(tmp_path: Path, model: nn.Linear, kept: Any) -> None:
    """A name in the file is ``optim.state.<parameter>.<key>``, and a dot in the key would belong to the parameter."""
    optimizer = stepped(model)
    optimizer.state[model.bias] |= kept
    path = checkpoint_of(tmp_path, model, optimizer)
    with pytest.raises(CheckpointError, match=r"optim\.state\.bias.* cannot be named in a safetensors file: use --to"):
        converted(path, tmp_path / "f", "safetensors", optimizer=True)
    assert converted(path, tmp_path / "f", "safetensors").tensors == 2, (
        "without the optimizer's state it can be written"
    )


def test_a_tied_weight_with_the_name_of_an_entry_of_the_header_is_refused(tmp_path: Path) -> None:
    """The second name of a tied weight stands in the metadata, where ``format`` means something else to the library."""
    model: Any = nn.ModuleDict({"a": nn.Linear(2, 2)})
    model.register_parameter("format", model["a"].weight)
    path = checkpoint_of(tmp_path, model, torch.optim.SGD(model.parameters()))
    with pytest.raises(CheckpointError, match="format cannot be the name of a weight in a safetensors file: use --to"):
        converted(path, tmp_path / "w", "safetensors")


def test_names_too_long_for_the_libraries_header_are_refused_before_the_file_exists(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(safetensors_file, "HEADER_MAX", 100)
    with pytest.raises(CheckpointError, match=r"the header would have \d+ bytes, and the limit is 100: use --to torch"):
        converted(checkpoint, tmp_path / "w", "safetensors")
    assert [each.name for each in tmp_path.iterdir()] == ["c"]


def test_a_disk_that_changes_a_name_is_noticed(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library would read such a file without an error, and a program would not find its weight."""
    write = safetensors_file.write

    def rotten(target: Path, *rest: Any) -> Any:
        found = write(target, *rest)
        target.write_bytes(target.read_bytes().replace(b"weight", b"weighs"))
        return found

    monkeypatch.setattr(safetensors_file, "write", rotten)
    with pytest.raises(CheckpointError, match="does not hold the names that were written"):
        converted(checkpoint, tmp_path / "w", "safetensors")
    assert [each.name for each in tmp_path.iterdir()] == ["c"]
