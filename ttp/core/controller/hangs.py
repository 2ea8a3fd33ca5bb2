"""Detects hangs: no rank makes progress, and no fault is known that explains it. No I/O, no clock, no threads.

Theory of operation
-------------------
A training job is synchronous: when one rank stops, all others stop within a step, because they wait for it. So a hang
is seen on the job, not on a rank: for longer than the job's patience no rank has moved. A rank has *moved* when its
*place* changes: its version, whether it updates, and its mark, which counts the points of a step that it has passed.

The patience is learnt. Heartbeats report places about once a second. The watch keeps the longest wait between two moves
of the job; the patience is ``FACTOR`` times that wait, but never less than a floor. An old wait is forgotten after some
hours. A false alarm teaches as well: once the job moves again, the wait that raised the alarm is the longest one. If
the job was ended instead, nobody knows whether it would have moved again, e.g. after a rank has written a checkpoint of
the program's own. So its next launch waits longer, unless a rank was silent; else it could be ended there each time.
Waits that make the patience longer are recorded in the history of launches, from which another controller, that leads
the job after this one, learns them. If it takes over a job that is past its first versions, it knows the pace at once.

There is no alarm until the pace of the job is known: the first versions of an incarnation (compilation, cold caches, a
jump of the version by ``restore()``) neither teach nor raise an alarm. There is none either after a rank has left its
loop, or while a rank reports that it does something else on purpose: the others may wait for it. But a rank that is
one update behind does not wait for it, because it has given its part of that update. If no rank at all was heard for a
while, this controller did not run, and the clock starts again.

The suspects: a rank that sends no heartbeats while others do is stopped, or something holds its interpreter lock. Such
ranks are the suspects, whatever their last place was, as no rescue can count on them. Without such ranks the suspects
are the ranks with the least progress, if most ranks are further: their peers wait for them. Else no rank is suspected:
a collective or a device hangs.

Cost: constant per heartbeat of a rank; proportional to the world when something is suspected.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from ttp.core.layout import Rank, ranks_text
from ttp.core.messages import Heartbeat, Phase

FACTOR = 3.0
"""A wait is too long if it is this many times the longest wait seen so far."""

UNSETTLED_VERSIONS = 3
"""Number of first versions whose waits are not learnt: they compile, allocate and fill caches."""

LEARNT_VERSIONS = 10
"""Versions of an incarnation after which its pace is known."""

LEARNT_BEATS = 3
"""Heartbeat intervals over which the pace has to be learnt before it is known."""

SILENT_BEATS = 3
"""Missed heartbeats after which a rank is silent."""

PATIENT_BEATS = 4
"""Least patience in heartbeats, so that a silent rank is recognised before a suspicion is made."""

MEMORY_S = 6 * 3600.0
"""Seconds for which waits are kept. The longest wait is that of the last one to two such periods: so an outage is
forgotten, and a regular evaluation is not.
"""

UNCLEAR_MAX_S = 200.0
"""Most seconds that an alarm teaches if the job was ended: a hang that is real must still be found, within ten minutes.
"""

TAUGHT_FACTOR = 1.25
"""A wait is recorded for later controllers if it is this many times the longest that is recorded."""

ADVICE = "If ranks were busy on purpose: ttp.paused(), TTP_HANG_S"
"""What to do about a false alarm."""

Place = tuple[int, bool, int]
"""The progress of a rank: version, whether it is updating, mark."""


@dataclass(frozen=True, slots=True)
class Suspicion:
    """The result of ``HangWatch.check``: which ranks hang, and the reasons.

    Args:
        subjects: the ranks that the others wait for; empty if none can be singled out.
        text: the observations, for the operator.
    """

    subjects: tuple[Rank, ...]
    text: str


@dataclass(slots=True)
class _Seen:
    """The last heartbeat of one rank."""

    place: Place
    heard_at: float


class HangWatch:
    """Watches the progress of one incarnation.

    Args:
        floor_s: the least patience, in seconds without any progress; None: hangs are not detected.
        heartbeat_s: seconds between two heartbeats of a rank.
    """

    def __init__(self, floor_s: float | None, heartbeat_s: float = 1.0) -> None:
        self._floor_s = floor_s
        self._beat_s = heartbeat_s
        self._alarm_s = 0.0  # the wait of the last alarm
        self._unclear_s = 0.0  # the same, while no rank was silent and it is not known to be false
        self.lesson_s = 0.0
        """A wait that was not recorded yet for controllers that lead the job later; 0: there is none."""
        self._told = False
        self.reset(0.0)

    # ------------------------------------------------------------------------------------------------------------ input

    def reset(self, now: float, *, same_job: bool = False) -> None:
        """Begin a new incarnation; ``same_job``: of the same job, whose waits are known."""
        self._seen: dict[Rank, _Seen] = {}
        self._pausing: set[Rank] = set()
        self._ending = False
        self._front: int | None = None  # the newest version of any rank
        self._first: int | None = None  # the front after its first move, which may have been a restore
        self._learning_since: float | None = None
        if not same_job:
            self._longest_s = self._longest_before_s = self._unclear_s = self._taught_s = 0.0
            self._turned_at = now
        self.remember(self._unclear_s, now)
        self._unclear_s = 0.0
        self._heard_at = now
        self.restart(now)

    def restart(self, now: float, *, was_false: bool = False) -> None:
        """Start the clock again without learning the wait: until now the ranks did not train (an incident, a pause).

        Args:
            now: the time, in seconds.
            was_false: the incident that was open has ended because nothing is broken: an alarm in it teaches its wait.
        """
        if was_false and self._told:
            self._learn(self._alarm_s, now)
        self.moved_at = now
        """Time at which a rank last moved; a move after a suspicion shows that the job goes on after all."""
        self._told = False
        self._excused_until = now

    def observed(self, ranks: Iterable[Rank], beat: Heartbeat, now: float) -> None:
        """Note the places of the ranks that have sent this heartbeat; ``now`` is in seconds."""
        if self._floor_s is None:
            return
        if now - self._heard_at > SILENT_BEATS * self._beat_s:
            self.restart(now)  # no rank was heard: this controller did not run
        self._heard_at = now
        self._ending = self._ending or beat.phase is Phase.DONE
        place, moved = (int(beat.version), beat.phase is Phase.UPDATING, beat.mark), False
        for rank in ranks:
            self._note_activity(rank, beat.activity, now)
            seen = self._seen.get(rank)
            if seen is None:
                self._seen[rank] = _Seen(place, now)
            else:
                moved |= seen.place != place
                seen.place, seen.heard_at = place, now
        if moved:
            self._moved(now)
        self._follow_front(int(beat.version), now)

    def remember(self, stood_s: float, now: float, base: int | None = None) -> None:
        """Learn a wait of ``stood_s`` seconds, which is recorded, and may have been a hang.

        Args:
            stood_s: the wait.
            now: the time, in seconds.
            base: the version that the incarnation started from, if another controller has led it and has recorded its
                long waits: then the pace is known as soon as the job is past its first versions. None: it began here.
        """
        self._taught_s = max(self._taught_s, stood_s)
        self._learn(min(stood_s, UNCLEAR_MAX_S), now)
        if base is not None and self._front is not None and self._front >= base + LEARNT_VERSIONS:
            self._first, self._learning_since = base, now

    def forget(self, rank: Rank) -> None:
        """Stop watching a lost rank."""
        self._seen.pop(rank, None)
        self._pausing.discard(rank)

    # -------------------------------------------------------------------------------------------------------- suspicion

    @property
    def patience_s(self) -> float | None:
        """Seconds for which the job may stand still; None: not known yet, or hangs are not detected."""
        if self._floor_s is None or not self._learnt():
            return None
        longest_s = max(self._longest_s, self._longest_before_s)
        return max(self._floor_s, FACTOR * longest_s, PATIENT_BEATS * self._beat_s)

    def deadline(self) -> float | None:
        """Return when ``check`` is due; None: not before the next heartbeat of a rank."""
        patience_s = self.patience_s
        if patience_s is None or self._told or self._ending:
            return None
        return max(self.moved_at + patience_s, self._excused_until)

    def check(self, now: float, live: Collection[Rank]) -> Suspicion | None:
        """Return a suspicion if the job hangs: once, and again only after it has moved or the clock was started again.

        Args:
            now: the time, in seconds of the clock that ``observed`` is given.
            live: the connected ranks.
        """
        due = self.deadline()
        if due is None or now < due:
            return None
        speaking = {rank for rank in live if rank in self._seen and not self._silent(rank, now)}
        if not speaking or self._waits_on_purpose(speaking & self._pausing, live):
            self._excused_until = now + SILENT_BEATS * self._beat_s
            return None
        self._told = True
        ranks = [rank for rank in live if rank in self._seen]
        self._alarm_s = now - self.moved_at
        self._unclear_s = self._alarm_s if len(speaking) == len(ranks) else 0.0
        self._teach(self._unclear_s)
        return self._suspicion(now, ranks)

    def _waits_on_purpose(self, pausing: Collection[Rank], live: Collection[Rank]) -> bool:
        """Return whether ranks do something else on purpose, and every other rank may be waiting for them.

        A rank that is one update behind them does not wait for them. One that is further behind makes no updates, and
        only receives results: it does not count.
        """
        newest = max((self._seen[rank].place[0] for rank in pausing), default=0)
        others = (seen for rank, seen in self._seen.items() if rank in live and rank not in self._pausing)
        return bool(pausing) and all(seen.place[0] != newest - 1 for seen in others)

    # ------------------------------------------------------------------------------------------------------- learning

    def _note_activity(self, rank: Rank, activity: str, now: float) -> None:
        if activity:
            self._pausing.add(rank)
        elif rank in self._pausing:
            self._pausing.discard(rank)
            self.restart(now)

    def _moved(self, now: float) -> None:
        if self._learning_since is not None and not self._pausing:
            self._learn(now - self.moved_at, now)
        self.moved_at, self._told, self._unclear_s = now, False, 0.0

    def _learn(self, wait_s: float, now: float) -> None:
        if now - self._turned_at > MEMORY_S:
            self._turned_at, self._longest_before_s, self._longest_s, self._taught_s = now, self._longest_s, 0.0, 0.0
        self._longest_s = max(self._longest_s, wait_s)
        self._teach(wait_s)

    def _teach(self, wait_s: float) -> None:
        """Have a wait recorded that makes the patience longer than its floor, unless one like it is recorded."""
        if self._floor_s is not None and FACTOR * wait_s > self._floor_s and wait_s > TAUGHT_FACTOR * self._taught_s:
            self._taught_s = self.lesson_s = wait_s

    def _follow_front(self, version: int, now: float) -> None:
        if self._front is None:
            self._front = version
        if version <= self._front:
            return
        self._front = version
        if self._first is None:
            self._first = version
        elif self._learning_since is None and version >= self._first + UNSETTLED_VERSIONS:
            self._learning_since = now

    def _learnt(self) -> bool:
        if self._front is None or self._first is None or self._learning_since is None:
            return False
        versions = self._front - self._first
        beats = (self._heard_at - self._learning_since) / self._beat_s
        return versions >= LEARNT_VERSIONS and beats >= LEARNT_BEATS

    # ------------------------------------------------------------------------------------------------------- suspects

    def _silent(self, rank: Rank, now: float) -> bool:
        return now - self._seen[rank].heard_at > SILENT_BEATS * self._beat_s

    def _suspicion(self, now: float, ranks: list[Rank]) -> Suspicion:
        stood = f"no rank has moved for {now - self.moved_at:.3g} s"
        known = f"the longest wait of this job so far was {max(self._longest_s, self._longest_before_s):.2g} s"
        silent = tuple(sorted(rank for rank in ranks if self._silent(rank, now)))
        if silent:
            quiet_s = max(now - self._seen[rank].heard_at for rank in silent)
            state = "stopped, or something holds the interpreter lock"
            text = f"{ranks_text(silent)} sent no heartbeat for {quiet_s:.3g} s ({state}), and {stood}; {known}"
            return Suspicion(silent, text)
        last = min(self._seen[rank].place for rank in ranks)
        behind = tuple(sorted(rank for rank in ranks if self._seen[rank].place == last))
        further = [rank for rank in ranks if self._seen[rank].place != last]
        if not further:
            where = f"all ranks are at the same place ({_words(last)})"
            return Suspicion((), f"{stood} and {where}: a collective or a device does not finish; {known}. {ADVICE}")
        places = sorted({self._seen[rank].place for rank in further})
        where = _words(places[0]) if len(places) == 1 else f"{_words(places[0])} and further"
        text = f"{stood}: {ranks_text(behind)} at {_words(last)}, {ranks_text(further)} at {where}; {known}"
        if len(behind) > len(further):
            return Suspicion((), f"{text}. Most ranks are behind, so no rank is suspected. {ADVICE}")
        return Suspicion(behind, f"{text}. {ADVICE}")


def _words(place: Place) -> str:
    version, updating, mark = place
    return f"step {version + 1}, {'in the update' if updating else f'point {mark}'}"
