"""The evidence of a run of a made-up job: three ranks on one host, with a fault in step 5."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ttp.chaos.notes import Digests, LifeKey, RankLife
from ttp.chaos.record import Evidence, Found, Injection, Record, Seen
from ttp.chaos.script import Fault, Run, Script
from ttp.chaos.vocabulary import Target

FIRST, SECOND = (0, 0), (0, 1)
AT_S = 100.0


def bits(rank: int, version: int) -> Digests:
    """Return the digests of a rank at a version in the unbroken run."""
    return f"shard {version}", f"own {rank} {version}"


REFERENCE = {rank: {version: bits(rank, version) for version in range(20)} for rank in range(4)}


def life(rank: int, start: int, finished: int, begun: int | None = None) -> RankLife:
    """Return a life without problems."""
    states = {version: bits(rank, version) for version in range(start + 1, finished + 1)}
    return RankLife(start, bits(rank, start), finished if begun is None else begun, finished, states)


def seen(kind: str, at_s: float = AT_S + 0.01, **facts: Any) -> Seen:
    """Return an event of the controller."""
    return Seen(kind, at_s, "incident", facts)


@dataclass
class Story:
    """A rank is killed in step 5, versions 5 and 4 are finished, version 5 is saved, the job goes on to version 7."""

    script: Script = field(default_factory=lambda: Script(1, 3))
    expect: str = "saved"
    faults: tuple[Fault, ...] = (Fault("first", "kill", Target("ranks", (1,)), 5, "backward"),)
    injections: list[Injection] = field(
        default_factory=lambda: [Injection("first", "kill", "rank 1", AT_S, FIRST, frozenset({1}))]
    )
    notes: dict[int, dict[LifeKey, RankLife]] = field(
        default_factory=lambda: {
            0: {FIRST: life(0, 2, 5, 6), SECOND: life(0, 5, 7)},
            1: {FIRST: life(1, 2, 4, 5), SECOND: life(1, 5, 7)},
            2: {FIRST: life(2, 2, 4, 5), SECOND: life(2, 5, 7)},
        }
    )
    events: list[Seen] = field(
        default_factory=lambda: [
            seen("opened", AT_S + 0.002),
            seen("committed", AT_S + 0.05, version=5),
            seen("released", AT_S + 0.06, exit_code=75),
        ]
    )
    found: list[Found] = field(default_factory=lambda: [Found(2), Found(5)])
    answers: list[dict[str, Any]] = field(default_factory=list)
    lives: list[LifeKey] = field(default_factory=lambda: [FIRST, SECOND])
    exits: list[int] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)
    diverged: bool = False
    trouble: str = ""

    def evidence(self) -> Evidence:
        """Return the story as evidence for ``judge``."""
        record = Record(
            Run("kill a rank", self.faults, self.expect),
            lives=self.lives,
            injections=self.injections,
            missed=self.missed,
            seen=self.events,
            found=self.found,
            answers=list(self.answers),
            exits=self.exits,
            trouble=self.trouble,
            back_s=AT_S + 4,
        )
        return Evidence(self.script, record, self.notes, REFERENCE, self.diverged)
