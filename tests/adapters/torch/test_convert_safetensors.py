"""What a safetensors file cannot hold is told, and what it can comes back: values, names and a header with limits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn

from tests.adapters.torch.checkpoints import write_checkpoint
from tests.adapters.torch.conversions import converted, facts, restored
from ttp.adapters.torch.convert import safetensors_file
from ttp.adapters.torch.saving.job_state import JobState
from ttp.errors import CheckpointError
from ttp.store.manifest import Manifest


class Counting(nn.Linear):
    """Keeps plain values beside its tensors."""

    def get_extra_state(self) -> dict[str, int]:
        return {"steps": 3}

    def set_extra_state(self, state: dict[str, int]) -> None:
        pass


def stepped(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return optimizer


@pytest.fixture
def model() -> nn.Linear:
    return nn.Linear(2, 2)


@pytest.fixture
def optimizer(model: nn.Linear) -> torch.optim.Optimizer:
    return stepped(model)


def checkpoint(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> Path:
    write_checkpoint(path, model, optimizer, JobState(version=3))
    return path


def test_weights_without_a_number_of_updates_begin_at_none(tmp_path: Path, model: nn.Linear) -> None:
    """A file that somebody saved with torch alone tells no step: none is made up for it on the way."""
    torch.save(model.state_dict(), tmp_path / "w.pt")
    done = converted(tmp_path / "w.pt", tmp_path / "w.safetensors", "safetensors")
    with safe_open(done.target, framework="pt") as file:
        assert done.version is None and file.metadata() == {"format": "pt", "ttp.source": "w.pt"}
    assert Manifest.load(converted(done.target, tmp_path / "new", "dcp").target).version == 0


def test_plain_values_in_the_state_of_an_optimizer_come_back(
    tmp_path: Path, model: nn.Linear, optimizer: torch.optim.Optimizer
) -> None:
    """Many optimizers count their steps in plain numbers; they stand in the metadata of the file."""
    optimizer.state[model.bias] |= {"count": 3, "warm": True, "range": (0.5, 2), "seen": {"most": 7}}
    path = checkpoint(tmp_path / "c", model, optimizer)
    file = converted(path, tmp_path / "f", "safetensors", optimizer=True).target
    other = nn.Linear(2, 2)
    again = torch.optim.SGD(other.parameters(), lr=1.0, momentum=0.5)
    restored(converted(file, tmp_path / "new", "dcp").target, other, again)
    assert facts(other, again) == facts(model, optimizer)


def test_values_of_a_model_that_are_no_tensors_are_left_out_and_named(tmp_path: Path) -> None:
    model = Counting(2, 2)
    done = converted(checkpoint(tmp_path / "c", model, stepped(model)), tmp_path / "w", "safetensors")
    assert done.left_out == ("model._extra_state.steps",) and done.tensors == 2


@pytest.mark.parametrize("kept", [{"inner": {"m": torch.ones(2)}}, {"a.b": torch.ones(2)}])
def test_a_moment_whose_name_could_not_be_read_back_is_refused(
    tmp_path: Path, model: nn.Linear, optimizer: torch.optim.Optimizer, kept: Any
) -> None:
    """A name in the file is ``optim.state.<parameter>.<key>``, and a dot in the key would belong to the parameter."""
    optimizer.state[model.bias] |= kept
    path = checkpoint(tmp_path / "c", model, optimizer)
    with pytest.raises(CheckpointError, match=r"optim\.state\.bias.* cannot be named in a safetensors file: use --to"):
        converted(path, tmp_path / "f", "safetensors", optimizer=True)
    assert converted(path, tmp_path / "f", "safetensors").tensors == 2, (
        "without the optimizer's state it can be written"
    )


def test_a_tied_weight_with_the_name_of_an_entry_of_the_header_is_refused(tmp_path: Path) -> None:
    """The second name of a tied weight stands in the metadata, where ``format`` means something else to the library."""
    model: Any = nn.ModuleDict({"a": nn.Linear(2, 2)})
    model.register_parameter("format", model["a"].weight)
    path = checkpoint(tmp_path / "c", model, torch.optim.SGD(model.parameters()))
    with pytest.raises(CheckpointError, match="format cannot be the name of a weight in a safetensors file: use --to"):
        converted(path, tmp_path / "w", "safetensors")


def test_names_too_long_for_the_libraries_header_are_refused_before_the_file_exists(
    tmp_path: Path, model: nn.Linear, optimizer: torch.optim.Optimizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(safetensors_file, "HEADER_MAX", 100)
    path = checkpoint(tmp_path / "c", model, optimizer)
    with pytest.raises(CheckpointError, match=r"the header would have \d+ bytes, and the limit is 100: use --to torch"):
        converted(path, tmp_path / "w", "safetensors")
    assert [each.name for each in tmp_path.iterdir()] == ["c"]


def test_a_disk_that_changes_a_name_is_noticed(
    tmp_path: Path, model: nn.Linear, optimizer: torch.optim.Optimizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library would read such a file without an error, and a program would not find its weight."""
    write = safetensors_file.write

    def rotten(target: Path, *rest: Any) -> Any:
        found = write(target, *rest)
        target.write_bytes(target.read_bytes().replace(b"weight", b"weighs"))
        return found

    monkeypatch.setattr(safetensors_file, "write", rotten)
    with pytest.raises(CheckpointError, match="does not hold the names that were written"):
        converted(checkpoint(tmp_path / "c", model, optimizer), tmp_path / "w", "safetensors")
    assert [each.name for each in tmp_path.iterdir()] == ["c"]
