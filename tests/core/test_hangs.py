"""When a job is said to hang, and who is named: cases, a slow oracle, and whole jobs in virtual time."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ttp.core.controller import hangs
from ttp.core.controller.hangs import FACTOR, HangWatch, Suspicion
from ttp.core.layout import Rank, Version
from ttp.core.messages import FaultKind, Phase

IDLE, UPDATING, DONE = Phase.IDLE, Phase.UPDATING, Phase.DONE


class Job:
    """Ranks that beat once a second; every one moves with each of its beats unless told otherwise."""

    def __init__(self, world: int = 4, floor_s: float | None = 20.0, versions: int = 20, base: int = 0) -> None:
        self.watch = HangWatch(floor_s)
        self.watch.reset(100.0)
        self.now = 100.0
        self.live = {Rank(r) for r in range(world)}
        self.version = base
        self.at: dict[Rank, tuple[int, int, Phase, str]] = {}
        for _ in range(versions):
            self.step()

    def step(self, seconds: float = 1.0) -> None:
        """The job finishes one more version."""
        self.version += 1
        self.beat(seconds, dict.fromkeys(self.live, (self.version, 0, IDLE, "")))

    def beat(self, seconds: float = 1.0, at: dict[Rank, tuple[int, int, Phase, str]] | None = None) -> None:
        """One heartbeat of every live rank that is not in ``stopped``."""
        self.now += seconds
        self.at.update(at or {})
        for rank in sorted(self.live):
            if rank in self.at:
                version, mark, phase, activity = self.at[rank]
                self.watch.observed(rank, Version(version), mark, phase, activity, self.now)

    def stand(self, **places: tuple[int, int] | str) -> None:
        """Ranks (``r0=...``) are from now on at (versions ahead, mark), or pause for what is named, or are silent."""
        for name, place in places.items():
            rank = Rank(int(name[1:]))
            if place == "silent":
                self.at.pop(rank)
            elif isinstance(place, str):
                self.at[rank] = (*self.at[rank][:3], place)
            else:
                self.at[rank] = (self.version + place[0], place[1], IDLE, "")

    def wait(self, seconds: int) -> list[Suspicion]:
        """Time passes, hearts beat, nothing else happens."""
        found = []
        for _ in range(seconds):
            self.beat()
            suspicion = self.watch.check(self.now, self.live)
            if suspicion is not None:
                found.append(suspicion)
        return found


def named(found: list[Suspicion]) -> list[tuple[int, ...]]:
    return [suspicion.subjects for suspicion in found]


class TestCulprit:
    def test_the_one_whose_peers_wait_for_it(self) -> None:
        job = Job()
        job.stand(r0=(0, 2), r1=(0, 2), r2=(0, 1), r3=(0, 2))
        (found,) = job.wait(60)
        assert found.subjects == (2,) and found.kind is FaultKind.HUNG
        assert "rank 2 at step 21, point 1, ranks 0-1,3 at step 21, point 2" in found.text

    def test_a_version_behind(self) -> None:
        job = Job()
        job.stand(r0=(1, 2), r1=(0, 3), r2=(1, 2), r3=(1, 1))
        assert named(job.wait(60)) == [(1,)]

    def test_inside_the_update_is_further_than_in_front_of_it(self) -> None:
        job = Job(3)
        job.at = {Rank(r): (20, 3, UPDATING, "") for r in range(3)} | {Rank(1): (20, 3, IDLE, "")}
        (found,) = job.wait(60)
        assert found.subjects == (1,) and "in the update" in found.text

    def test_one_of_two(self) -> None:
        job = Job(2)
        job.stand(r0=(0, 2), r1=(0, 1))
        assert named(job.wait(60)) == [(1,)]

    def test_the_one_that_is_silent_at_the_same_place(self) -> None:
        job = Job()
        job.stand(r0=(0, 2), r1=(0, 2), r2=(0, 2), r3=(0, 2))
        job.beat()
        job.stand(r1="silent")
        (found,) = job.wait(60)
        assert found.subjects == (1,) and "rank 1 said nothing for 20 s (stopped" in found.text

    def test_the_silent_one_even_where_others_are_behind(self) -> None:
        job = Job()
        job.stand(r0=(0, 2), r1=(1, 0), r2=(0, 2), r3=(0, 2))
        job.beat()
        job.stand(r1="silent")
        assert named(job.wait(60)) == [(1,)], "a ring that lost a member leaves its neighbours behind"

    def test_nobody_when_all_are_at_the_same_place(self) -> None:
        job = Job()
        job.stand(r0=(0, 2), r1=(0, 2), r2=(0, 2), r3=(0, 2))
        (found,) = job.wait(60)
        assert found.subjects == () and "a collective or a device does not finish" in found.text

    def test_nobody_when_most_are_behind(self) -> None:
        job = Job()
        job.stand(r0=(0, 2), r1=(1, 0), r2=(0, 2), r3=(0, 2))
        (found,) = job.wait(60)
        assert found.subjects == () and "nobody is singled out" in found.text

    def test_only_ranks_that_live(self) -> None:
        job = Job()
        job.stand(r0=(0, 2), r1=(0, 1), r2=(0, 1), r3=(0, 2))
        job.beat()
        job.live.discard(Rank(1))
        assert named(job.wait(60)) == [(2,)]


class TestPatience:
    def test_the_floor(self) -> None:
        job = Job(floor_s=20.0)
        assert job.wait(19) == []
        assert job.watch.deadline() == job.now + 1
        assert len(job.wait(1)) == 1

    def test_said_once_and_again_after_a_move(self) -> None:
        job = Job()
        assert len(job.wait(500)) == 1
        assert job.watch.deadline() is None
        job.step()
        assert len(job.wait(5000)) == 1

    def test_three_times_the_longest_wait(self) -> None:
        job = Job()
        assert job.wait(14) == []
        job.step()
        job.wait(6)
        job.step()
        assert job.watch.patience_s == 45.0
        assert job.wait(44) == [] and len(job.wait(1)) == 1

    def test_a_false_alarm_teaches(self) -> None:
        job = Job()
        assert len(job.wait(29)) == 1
        job.step()
        assert job.watch.patience_s == 90.0
        assert job.wait(89) == []

    def test_an_outage_is_forgotten_in_the_end(self) -> None:
        job = Job()
        job.step(1000.0)
        job.watch.restart(job.now)
        assert job.watch.patience_s == 20.0, "nobody was heard for so long: we were away"
        job.wait(1000)
        job.step()
        assert job.watch.patience_s == 3003.0
        job.now += hangs.MEMORY_S + 1
        job.step()
        job.step()
        assert job.watch.patience_s == 3003.0
        job.now += hangs.MEMORY_S + 1
        job.step()
        job.step()
        assert job.watch.patience_s == 20.0

    def test_at_least_some_heartbeats(self) -> None:
        assert Job(floor_s=0.001).watch.patience_s == hangs.PATIENT_BEATS * 1.0

    def test_an_incident_starts_the_clock_again(self) -> None:
        job = Job()
        job.wait(15)
        job.watch.restart(job.now)
        for _ in range(2):
            assert job.wait(19) == [] and len(job.wait(1)) == 1
            job.watch.restart(job.now)
        job.step()
        assert job.watch.patience_s == 20.0, "what it took is not the job's own wait"


class TestLearning:
    @pytest.mark.parametrize("base", [0, 1000])
    def test_not_before_the_pace_is_known(self, base: int) -> None:
        job = Job(versions=11, base=base)  # the first one may be a jump to what was restored
        assert job.watch.patience_s is None and job.watch.deadline() is None
        assert job.wait(1000) == []
        job = Job(versions=12, base=base)
        assert job.watch.patience_s == 20.0

    def test_a_restore_is_no_pace(self) -> None:
        job = Job(versions=0)
        job.beat(1.0, dict.fromkeys(job.live, (0, 0, IDLE, "")))
        job.beat(1.0, dict.fromkeys(job.live, (5000, 0, IDLE, "")))
        assert job.wait(1000) == []

    def test_the_first_steps_do_not_count(self) -> None:
        job = Job(versions=2)
        job.step(50.0)
        for _ in range(20):
            job.step()
        assert job.watch.patience_s == 20.0

    def test_many_versions_between_two_beats_are_not_enough(self) -> None:
        job = Job(versions=1)
        for _ in range(4):
            job.version += 100
            job.step()
            assert job.watch.patience_s is None
        job.version += 100
        job.step()
        assert job.watch.patience_s == 20.0

    def test_a_new_incarnation_learns_anew(self) -> None:
        job = Job()
        job.step(2000.0)
        job.watch.reset(job.now)
        assert job.wait(1000) == []
        job.version += 1000
        patience = []
        for _ in range(12):
            job.step()
            patience.append(job.watch.patience_s)
        assert patience == [None] * 10 + [20.0] * 2

    def test_switched_off(self) -> None:
        job = Job(floor_s=None)
        assert job.watch.patience_s is None and job.watch.deadline() is None
        assert job.wait(1000) == []


class TestPauses:
    def test_nothing_is_raised_in_one(self) -> None:
        job = Job()
        job.stand(r0=(0, 1), r1=(0, 2), r2=(0, 2), r3=(0, 2))
        job.beat()
        job.stand(r0="evaluation")
        assert job.wait(1000) == []
        due = job.watch.deadline()
        assert due is not None and due > job.now, "and nobody asks all the time"

    def test_the_clock_starts_when_it_ends_and_it_teaches_nothing(self) -> None:
        job = Job()
        job.stand(r0="evaluation", r1="evaluation")
        job.wait(1000)
        job.stand(r0=(0, 0))
        job.wait(500)
        job.stand(r1=(0, 0))
        assert job.wait(20) == [] and len(job.wait(1)) == 1
        job.watch.restart(job.now)
        job.step()
        assert job.watch.patience_s == 20.0

    def test_one_that_was_stopped_in_it_is_found(self) -> None:
        job = Job()
        job.stand(r0="evaluation")
        job.beat()
        job.stand(r0="silent")
        assert named(job.wait(60)) == [(0,)]

    def test_a_pause_of_somebody_who_left_does_not_last(self) -> None:
        job = Job()
        job.stand(r0="evaluation")
        job.beat()
        job.stand(r0="silent")
        job.live.discard(Rank(0))
        job.watch.forget(Rank(0))
        assert named(job.wait(58)) == [()]
        job.step()
        assert job.watch.patience_s == 180.0, "and what follows is learnt"


class TestExcuses:
    def test_the_end_of_the_job_is_no_hang(self) -> None:
        job = Job()
        job.at[Rank(2)] = (20, 0, DONE, "")
        assert job.wait(1000) == []

    def test_when_nobody_is_heard_the_listener_was_away(self) -> None:
        job = Job()
        job.now += 1000.0
        assert job.watch.check(job.now, job.live) is None
        due = job.watch.deadline()
        assert due is not None and due > job.now
        assert job.wait(20) == [] and len(job.wait(1)) == 1

    def test_beats_of_a_rank_that_is_gone_are_no_ears(self) -> None:
        job = Job()
        job.live.discard(Rank(0))
        for _ in range(100):
            job.now += 1.0
            job.watch.observed(Rank(0), Version(job.version), 0, IDLE, "", job.now)
            assert job.watch.check(job.now, job.live) is None

    def test_an_empty_world(self) -> None:
        job = Job()
        job.now += 1000.0
        assert job.watch.check(job.now, set()) is None


# ---------------------------------------------------------------------------------------------------- against an oracle


@dataclass(frozen=True)
class Beat:
    """One word of a rank."""

    now: float
    rank: int
    place: tuple[int, bool, int]
    activity: str


@dataclass
class Oracle:
    """The module's docstring, computed from the whole story every time."""

    floor_s: float
    beats: list[Beat] = field(default_factory=list)

    def story(self) -> tuple[list[tuple[float, float]], float, float | None]:
        """Waits with the time of their end, when the clock started last, and since when is learnt."""
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
        """When the newest version became what."""
        found: list[tuple[float, int]] = []
        for beat in self.beats[: last + 1]:
            if not found or beat.place[0] > found[-1][1]:
                found.append((beat.now, beat.place[0]))
        return found

    def learning(self, last: int) -> float | None:
        """Since when waits are learnt."""
        fronts = self.fronts(last)
        return next((now for now, v in fronts[2:] if v >= fronts[1][1] + 3), None)

    def pausing(self, last: int) -> set[int]:
        """Who was doing something else after this beat."""
        latest = {beat.rank: beat.activity for beat in self.beats[: last + 1]}
        return {rank for rank, activity in latest.items() if activity}

    def patience(self) -> float | None:
        waits, _, since = self.story()
        fronts = self.fronts(len(self.beats) - 1)
        if since is None or fronts[-1][1] < fronts[1][1] + 10 or self.beats[-1].now - since < 3.0:
            return None
        return max(self.floor_s, 3.0 * max((wait for _, wait in waits), default=0.0), 4.0)

    def hangs(self, now: float, live: set[Rank]) -> tuple[int, ...] | None:
        """Who is named; None: nothing is raised."""
        patience = self.patience()
        latest = {beat.rank: beat for beat in self.beats if beat.rank in live}
        silent = {rank for rank, beat in latest.items() if now - beat.now > 3.0}
        if patience is None or now < self.story()[1] + patience or silent == set(latest):
            return None
        if any(beat.activity for rank, beat in latest.items() if rank not in silent):
            return None
        if silent:
            return tuple(sorted(silent))
        last = min(beat.place for beat in latest.values())
        behind = {rank for rank, beat in latest.items() if beat.place == last}
        return tuple(sorted(behind)) if 2 * len(behind) <= len(latest) else ()


