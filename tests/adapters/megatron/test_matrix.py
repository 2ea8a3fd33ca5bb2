"""Megatron's layouts x killed ranks x points of a step: saved, or refused with the reason, and resumed bit for bit.

With ``-s`` pytest prints a row for each job; docs/reliability.md sums them up.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.adapters.megatron.jobs import DP4, EP2_DP2, PP2_DP2, TP2_DP2, Job
from tests.adapters.megatron.nursery import Nursery
from tests.halfway import divisions

pytestmark = [pytest.mark.xdist_group("megatron"), pytest.mark.slow, pytest.mark.timeout(1800)]

LAYOUTS = {"TP2 x DP2": TP2_DP2, "DP4": DP4, "EP2 x DP2, experts": EP2_DP2, "PP2 x DP2": PP2_DP2}
"""In two instances of the distributed optimizer each."""
PHASES = [
    "begin", "forward", "backward", "reduced", "barrier", "passed", "post_step0", "post_step1", "gathered", "stepped",
]  # fmt: skip
COLUMNS = [*PHASES, "halfway"]
STEPS = 2 * (len(PHASES) + 6) + 4


def groups_of(layout: str) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the two groups of ranks with the same half of the state."""
    return ((0, 1), (2, 3)) if layout.startswith("PP") else ((0, 2), (1, 3))


def victims(layout: str) -> dict[str, list[int]]:
    """Return the sets of ranks to kill, by name."""
    one, two = groups_of(layout)
    return {
        "one rank": [3],
        "rank 0": [0],
        "one of each shard, in different columns": [one[0], two[1]],
        "a whole column": [one[0], two[0]],
        "all copies of a shard": list(one),
    }


def phases_of(layout: str, who: str, undo: bool) -> list[str]:
    """Return the phases. Only experts have a second optimizer, and two stages are never in their passes at once."""
    never = set() if "experts" in layout else {"post_step1"}
    never |= {"barrier"} if undo else set()
    never |= {"forward", "backward"} if (layout, who) == ("PP2 x DP2", "a whole column") else set()
    return [phase for phase in PHASES if phase not in never]


def faults_of(layout: str, who: str, undo: bool) -> Iterator[dict[str, Any]]:
    """Yield faults without their steps: every phase, and every way to divide the survivors; see ``tests.halfway``."""
    dead = victims(layout)[who]
    for phase in phases_of(layout, who, undo):
        yield {"ranks": dead, "phase": phase}
    for out, broken in divisions(dead):
        yield {"ranks": dead, "phase": "halfway", "out": list(out), "broken": broken, "undo": undo}


def allowed(layout: str, fault: dict[str, Any], undo: bool) -> set[int]:
    """Return the versions that may be saved, by Statement 1; empty: the save must be refused.

    Before the dead ranks have sent their last gradient no rank can have updated. After the barrier every rank has the
    gradient, so the update is made. In between survivors may have updated or not.
    """
    dead, before, phase = set(fault["ranks"]), fault["step"], fault["phase"]
    if any(set(group) <= dead for group in groups_of(layout)):
        return set()
    if phase in ("begin", "forward", "backward"):
        return {before}
    if phase == "halfway":
        whole = all(set(group) & set(fault["out"]) for group in groups_of(layout))
        return {before + 1} if whole or not undo else {before}
    return {before, before + 1} if undo or phase in ("reduced", "barrier") else {before + 1}


# ---------------------------------------------------------------------------------------------------------------- run


def unbroken(nursery: Nursery, directory: Path, layout: str) -> Job:
    """Run the job without a fault."""
    job = Job(nursery, directory, LAYOUTS[layout])
    assert nursery.run(directory, "job", shape=job.shape, steps=STEPS) == [0] * 4, job.story()
    return job


