"""What counts as a change of the weights between a backward pass and the step, and what loops do with gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.adapters.torch.checkpoints import Net
from tests.adapters.torch.going_on import Program, data, goes_on
from tests.adapters.torch.stub_processor import Loop as Job
from ttp.adapters.torch.loop.untouched import Untouched
from ttp.errors import UsageError


@pytest.fixture
def weight() -> Any:
    return nn.Parameter(torch.randn(32, 32))


@pytest.fixture
def watch(weight: Any) -> Untouched:
    """The watch of the weight on the host, after the first step and a backward pass."""
    watch = Untouched([torch.optim.SGD([weight])], lambda _: True)
    assert watch.stepped()
    watch.backward()
    return watch


def test_other_memory_with_the_same_values_is_no_change(weight: Any, watch: Untouched) -> None:
    weight.data = weight.data.t().contiguous().t()
    watch.before_step()


def test_weights_that_are_doubled_are_seen(weight: Any, watch: Untouched) -> None:
    """A sum that wraps around stays the same if the exponents of so many elements grow by one."""
    weight.data.mul_(2)
    with pytest.raises(UsageError, match="between the backward pass and the step"):
        watch.before_step()


def test_a_loop_that_seldom_changes_them_between_backward_passes_goes_on(
    weight: Any, watch: Untouched, caplog: pytest.LogCaptureFixture
) -> None:
    """As one does that skips a step, but normalises the weights all the same. In each iteration it would be SAM."""
    for _ in range(2):
        for _ in range(2):
            weight.data.add_(1)
            watch.backward()
        watch.stepped()
        watch.backward()
    (said,) = caplog.messages
    assert "If the loop has skipped it" in said
    weight.data.add_(1)
    with pytest.raises(UsageError, match="between two backward passes"):
        watch.forward()


def clamped(weight: Any) -> None:
    weight.clamp_(-9, 9)


def shortened(weight: Any) -> None:
    """Change it in each forward pass, as an embedding with ``max_norm`` does, and layers of EDM2."""
    if weight.requires_grad:
        weight.mul_(0.9)


def moved(weight: Any) -> None:
    """Move it to other memory, as ``flatten_parameters()`` of an LSTM does on a CUDA device."""
    weight.set_(weight.clone())


@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize("write", [clamped, moved, shortened])
def test_accumulated_gradients_and_layers_that_write_to_their_weights_are_no_change_by_the_loop(
    start: Callable[..., Job], monkeypatch: pytest.MonkeyPatch, write: Any, on_host: bool
) -> None:
    model = Net()
    job = start(model, torch.optim.Adam(model.parameters()))
    monkeypatch.setattr(job.adapter._attachment._untouched, "_on_host", lambda _: on_host)

    def written(layer: nn.Module, _args: Any) -> None:
        with torch.no_grad():
            for weight in layer.parameters():
                write(weight)

    job.model.register_forward_pre_hook(written)
    for _ in range(3):
        for _ in range(2):
            job.model(torch.randn(6, 4)).square().mean().backward()
        job.optimizer.step()
    assert job.gate.version == 3


class TwoTasks(nn.Module):
    """A network with two heads, of which each batch uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.heads = nn.Linear(6, 8), nn.ModuleList([nn.Linear(8, 3), nn.Linear(8, 2)])

    def forward(self, x: Tensor, task: int) -> Any:
        return self.heads[task](self.trunk(x))


@pytest.mark.supports("parameters that not every step uses")
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("at_the_end", [True, False])
@goes_on
def test_heads_that_are_trained_in_turns(set_to_none: bool, at_the_end: bool) -> Program:
    """A gradient of zeros lets the optimizer go on with the momentum of the other head; it skips one that is None."""
    model = TwoTasks()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(number: int) -> Any:
        loss = model(data(), number // 2 % 2).square().mean()
        if not at_the_end:
            optimizer.zero_grad(set_to_none)
        loss.backward()
        optimizer.step()
        if at_the_end:
            optimizer.zero_grad(set_to_none)
        return loss

    return Program(model, optimizer, step)


@pytest.mark.supports("checkpoints of the program's own")
@pytest.mark.parametrize("other", [True, False])
def test_weights_that_are_loaded_over_restored_ones_are_told_once(
    start: Callable[..., Job], other: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Not those that are equal: a DistributedDataParallel that is made now writes them once more."""
    model = Net()
    job = start(model, torch.optim.Adam(model.parameters()))
    job.backward()
    job.optimizer.step()
    job.load(job.save(1))
    job.gate.open()
    model.load_state_dict({name: 2 * t if other else t.clone() for name, t in model.state_dict().items()})
    for _ in range(2):
        job.backward()
        job.optimizer.step()
    said = [text for text in caplog.messages if "weights were changed between ttp.restore() and the first" in text]
    assert len(said) == other


def test_a_step_before_the_first_forward_pass_is_no_other_weights(
    weight: Any, watch: Untouched, caplog: pytest.LogCaptureFixture
) -> None:
    """A loop may call other methods of the model than ``forward``, and ``forward`` itself only later."""
    watch.restored(False)
    watch.before_step()
    weight.data.add_(1)
    watch.stepped()
    watch.forward()
    assert not caplog.messages
