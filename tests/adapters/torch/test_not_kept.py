"""A state that could not be put into new objects as it was is not kept, or not handed over; the text says why."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from ttp.adapters.torch.restoring.kept import Kept, UnlikeError, hand_over, keep
from ttp.adapters.torch.saving.piece_index import IndexEntry
from ttp.adapters.torch.sharding.names import ModelNames
from ttp.core.layout import Version
from ttp.core.rank.kept_state import Origin
from ttp.testing.digests import digest


def net(*, tied: bool = False) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    if tied:
        model[1].weight = model[0].weight
    return model


def stepped(model: nn.Module, kind: Any = torch.optim.AdamW) -> Any:
    optimizer = kind(model.parameters(), lr=0.1)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    return optimizer


def kept(model: nn.Module, optimizer: Any) -> Kept:
    return keep(Origin(Version(1), "incident"), ModelNames(model, optimizer), optimizer)


def take(state: Kept, model: nn.Module, optimizer: Any) -> None:
    """Hand the state over to new objects, as when the checkpoint has an entry for each of its values."""
    values = [(name, key) for name, found in state.optimizer.items() for key in found]
    saved = [IndexEntry(("optim", "state", name, key), "file", 0, 0) for name, key in values]
    hand_over(state, ModelNames(model, optimizer), optimizer, saved)


def of_nobody(optimizer: Any, _weight: Any) -> None:
    optimizer.state["seen"] = {"steps": 3}


def numbered(optimizer: Any, weight: Any) -> None:
    optimizer.state[weight][0] = torch.ones(2)


def overlapping(optimizer: Any, weight: Any) -> None:
    optimizer.state[weight]["mean"] = torch.zeros(1).expand(3)


@pytest.mark.parametrize(
    ("add", "why"),
    [
        (of_nobody, "belongs to no parameter"),
        (numbered, "keys that are not strings"),
        (overlapping, "a tensor is not plain and dense"),
    ],
)
def test_what_an_optimizer_keeps_in_another_form_is_not_kept(add: Callable[[Any, Any], None], why: str) -> None:
    """The survivor reads the checkpoint instead, as a new process does."""
    model = net()
    optimizer = stepped(model)
    kept(model, optimizer)
    add(optimizer, model[0].weight)
    with pytest.raises(UnlikeError, match=why):
        kept(model, optimizer)


@pytest.mark.usefixtures("world_of_one")
def test_an_optimizer_that_sends_updated_weights_is_not_kept() -> None:
    """After a death in the exchange the survivors may hold weights of two versions."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch gives one to itself
        from torch.distributed.optim import ZeroRedundancyOptimizer
    model = net()

    def zero(parameters: Any, lr: float) -> Any:
        return ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, lr=lr)

    with pytest.raises(UnlikeError, match="ZeroRedundancyOptimizer shards its state and exchanges updated weights"):
        kept(model, stepped(model, zero))


class Extra(nn.Linear):
    """Has a state of its own beside its tensors, which only a checkpoint holds."""

    def get_extra_state(self) -> int:
        return 1

    def set_extra_state(self, state: int) -> None:
        pass


@pytest.mark.parametrize(
    ("new", "why"),
    [
        (lambda: net(tied=True), "other parameters were tied"),
        (lambda: nn.Sequential(nn.Linear(3, 3), Extra(3, 3)), "a module has an extra state"),
    ],
)
def test_another_model_with_the_same_names_and_shapes_gets_nothing(new: Callable[[], nn.Module], why: str) -> None:
    """One tensor cannot hold what two have held, and an extra state is not in memory."""
    old, other = net(), new()
    state, optimizer, before = (
        kept(old, stepped(old)),
        torch.optim.AdamW(other.parameters()),
        digest(other.state_dict()),
    )
    with pytest.raises(UnlikeError, match=why):
        take(state, other, optimizer)
    assert digest(other.state_dict()) == before and not optimizer.state


@pytest.mark.usefixtures("world_of_one")
def test_moments_of_a_sharded_model_are_distributed_again() -> None:
    """They are kept as this rank's part: the new parameter tells how they are cut. Plain values stay as they are."""
    old, new, whole = net(), net(), net()
    fully_shard(old)
    fully_shard(new)
    optimizer, again, plain = stepped(old), torch.optim.AdamW(new.parameters()), torch.optim.AdamW(whole.parameters())
    optimizer.state[next(old.parameters())]["restarts"] = 2
    state = kept(old, optimizer)
    with pytest.raises(UnlikeError, match="a parameter is no longer distributed"):
        take(state, whole, plain)
    assert not plain.state
    take(state, new, again)
    pairs: Any = zip(new.parameters(), old.parameters(), strict=True)
    for mine, its in pairs:
        got, expected = again.state[mine], optimizer.state[its]
        assert got.keys() == expected.keys() and got.get("restarts") == expected.get("restarts")
        assert got["exp_avg"].placements == mine.placements and torch.equal(mine.to_local(), its.to_local())
        assert torch.equal(got["exp_avg"].to_local(), expected["exp_avg"].to_local()) and got["exp_avg"].any()
