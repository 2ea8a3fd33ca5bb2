"""``ttp convert`` without its command line: the target equals the source, or there is no target."""

from __future__ import annotations

import copy
import gc
import sys
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as stock_load

from tests.adapters.torch.checkpoints import shards, train, whole_checkpoint, write_checkpoint
from tests.adapters.torch.conversions import (
    Trained,
    checkpoint_of,
    converted,
    facts,
    fresh,
    restored,
    same,
    sharded,
    there_and_back,
)
from tests.damage import flip
from ttp.adapters.torch.convert import conversion, from_checkpoint, safetensors_file, to_checkpoint, torch_file
from ttp.adapters.torch.convert.conversion import convert
from ttp.adapters.torch.restoring import reader
from ttp.adapters.torch.saving.job_state import JobState, Schedule, read_job_state
from ttp.errors import CheckpointError, ConfigError, UsageError
from ttp.store.manifest import MANIFEST, Manifest


@pytest.fixture
def trained() -> Trained:
    model, optimizer, scheduler = fresh(3)
    train(model, optimizer, scheduler, 3)
    return model, optimizer, scheduler


@pytest.fixture
def checkpoint(tmp_path: Path, trained: Trained) -> Path:
    path = tmp_path / "tft_saved_checkpoints-step_3"
    write_checkpoint(path, trained[0], trained[1], JobState(version=3, scheduler=trained[2].state_dict()))
    return path


# ---------------------------------------------------------------------------------------------- what comes out


def test_of_chunks_it_has_whole_tensors_and_each_tied_weight_once(tmp_path: Path) -> None:
    whole = {
        "a": torch.randn(5, 3, dtype=torch.bfloat16),
        "c": torch.randn(7).double(),
        "d": torch.arange(6, dtype=torch.uint8).reshape(6, 1),
        "e": torch.randn(4, 2).to(torch.float8_e4m3fn),
        "f": torch.zeros(0, 3),
        "g": torch.randn(3, 2, dtype=torch.complex64),
    }
    done = converted(sharded(tmp_path / "c", whole), tmp_path / "deep" / "w.safetensors", "safetensors")
    assert (done.version, done.optimizer, done.tied, done.left_out) == (4, False, {"b": "a"}, ())
    found = load_file(done.target)
    assert found.keys() == whole.keys()
    for name, tensor in whole.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape
        assert torch.equal(found[name].view(torch.uint8), tensor.contiguous().view(torch.uint8))
    with safe_open(done.target, framework="pt") as file:
        assert file.metadata() == {"format": "pt", "ttp.source": "c", "ttp.version": "4", "b": "a"}
    assert [path.name for path in done.target.parent.iterdir()] == ["w.safetensors"]
    model = torch.load(converted(tmp_path / "c", tmp_path / "w.pt", "torch").target, weights_only=True)["model"]
    assert model.pop("b").data_ptr() == model["a"].data_ptr() and model.keys() == whole.keys()
    for name, tensor in found.items():
        assert model[name].shape == tensor.shape and torch.equal(
            model[name].view(torch.uint8), tensor.view(torch.uint8)
        )


def test_the_libraries_own_load_model_understands_the_tied_weights(
    tmp_path: Path, checkpoint: Path, trained: Trained
) -> None:
    converted(checkpoint, tmp_path / "w.safetensors", "safetensors")
    model = fresh()[0]
    missing, unexpected = load_model(model, tmp_path / "w.safetensors")
    assert not missing and not unexpected
    assert same(model.state_dict().values(), trained[0].state_dict().values())


def test_a_plain_torch_job_goes_on_with_the_torch_file(tmp_path: Path, checkpoint: Path, trained: Trained) -> None:
    done = converted(checkpoint, tmp_path / "all.pt", "torch")
    file = torch.load(done.target, weights_only=True)
    assert file.keys() == {"model", "optim", "version", "scheduler", "ttp"} and file["version"] == 3
    assert file["model"]["tied.weight"].data_ptr() == file["model"]["first.weight"].data_ptr()
    assert file["model"]["norm.bias"].untyped_storage().nbytes() == file["model"]["norm.bias"].nbytes
    model, optimizer, scheduler = fresh()
    set_state_dict(model, optimizer, model_state_dict=file["model"], optim_state_dict=file["optim"])
    assert facts(model, optimizer) == facts(*trained[:2]), "the names fit torch's own functions"
    model, optimizer, scheduler = fresh()
    model.load_state_dict(file["model"])
    optimizer.load_state_dict(file["optim"])
    scheduler.load_state_dict(file["scheduler"])
    assert facts(model, optimizer) == facts(*trained[:2])
    for one in ((model, optimizer, scheduler), trained):
        torch.manual_seed(5)
        train(*one, 3)
    assert facts(model, optimizer) == facts(*trained[:2])
    weights = torch.load(converted(checkpoint, tmp_path / "w.pt", "torch", optimizer=False).target, weights_only=True)
    assert weights.keys() == {"model", "version", "ttp"}


