"""Whole lives of jobs, against an oracle: which ranks are found to hang, and when."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ttp.core.controller.hangs import HangWatch
from ttp.core.layout import Rank, Version
from ttp.core.messages import Heartbeat, Phase


@dataclass(frozen=True)
class Beat:
    """One heartbeat of a rank."""

    now: float
    rank: int
    place: tuple[int, bool, int]
    activity: str


@dataclass
class Oracle:
    """The rule of the module's docstring, computed from all heartbeats each time."""

    floor_s: float
    beats: list[Beat] = field(default_factory=list)

    def story(self) -> tuple[list[tuple[float, float]], float, float | None]:
        """Return the waits with their ends, the time when the clock started last, and the time when learning began."""
        waits: list[tuple[float, float]] = []
        clock, heard = 0.0, 0.0
        for index, beat in enumerate(self.beats):
            if beat.now - heard > 3.0:
                clock = beat.now
            heard = beat.now
            mine = [b for b in self.beats[:index] if b.rank == beat.rank]
            if mine and mine[-1].activity and not beat.activity:
                clock = beat.now
            if mine and mine[-1].place != beat.place:
                if self.learning(index - 1) is not None and not self.pausing(index):
                    waits.append((beat.now, beat.now - clock))
                clock = beat.now
        return waits, clock, self.learning(len(self.beats) - 1)

    def fronts(self, last: int) -> list[tuple[float, int]]:
        """Return the times at which the newest version rose."""
        found: list[tuple[float, int]] = []
        for beat in self.beats[: last + 1]:
            if not found or beat.place[0] > found[-1][1]:
                found.append((beat.now, beat.place[0]))
        return found

    def learning(self, last: int) -> float | None:
        """Return the time from which waits are learnt; None: they are not yet."""
        fronts = self.fronts(last)
        return next((now for now, v in fronts[2:] if v >= fronts[1][1] + 3), None)

    def pausing(self, last: int) -> set[int]:
        """Return the ranks that had named another activity after this heartbeat."""
        latest = {beat.rank: beat.activity for beat in self.beats[: last + 1]}
        return {rank for rank, activity in latest.items() if activity}

    def patience(self) -> float | None:
        waits, _, since = self.story()
        fronts = self.fronts(len(self.beats) - 1)
        if since is None or fronts[-1][1] < fronts[1][1] + 10 or self.beats[-1].now - since < 3.0:
            return None
        return max(self.floor_s, 3.0 * max((wait for _, wait in waits), default=0.0), 4.0)

    def hangs(self, now: float, live: set[Rank]) -> tuple[int, ...] | None:
        """Return the ranks to accuse; None: there is no suspicion."""
        patience = self.patience()
        latest = {beat.rank: beat for beat in self.beats if beat.rank in live}
        silent = {rank for rank, beat in latest.items() if now - beat.now > 3.0}
        if patience is None or now < self.story()[1] + patience or silent == set(latest):
            return None
        paused = [beat.place[0] for rank, beat in latest.items() if rank not in silent and beat.activity]
        if paused and not any(beat.place[0] == max(paused) - 1 for beat in latest.values() if not beat.activity):
            return None
        if silent:
            return tuple(sorted(silent))
        last = min(beat.place for beat in latest.values())
        behind = {rank for rank, beat in latest.items() if beat.place == last}
        return tuple(sorted(behind)) if 2 * len(behind) <= len(latest) else ()


def a_life(random: Random) -> Iterator[tuple[HangWatch, Oracle, set[Rank], float]]:
    """Play a job that starts well and then does anything, one heartbeat after the other."""
    world, floor_s, now = random.randint(1, 4), random.choice([0.5, 6.0]), 0.0
    watch, oracle = HangWatch(floor_s), Oracle(floor_s)
    watch.reset(now)
    live = {Rank(r) for r in range(world)}
    places = dict.fromkeys(live, (0, False, 0))
    wild = random.choice([0.02, 0.1, 0.5])
    for number in range(random.randint(20, 70)):
        now += random.choice([0.0, 0.3, 1.0, 2.5, 20.0]) if random.random() < wild else 1.0 / world
        rank = Rank(number % world if random.random() > wild else random.randrange(world))
        version, updating, mark = places[rank]
        if number < 16 * world:
            places[rank] = (version + 1, False, 0)
        elif random.random() < wild:
            places[rank] = (version + random.choice([0, 0, 1]), random.random() < 0.3, mark + random.choice([0, 1]))
        activity = "evaluation" if random.random() < wild / 4 else ""
        version, updating, mark = places[rank]
        phase = Phase.UPDATING if updating else Phase.IDLE
        watch.observed((Rank(rank),), Heartbeat(Rank(rank), Version(version), phase, mark, activity), now)
        oracle.beats.append(Beat(now, rank, places[rank], activity))
        yield watch, oracle, live, now


@given(seed=st.integers(0, 2**32))
@settings(max_examples=30)
def test_as_the_oracle_says(seed: int) -> None:
    random = Random(seed)
    for watch, oracle, live, now in a_life(random):
        assert watch.patience_s == pytest.approx(oracle.patience())
        later = now + random.choice([0.0, 2.0, 3.5, 20.0])
        found = copy.deepcopy(watch).check(later, live)
        assert (None if found is None else found.subjects) == oracle.hangs(later, live)
