"""Several shards in real jobs: HSDP, stages, tensor parallel, ZeRO-1; killed at any point, resumed with the
same bits.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.e2e.forked import ForkedJob
from tests.e2e.harness import newest_of_survivors
from tests.e2e.shards import Row, bits_of, fault, faults_of, rows, unbroken
from ttp.cli.main import main

TIMEOUT_S = 1200

pytestmark = pytest.mark.timeout(TIMEOUT_S)


def test_hsdp_survives_in_different_columns_and_refuses_when_a_shard_is_gone(tmp_path: Path) -> None:
    """First one rank of each shard, one of them rank 0, is killed in the barrier; then both ranks of one shard."""
    faults = [{**fault("first", "barrier", (0, 3)), "step": 3}, {**fault("then", "allreduced", (1, 3)), "step": 6}]
    job = ForkedJob(tmp_path / "job", steps=9, faults=faults, env={"JOB_KIND": "hsdp"})
    assert job.live(TIMEOUT_S / 4) == [-9, 75, 75, -9], job.story()
    assert job.live(TIMEOUT_S / 4) == [70, -9, 70, -9], job.story()
    (version,) = job.committed()
    assert job.starts() == [0, version], job.story()
    newest = newest_of_survivors(job, 0, {0, 3})
    assert newest <= version <= newest + 1, (newest, version)
    for mine, theirs in zip(bits_of(job.directory), unbroken(tmp_path / "unbroken", "hsdp", 9), strict=True):
        assert mine <= theirs, sorted(mine - theirs)
    redone = {4} & {version}  # by those whom the dead had let out of the barrier, or by order; rank 0 never saw it
    assert {int(line.split()[0]) for line in bits_of(job.directory)[0]} == set(range(1, 7)) - redone
    reasons = [e["text"] for events in job.incidents() for e in events if "text" in e]
    assert any("shard 'model-1' has no whole copy left: " in text for text in reasons), reasons
    assert main(["verify", str(job.directory / "checkpoints")]) == 0


@pytest.mark.parametrize(
    ("kind", "who", "mode", "name", "outcome"),
    [
        ("tp", "one of each shard", "redo", "halfway-1-broken", "saved + redo"),
        pytest.param("pp", "rank 0", "undo", "halfway-12-broken", "saved", marks=pytest.mark.slow),
        pytest.param("replicated", "a column", "undo", "halfway-2-broken", "saved + undo", marks=pytest.mark.slow),
    ],
)
def test_survivors_at_two_versions(tmp_path: Path, kind: str, who: str, mode: str, name: str, outcome: str) -> None:
    """Some survivors have made the update when ranks die, and others have not."""
    (hurt,) = (f for f in faults_of(kind, who, mode) if f["id"] == name)
    hurt["step"] = 2
    row = Row(kind, who, mode).run(tmp_path / "job", unbroken(tmp_path / "unbroken", kind, 5), [hurt])
    assert not row.problems, "\n".join(row.problems)
    assert row.outcomes == {"halfway": Counter({outcome: 1})}


@pytest.mark.slow
@pytest.mark.timeout(4 * TIMEOUT_S)
@pytest.mark.parametrize(("kind", "mode", "who"), list(rows()))
def test_matrix(tmp_path: Path, kind: str, mode: str, who: str) -> None:
    """All phases and all halfway faults, in one job. Prints the numbers of the table in docs/reliability.md."""
    faults = faults_of(kind, who, mode)
    bits = unbroken(tmp_path / "unbroken", kind, faults[-1]["step"] + 3)
    row = Row(kind, who, mode).run(tmp_path / "job", bits, faults)
    halfway = row.outcomes.pop("halfway", Counter())
    print(f"\n| {kind} | {mode} | {who} | {sum(row.outcomes.values(), Counter())} | {halfway} |")
    assert not row.problems, "\n".join(row.problems)
