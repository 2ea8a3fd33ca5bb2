"""The facts about one run, from which it is judged: injected faults, events of controllers, checkpoints on disk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ttp.chaos.notes import Digests, LifeKey, Notes
from ttp.chaos.script import Run, Script


@dataclass(frozen=True, slots=True)
class Seen:
    """An event of a controller. ``at_s``: seconds of this machine's monotonic clock."""

    kind: str
    at_s: float
    incident: str
    facts: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Injection:
    """A fault that was injected.

    Args:
        name: name of the fault.
        what: its kind, a word of ``FAULT_WORDS``.
        who: the target, in words; ranks by number.
        at_s: time of the injection, in seconds of the monotonic clock.
        life: life of the job at that time.
        unreadable: ranks whose state can no longer be read in that life.
        cut_off: ranks that the others cannot reach; the job may continue from either side.
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
    """A checkpoint on disk: its version, the problems found in it, and the ranks whose rank-local state it lacks.

    ``earlier_pages``: the ranks whose rank-local state is that of the version before.
    """

    version: int
    problems: tuple[str, ...] = ()
    missing_pages: tuple[int, ...] = ()
    earlier_pages: tuple[int, ...] = ()


@dataclass(slots=True)
class Record:
    """The facts about one run of a job, filled while it lasts.

    Args:
        run: the planned run.
        lives: lives of the job during the run, in order; the run began in the first.
        injections: the faults that were injected.
        missed: the faults that were not injected, with the reason.
        seen: the events of controllers during the run.
        found: the checkpoints after the run.
        answers: answers of the controller to requests.
        exits: exit codes of launchers that ended during the run.
        processes: by life and rank: the process id, and whether the process was forked.
        reasons: logged reasons of launchers for starting ranks as new interpreters, or all ranks anew.
        trouble: why the run was aborted; empty if it was not.
        back_s: when the job was seen training again, in seconds of the monotonic clock; None if it was not.
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
        """Return the injected faults of these kinds."""
        return [injection for injection in self.injections if injection.what in words]

    def told(self, kind: str) -> list[Seen]:
        """Return the events of this kind, in order."""
        return [seen for seen in self.seen if seen.kind == kind]


@dataclass(frozen=True, slots=True)
class Evidence:
    """All facts from which a run is judged.

    Args:
        script: the script of the job.
        record: the facts about the run.
        notes: the notes of all ranks.
        reference: digests of an unbroken run, by rank and version.
        diverged: whether an earlier run of this job lost rank-local state, so that bits cannot be compared.
        cold: whether a launcher logged in an earlier run of this job that it starts ranks as new interpreters.
    """

    script: Script
    record: Record
    notes: Notes
    reference: Mapping[int, Mapping[int, Digests]]
    diverged: bool = False
    cold: bool = False
