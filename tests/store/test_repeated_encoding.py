"""A state that is encoded again and again gives the result of ``encode``, whatever has changed since the last time."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.store.test_encoding import Foo, Odd, numpy, same, torch, values
from ttp.store.encoding import EncodingError, decode, encode
from ttp.store.repeated_encoding import RepeatedEncoder


@settings(max_examples=80, deadline=None)
@given(st.lists(values(), min_size=1, max_size=4))
def test_it_says_what_encode_says(states: list[Any]) -> None:
    encoder = RepeatedEncoder("state")
    for state in (each for pair in zip(states, states, strict=True) for each in pair):
        assert encoder.encode(state) == encode(state)
        assert encoder.apart == []


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.integers(0, 3), min_size=14, max_size=20), min_size=2, max_size=6))
def test_long_lists_that_change_in_place(states: list[list[int]]) -> None:
    encoder, live = RepeatedEncoder("state"), list[int]()
    for state in states:
        live[:] = state
        nested = {"a": {"b": live}, "c": [live, {"d": 1.0}]}
        assert encoder.encode(nested) == encode(nested)


@pytest.mark.parametrize("later", [True, 1.0, numpy.ones(2)], ids=["bool", "float", "array"])
@pytest.mark.parametrize("first", [1, None])
def test_values_that_become_of_another_type(first: Any, later: Any) -> None:
    encoder = RepeatedEncoder("state")
    for state in ({"long": [value] * 20, "alone": value} for value in (first, later)):
        assert encoder.encode(state) == encode(state)


@pytest.mark.parametrize("kind", [dict, OrderedDict])
def test_large_arrays_are_left_to_the_caller(kind: Any) -> None:
    tensor, array = torch.arange(20_000.0), numpy.arange(10_000)
    state = kind(t=tensor, inside={"a": [array, 1]}, small=torch.zeros(2), turned=tensor.view(2, -1).t())
    encoder = RepeatedEncoder("state")
    data = encoder.encode(state)
    assert len(encoder.apart) == 2 and encoder.apart[0] is tensor and encoder.apart[1] is array
    assert same(
        decode(data, [each.numpy().tobytes() if each is tensor else each.tobytes() for each in encoder.apart]),
        state,
    )
    with pytest.raises(EncodingError):
        decode(data)


def test_what_cannot_be_stored_is_named_by_its_path() -> None:
    encoder = RepeatedEncoder("state")
    with pytest.raises(EncodingError, match=r"state\['a'\]\[1\]: object of type"):
        encoder.encode({"a": [1, Odd()]})
    assert encoder.encode({"a": 1}) == encode({"a": 1}), "and it goes on"


def test_what_a_state_dict_says_about_itself_may_change() -> None:
    state = {"model": torch.nn.Sequential(torch.nn.BatchNorm1d(2)).state_dict()}
    encoder, live = RepeatedEncoder("state"), state["model"]._metadata["0"]
    for version in (2, 3, torch.ones(2), torch.zeros(2), 3):
        live["version"] = version
        assert encoder.encode(state) == encode(state)
    live["version"] = Foo()
    with pytest.raises(EncodingError, match=r"state\['model'\]\._metadata\['0'\]\['version'\]: object of type .*Foo"):
        encoder.encode(state)
    state["model"]._metadata = torch.ones(2)
    assert encoder.encode(state) == encode(state), "what is no dict is not read by load_state_dict()"
