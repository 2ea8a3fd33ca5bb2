"""Losses with a state of their own, which they change in the forward pass."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.adapters.torch.going_on import Program, assert_goes_on_with_its_bits, data, net
from tests.adapters.torch.stub_processor import Loop
from ttp.adapters.torch.loop import followers
from ttp.errors import UsageError


class Centred(nn.Module):
    """A loss with a running center that it replaces, as DINO's."""

    center: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(1, 3))

    def forward(self, x: Tensor) -> Any:
        loss = (x - self.center).square().mean()
        self.center = 0.9 * self.center + 0.1 * x.detach().mean(0, keepdim=True)
        return loss


@pytest.mark.supports("losses with a state of their own")
@pytest.mark.parametrize("small", [True, False])
def test_a_module_beside_the_model_that_changes_in_the_forward_pass_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: bool
) -> None:
    """It is read in place, when the center may be that of the next version already. An average is not refused."""
    if not small:
        monkeypatch.setattr(followers, "_COPIED_BYTES_MAX", 0)
    model, loss = net(), Centred()
    average: Any = torch.optim.swa_utils.AveragedModel(model, use_buffers=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    Loop(tmp_path, model, optimizer, extra_state={"loss": loss, "average": average}).start(tmp_path / "pages")

    def step(forward: Callable[[Tensor], Any]) -> None:
        optimizer.zero_grad()
        forward(model(data())).backward()
        optimizer.step()
        average.update_parameters(model)

    step(loss)
    for _ in range(3):
        step(Tensor.sum)
    with pytest.raises(UsageError, match=r"changes extra_state\['loss'\]\.center between .* within model= instead"):
        step(loss)


@pytest.mark.supports("losses with a state of their own")
def test_a_loss_within_the_model_comes_back(tmp_path: Path) -> None:
    def make() -> Program:
        model, loss = net(), Centred()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

        def step(_number: int) -> Any:
            optimizer.zero_grad()
            found = loss(model(data()))
            found.backward()
            optimizer.step()
            return found

        return Program(nn.ModuleDict({"model": model, "loss": loss}), optimizer, step)

    assert_goes_on_with_its_bits(tmp_path, make)
