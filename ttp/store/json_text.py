"""Parses JSON of unknown origin into values that are safe to print, copy and compare."""

from __future__ import annotations

import json
import math
from typing import Any

DEPTH_MAX = 64
"""Most levels of nested containers; ttp writes a handful. Much deeper values overflow the stack when they are printed,
copied or compared.
"""


def parse_json(text: str | bytes) -> Any:
    """Parse ``text`` and return its value.

    Raises:
        ValueError: the text is no JSON, holds NaN or an infinity, or is nested deeper than ``DEPTH_MAX``.
    """
    try:
        value = json.loads(text, parse_float=_finite, parse_constant=_finite)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    level = [value]
    for _ in range(DEPTH_MAX):
        level = [inner for item in level for inner in _parts(item) if isinstance(inner, (dict, list))]
        if not level:
            return value
    raise ValueError(f"it is nested deeper than {DEPTH_MAX}")


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text} is not a finite number")
    return value


def _parts(item: Any) -> Any:
    if isinstance(item, dict):
        return item.values()
    return item if isinstance(item, list) else ()
