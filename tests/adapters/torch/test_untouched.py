"""What counts as a change of the weights between a backward pass and the step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

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
