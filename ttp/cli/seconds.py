"""Options that take seconds."""

from __future__ import annotations

import math
from typing import Any

import typer

SECONDS_MAX = 1e7
"""Most seconds that an option takes, 115 days: the system and gRPC refuse to wait for much longer."""


def seconds(flag: str, *, least: float = 0.1, most: float = SECONDS_MAX, about: str) -> Any:
    """Return an option that takes seconds: a number from ``least`` to ``most``, which NaN is not."""
    return typer.Option(flag, min=least, max=most, callback=_number, help=about)


def _number(value: float | None) -> float | None:
    if value is not None and math.isnan(value):
        raise typer.BadParameter("nan is not a number of seconds")
    return value
