"""Second copies of sharded states in real jobs: a rank or a host is lost, the job goes on with the same bits."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.forked import ForkedJob
from tests.e2e.harness import Job, MakeJob, newest_of_survivors, two_nodes
from tests.e2e.shards import SCRIPT, assert_same_bits
from ttp.processor.local_state.page_dir import SHARED_MEMORY

EVERY = 4
STEPS = 14
HURT_AT = 10
TIMEOUT_S = 1200

pytestmark = [pytest.mark.timeout(TIMEOUT_S), pytest.mark.xdist_group("ttp")]


def fault(*ranks: int, action: str = "kill") -> dict[str, Any]:
    """Return a fault in the middle of a step."""
    return {"id": action, "ranks": list(ranks), "step": HURT_AT, "phase": "data", "action": action, "together": True}


def env(kind: str) -> dict[str, str]:
    """Return an environment with steps long enough for the copies."""
    return {"JOB_KIND": kind, "JOB_BUDDY": "1", "TTP_BUDDY_EVERY": str(EVERY), "JOB_STEP_S": "0.1"}


def how_saved(job: Job) -> tuple[int, set[str], str]:
    """Return version, source and reason of the only checkpoint."""
    (version,) = job.committed()
    plans = [e for events in job.incidents() for e in events if e["kind"] == "plan"]
    return version, set(plans[-1]["how"].values()), plans[-1]["reason"]


def assert_from_copies(job: Job, dead: set[int]) -> None:
    """Check that the newest copies were saved, and that the reported loss is within the bound."""
    version, hows, reason = how_saved(job)
    finished = newest_of_survivors(job, 0, dead)
    assert hows == {"kept"} and version % EVERY == 0, reason
    assert 0 <= finished - version <= 2 * EVERY - 1, (finished, version)
    lost = finished - version
    assert (f"{lost} finished steps are lost" if lost else "no step is lost") in reason
    assert job.starts() == [0, version], job.story()


def assert_live(job: Job, dead: set[int]) -> None:
    """Check that nothing was lost."""
    version, hows, reason = how_saved(job)
    assert "kept" not in hows, reason
    assert version >= newest_of_survivors(job, 0, dead)
    assert job.starts() == [0, version], job.story()


@pytest.mark.parametrize(
    ("kind", "hosts", "hurt"),
    [
        pytest.param("fsdp", "aabb", fault(2, 3, action="lose host"), id="fsdp"),
        pytest.param("zero", "aabb", fault(2, 3, action="lose host"), id="zero", marks=pytest.mark.slow),
        pytest.param("fsdp", "aaaa", fault(2), id="nobody to send to, but the memory stays", marks=pytest.mark.slow),
        pytest.param("fsdp", "aabb", fault(0), id="rank 0", marks=pytest.mark.slow),
        pytest.param("fsdp", "aabb", fault(1) | {"step": 8}, id="as a copy is made", marks=pytest.mark.slow),
    ],
)
def test_a_whole_host_is_lost(tmp_path: Path, kind: str, hosts: str, hurt: dict[str, Any]) -> None:
    """Or a rank of it. Each shard is on one rank."""
    job = ForkedJob(tmp_path / "job", steps=STEPS, hosts=[*hosts], faults=[hurt])
    job.env = env(kind) | {"JOB_STEP_S": "0.05"}
    assert job.live(TIMEOUT_S / 3) == [-9 if rank in hurt["ranks"] else 75 for rank in range(4)], job.story()
    assert job.live(TIMEOUT_S / 3) == [0] * 4, job.story()
    assert_from_copies(job, set(hurt["ranks"]))
    assert_same_bits(job, tmp_path / "unbroken", every=True)
    assert "derived from its seed" not in job.story()
    for host in hosts:
        key = hashlib.sha256(f"127.0.0.1|{job.port}|none|{host}".encode()).hexdigest()[:12]
        assert not (SHARED_MEMORY / f"ttp-{os.getuid()}-{key}").exists(), "nothing is left in the memory"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fsdp", "zero"])
def test_a_rank_is_lost_under_a_launcher(make_job: MakeJob, tmp_path: Path, kind: str) -> None:
    """Copies of a lost rank stay in the memory of the only host; ``ttp run`` restarts the job."""
    job = make_job(script=SCRIPT, steps=STEPS, max_restarts=1, faults=[fault(2)], env=env(kind))
    assert job.run(TIMEOUT_S / 2) == 0, job.story()
    assert_from_copies(job, {2})
    assert_same_bits(job, tmp_path / "unbroken", every=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "check"),
    [("fsdp", assert_from_copies), ("zero", assert_from_copies), ("hsdp", assert_live), ("replicated", assert_live)],
)
def test_a_host_is_lost_under_a_launcher(
    make_job: MakeJob, tmp_path: Path, kind: str, check: Callable[[Job, set[int]], None]
) -> None:
    """A host loses its ranks, launcher and memory; then the job is started again on two hosts.

    Where each host has a copy of every shard nothing is lost, and no second copies are kept. The random streams of the
    lost ranks come from the mirror of their pages.
    """
    job = make_job(script=SCRIPT, steps=STEPS, max_restarts=0, nodes=two_nodes(), hosts=["one", "two"])
    job.faults, job.env = [fault(2, 3, action="lose host")], env(kind) | {"TTP_TOKEN": "a secret", "TTP_MIRROR": "1"}
    job.start()
    assert [launcher.wait(TIMEOUT_S / 3) for launcher in job.processes] == [75, -9], job.story()
    assert job.run(TIMEOUT_S / 3) == 0, job.story()
    check(job, {2, 3})
    assert_same_bits(job, tmp_path / "unbroken", every=True)
