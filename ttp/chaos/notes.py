"""The notes of the ranks of a job under test: the versions they began and finished, and the digests of their state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

LifeKey = tuple[int, int]
"""A life, that is one start of the job: the number of launches by the scheduler, and of restarts by the launcher."""

Digests = tuple[str, str]
"""Two digests: of the state that is equal on all ranks, and of a rank's own state."""


@dataclass(slots=True)
class RankLife:
    """The notes of one rank in one life. ``start`` is the restored version; None if the rank died before that."""

    start: int | None = None
    start_digests: Digests | None = None
    begun: int = 0
    """The newest version whose update the rank began; ``start`` if none."""
    finished: int = 0
    """The newest version that the rank finished; ``start`` if none."""
    states: dict[int, Digests] = field(default_factory=dict)
    """Digests at the end of each step, by version."""


Notes = Mapping[int, Mapping[LifeKey, RankLife]]
"""Notes by rank, then by life."""


def read(folder: Path, ranks: int) -> Notes:
    """Read the notes of all ``ranks`` ranks of a job from its folder."""
    return {rank: parse(_lines(folder / f"rank{rank}.log")) for rank in range(ranks)}


def parse(lines: Iterable[str]) -> dict[LifeKey, RankLife]:
    """Parse the notes of one rank. A last line that was cut off by a crash is ignored."""
    lives: dict[LifeKey, RankLife] = {}
    for line in lines:
        words = line.split()
        if len(words) < 4:
            continue
        _, life, kind, number, *digests = words
        launch, restart = life.split(".")
        _take(lives.setdefault((int(launch), int(restart)), RankLife()), kind, int(number), digests)
    return lives


def _take(life: RankLife, kind: str, version: int, digests: list[str]) -> None:
    pair = (digests[0], digests[1]) if len(digests) == 2 else None
    match kind:
        case "start":
            life.start, life.start_digests, life.begun, life.finished = version, pair, version, version
        case "update":
            life.begun = version
        case "version":
            life.finished = version
        case "state" if pair is not None:
            life.states[version] = pair


def _lines(path: Path) -> list[str]:
    return path.read_text().split("\n")[:-1] if path.exists() else []


def reference(notes: Notes) -> dict[int, dict[int, Digests]]:
    """Return the digests of every version, by rank, from the notes of an unbroken run."""
    known: dict[int, dict[int, Digests]] = {}
    for rank, lives in notes.items():
        (life,) = lives.values()
        assert life.start == 0 and life.start_digests is not None
        known[rank] = {0: life.start_digests, **life.states}
    return known
