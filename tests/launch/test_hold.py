"""The decisions of ``Hold`` as stories: time, living ranks, exit codes, leases and their ends -> decision."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ttp.launch.hold import LEAVING_S, STRAGGLER_S, Hold, HoldDecision, WorkersNow

WAIT, LEFT, STOP = HoldDecision.WAIT, HoldDecision.LEFT, HoldDecision.STOP
KILL, LATE, AGAIN = HoldDecision.KILL_HUNG, HoldDecision.OUT_OF_PATIENCE, HoldDecision.AGAIN

EVERYBODY = frozenset({1, 2, 3})
Look = tuple[float, set[int], dict[int, int], dict[int, float], HoldDecision]


def scene(
    alive: set[int], exits: Mapping[int, int], deadlines: Mapping[int, float], armed: frozenset[int] = EVERYBODY
) -> WorkersNow:
    """Return what the launcher sees. A negative pid in ``deadlines`` is a worker that goes on."""
    again = {-pid: until for pid, until in deadlines.items() if pid < 0}
    leases = {pid: until for pid, until in deadlines.items() if pid > 0}
    return WorkersNow(frozenset(alive), exits, armed - again.keys(), leases, again)


STORIES: dict[str, list[Look]] = {
    "all save and leave": [
        (0.0, {1, 2}, {3: -9}, {1: 60, 2: 60}, WAIT),
        (50.0, {1, 2}, {3: -9}, {1: 60, 2: 60}, WAIT),
        (51.0, {2}, {3: -9, 1: 75}, {2: 60}, WAIT),
        (52.0, set(), {3: -9, 1: 75, 2: 75}, {}, LEFT),
    ],
    "the first lease comes late": [
        (0.0, {1, 2}, {3: -9}, {}, WAIT),
        (4.9, {1, 2}, {3: -9}, {}, WAIT),
        (4.95, {1, 2}, {3: -9}, {1: 60}, WAIT),
        (20.0, {1, 2}, {3: -9}, {1: 60}, WAIT),
    ],
    "no lease comes": [
        (0.0, {1, 2}, {3: -9}, {}, WAIT),
        (5.0, {1, 2}, {3: -9}, {}, STOP),
    ],
    "a hung rank outlives its peers": [
        (0.0, {1, 2}, {3: -9}, {1: 60}, WAIT),
        (10.0, {2}, {3: -9, 1: 75}, {}, WAIT),  # its freeze may be on the way
        (10.0 + STRAGGLER_S, {2}, {3: -9, 1: 75}, {}, KILL),
        (12.0, {2}, {3: -9, 1: 75}, {}, LEFT),  # it dies when the kernel lets it
    ],
    "all who live go on: only the dead are to be started": [
        (0.0, {1, 2}, {3: -9}, {1: 60, 2: 60}, WAIT),
        (0.1, {1, 2}, {3: -9}, {2: 60, -1: 30}, WAIT),
        (0.2, {1, 2}, {3: -9}, {-1: 30, -2: 30}, AGAIN),
    ],
    "a saver stands still while the others leave": [
        (0.0, {1, 2}, {3: -9}, {1: 60, 2: 60}, WAIT),
        (1.0, {1, 2}, {3: -9}, {1: 60, 2: 60}, WAIT),
        (2.0, {2}, {3: -9, 1: 75}, {2: 60}, WAIT),  # it may be on its way out
        (2.0 + LEAVING_S, {2}, {3: -9, 1: 75}, {2: 60}, KILL),
        (14.0, {2}, {3: -9, 1: 75}, {2: 60}, LEFT),
    ],
    "it had left before the first look, and its lease is still there": [
        (0.0, {2}, {3: -9, 1: 75}, {1: 60, 2: 60}, WAIT),
        (LEAVING_S, {2}, {3: -9, 1: 75}, {1: 60, 2: 60}, KILL),
    ],
    "a saver stands still while the others are to go on": [
        (0.0, {1, 2}, {3: -9}, {1: 60, 2: 60}, WAIT),
        (0.1, {1, 2}, {3: -9}, {-1: 30, 2: 60}, WAIT),
        (0.1 + LEAVING_S, {1, 2}, {3: -9}, {-1: 30, 2: 60}, KILL),
        (12.0, {1, 2}, {3: -9}, {-1: 30, 2: 60}, AGAIN),
    ],
    "a program that leaves with 75 by itself says nothing of the others": [
        (0.0, {1, 2}, {3: 75}, {1: 60, 2: 60}, WAIT),
        (50.0, {1, 2}, {3: 75}, {1: 60, 2: 60}, WAIT),
    ],
    "one went on too long": [
        (31.0, {1, 2}, {3: -9}, {-1: 30, -2: 31.5}, STOP),
    ],
    "one that was to go on has left: the others have nothing to lose": [
        (0.0, {1, 2}, {3: -9}, {1: 60, 2: 60}, WAIT),
        (0.2, {2}, {3: -9, 1: 75}, {-2: 30}, KILL),
        (0.3, {2}, {3: -9, 1: 75}, {-2: 30}, LEFT),
    ],
    "all were released before the first look": [
        (0.0, {2}, {3: -9, 1: 75}, {}, WAIT),
        (STRAGGLER_S, {2}, {3: -9, 1: 75}, {}, KILL),
    ],
    "the lease holder could not save, the hung one is killed all the same": [
        (0.0, {1, 2}, {3: -9}, {1: 60}, WAIT),
        (10.0, {2}, {3: -9, 1: 70}, {}, WAIT),
        (11.0, {2}, {3: -9, 1: 70}, {}, KILL),
    ],
    "a fenced rank leaves with 70: its peers have yet to save": [
        (0.0, {1, 2}, {3: 70}, {}, WAIT),
        (3.0, {1, 2}, {3: 70}, {}, WAIT),
        (3.1, {1, 2}, {3: 70}, {1: 60}, WAIT),
    ],
    "the saver dies; the next one gets its lease": [
        (0.0, {1, 2}, {3: -9}, {1: 60}, WAIT),
        (10.0, {2}, {3: -9, 1: -9}, {}, WAIT),
        (12.0, {2}, {3: -9, 1: -9}, {2: 60}, WAIT),
    ],
    "the saver dies; nobody takes over": [
        (0.0, {1, 2}, {3: -9}, {1: 60}, WAIT),
        (10.0, {2}, {3: -9, 1: -9}, {}, WAIT),
        (15.0, {2}, {3: -9, 1: -9}, {}, STOP),
    ],
    "a lease is over": [
        (0.0, {1}, {3: -9}, {1: 10}, WAIT),
        (10.0, {1}, {3: -9}, {1: 10}, WAIT),
        (15.0, {1}, {3: -9}, {1: 10}, STOP),
    ],
    "thawed and frozen again": [
        (0.0, {1}, {3: -9}, {1: 10}, WAIT),
        (2.0, {1}, {3: -9}, {}, WAIT),
        (5.0, {1}, {3: -9}, {1: 60}, WAIT),
    ],
    "longer than anybody may take": [
        (0.0, {1}, {3: -9}, {1: 1e6}, WAIT),
        (99.9, {1}, {3: -9}, {1: 1e6}, WAIT),
        (100.0, {1}, {3: -9}, {1: 1e6}, LATE),
    ],
    "only another one was saving": [
        (0.0, {1, 2}, {3: -9}, {1: 1e6}, WAIT),
        (98.0, {2}, {1: 1, 3: -9}, {}, WAIT),
        (100.0, {2}, {1: 1, 3: -9}, {}, STOP),
    ],
    "its lease ends just before": [  # "no rank saves, or has begun to" was not true
        (0.0, {1}, {3: -9}, {1: 99.5}, WAIT),
        (100.0, {1}, {3: -9}, {1: 99.5}, LATE),
    ],
    "one hung rank is killed, another one appears hung": [
        (0.0, {1, 2, 4}, {3: -9}, {4: 60}, WAIT),
        (1.0, {1, 2}, {3: -9, 4: 75}, {}, WAIT),
        (2.0, {1, 2}, {3: -9, 4: 75}, {}, KILL),
        (2.1, {1, 2}, {3: -9, 4: 75}, {}, LEFT),
    ],
}


@pytest.mark.parametrize("name", STORIES)
def test_story(name: str) -> None:
    hold = Hold(0.0, patience_s=100.0, first_lease_s=5.0)
    for now, alive, exits, deadlines, verdict in STORIES[name]:
        assert hold.look(now, scene(alive, exits, deadlines)) is verdict, now


@pytest.mark.parametrize("armed", [(), (3,)])
def test_where_nobody_or_only_the_dead_was_armed_all_are_stopped_at_once(armed: tuple[int, ...]) -> None:
    assert Hold(0.0, 100.0).look(0.0, scene({1, 2}, {3: -9}, {}, armed=frozenset(armed))) is STOP


def test_unarmed_helpers_are_not_killed_as_hung() -> None:
    hold = Hold(0.0, 100.0)
    armed = frozenset({1, 2})
    hold.look(0.0, scene({1, 2, 4}, {3: -9}, {1: 60}, armed))
    hold.look(1.0, scene({2, 4}, {1: 75}, {}, armed))
    assert hold.look(3.0, scene({2, 4}, {1: 75}, {}, armed)) is KILL
    assert hold.hung == {2}


pids = st.sets(st.integers(1, 4))
looks = st.tuples(
    st.floats(0, 20), pids, st.dictionaries(st.integers(1, 4), st.sampled_from([-9, 0, 1, 70, 75])),
    st.dictionaries(st.integers(1, 4), st.floats(0, 300)),
)  # fmt: skip


@given(st.lists(looks, max_size=12), pids)
def test_always_ends_and_never_hurts_a_lease_holder(story: list[Any], armed: set[int]) -> None:
    """A worker with a lease is neither stopped nor killed before TTP_OT has passed or the job is saved."""
    hold, now, killed, held, saved_at = Hold(0.0, patience_s=100.0), 0.0, set[int](), set[int](), float("inf")
    for wait_s, alive, exits, deadlines in story:
        now += wait_s
        holders = {pid for pid in alive if deadlines.get(pid, 0) > now}
        held |= (holders - killed) | (exits.keys() & deadlines.keys())
        if any(exits.get(pid) == 75 for pid in held):
            saved_at = min(saved_at, now)
        verdict = hold.look(now, scene(alive, exits, deadlines, frozenset(armed)))
        if verdict is KILL:
            assert not holders - killed or now - saved_at >= LEAVING_S
            assert hold.hung <= alive & (armed | holders)
            killed |= hold.hung
        if verdict is STOP:
            assert not holders - killed or now >= 100
        if now >= 100:
            assert verdict is not WAIT
