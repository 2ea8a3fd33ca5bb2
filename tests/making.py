"""A context for fixtures that make several objects and end them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def making(make: Callable[..., Any], end: Callable[[Any], object]) -> Iterator[Callable[..., Any]]:
    """Yield a ``make`` that remembers what it has made; when the block ends, ``end`` is called with each."""
    made: list[Any] = []

    def one(*args: Any, **kwargs: Any) -> Any:
        made.append(make(*args, **kwargs))
        return made[-1]

    try:
        yield one
    finally:
        for each in made:
            end(each)
