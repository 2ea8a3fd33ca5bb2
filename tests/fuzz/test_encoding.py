"""Damaged encoded state and pages: refused, and the memory used is bounded by the bytes read."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest
import torch  # noqa: F401 - before memory is counted
from hypothesis import strategies as st

from tests.fuzz.files import changed_bytes
from tests.fuzz.places import place
from tests.fuzz.profile import at_most, fuzz
from tests.store.test_encoding import extension, forged
from ttp.processor.local_state.page_file import MAGIC
from ttp.processor.local_state.page_reader import Page, read_page
from ttp.store.encoding import EncodingError, decode, encode

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9) | st.binary(max_size=9) | st.just(1j),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3)
        | st.frozensets(st.integers(), max_size=3)
    ),
    max_leaves=10,
)
ARRAYS: list[list[Any]] = [
    ["<f4", [2**62, 0], b""],
    ["<f4", [2**40], b"xxxx"],
    ["<f4", [3] * 1_000_000, b""],
    ["<f4", [2**63] * 400_000, b""],
    ["<f4", [-1, -4], b"x" * 16],
    ["S2000000000", [0], b""],
    ["O", [1], b"12345678"],
    ["i4,O", [1], b"12345678" * 2],
    ["(100000000,)f8", [0], b""],
    [["a", "b"], [0], b""],
    [{"names": ["a"], "formats": ["O"]}, [0], b""],
    [5, [1], b"12345678"],
    ["<f4", "ab", b""],
    ["<f4"],
]


def ask(data: bytes) -> Any:
    """Return the decoded value; None: it was refused."""
    try:
        return decode(data)
    except EncodingError as problem:
        assert str(problem)
        return None


@fuzz(st.tuples(VALUES, st.data()), examples=125)
def test_changed_bytes_behind_the_checksum(drawn: Any) -> None:
    value, data = drawn
    good = encode(value)
    repr(ask(forged(data.draw(changed_bytes(good[12:])))))


@fuzz(st.binary(max_size=80), examples=75)
def test_bytes_that_are_no_state(data: bytes) -> None:
    assert ask(data) is None
    repr(ask(forged(data)))


@pytest.mark.parametrize("code", [16, 17, 32], ids=["array", "scalar", "tensor"])
@pytest.mark.parametrize("index", range(len(ARRAYS)))
def test_arrays_that_promise_too_much(code: int, index: int) -> None:
    fields = ARRAYS[index]
    if code == 32:
        fields = ["float32" if fields[0] == "<f4" else fields[0], *fields[1:], False, False]
    with at_most(120):
        ask(forged(extension(code, fields)))


def test_a_state_of_many_small_things_is_a_multiple_of_its_bytes() -> None:
    data = forged(msgpack.packb([[]] * 100_000))
    with at_most(100 * len(data) / (1 << 20)):
        assert len(ask(data)) == 100_000


# --------------------------------------------------------------------------------------------------------------- pages


@fuzz(st.binary(max_size=300), examples=50, campaign=50)
def test_a_page_of_noise(data: bytes) -> None:
    assert isinstance(read(data), str) and isinstance(read(MAGIC + data), str)


def read(data: bytes) -> Page | str:
    pages = place("pages")
    pages.chmod(0o700)
    file = pages / "rank_3.page"
    file.unlink(missing_ok=True)
    file.write_bytes(data)
    file.chmod(0o600)
    return read_page(pages, 3, 6, 2)
