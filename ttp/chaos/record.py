"""The facts about one finished run: the injected faults, the controller's events, the checkpoints on disk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ttp.chaos.notes import Digests, LifeKey, Notes
from ttp.chaos.script import Run, Script


@dataclass(frozen=True, slots=True)
class Seen:
    """One event that a controller recorded. ``at_s``: seconds of this machine's monotonic clock."""

    kind: str
    at_s: float
    unix_s: float
    incident: str
    facts: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Injection:
    """One fault that was injected.

    Args:
        name: name of the fault.
        what: the word for its kind.
        who: the target, in words; ranks by number.
        at_s: time of the injection, in seconds of the monotonic clock.
        life: life of the job at that time.
        unreadable: ranks whose state cannot be read any more in that life.
        cut_off: ranks that cannot be reached by the others; either side may be the one that goes on.
    """

    name: str
    what: str
    who: str
    at_s: float
    life: LifeKey
    unreadable: frozenset[int] = frozenset()
    cut_off: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint on the disk: its version, what is wrong with it, and the ranks whose own state is not in it."""

    version: int
    problems: tuple[str, ...] = ()
    missing_pages: tuple[int, ...] = ()


@dataclass(slots=True)
class Record:
    """One run of a job. Filled while it goes on.

    Args:
        run: what was planned.
        lives: lives of the job while the run lasted, in order; the first is the one that was hurt.
        injections: the faults that were injected.
        missed: faults whose moment never came, with the reason.
        seen: events that controllers sent meanwhile.
        found: checkpoints after the run.
        answers: answers of the controller to requests.
        exits: exit codes of launchers that ended meanwhile.
        processes: of each life, by rank: process id, and whether it was forked.
        reasons: why launchers started ranks as new interpreters, or all of them anew, in their words.
        trouble: what made the run end before it was over; empty: nothing.
        back_s: when the job was seen training again, monotonic; None: never.
    """

    run: Run
    lives: list[LifeKey] = field(default_factory=list)
    injections: list[Injection] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)
    seen: list[Seen] = field(default_factory=list)
    found: list[Found] = field(default_factory=list)
    answers: list[Mapping[str, Any]] = field(default_factory=list)
    exits: list[int] = field(default_factory=list)
    processes: dict[LifeKey, dict[int, tuple[int, bool]]] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)
    trouble: str = ""
    back_s: float | None = None

    def injected(self, *words: str) -> list[Injection]:
        """Return the injected faults with one of these words."""
        return [injection for injection in self.injections if injection.what in words]

    def told(self, kind: str) -> list[Seen]:
        """Return the events of this kind, in order."""
        return [seen for seen in self.seen if seen.kind == kind]


@dataclass(frozen=True, slots=True)
class Evidence:
    """A record with what it is judged against.

    Args:
        script: the job.
        record: the run.
        notes: notes of all ranks.
        reference: digests of an unbroken run, by rank and version.
        cold: a launcher has said in an earlier run of this job that it starts ranks as new interpreters.
        diverged: an earlier run of this job has lost rank-local state: later bits cannot be the reference's.
    """

    script: Script
    record: Record
    notes: Notes
    reference: Mapping[int, Mapping[int, Digests]]
    diverged: bool = False
    cold: bool = False
