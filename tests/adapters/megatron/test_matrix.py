"""Layouts of Megatron x who is killed x where in a step: saved, or refused with the reason, and resumed bit for bit.

``python -m tests.adapters.megatron.test_matrix`` runs all of it, or what is named, and prints the table of
docs/reliability.md.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.adapters.megatron.jobs import DP4, EP2_DP2, TP2_DP2, Job
from tests.adapters.megatron.nursery import Nursery

pytestmark = [pytest.mark.xdist_group("megatron"), pytest.mark.slow, pytest.mark.timeout(1200)]

LAYOUTS = {"TP2 x DP2": TP2_DP2, "DP4": DP4, "EP2 x DP2, experts": EP2_DP2}
"""In two instances of the distributed optimizer each: ranks 0 and 2 hold one half of the state, 1 and 3 the other."""
PHASES = [
    "begin", "forward", "backward", "reduced", "barrier", "passed", "post_step0", "post_step1", "gathered", "stepped",
]  # fmt: skip
WHO = {
    "one rank": [3],
    "rank 0": [0],
    "one of each shard, in different columns": [0, 3],
    "a whole column": [0, 1],
    "all copies of a shard": [0, 2],
}


STEPS = 2 * len(PHASES) + 4
PORT_TAKEN = 64
"""What a rank exits with when another program on this machine was faster to take the controller's port."""


def phases_of(layout: str) -> list[str]:
    """Only with experts there is a second optimizer."""
    return [phase for phase in PHASES if phase != "post_step1" or "experts" in layout]


def unbroken(nursery: Nursery, directory: Path, shape: dict[str, Any], steps: int) -> Job:
    job = Job(nursery, directory, shape)
    assert nursery.run(directory, "job", shape=shape, steps=steps) == [0] * 4, job.story()
    return job


def run_case(nursery: Nursery, directory: Path, layout: str, who: str, reference: Job) -> dict[str, str]:
    """One job that is hurt in one phase after the other, each time in the life that the one before has left.

    Returns:
        what came of each phase.
    """
    job, dead, seen = Job(nursery, directory, LAYOUTS[layout]), WHO[who], dict[str, str]()
    start, life = 0, -1
    for phase in phases_of(layout):
        fault, codes = {"ranks": dead, "step": start + 1, "phase": phase}, [PORT_TAKEN]
        while PORT_TAKEN in codes:
            life += 1
            codes = job.live(life, fault=fault, steps=STEPS)
        seen[phase], start = _judged(job, life, phase, dead, codes, start)
    assert job.live(life + 1, steps=STEPS) == [0] * 4, job.story()
    for rank in range(4):
        known = reference.seen(rank)
        assert all(found == known[version] for version, found in job.seen(rank).items()), (layout, who, rank)
        assert (directory / f"result{rank}.json").read_text() == (
            reference.directory / f"result{rank}.json"
        ).read_text()
    return seen


def _judged(job: Job, life: int, phase: str, dead: list[int], codes: list[int], start: int) -> tuple[str, int]:
    """What came of it, and the version at which the next life has to begin."""
    alive = [rank for rank in range(4) if rank not in dead]
    assert [codes[rank] for rank in dead] == [-9] * len(dead), (phase, codes, job.story())
    newest = max([start, *(version for rank in alive for version in job.seen(rank, life))])
    committed = max((int(name.rpartition("_")[2]) for name in job.versions()), default=0)
    if codes[alive[0]] == 70:
        assert [codes[rank] for rank in alive] == [70] * len(alive), job.story()
        told = "".join(path.read_text() for path in (job.save_dir / "incidents").glob("*.jsonl"))
        assert told.count("has no whole copy left") > life, told
        return "refused", committed
    assert [codes[rank] for rank in alive] == [75] * len(alive), (phase, codes, job.story())
    assert newest <= committed <= start + 2, (phase, newest, committed)
    assert committed >= start + 1, (phase, start, committed)
    return "saved", committed


@pytest.mark.parametrize("layout", LAYOUTS)
def test_matrix(nursery: Nursery, tmp_path: Path, layout: str) -> None:
    reference = unbroken(nursery, tmp_path / "unbroken", LAYOUTS[layout], STEPS)
    for number, who in enumerate(WHO):
        seen = run_case(nursery, tmp_path / str(number), layout, who, reference)
        assert seen == dict.fromkeys(phases_of(layout), "refused" if who.startswith("all") else "saved")


def main(wanted: list[str]) -> None:
    """Run the cases whose names contain one of these words, or all; print a row of the table for each."""
    nursery, failed, references = Nursery(), 0, dict[str, Job]()
    cases = [(layout, who) for layout in LAYOUTS for who in WHO]
    print(f"| layout | killed | {' | '.join(PHASES)} |\n|---|---|{'---|' * len(PHASES)}", flush=True)
    with tempfile.TemporaryDirectory() as directory:
        for layout, who in cases:
            if wanted and not any(word in f"{layout}: {who}" for word in wanted):
                continue
            try:
                if layout not in references:
                    references[layout] = unbroken(nursery, Path(directory) / layout, LAYOUTS[layout], STEPS)
                seen = run_case(nursery, Path(directory) / f"{layout} {who}", layout, who, references[layout])
                cells = [seen.get(phase, "") for phase in PHASES]
            except AssertionError as problem:
                failed += 1
                cells = ["FAILED"]
                print(problem, file=sys.stderr, flush=True)
            print(f"| {layout} | {who} | {' | '.join(cells)} |", flush=True)
    nursery.close()
    sys.exit(bool(failed))


if __name__ == "__main__":
    main(sys.argv[1:])
