"""Files that were saved without ttp become checkpoints, or are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("safetensors")

import torch
from torch import nn

from tests.adapters.torch.checkpoints import Net, adamw, train
from tests.adapters.torch.conversions import converted, facts, restored, same
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
    back = restored(done.target, other, again)
    assert back.version == (5 if form == "numbered" else 0)
    if form == "numbered":
        assert facts(other, again) == facts(model, optimizer)
        assert bool(done.notes) is (make is sgd)  # that names were guessed is said
    else:
        assert same(other.parameters(), model.parameters())


def test_a_list_of_schedules_is_understood(tmp_path: Path) -> None:
    model = plain_net()
    optimizer = sgd(model)
    states = [{"last_epoch": 2}, {"last_epoch": 1}]
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": states}, tmp_path / "f.pt"
    )
    path = converted(tmp_path / "f.pt", tmp_path / "new", "dcp").target
    job = read_job_state(path, Manifest.load(path).pieces)
    assert [(each.state, each.pending) for each in job.schedules] == [(state, False) for state in states]


def test_modules_beside_the_model_are_taken_along(tmp_path: Path) -> None:
    """An average of the weights stands beside them under ``extra``, in a file and in a checkpoint."""
    average = plain_net().state_dict()
    torch.save({"model": plain_net().state_dict(), "extra": {"average": average}}, tmp_path / "f.pt")
    path = converted(tmp_path / "f.pt", tmp_path / "new", "dcp").target
    back = torch.load(converted(path, tmp_path / "back.pt", "torch").target, weights_only=True)["extra"]
    assert same(back["average"].values(), average.values())


def test_names_are_also_guessed_beside_values_that_are_no_tensors(tmp_path: Path) -> None:
    """A module may keep plain values (``get_extra_state``): they are no parameters, and do not count as such."""

    class Counting(nn.Linear):
        def get_extra_state(self) -> int:
            return 3

        def set_extra_state(self, state: int) -> None:
            assert state == 3

    models = [nn.Sequential(Counting(4, 4), nn.Linear(4, 4)) for _ in range(2)]
    optimizers = [sgd(model) for model in models]
    train(models[0], optimizers[0], None, 1)
    torch.save({"model": models[0].state_dict(), "optimizer": optimizers[0].state_dict()}, tmp_path / "f.pt")
    restored(converted(tmp_path / "f.pt", tmp_path / "new", "dcp").target, models[1], optimizers[1])
    assert facts(models[1], optimizers[1]) == facts(models[0], optimizers[0])


def test_a_checkpoint_does_not_replace_a_file(tmp_path: Path) -> None:
    torch.save(plain_net().state_dict(), tmp_path / "f.pt")
    (tmp_path / "new").write_text("mine")
    with pytest.raises(UsageError, match="new is not a directory: --to dcp writes a directory"):
        converted(tmp_path / "f.pt", tmp_path / "new", "dcp", force=True)
    assert (tmp_path / "new").read_text() == "mine"


def test_numbers_that_could_mean_anything_are_refused_unless_nobody_wants_them(tmp_path: Path) -> None:
    model = Net()
    torch.save({"model": model.state_dict(), "optimizer": adamw(model).state_dict()}, tmp_path / "f.pt")
    with pytest.raises(CheckpointError, match="numbers instead of parameter names"):
        converted(tmp_path / "f.pt", tmp_path / "new", "dcp")
    assert not converted(tmp_path / "f.pt", tmp_path / "new", "dcp", optimizer=False).optimizer
    other = plain_net()
    turned = torch.optim.SGD(list(other.parameters())[::-1], lr=0.1, momentum=0.9)
    train(other, turned, None, 1)
    torch.save({"model": other.state_dict(), "optimizer": turned.state_dict()}, tmp_path / "turned.pt")
    with pytest.raises(CheckpointError, match="numbers instead of parameter names"):
        converted(tmp_path / "turned.pt", tmp_path / "turned", "dcp")


class _Evil:
    def __reduce__(self) -> Any:
        return Path.touch, (Path(self.target),)

    def __init__(self, target: Path) -> None:
        self.target = str(target)


def test_a_file_that_would_run_code_is_refused(tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.ones(1)}, "args": _Evil(tmp_path / "ran")}, tmp_path / "f.pt")
    with pytest.raises(CheckpointError, match="without running code"):
        converted(tmp_path / "f.pt", tmp_path / "new", "dcp")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["f.pt"]


@pytest.mark.parametrize(
    "state",
    [
        [torch.ones(1)],
        {"model": {}},
        {"w": torch.eye(3).to_sparse()},
        {"model": {"w": torch.ones(1)}, "optim": {"state": {}}},
        {"model": {"w": torch.ones(1)}, "optim": {"state": {}, "param_groups": [{}]}},
        {"model": {"w": torch.ones(1)}, "optim": {"state": {5: {}}, "param_groups": [{"params": [0]}]}},
        {"model": {"w": torch.ones(1)}, "optim": {"state": {0: None}, "param_groups": [{"params": [0]}]}},
        {
            "model": {"w": torch.ones(1)},
            "optim": {"state": {}, "param_groups": [{"params": ["w"]}]},
            "ttp": {"job": {"scaler": 3}},
        },
    ],
)
def test_a_file_of_another_form_is_refused(tmp_path: Path, state: Any) -> None:
    torch.save(state, tmp_path / "f.pt")
    with pytest.raises(CheckpointError):
        converted(tmp_path / "f.pt", tmp_path / "new", "dcp")
    assert not list(tmp_path.glob("new/tft*"))


@pytest.mark.parametrize("content", [b"", b"{}", b"\x00" * 64, b"\x02" + b"\0" * 7 + b"{}", b"\x10" + b"\0" * 7 + b"{"])
def test_a_file_that_is_nothing_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "f").write_bytes(content)
    with pytest.raises(CheckpointError):
        converted(tmp_path / "f", tmp_path / "new", "dcp")
    assert not (tmp_path / "new").exists()