@pytest.mark.parametrize("to", ["torch", "safetensors"])
def test_there_and_back_every_bit_is_the_same(tmp_path: Path, checkpoint: Path, trained: Trained, to: str) -> None:
    path = there_and_back(checkpoint, to)
    assert path == tmp_path / "new" / checkpoint.name and Manifest.load(path).cause == "converted from file"
    model, optimizer, scheduler = fresh()
    job, notes = restored(path, model, optimizer, scheduler if to == "torch" else None)
    assert (job.version, notes) == (3, []) and facts(model, optimizer) == facts(*trained[:2])
    if to == "torch":
        assert scheduler.state_dict() == trained[2].state_dict()
    model, optimizer, _ = fresh()
    stock: dict[str, Any] = dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))
    with pytest.warns(UserWarning, match=r"torch\.distributed is disabled"):
        stock_load(stock, checkpoint_id=path, no_dist=True)
    set_state_dict(model, optimizer, model_state_dict=stock["model"], optim_state_dict=stock["optim"])
    assert facts(model, optimizer) == facts(*trained[:2])


def test_several_schedules_and_a_skipped_update_of_the_scaler_survive_there_and_back(
    tmp_path: Path, trained: Trained
) -> None:
    path, scale = tmp_path / "c", {"scale": 8.0, "_growth_tracker": 1}
    schedules = [Schedule({"last_epoch": 3}), Schedule({"last_epoch": 2}, pending=True)]
    job = replace(JobState.of(3, schedules, scale, scaler_pending=True), scaler_skipped=True)
    write_checkpoint(path, trained[0], trained[1], job)
    there = converted(path, tmp_path / "all.pt", "torch")
    assert any("scheduler.step() had not been called" in note for note in there.notes)
    back = converted(there.target, tmp_path / "new", "dcp").target
    assert read_job_state(back, Manifest.load(back).pieces) == job


def test_weights_alone_start_a_job_with_an_optimizer_of_its_own(
    tmp_path: Path, checkpoint: Path, trained: Trained
) -> None:
    file = converted(checkpoint, tmp_path / "w.safetensors", "safetensors").target
    path = converted(file, tmp_path / "tft_saved_checkpoints-step_0", "dcp", step=0).target
    assert path == tmp_path / "tft_saved_checkpoints-step_0"
    model, optimizer, _ = fresh()
    train(model, optimizer, None, 1)
    before = copy.deepcopy(optimizer.state_dict())
    job, notes = restored(path, model, optimizer)
    assert job.version == 0 and "weights only" in notes[0]
    assert same(model.state_dict().values(), trained[0].state_dict().values())
    after = optimizer.state_dict()
    assert torch.equal(before["state"][0]["exp_avg"], after["state"][0]["exp_avg"])
    assert before["param_groups"] == after["param_groups"]


def by_names(path: Path, model: nn.Module, settings: dict[str, Any], state: dict[str, Any]) -> Path:
    """Write a checkpoint with the settings of each parameter by its name, as jobs with several pipeline stages do."""
    path.mkdir()
    optim = {"state": state, "param_groups": settings}
    pieces = shards(path, {"model": model.state_dict(), "optim": optim, "ttp": {"version": 2, "optimizer": ""}})
    whole_checkpoint(path, pieces, 2)
    return path


