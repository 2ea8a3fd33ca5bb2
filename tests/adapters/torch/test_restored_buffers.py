"""Buffers whose shape, kind or place differs in the restored program from that in the saved one."""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from tests.adapters.torch.going_on import UPDATES, adamw, assert_goes_on_with_its_bits, plainly, program_of
from tests.adapters.torch.stub_processor import Loop
from ttp.adapters.torch.local_state.buffers import LARGE_BYTES
from ttp.errors import CheckpointError, UsageError

supports = pytest.mark.supports


class Remembering(nn.Module):
    """A module whose buffers are made, or grow, in the forward pass."""

    def __init__(self, begin: Any, persistent: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.register_buffer("seen", begin, persistent=persistent)

    def forward(self, x: Tensor) -> Any:
        y = self.layer(x)
        with torch.no_grad():
            new = y[:1] if self.seen is None else torch.cat([self.seen, y[:1]])
            self.seen: Tensor | None = new[-2 * UPDATES :]
        return y + self.seen.mean()


@supports("buffers made in training")
@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.parametrize("begin", [None, torch.empty(0, 3)], ids=["none", "empty"])
def test_they_come_back(tmp_path: Path, begin: Any, persistent: bool) -> None:
    assert_goes_on_with_its_bits(tmp_path, program_of(lambda: Remembering(begin, persistent)))


@supports("buffers made in training")
@pytest.mark.filterwarnings("ignore:torch.ao.quantization:DeprecationWarning")
def test_observers_of_quantisation_aware_training(tmp_path: Path) -> None:
    """Their buffers get one entry for each channel in the first forward pass."""
    from torch.ao.quantization import FakeQuantize, MovingAveragePerChannelMinMaxObserver

    class Quantised(nn.Linear):
        def __init__(self) -> None:
            super().__init__(6, 3)
            observer = MovingAveragePerChannelMinMaxObserver.with_args(qscheme=torch.per_channel_symmetric)
            quantise: Any = FakeQuantize
            self.quantise = quantise(observer, quant_min=-128, quant_max=127, dtype=torch.qint8)

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(x, self.quantise(self.weight), self.bias)

    assert_goes_on_with_its_bits(tmp_path, program_of(Quantised))


def saved_with(directory: Path, make: Any) -> tuple[Any, Path]:
    model = make()
    job = Loop(directory, model, adamw(model)).start(directory / "pages")
    for _ in range(2):
        plainly(model, job.optimizer)(0)
    return model, job.save(2)


@supports("buffers made in training")
def test_a_cache_of_another_size_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Like the cache of rotary embeddings, which grows with the longest sequence."""

    def make(size: int = 4) -> nn.Module:
        model = nn.Linear(6, 3)
        model.register_buffer("cache", torch.arange(float(size)), persistent=False)
        return model

    _, path = saved_with(tmp_path, functools.partial(make, 8))
    other = make()
    assert Loop(tmp_path, other, adamw(other)).load(path) == 2
    assert torch.equal(other.get_buffer("cache"), torch.arange(4.0))
    assert "the buffer cache was float32 (8,) when it was saved and is float32 (4,) here" in caplog.text


def test_one_that_belongs_into_the_checkpoint_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    def make(size: int = 6) -> Any:
        model = nn.Linear(6, 3)
        model.register_buffer("seen", torch.zeros(size, 3))
        return model

    _, path = saved_with(tmp_path, make)
    other = make(4)
    before = other.weight.clone()
    with pytest.raises(CheckpointError, match=r"seen \(float32 \[4, 3\] here, float32 \[6, 3\].*Nothing was loaded"):
        Loop(tmp_path, other, adamw(other)).load(path)
    assert torch.equal(other.weight, before)


@supports("buffers made in training")
def test_one_that_grows_from_something_is_refused_while_nothing_is_lost(tmp_path: Path) -> None:
    """A restarted program begins with the first size, and could not load the checkpoint."""
    with pytest.raises(UsageError, match=r"seen had the shape \(1, 3\) .* and has \(\d, 3\) now.* empty or None"):
        saved_with(tmp_path, functools.partial(Remembering, torch.zeros(1, 3), True))


@supports("buffers made in training")
@pytest.mark.parametrize("persistent", [True, False])
def test_one_that_is_registered_in_a_forward_pass(tmp_path: Path, persistent: bool) -> None:
    class Late(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if "seen" not in self._buffers:
                self.register_buffer("seen", torch.zeros(3), persistent=persistent)
            return super().forward(x)

    refused = pytest.raises(UsageError, match=r"the buffer seen was made after wrap_optimizer\(\).*persistent=False")
    with refused if persistent else contextlib.nullcontext():
        saved_with(tmp_path, lambda: Late(6, 3))


@supports("buffers made in training")
def test_one_that_is_made_in_mid_run_is_said_to_be_missing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Such as the mask of a weight that is pruned after some epochs: the program that resumes has to make it again."""
    model: Any = nn.Sequential(nn.Linear(6, 3))
    job = Loop(tmp_path, model, adamw(model)).start(tmp_path / "pages")
    step = plainly(model, job.optimizer)
    for number in range(4):
        step(number)
    prune.random_unstructured(model[0], "weight", amount=0.5)
    step(4)
    path = job.save(5)
    assert "not in the checkpoint, as they were made after wrap_optimizer(): 0.weight_mask" in caplog.text
    other: Any = nn.Sequential(nn.Linear(6, 3))
    Loop(tmp_path, other, adamw(other)).load(path)
    assert "model.0.weight_mask could not be saved" in caplog.text
    assert torch.equal(other[0].weight, model[0].weight_orig)


def test_a_large_one_made_in_inference_mode(tmp_path: Path) -> None:
    """Torch counts no writes to it."""

    def make(value: float = 0.0) -> nn.Module:
        model = nn.Linear(6, 3)
        with torch.inference_mode():
            model.register_buffer("mask", torch.full((LARGE_BYTES,), value))
        return model

    _, path = saved_with(tmp_path, functools.partial(make, 5.0))
    other = make()
    Loop(tmp_path, other, adamw(other)).load(path)
    assert torch.equal(other.get_buffer("mask"), torch.full((LARGE_BYTES,), 5.0))


def test_an_expanded_one(tmp_path: Path) -> None:
    """One that belongs into the checkpoint: see ``test_restore``."""

    def make(value: float) -> nn.Module:
        model = nn.Linear(6, 3)
        model.register_buffer("wide", torch.tensor([value]).expand(4), persistent=False)
        return model

    _, path = saved_with(tmp_path, functools.partial(make, 5.0))
    other = make(1.0)
    Loop(tmp_path, other, adamw(other)).load(path)
    assert torch.equal(other.get_buffer("wide"), torch.full((4,), 5.0))


def test_one_in_the_memory_of_a_weight(tmp_path: Path) -> None:
    """It has no value of its own: torch's step changes it, and a restore copies it over the weight."""

    def sharing() -> nn.Module:
        model = nn.Linear(6, 3)
        model.register_buffer("first", model.weight.data[0])
        return model

    assert_goes_on_with_its_bits(tmp_path, program_of(sharing))