@dataclass
class Row:
    """One job with a fault in one phase after the other, each in the next launch.

    Args:
        layout: one of ``LAYOUTS``.
        who: one of ``victims``.
        undo: with pre-images instead of the barrier.
        outcomes: number of outcomes, by phase.
        problems: what was not as expected.
    """

    layout: str
    who: str
    undo: bool = False
    outcomes: dict[str, Counter[str]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    _life: int = -1
    _start: int = 0

    def run(self, nursery: Nursery, directory: Path, reference: Job) -> Row:
        """Inject the faults, launch after launch; then run to the end and compare all versions with ``reference``."""
        job = Job(nursery, directory, LAYOUTS[self.layout])
        for fault in faults_of(self.layout, self.who, self.undo):
            try:
                outcome = self._hurt(job, fault | {"step": self._start + 1})
            except AssertionError as problem:
                outcome = "WRONG"
                self.problems.append(f"{self.layout}, {self.who}, undo {self.undo}, {fault}: {problem}\n{job.story()}")
            self.outcomes.setdefault(fault["phase"], Counter())[outcome] += 1
        if not self.who.startswith("all"):  # else every life began anew, with other weights
            self._compare(job, reference)
        return self

    def _hurt(self, job: Job, fault: dict[str, Any]) -> str:
        """Run one launch with its fault and return the outcome.

        Raises:
            AssertionError: the outcome is not allowed.
        """
        known = _incidents(job)
        try:
            codes = self._live(job, fault=fault)
        finally:
            before, self._start = self._start, _committed(job)
        versions = allowed(self.layout, fault, self.undo)
        expected = [-9 if rank in fault["ranks"] else 75 if versions else 70 for rank in range(4)]
        assert codes == expected, f"exit codes {codes}"
        (incident,) = _incidents(job) - known
        if not versions:
            assert "has no whole copy left" in incident.read_text(), "the reason is not said"
            assert self._start == before, "refused and saved"
            return "refused"
        assert self._start in versions, f"saved {self._start}, not one of {versions}"
        newest = max([0, *(v for rank in range(4) if rank not in fault["ranks"] for v in job.seen(rank, self._life))])
        assert self.undo or newest <= self._start, f"saved {self._start}, a survivor had {newest}"
        events = [json.loads(line) for line in incident.read_text().splitlines()]
        hows = {how for e in events if e["kind"] == "plan" for how in e.get("how", {}).values()}
        return " + ".join(["saved", *sorted(hows)])

    def _live(self, job: Job, **how: Any) -> list[int]:
        self._life += 1
        return job.live(self._life, steps=STEPS, undo="preimage" if self.undo else None, **how)

    def _compare(self, job: Job, reference: Job) -> None:
        codes = self._live(job)
        if codes != [0] * 4:
            self.problems.append(f"{self.layout}, {self.who}: the last life ended with {codes}\n{job.story()}")
            return
        for rank in range(4):
            theirs = reference.seen(rank)
            other = [version for version, found in job.seen(rank).items() if found != theirs[version]]
            results = [(each.directory / f"result{rank}.json").read_text() for each in (job, reference)]
            if other or results[0] != results[1]:
                self.problems.append(f"{self.layout}, {self.who}: other bits on rank {rank}: {other}, {results}")

    def __str__(self) -> str:
        cells = (self.outcomes.get(column, Counter()) for column in COLUMNS)
        shown = (", ".join(f"{n} {what}" if n > 1 else what for what, n in sorted(cell.items())) for cell in cells)
        return f"| {self.layout} | {'undo' if self.undo else 'redo'} | {self.who} | {' | '.join(shown)} |"


def _incidents(job: Job) -> set[Path]:
    return set((job.save_dir / "incidents").glob("*.jsonl"))


def _committed(job: Job) -> int:
    return max((int(name.rpartition("_")[2]) for name in job.versions()), default=0)


@pytest.fixture(scope="module")
def references(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Job]:
    return {layout: unbroken(nursery, tmp_path_factory.mktemp("unbroken"), layout) for layout in LAYOUTS}


@pytest.mark.parametrize("undo", [False, True], ids=["redo", "undo"])
@pytest.mark.parametrize("who", victims("DP4"))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_matrix(
    nursery: Nursery, tmp_path: Path, references: dict[str, Job], layout: str, who: str, undo: bool
) -> None:
    row = Row(layout, who, undo).run(nursery, tmp_path, references[layout])
    print(f"\n{row}")
    assert not row.problems, "\n".join(row.problems)
