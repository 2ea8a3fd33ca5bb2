"""Many shards in real jobs: HSDP, pipeline stages, tensor parallel; killed anywhere, resumed with the same bits.

Two shards of two copies each: ranks 0 and 2 hold one and 1 and 3 the other (hsdp, tp); of pipeline stages 0 and 1, 2
and 3. ``python -m tests.e2e.test_sharded`` runs the whole matrix and prints the table of docs/reliability.md.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.adapters.torch.worlds import run_world
from tests.e2e.harness import Job, newest_of_survivors

MakeJob = Callable[..., Job]
Bits = list[set[str]]
"""For every rank, what it held at each version, in any of its lives: the version and digests."""

SCRIPT = Path(__file__).with_name("sharded_job.py")
STEPS = 9
TIMEOUT_S = 1200

KINDS = {"hsdp": ((0, 2), (1, 3)), "tp": ((0, 2), (1, 3)), "pp": ((0, 1), (2, 3))}
"""The replica groups of each kind."""

PHASES = ["data", "backward", "allreduced", "barrier", "passed", "in_step", "stepped", "scheduled"]


def kills(kind: str) -> dict[str, tuple[int, ...]]:
    """Who is killed: what survives is one copy of each shard, or none of the first one."""
    one, two = KINDS[kind]
    return {
        "one rank": (one[1],),
        "rank 0": (0,),
        "one of each shard": (one[0], two[1]),
        "all of a shard": one,
    }


def kill(step: int, phase: str, ranks: tuple[int, ...]) -> dict[str, Any]:
    name = f"{phase}{step}"
    return {"id": name, "ranks": list(ranks), "step": step, "phase": phase, "action": "kill", "together": True}


def sharded(directory: Path, kind: str, faults: list[dict[str, Any]], restarts: int) -> Job:
    env = {"JOB_KIND": kind}
    return Job(directory, script=SCRIPT, steps=STEPS, faults=faults, max_restarts=restarts, env=env)


def bits_of(directory: Path) -> Bits:
    return [set((directory / f"bits{rank}.log").read_text().splitlines()) for rank in range(4)]


def unbroken(directory: Path, kind: str) -> Bits:
    env = {"JOB_DIR": str(directory), "JOB_STEPS": str(STEPS), "JOB_KIND": kind}
    run_world(directory, "tests.e2e.sharded_job", "reference", env=env)
    return bits_of(directory)


def reasons(job: Job) -> list[str]:
    return [e["text"] for events in job.incidents() for e in events if "text" in e]


def assert_resumed(job: Job, bits: Bits) -> None:
    """Nothing that a survivor had finished is lost, and every version of every life has the unbroken run's bits."""
    committed = job.committed()
    assert job.starts() == [0, *committed], job.story()
    for life, (fault, version) in enumerate(zip(job.faults, committed, strict=False)):
        newest = newest_of_survivors(job, life, set(fault["ranks"]))
        assert newest <= version <= newest + 1, (job.faults, committed)
    for mine, theirs in zip(bits_of(job.directory), bits, strict=True):
        assert mine <= theirs, sorted(mine - theirs)


@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.xdist_group("ttp")
def test_hsdp_survives_in_different_columns_and_refuses_when_a_shard_is_gone(tmp_path: Path) -> None:
    """First one rank of each shard dies, rank 0 among them, while they stand in the barrier; then both of one shard."""
    faults = [kill(3, "barrier", (0, 3)), kill(6, "allreduced", (1, 3))]
    job = sharded(tmp_path / "job", "hsdp", faults, restarts=1)
    try:
        assert job.run(TIMEOUT_S - 60) == 70, job.story()
    finally:
        job.stop()
    assert_resumed(job, unbroken(tmp_path / "unbroken", "hsdp"))
    (version,) = job.committed()
    redone = {4} & {version}  # by those whom the dead had let out of the barrier, or by order; rank 0 never saw it
    assert {int(line.split()[0]) for line in bits_of(job.directory)[0]} == set(range(1, 7)) - redone
    assert any("shard 'model-1' has no whole copy left: ranks 1,3 gave no answer" in text for text in reasons(job))
    verified = job.ttp("verify", str(job.directory / "checkpoints"))
    assert verified.returncode == 0, verified.stderr


# ---------------------------------------------------------------------------------------------------------- the matrix


def run_case(directory: Path, kind: str, who: str, phases: list[str], bits: Bits) -> Counter[str]:
    """One job, hurt in one phase after the other. Returns how often which outcome was seen."""
    ranks = kills(kind)[who]
    seen: Counter[str] = Counter()
    if who == "all of a shard":
        for number, phase in enumerate(phases):
            job = sharded(directory / f"{number}", kind, [kill(4, phase, ranks)], restarts=0)
            try:
                assert job.run(TIMEOUT_S) == 70, job.story()
            finally:
                job.stop()
            assert any("has no whole copy left" in text for text in reasons(job)), job.story()
            assert_resumed(job, bits)
            seen["refused"] += 1
        return seen
    for part in (phases[0::2], phases[1::2]):
        faults = [kill(1 + 2 * number, phase, ranks) for number, phase in enumerate(part)]
        job = sharded(directory / part[0], kind, faults, restarts=len(faults))
        try:
            assert job.run(TIMEOUT_S) == 0, job.story()
        finally:
            job.stop()
        assert len(job.committed()) == len(faults), job.story()
        assert_resumed(job, bits)
        for events in job.incidents():
            hows = {how for e in events if e["kind"] == "plan" for how in e.get("how", {}).values()}
            seen["saved after redo" if "redo" in hows else "saved"] += 1
    return seen


@pytest.mark.slow
@pytest.mark.timeout(4 * TIMEOUT_S)
@pytest.mark.xdist_group("ttp")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("who", ["one rank", "rank 0", "one of each shard", "all of a shard"])
def test_matrix(tmp_path: Path, kind: str, who: str) -> None:
    bits = unbroken(tmp_path / "unbroken", kind)
    seen = run_case(tmp_path, kind, who, PHASES if who != "all of a shard" else PHASES[2:5], bits)
    assert seen.total() == (len(PHASES) if who != "all of a shard" else 3)


def main() -> None:
    """Print the table."""
    print("| layout | killed | phases | outcome |\n|---|---|---|---|")
    for kind in KINDS:
        with tempfile.TemporaryDirectory() as name:
            directory = Path(name)
            bits = unbroken(directory / "unbroken", kind)
            for who in kills(kind):
                phases = PHASES if who != "all of a shard" else PHASES[2:5]
                seen = run_case(directory / who.replace(" ", "-"), kind, who, phases, bits)
                outcome = ", ".join(f"{count} {what}" for what, count in sorted(seen.items()))
                print(f"| {kind} | {who} | {len(phases)} | {outcome} |", flush=True)


if __name__ == "__main__":
    main()
