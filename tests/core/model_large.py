"""``python -m tests.core.model_large [NUMBER ...]``: explores larger worlds than the tests do; see ``model``."""

from __future__ import annotations

import sys
import time
from typing import Any

from tests.core.model import Model
from ttp.testing.scenario import grid

LARGE: list[tuple[int, int, int, frozenset[int], dict[str, Any]]] = [
    (1, 2, 1, frozenset(), {"rival": True, "breaks": 1, "takeovers": 1}),
    (1, 2, 1, frozenset(), {"rival": True, "breaks": 2}),
    (1, 2, 0, frozenset(), {"rival": True, "breaks": 2, "takeovers": 1}),
    (1, 2, 1, frozenset(), {"rival": True, "breaks": 1, "repeats": 1}),
    (1, 3, 1, frozenset(), {"rival": True, "takeovers": 1}),
    (1, 3, 0, frozenset(), {"rival": True, "breaks": 1}),
    (2, 2, 0, frozenset(), {"rival": True, "breaks": 1, "eager": True}),
    (1, 2, 2, frozenset(), {"breaks": 1, "takeovers": 1}),
    (1, 3, 2, frozenset(), {"repeats": 1, "eager": True}),
    (1, 3, 1, frozenset(), {"breaks": 1, "eager": True}),
    (2, 2, 1, frozenset(), {"gradients": True, "preimages": True, "repeats": 1, "eager": True}),
    (2, 2, 1, frozenset({0}), {"gradients": True, "takeovers": 1, "eager": True}),
    (2, 2, 2, frozenset({0}), {"gradients": True, "preimages": True, "eager": True}),
    (3, 2, 1, frozenset({0, 1, 2, 3}), {"gradients": True, "preimages": True, "eager": True}),
]
"""Shards, replicas, kills, who hangs, and the rest, as ``Model`` says."""


def main(arguments: list[str]) -> int:
    """Explore the large worlds, or those whose numbers are given."""
    chosen = [int(a) for a in arguments] or range(len(LARGE))
    total = 0
    for number in chosen:
        shards, replicas, kills, hanging, more = LARGE[number]
        model, began = Model(grid(shards, replicas), kills, hanging, **more), time.process_time()
        states = model.explore(8_000_000)
        total += states
        extra = "".join(f", {name}" if value is True else f", {value} {name}" for name, value in more.items())
        sys.stdout.write(
            f"{shards} shards x {replicas} replicas, {kills} kills, {set(hanging) or 'nobody'} hangs{extra}: "
            f"{states} states, {len(model.outcomes)} ways to end, {time.process_time() - began:.0f} s\n"
        )
        sys.stdout.flush()
    sys.stdout.write(f"{total} states, every invariant holds\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