@pytest.mark.parametrize("to", ["torch", "safetensors"])
def test_settings_by_the_names_of_parameters_become_param_groups(tmp_path: Path, to: str) -> None:
    model = nn.Linear(3, 2)
    groups: list[dict[str, Any]] = [{"params": [model.bias], "lr": 0.5}, {"params": [model.weight]}]
    optimizer = torch.optim.AdamW(groups)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    named = {"weight": optimizer.param_groups[1], "bias": optimizer.param_groups[0]}
    settings = {name: {key: v for key, v in group.items() if key != "params"} for name, group in named.items()}
    moments = {name: optimizer.state[p] for name, p in model.named_parameters()}
    path = by_names(tmp_path / "c", model, settings, moments)
    file = converted(path, tmp_path / "f", to, optimizer=True).target
    if to == "torch":
        found = torch.load(file, weights_only=True)["optim"]["param_groups"]
        assert [(group["lr"], group["params"]) for group in found] == [(1e-3, ["weight"]), (0.5, ["bias"])]
    other = nn.Linear(3, 2)
    groups = [{"params": [other.weight]}, {"params": [other.bias]}]
    again = torch.optim.AdamW(groups)
    restored(converted(file, tmp_path / "new", "dcp").target, other, again)
    assert [group["lr"] for group in again.param_groups] == [1e-3, 0.5]
    assert torch.equal(again.state[other.bias]["exp_avg"], optimizer.state[model.bias]["exp_avg"])


def test_parameters_with_equal_settings_are_one_param_group(tmp_path: Path) -> None:
    """What has no settings, such as a buffer, is in none."""
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    settings = {name: {"lr": 0.5 if name == "0.bias" else 0.1} for name, _ in model.named_parameters()}
    path = by_names(tmp_path / "c", model, settings, {})
    file = torch.load(converted(path, tmp_path / "f", "torch", optimizer=True).target, weights_only=True)
    groups = [(group["lr"], group["params"]) for group in file["optim"]["param_groups"]]
    assert groups == [(0.1, ["0.weight", "1.weight", "1.bias"]), (0.5, ["0.bias"])]


@pytest.mark.parametrize("optimizer", [True, False])
@pytest.mark.parametrize("to", ["torch", "safetensors"])
def test_names_like_those_of_wrappers_are_kept(tmp_path: Path, to: str, optimizer: bool) -> None:
    """A model may call its only child ``module``, as DistributedDataParallel does."""
    model, again = (nn.ModuleDict({"module": nn.Linear(2, 2)}) for _ in range(2))
    make = torch.optim.AdamW
    path = there_and_back(checkpoint_of(tmp_path, model, make(model.parameters())), to, optimizer=optimizer)
    restored(path, again, make(again.parameters()))
    assert same(model.state_dict().values(), again.state_dict().values())


def test_plain_values_and_tensors_of_the_optimizer_that_are_also_others(tmp_path: Path) -> None:
    """Counts and the like, which stand in the metadata; one count for all parameters, and a reference to a weight."""
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer, again = (torch.optim.AdamW(each.parameters(), lr=lr) for each, lr in ((model, 0.1), (other, 1.0)))
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.state[model.bias] |= {"steps": 3, "warm": True, "range": (0.5, 2), "seen": {"most": 7}}
    for parameter in model.parameters():
        optimizer.state[parameter] |= {"count": torch.tensor(5.0), "slow": parameter.detach()}
    optimizer.state[model.bias]["count"] = optimizer.state[model.weight]["count"]
    restored(there_and_back(checkpoint_of(tmp_path, model, optimizer), "safetensors"), other, again)
    assert facts(other, again) == facts(model, optimizer)


@pytest.mark.parametrize("value", [{1: 2}, [(1, 2)], {"__tuple__": [1]}, float("nan")])
def test_what_json_would_change_is_not_written(tmp_path: Path, trained: Trained, value: Any) -> None:
    trained[1].param_groups[0]["odd"] = value
    with pytest.raises(CheckpointError, match=r"odd.* cannot be stored in a safetensors file: use --to torch"):
        there_and_back(checkpoint_of(tmp_path, *trained[:2]), "safetensors")


# ---------------------------------------------------------------------------------------------- refusals


def test_a_damaged_checkpoint_is_not_converted(tmp_path: Path, checkpoint: Path) -> None:
    flip(checkpoint / "__0_0.distcp")
    with pytest.raises(CheckpointError, match="is damaged"):
        converted(checkpoint, tmp_path / "new", "torch")
    assert not (tmp_path / "new").exists()


