"""When a rank may go on with its state in memory, and which ranks give theirs to which."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ttp.core.layout import Layout, Rank, Shard, Version
from ttp.core.messages import Phase
from ttp.core.rank.kept_state import Look, Origin, givers, why_not_adopted, why_not_kept

STOPPED = Look(Version(7), ("d0", "d1"), (("weight", 64, (2, 2), 7), ("bias", 128, (2,), 7)))


def test_a_state_that_nobody_has_touched_is_kept() -> None:
    assert why_not_kept(STOPPED, replace(STOPPED), Version(7), Phase.IDLE) == ""
    assert why_not_kept(STOPPED, replace(STOPPED), Version(7), Phase.DONE) == ""


@pytest.mark.parametrize(
    ("stopped", "now", "version", "phase", "text"),
    [
        (STOPPED, STOPPED, 7, Phase.TORN, "half done"),
        (STOPPED, STOPPED, 7, Phase.UPDATING, "half done"),
        (None, STOPPED, 7, Phase.IDLE, "were not compared"),
        (replace(STOPPED, digests=("", "")), replace(STOPPED, digests=("", "")), 7, Phase.IDLE, "were not compared"),
        (replace(STOPPED, digests=()), replace(STOPPED, digests=()), 7, Phase.IDLE, "were not compared"),
        (STOPPED, replace(STOPPED, version=Version(8)), 8, Phase.IDLE, "is at step 8 now"),
        (STOPPED, STOPPED, 6, Phase.IDLE, "is at step 6 now"),
        (
            STOPPED,
            replace(STOPPED, marks=(STOPPED.marks[0], ("bias", 128, (2,), 8))),
            7,
            Phase.IDLE,
            "bias was written",
        ),
        (STOPPED, replace(STOPPED, marks=STOPPED.marks[:1]), 7, Phase.IDLE, "replaced"),
        (STOPPED, replace(STOPPED, digests=("d0", "d2")), 7, Phase.IDLE, "its values differ"),
    ],
)
def test_any_doubt_is_a_reason(stopped: Any, now: Look, version: int, phase: Phase, text: str) -> None:
    assert text in why_not_kept(stopped, now, Version(version), phase)


def test_only_what_was_committed_is_adopted() -> None:
    kept = Origin(Version(7), "i3")
    assert why_not_adopted(kept, Origin(Version(7), "i3")) == ""
    assert "step 7" in why_not_adopted(kept, Origin(Version(6), "i3"))
    assert "incident" in why_not_adopted(kept, Origin(Version(7), "i4"))
    assert "incident" in why_not_adopted(Origin(Version(7), ""), Origin(Version(7), ""))


def ranks(*numbers: int) -> tuple[Rank, ...]:
    return tuple(map(Rank, numbers))


@pytest.mark.parametrize(
    ("groups", "holders", "expected"),
    [
        ({"m": (0, 1, 2, 3)}, (1, 2), {0: 1, 3: 2}),  # dealt out evenly
        ({"m": (0, 1, 2, 3)}, (0, 1, 2, 3), {}),
        ({"m": (0, 1, 2, 3)}, (), {}),
        ({"a": (0, 2), "b": (1, 3)}, (0, 1, 3), {2: 0}),
        ({"a": (0, 2), "b": (1, 3)}, (1, 3), {}),  # nobody has that shard: they read
        ({"a": (0, 1), "b": (0, 2), "c": (1, 2)}, (1, 2), {}),  # two shards, of which nobody has both
        ({"a": (0, 1), "b": (0, 1, 2)}, (0,), {1: 0, 2: 0}),
    ],
)
def test_who_gives_to_whom(groups: dict[str, tuple[int, ...]], holders: Any, expected: dict[int, int]) -> None:
    world = 1 + max(rank for members in groups.values() for rank in members)
    layout = Layout(world, {Shard(name): ranks(*members) for name, members in groups.items()})
    assert givers(layout, ranks(*holders)) == expected
