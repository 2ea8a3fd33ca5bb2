"""The state that modules keep beside their tensors: captured with each version, and kept for a few versions."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

from ttp.adapters.megatron.extra_states import ExtraStates
from ttp.adapters.megatron.param_sync import ParamSyncs
from ttp.errors import ConfigError


class Scaled(nn.Module):
    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state

    def get_extra_state(self) -> Any:
        if isinstance(self.state, Exception):
            raise self.state
        return self.state


def test_each_version_has_the_state_of_its_moment() -> None:
    module = Scaled(torch.zeros(2))
    states = ExtraStates({"a": module}, ["a"])
    for version in range(1, 8):
        module.state += 1
        states.take(version)
    assert [float(states.of(version)["a"][0][0]) for version in (5, 6, 7)] == [5, 6, 7]


def test_a_state_that_appears_late_is_found_at_once_and_written_as_megatron_expects_it() -> None:
    none, empty, late = Scaled(None), Scaled(torch.empty(0)), Scaled(None)
    states = ExtraStates({"none": none, "empty": empty, "late": late, "copy": Scaled(1)}, ["none", "empty", "late"])
    for version in range(50):
        states.take(version)
    late.state = torch.ones(1)  # FP8 is switched on after a warm-up
    states.take(50)
    assert states.of(50) == {"none": (None,), "empty": (None,), "late": (torch.ones(1),)}


def test_a_state_that_needs_unpickling_is_refused() -> None:
    own = Chunk(overlap=False)  # not a BytesIO: Megatron, where imported, tells torch to load that one
    states = ExtraStates({"mlp._extra_state/shard_0_2": Scaled(own)}, [])
    with pytest.raises(ConfigError, match=r"mlp._extra_state/shard_0_2.*Scaled gives a Chunk.*a tensor of bytes"):
        states.take(1)


def test_a_module_that_fails_does_not_hurt_the_training(caplog: pytest.LogCaptureFixture) -> None:
    module = Scaled(7)
    states = ExtraStates({"a": module}, ["a"])
    states.take(1)
    module.state = ValueError("no")
    with caplog.at_level(logging.WARNING):
        states.take(2)
        states.take(3)
        assert states.of(3) == {"a": (7,)}
    assert [record.getMessage() for record in caplog.records] == [
        "get_extra_state() failed: checkpoints may hold states of another version",
        "the checkpoint of version 3 holds the extra states of version 1",
    ]


class Chunk(nn.Module):
    """A stand-in for Megatron's DistributedDataParallel in a gather."""

    def __init__(self, overlap: bool) -> None:
        super().__init__()
        self.ddp_config = type("Config", (), {"overlap_param_gather": overlap})()
        self.weight = nn.Parameter(torch.ones(1))

    def start_param_sync(self) -> None: ...


@pytest.mark.parametrize("overlap", [False, True])
def test_gathers_are_put_off_while_the_optimizers_step_and_nothing_is_replaced(overlap: bool) -> None:
    chunk = Chunk(overlap)
    syncs, seen = ParamSyncs([chunk]), []
    first, last = (torch.optim.SGD(chunk.parameters(), lr=0.1) for _ in range(2))
    syncs.attach([first, last])
    assert "start_param_sync" not in vars(chunk)
    for optimizer in (first, last):
        optimizer.step()
        seen.append(chunk.ddp_config.overlap_param_gather)
    assert seen == [True, overlap], "the last one gathers, unless Megatron does it later anyway"
    first.step()
    syncs.detach()
    assert chunk.ddp_config.overlap_param_gather is overlap
