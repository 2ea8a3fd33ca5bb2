"""Nested states become flat entries by the rules of stock torch, and come back as they were."""

from __future__ import annotations

import io
from collections import OrderedDict
from enum import Enum, IntEnum
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from ttp.adapters.torch.saving.flatten_state import dump, leaves, put, whole

T = torch.ones(2)
VALUES = st.recursive(
    st.sampled_from([T, 1, "x", None, (T, 1), (1, 2)]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "b", "c"]), inner, max_size=3),
    max_leaves=12,
)
STATES = st.dictionaries(st.sampled_from(["p", "q", "r"]), VALUES, max_size=3)


@given(STATES)
def test_the_rules_are_those_of_stock_torch(state: dict[str, Any]) -> None:
    stock, paths = flatten_state_dict(state)
    ours = {".".join(map(str, path)): (path, value) for path, _, value in leaves(state)}
    assert {key: path for key, (path, _) in ours.items()} == paths
    assert all(ours[key][1] is stock[key] for key in ours)


def test_put_is_the_inverse_and_keeps_integer_keys_apart_from_indices() -> None:
    state = {"a": [T, {0: T, "1": 2}, [3]], "b": {7: {8: "x"}}, "c": (1, 2), 5: T, "d": {(1, 2): T, None: {3: T}}}
    state |= {"e": {1: T, "1": 2}, "f": {True: 1}}
    rebuilt: dict[str, Any] = {}
    for path, int_keys, value in leaves(state):
        put(rebuilt, path, value, int_keys)
    assert rebuilt == state


@pytest.mark.parametrize(
    "value",
    [
        1,
        1.5,
        None,
        "x",
        True,
        (0.9, 0.999),
        ["a", "b"],
        {"k": [1, (2,)]},
        {1, 2},
        2**80,
        OrderedDict(a=1),
        torch.float16,
    ],
)
def test_plain_values_come_back_as_they_were(value: Any) -> None:
    data = dump(value, torch.Tensor.cpu)
    assert data is not None
    back = torch.load(io.BytesIO(data), weights_only=True)
    assert (back, type(back)) == (value, type(value))


def test_numpy_scalars_become_plain_numbers() -> None:
    data = dump({"lr": numpy.float64(0.1), "n": (numpy.int64(3),), numpy.int64(4): 5}, torch.Tensor.cpu)
    assert data is not None
    assert torch.load(io.BytesIO(data), weights_only=True) == {"lr": 0.1, "n": (3,), 4: 5}


class Odd:
    """It cannot be pickled."""

    def __reduce__(self) -> Any:
        raise KeyError("no")


class Mode(str, Enum):
    """A text of a class of its own."""

    FAST = "fast"


class Level(IntEnum):
    """A number of a class of its own."""

    LOW = 1


@pytest.mark.parametrize("value", [lambda: 1, Odd(), print, [numpy.ones(3)], Mode.FAST, Level.LOW, {T: T}, [{T: 1}]])
def test_what_torch_does_not_load_safely_is_refused(value: Any) -> None:
    """With it the whole checkpoint could not be restored."""
    assert dump(value, torch.Tensor.cpu) is None


BASE = torch.arange(24, dtype=torch.bfloat16).reshape(4, 6)


@pytest.mark.parametrize(
    ("tensor", "copied"),
    [
        (BASE, False),
        (BASE.t(), False),
        (BASE[1:3], False),
        (BASE[:, 1:3], True),
        (BASE[0, 0], False),
        (torch.ones(1).expand(5), True),
        (torch.ones(0, 3), False),
        (BASE[2:2], True),
        (torch.tensor(2.5), False),
        (torch.ones(2, dtype=torch.complex64).conj(), True),
        (torch.tensor([True, False, True])[1:], False),
    ],
)
def test_a_tensor_is_reduced_to_its_own_bytes_without_a_copy_where_possible(tensor: Any, copied: bool) -> None:
    alone = whole(tensor)
    assert torch.equal(alone, tensor) and alone.dtype == tensor.dtype and alone.shape == tensor.shape
    assert alone.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    assert copied or alone.data_ptr() == tensor.data_ptr()
