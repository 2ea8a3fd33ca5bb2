"""When a job counts as hanging, and which ranks are named: cases; ``test_hang_lives`` has an oracle."""

from __future__ import annotations

import pytest

from ttp.core.controller import hangs
from ttp.core.controller.hangs import HangWatch, Suspicion
from ttp.core.layout import Rank, Version
from ttp.core.messages import Heartbeat, Phase

IDLE, UPDATING, DONE = Phase.IDLE, Phase.UPDATING, Phase.DONE


class Job:
    """Ranks that beat once a second. Each moves with each of its heartbeats unless told otherwise."""

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
        """Finish one more version."""
        self.version += 1
        self.beat(seconds, dict.fromkeys(self.live, (self.version, 0, IDLE, "")))

    def beat(self, seconds: float = 1.0, at: dict[Rank, tuple[int, int, Phase, str]] | None = None) -> None:
        """Send one heartbeat of every live rank that is not in ``stopped``."""
        self.now += seconds
        self.at.update(at or {})
        for rank in sorted(self.live):
            if rank in self.at:
                version, mark, phase, activity = self.at[rank]
                beat = Heartbeat(Rank(rank), Version(version), phase, mark, activity)
                self.watch.observed((Rank(rank),), beat, self.now)

    def stand(self, **places: tuple[int, int] | str) -> None:
        """Set ranks (``r0=...``) to (versions ahead, mark), to a pause with that name, or to silence."""
        for name, place in places.items():
            rank = Rank(int(name[1:]))
            if place == "silent":
                self.at.pop(rank)
            elif isinstance(place, str):
                self.at[rank] = (*self.at[rank][:3], place)
            else:
                self.at[rank] = (self.version + place[0], place[1], IDLE, "")

    def wait(self, seconds: int) -> list[Suspicion]:
        """Let time pass with heartbeats only."""
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
        assert found.subjects == (2,)
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
        assert found.subjects == (1,) and "rank 1 sent no heartbeat for 20 s (stopped" in found.text

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
        assert found.subjects == () and "no rank is suspected" in found.text

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

    @pytest.mark.parametrize("before", [2, 4])
    def test_the_first_steps_do_not_count(self, before: int) -> None:
        job = Job(versions=before)
        job.wait(50)
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
        job.wait(2000)
        job.step()
        job.watch.reset(job.now)
        assert job.wait(1000) == []
        job.version += 1000
        patience = []
        for _ in range(12):
            job.step()
            patience.append(job.watch.patience_s)
        assert patience == [None] * 10 + [20.0] * 2

    def relaunched(self, job: Job, versions: int = 20) -> None:
        job.watch.reset(job.now, same_job=True)
        for _ in range(versions):
            job.step()

    def test_an_alarm_that_may_have_been_false_teaches_the_next_launch(self) -> None:
        """One rank writes a checkpoint of the program's own, and its peers wait: without this, at each checkpoint."""
        job = Job()
        (alarm,) = job.wait(25)
        assert "ttp.paused()" in alarm.text and "TTP_HANG_S" in alarm.text
        self.relaunched(job)
        assert job.wait(59) == [] and len(job.wait(1)) == 1
        self.relaunched(job)
        self.relaunched(job)
        assert job.watch.patience_s == 180.0, "once"

    def test_a_real_hang_is_found_within_ten_minutes_after_any_number_of_launches(self) -> None:
        job = Job()
        for _ in range(9):
            assert len(job.wait(600)) == 1
            self.relaunched(job)
        assert job.watch.patience_s == 600.0

    def test_an_alarm_teaches_nothing_if_a_rank_was_silent_or_the_job_moved(self) -> None:
        job = Job()
        job.stand(r0="silent")
        (alarm,) = job.wait(25)
        assert "ttp.paused()" not in alarm.text
        job.at = dict.fromkeys(job.live, (job.version, 0, IDLE, ""))
        self.relaunched(job)
        assert job.watch.patience_s == 20.0
        job.wait(25)
        job.watch.restart(job.now)
        job.step()
        self.relaunched(job)
        assert job.watch.patience_s == 20.0

    def test_waits_are_known_to_the_next_launch_of_the_same_job_and_to_no_other(self) -> None:
        job = Job()
        job.wait(19)
        job.step()
        self.relaunched(job)
        assert job.watch.patience_s == 60.0
        job.wait(70)
        job.watch.reset(job.now)
        for _ in range(20):
            job.step()
        assert job.watch.patience_s == 20.0

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

    def test_a_rank_that_never_came_to_it_is_found(self) -> None:
        job = Job()
        job.stand(r0=(0, 3), r1=(1, 0), r2=(1, 0), r3=(1, 0))
        job.beat()
        job.stand(r1="evaluation", r2="evaluation", r3="evaluation")
        (found,) = job.wait(60)
        assert found.subjects == (0,) and "rank 0 at step 21, point 3, ranks 1-3 at step 22, point 0" in found.text

    def test_ranks_that_make_no_updates_may_wait_for_one_that_pauses(self) -> None:
        """They roll out, for example, and get the weights of the rank that trains."""
        job = Job()
        job.stand(r1=(-20, 0), r2=(-20, 0), r3=(-20, 0))
        job.beat()
        job.stand(r0="evaluation")
        assert job.wait(1000) == []

    def test_ranks_at_the_next_step_may_wait_for_one_that_pauses(self) -> None:
        job = Job()
        job.stand(r0=(1, 0), r1=(1, 0), r2=(1, 0), r3=(1, 2))
        job.beat()
        job.stand(r0="saving")
        assert job.wait(1000) == []

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
            job.watch.observed((Rank(0),), Heartbeat(Rank(0), Version(job.version), IDLE), job.now)
            assert job.watch.check(job.now, job.live) is None

    def test_an_empty_world(self) -> None:
        job = Job()
        job.now += 1000.0
        assert job.watch.check(job.now, set()) is None