def a_life(random: Random) -> Iterator[tuple[HangWatch, Oracle, set[Rank], float]]:
    """A job that starts well and then does anything, one beat after the other."""
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
        watch.observed(rank, Version(version), mark, UPDATING if updating else IDLE, activity, now)
        oracle.beats.append(Beat(now, rank, places[rank], activity))
        yield watch, oracle, live, now


@given(seed=st.integers(0, 2**32))
@settings(max_examples=50)
def test_as_the_oracle_says(seed: int) -> None:
    random = Random(seed)
    for watch, oracle, live, now in a_life(random):
        assert watch.patience_s == pytest.approx(oracle.patience())
        later = now + random.choice([0.0, 2.0, 3.5, 20.0])
        found = copy.deepcopy(watch).check(later, live)
        assert (None if found is None else found.subjects) == oracle.hangs(later, live)


# ------------------------------------------------------------------------------------------------ jobs in virtual time


@dataclass
class Training:
    """A synchronous job: nobody is more than one version ahead, marks are passed at drawn times."""

    random: Random
    world: int
    step_s: float

    def places(self, versions: int, hung: int | None, mark: int) -> dict[int, list[tuple[float, tuple[int, int]]]]:
        """When every rank reaches which (version, mark). ``hung`` gets no further than ``mark`` of the last version."""
        found: dict[int, list[tuple[float, tuple[int, int]]]] = {rank: [(0.0, (0, 0))] for rank in range(self.world)}
        now = 1.0
        for version in range(versions):
            ends = []
            for rank, story in found.items():
                last = version == versions - 1
                marks = [m for m in (1, 2, 3) if not (last and (m > mark if rank == hung else m > 2))]
                times = sorted(now + self.step_s * self.random.uniform(0.05, 1.0) for _ in marks)
                story += [(at, (version, m)) for at, m in zip(times, marks, strict=True)]
                ends.append(max(times, default=now))
            now = max(ends) + self.step_s * 0.01
            if version < versions - 1:
                for story in found.values():
                    story.append((now, (version + 1, 0)))
        return found


