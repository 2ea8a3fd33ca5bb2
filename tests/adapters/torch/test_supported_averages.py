"""Averages of the weights are saved and restored with their bits; see ``test_supported``."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.adapters.torch.going_on import Program, adamw, assert_goes_on_with_its_bits, net, plainly

supports = pytest.mark.supports


@supports("EMA")
@pytest.mark.parametrize("use_buffers", [True, False])
def test_an_averaged_model(tmp_path: Path, use_buffers: bool) -> None:
    def make() -> Program:
        from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

        model = net(nn.BatchNorm1d(8))
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=use_buffers)
        optimizer = adamw(model)
        after = functools.partial(average.update_parameters, model)
        return Program(model, optimizer, plainly(model, optimizer, after=after), extra_state={"ema": average})

    assert_goes_on_with_its_bits(tmp_path, make)


@supports("EMA")
def test_statistics_in_an_average_are_told() -> None:
    """Each rank computes them from its own batches, and a checkpoint has those of one rank."""
    from ttp.adapters.torch.local_state.extra_state import ExtraState

    plain, synced = net(nn.BatchNorm1d(8)), nn.SyncBatchNorm.convert_sync_batchnorm(net(nn.BatchNorm1d(8)))
    (note,) = ExtraState({"ema": plain}).notes()
    assert note.startswith("extra_state['ema'] holds statistics of BatchNorm (3), which differ between ranks")
    assert ExtraState({"ema": synced}).notes() == ExtraState({"ema": net()}).notes() == []
    (note,) = ExtraState({"hits": Hits()}).notes()
    assert note.startswith("extra_state['hits'] is a module without parameters. Modules count as equal on all ranks")


class Hits(nn.Module):
    """A metric."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(3))


class OwnAverage:
    """An average of the weights, by name, that is not a module."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.shadow = model, {name: p.detach().clone() for name, p in model.named_parameters()}

    @torch.no_grad()
    def update(self) -> None:
        for name, parameter in self.model.named_parameters():
            self.shadow[name].lerp_(parameter, 0.1)

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow = state["shadow"]


@supports("EMA")
def test_an_average_that_is_no_module(tmp_path: Path) -> None:
    """It is changed after the step: step_done() says when."""

    def make() -> Program:
        model = net()
        average, optimizer = OwnAverage(model), adamw(model)
        program = Program(model, optimizer, lambda _number: None, extra_state={"ema": average})

        def after() -> None:
            average.update()
            program.step_done()

        program.step = plainly(model, optimizer, after=after)
        return program

    assert_goes_on_with_its_bits(tmp_path, make)
