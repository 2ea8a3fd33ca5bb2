"""How many inputs are tried. The default suite tries the same few hundred inputs each time; ``-m slow`` tries
new ones.
"""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

Body = Callable[[Any], None]


def fuzz(inputs: st.SearchStrategy[Any], examples: int, campaign: int = 100) -> Callable[[Body], Any]:
    """Make a test that calls its body with ``examples`` of ``inputs``; ``campaign`` times as many with ``-m slow``."""

    def make(body: Body) -> Any:
        def once(data: Any) -> None:
            body(data)

        def quick() -> None:
            settings(**_PLAIN, max_examples=examples, derandomize=True, database=None)(given(inputs)(once))()

        def long() -> None:
            settings(**_PLAIN, max_examples=examples * campaign, print_blob=True, database=None)(given(inputs)(once))()

        campaigns = pytest.param(long, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])

        @pytest.mark.parametrize("search", [quick, campaigns], ids=["quick", "long"])
        def test(search: Callable[[], None]) -> None:
            search()

        test.__name__, test.__doc__ = body.__name__, body.__doc__
        return test

    return make


_PLAIN: dict[str, Any] = {"deadline": None, "suppress_health_check": list(HealthCheck)}


@contextmanager
def at_most(mebibytes: float) -> Iterator[None]:
    """Fail if the code inside allocates more of Python's memory at once."""
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1] / (1 << 20)
    finally:
        tracemalloc.stop()
    assert peak <= mebibytes, f"{peak:.1f} MiB"


def jsonable(value: Any) -> None:
    """Fail if ``value`` cannot be written as JSON."""
    json.loads(json.dumps(value, default=str))