def watched(training: Training, hung: int | None, stopped: bool, floor_s: float) -> tuple[list[Suspicion], float]:
    """What is raised in a job that ends, or hangs, after 60 versions; and how long it took since the last move."""
    story = training.places(60, hung, mark=training.random.choice([0, 1]))
    end = max(at for moves in story.values() for at, _ in moves)
    until = end + (3 * max(floor_s, 3 * training.step_s) + 20.0 if hung is not None else 0.0)
    beats = []
    for rank, moves in story.items():
        at, silent_from = training.random.uniform(0, 1), moves[-1][0] if stopped and rank == hung else until
        while at < min(until, silent_from):
            beats.append((at, rank, max((t, place) for t, place in moves if t <= at)[1]))
            at += training.random.uniform(0.95, 1.05)
    watch, found, raised_at = HangWatch(floor_s), [], end
    for at, rank, (version, mark) in sorted(beats):
        suspicion = watch.check(at, {Rank(r) for r in range(training.world)})
        if suspicion is not None:
            found.append(suspicion)
            raised_at = at
        watch.observed(Rank(rank), Version(version), mark, IDLE, "", at)
    return found, raised_at - end


@given(seed=st.integers(0, 2**32), world=st.integers(1, 6), step_s=st.sampled_from([0.01, 0.3, 2.0, 30.0]))
@settings(max_examples=25)
def test_a_healthy_job_is_left_alone(seed: int, world: int, step_s: float) -> None:
    found, _ = watched(Training(Random(seed), world, step_s), None, stopped=False, floor_s=5.0)
    assert found == []


@given(
    seed=st.integers(0, 2**32),
    world=st.integers(2, 6),
    step_s=st.sampled_from([0.1, 2.0, 30.0]),
    stopped=st.booleans(),
)
@settings(max_examples=25)
def test_a_hang_is_found_and_the_culprit_named(seed: int, world: int, step_s: float, stopped: bool) -> None:
    random = Random(seed)
    hung = random.randrange(world)
    found, after_s = watched(Training(random, world, step_s), hung, stopped, floor_s=5.0)
    assert named(found) == [(hung,)]
    assert after_s <= max(5.0, FACTOR * (step_s + 2.0)) + 2.0, "soon"