def test_a_new_checkpoint_is_verified(tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that keeps something else is noticed while the file that was converted is still there."""
    file = converted(checkpoint, tmp_path / "f", "torch").target
    written = to_checkpoint.write_checkpoint

    def rotten(*args: Any, **kwargs: Any) -> Path:
        path = written(*args, **kwargs)
        flip(path / "__0_0.distcp")
        return path

    monkeypatch.setattr(conversion, "write_checkpoint", rotten)
    with pytest.raises(CheckpointError, match=r"differs from what was written: .*Check the disk"):
        converted(file, tmp_path / "new", "dcp")


@pytest.mark.parametrize("to", ["torch", "safetensors"])
def test_an_old_file_is_replaced_only_if_that_is_wanted_and_by_what_was_written(
    tmp_path: Path, checkpoint: Path, to: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flipped(tensor: Tensor) -> memoryview:
        data = bytearray(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        data[0] ^= 1
        return memoryview(data)

    (tmp_path / "file").write_text("old")
    with pytest.raises(UsageError, match="--force"):
        converted(checkpoint, tmp_path / "file", to)
    with monkeypatch.context() as rotten:
        rotten.setattr(safetensors_file if to == "safetensors" else torch_file, "bytes_of", flipped)
        with pytest.raises(CheckpointError, match="differs from what was written"):
            converted(checkpoint, tmp_path / "file", to, force=True)
    assert (tmp_path / "file").read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", checkpoint.name]
    assert converted(checkpoint, tmp_path / "file", to, force=True).target.stat().st_size > 1000


def test_whatever_interrupts_it_leaves_nothing_behind(tmp_path: Path, checkpoint: Path) -> None:
    def interrupted(_what: str, _total: int | None) -> Any:
        def told(_count: int) -> None:
            if _what == "writing":
                raise KeyboardInterrupt

        return told

    torch.save({"model": {"w": torch.ones(1)}}, tmp_path / "f.pt")
    before = sorted(tmp_path.rglob("*"))
    for source, target, to in (
        (checkpoint, tmp_path / "a", "torch"),
        (checkpoint, tmp_path / "b", "safetensors"),
        (tmp_path / "f.pt", tmp_path, "dcp"),
    ):
        with pytest.raises(KeyboardInterrupt):
            convert(source, target, to, watch=interrupted)  # type: ignore[arg-type]
    assert sorted(tmp_path.rglob("*")) == before


def test_what_does_not_fit_the_target_is_refused_by_name(tmp_path: Path, checkpoint: Path) -> None:
    (checkpoint / MANIFEST).write_text(replace(Manifest.load(checkpoint), framework="mindspore").to_json())
    with pytest.raises(CheckpointError, match="mindspore"):
        converted(checkpoint, tmp_path / "new", "torch")
    with pytest.raises(CheckpointError, match="which safetensors does not support"):
        converted(sharded(tmp_path / "c", {"a": torch.zeros(3, dtype=torch.complex128)}), tmp_path / "n", "safetensors")
    with pytest.raises(CheckpointError, match="no state of an optimizer"):
        converted(tmp_path / "c", tmp_path / "n", "torch", optimizer=True)
    torch.save({"w": torch.ones(1)}, tmp_path / "f.pt")
    with pytest.raises(UsageError, match="is the name of step 3"):
        converted(tmp_path / "f.pt", tmp_path / checkpoint.name, "dcp", step=4)


def test_a_missing_library_is_named(tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ConfigError, match=r"ttp-ft\[convert\]"):
        converted(checkpoint, tmp_path / "new", "safetensors")


# ---------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("to", ["torch", "safetensors"])
def test_one_tensor_at_a_time_is_in_memory(tmp_path: Path, to: str, monkeypatch: pytest.MonkeyPatch) -> None:
    alive: weakref.WeakSet[Any] = weakref.WeakSet()
    most = 0
    read = reader.read_whole

    def counting(path: Path, chunks: Any) -> Tensor:
        nonlocal most
        tensor: Tensor = read(path, chunks)
        if alive:
            gc.collect()  # what is in a cycle is not held
        alive.add(tensor.untyped_storage())
        most = max(most, len(alive))
        return tensor

    monkeypatch.setattr(from_checkpoint, "read_whole", counting)
    converted(sharded(tmp_path / "c", {f"{n}": torch.randn(9, 9) for n in "acdef"}), tmp_path / "new", to)
    assert most == 1
