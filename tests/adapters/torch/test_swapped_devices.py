"""Bytes of the weights that are noted on a device, which may be behind its host, or in another form."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.adapters.torch.fake_device import Watching
from tests.adapters.torch.fake_runtime import FakeRuntime
from ttp.adapters.torch.loop import swapped as swapped_module
from ttp.adapters.torch.loop.swapped import Swapped


def updates(device: Any, parameter: nn.Parameter, count: int, hangs_in: int = -1) -> Iterator[tuple[Swapped, bool]]:
    """Make updates on the device, which hangs from the one with this number on.

    Yields what notes the weights, and what it has returned after the update.
    """
    device.device.put(parameter)
    optimizer = torch.optim.SGD([parameter], lr=0.5, foreach=False)
    with Watching(device.device):
        swapped = Swapped([optimizer], {}, [device])
        parameter.grad = device.device.put(torch.ones(8))
        for number in range(count):
            swapped.used()
            if number == hangs_in:
                device.device.run()
                device.device.hang()
            optimizer.step()
            yield swapped, swapped.updated()
    assert not device.device.sins


def test_on_a_device_the_bytes_are_those_that_the_device_has() -> None:
    """The host has taken the averages out again, and the device has not even put them in."""
    device: Any = FakeRuntime()
    parameter, average = nn.Parameter(torch.ones(8)), device.device.put(torch.zeros(8))
    *_, (swapped, _) = updates(device, parameter, 7)
    with Watching(device.device):
        device.device.run()
        with device.device.no_waiting():
            assert not swapped.holds_others()
            kept = parameter.detach().clone()
            device.device.run()
            device.device.hang()
            parameter.data.copy_(average)
            assert not swapped.holds_others(), "queued only"
            device.device.release()
            device.device.run()
            assert swapped.holds_others()
            device.device.hang()
            parameter.data.copy_(kept)
            assert swapped.holds_others(), "taken out on the host only"
    assert not device.device.sins


def test_a_host_that_is_ahead_in_the_first_updates_suspects_nothing() -> None:
    """The device hangs in the second step; what the host has queued to note since has not arrived."""
    device: Any = FakeRuntime()
    for number, (swapped, _) in enumerate(updates(device, nn.Parameter(torch.ones(8)), 4, hangs_in=1)):
        with device.device.no_waiting():
            assert not swapped.holds_others(), number


@pytest.mark.parametrize("behind", [True, False])
def test_ranks_are_compared_by_what_the_device_has_done(behind: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host has queued the first updates; until the device has made them there is nothing to compare."""
    monkeypatch.setattr(swapped_module, "_EARLY_S", 0.01)
    device: Any = FakeRuntime()
    parameter = nn.Parameter(torch.ones(8))
    *_, (swapped, last) = updates(device, parameter, 5, hangs_in=1 if behind else -1)
    assert last
    with Watching(device.device), device.device.no_waiting():
        if behind:
            with pytest.raises(TimeoutError, match="first updates"):
                swapped.early()
            device.device.release()
        device.device.run()
        ((found, noted),) = swapped.early()
    assert found is parameter
    made = torch.frombuffer(bytearray(noted), dtype=torch.float32).view(5, 8)
    assert made[:, 0].tolist() == [0.5, 0.0, -0.5, -1.0, -1.5]
    assert not device.device.sins


@pytest.mark.parametrize(
    "form",
    [
        lambda p: p.contiguous(memory_format=torch.channels_last),
        lambda p: p.half(),
        lambda p: torch.empty(0),
        lambda p: p[::2],
    ],
)
@pytest.mark.parametrize("on_device", [False, True])
def test_weights_that_take_another_form_stop_no_training(form: Callable[[Tensor], Tensor], on_device: bool) -> None:
    """A model may change its memory format, and evaluations may run in another dtype."""
    device: Any = FakeRuntime()
    parameter = nn.Parameter(torch.arange(16.0).view(2, 2, 2, 2))
    with Watching(device.device):
        if on_device:
            device.device.put(parameter)
        swapped = Swapped([torch.optim.SGD([parameter], lr=0.1)], {}, [device])
        kept = parameter.data
        parameter.data = form(kept)
        if on_device:
            device.device.put(parameter)
        swapped.evaluates()
        swapped.holds_others()
        parameter.data = kept
        swapped.used()
        swapped.updated()
        assert not swapped.holds_others()
        parameter.data = form(kept)
        for _ in range(6):
            swapped.used()
            swapped.updated()
        device.device.run()
        assert not swapped.holds_others()
