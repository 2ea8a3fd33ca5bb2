"""Damaged files of ttp: good files with random changes."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

from hypothesis import strategies as st

from ttp.cli.main import main

ODD_VALUES: list[Any] = [
    None, True, -1, 0, 1, 2**31, 2**63, 10**400, 0.5, -0.0, 1e300, "", "x", "\ud800", "\0", "../..", "a" * 300,
    "\x1b[2J\n", [], [[]], [1, "2", None], {}, {"a": 1}, {"1": "x", "²": 1, "9" * 30: 2},
]  # fmt: skip
ODD = (
    st.sampled_from(ODD_VALUES) | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=9)
)


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from _places(inner, (*path, key))


@st.composite
def changed_json(draw: st.DrawFn, good: Any) -> Any:
    """Return ``good`` with one to three of its values replaced, removed, or doubled."""
    value = json.loads(json.dumps(good))
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(list(_places(value))))
        if not path:
            return deepcopy(draw(ODD))
        owner = value
        for key in path[:-1]:
            owner = owner[key]
        what = draw(st.sampled_from(["replace", "replace", "remove", "double"]))
        if what == "replace":
            owner[path[-1]] = deepcopy(draw(ODD))
        elif what == "remove":
            del owner[path[-1]]
        elif isinstance(owner, list):
            owner.append(deepcopy(owner[path[-1]]))
    return value


@st.composite
def changed_bytes(draw: st.DrawFn, good: bytes) -> bytes:
    """Return ``good`` with some bytes changed, cut out, put in, or with its end cut off."""
    data = bytearray(good)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        what = draw(st.sampled_from(["set", "set", "cut", "insert", "end"]))
        if what == "set" and data:
            data[at] = draw(st.integers(0, 255))
        elif what == "cut":
            del data[at : at + draw(st.integers(1, 16))]
        elif what == "insert":
            data[at:at] = draw(st.binary(max_size=16))
        elif what == "end":
            del data[at:]
    return bytes(data)


def ttp(*arguments: str) -> tuple[int, str, str]:
    """Run a command in this process. Its output must be valid UTF-8; an unexpected error is an exception."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(arguments)
    said, complained = (stream.buffer.getvalue().decode() for stream in (out, err))
    assert code in (0, 1, 64), (code, complained)
    assert code == 0 or said or complained.strip(), arguments
    assert complained.count("\n") <= 1, complained
    if "--json" in arguments and said:
        json.loads(said, parse_constant=_no_constant)
    else:
        assert not set(said) & {"\x1b", "\0", "\x07"}, said
    return code, said, complained


def _no_constant(text: str) -> None:
    raise AssertionError(f"{text} is no JSON")
