"""ZeRO-1 with copies in real jobs: killed at any point, saved from the other copies, resumed with the bits of plain
DDP.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.e2e.harness import Job, newest_of_survivors

MakeJob = Callable[..., Job]
Unbroken = Callable[[Job], list[dict[str, Any]]]

TIMEOUT_S = 400

pytestmark = [pytest.mark.timeout(TIMEOUT_S), pytest.mark.xdist_group("ttp")]


def kill(step: int, phase: str, *ranks: int) -> dict[str, Any]:
    """Return the fault; a rank that is released before it kills itself would do so in the next launch."""
    fault = {"id": f"{phase}{step}", "ranks": list(ranks), "step": step, "phase": phase}
    return {**fault, "action": "kill", "together": True}


def replicated(make_job: MakeJob, faults: list[dict[str, Any]], **settings: Any) -> Job:
    """Make a job of four ranks and two shards: ranks 0 and 2 hold one, 1 and 3 the other."""
    env = {"JOB_OPTIMIZER": "replicated:2", **settings.pop("env", {})}
    return make_job(steps=16, max_restarts=len(faults), faults=faults, env=env, **settings)


def assert_nothing_lost(job: Job, unbroken: Unbroken) -> None:
    """Check one commit per fault, none older than a survivor's version, and the results of plain DDP at the end."""
    committed = job.committed()
    newest = [newest_of_survivors(job, life, set(fault["ranks"])) for life, fault in enumerate(job.faults)]
    assert len(committed) == len(newest), job.story()
    assert all(seen <= saved <= seen + 1 for seen, saved in zip(newest, committed, strict=True)), (newest, committed)
    assert job.starts() == [0, *committed], job.story()
    verified = job.ttp("verify", str(job.directory / "checkpoints"))
    assert verified.returncode == 0, verified.stderr
    for mine, plain in zip(job.results(), unbroken(job), strict=True):
        held, whole = mine.pop("optimizer"), plain["optimizer"]
        assert 0 < len(held) < len(whole) and held == {number: whole[number] for number in held}
        assert mine == {key: value for key, value in plain.items() if key != "optimizer"}


@pytest.mark.slow
def test_one_of_each_shard_in_the_exchange(make_job: MakeJob, unbroken: Unbroken) -> None:
    """The two dead ranks are of different columns; the two that wait for them in the exchange save."""
    job = replicated(make_job, [kill(5, "gather", 0, 3)])
    assert job.run(TIMEOUT_S - 30) == 0, job.story()
    assert_nothing_lost(job, unbroken)
    (incident,) = job.incidents()
    plans = [e["savers"] for e in incident if e["kind"] == "plan"]
    assert plans[-1].keys() == {"model-0", "model-1", "common"}, plans
    assert job.committed() == [6], "their update was finished"


PHASES = ["data", "forward", "loss", "backward", "allreduced", "in_step", "gather", "stepped", "scheduler", "scheduled"]


@pytest.mark.slow
@pytest.mark.timeout(3 * TIMEOUT_S)
@pytest.mark.parametrize("ranks", [(0,), (3,), (0, 1), (0, 3), (1, 2)], ids=str)
@pytest.mark.parametrize("undo", [None, "preimage"])
def test_every_phase(make_job: MakeJob, unbroken: Unbroken, ranks: tuple[int, ...], undo: str | None) -> None:
    """Kills one rank, one column, and one rank of each shard in different columns."""
    for phases in (PHASES[5:], PHASES[:5]):
        faults = [kill(2 + 2 * number, phase, *ranks) for number, phase in enumerate(phases)]
        job = replicated(make_job, faults, env={"JOB_UNDO": undo} if undo else {})
        assert job.run(1.2 * TIMEOUT_S) == 0, job.story()
        assert_nothing_lost(job, unbroken)


@pytest.mark.slow
def test_both_copies_of_a_shard(make_job: MakeJob) -> None:
    job = replicated(make_job, [kill(4, "allreduced", 1, 3)])
    job.max_restarts = 0
    assert job.run(TIMEOUT_S - 30) == 70, job.story()
    (incident,) = job.incidents()
    reasons = [e["text"] for e in incident if "has no whole copy left" in e.get("text", "")]
    assert reasons and "shard 'model-1' has no whole copy left: ranks 1,3 gave no answer" in reasons[0]


@pytest.mark.slow
def test_torchs_own_trains_on_and_is_saved_on_request(make_job: MakeJob, unbroken: Unbroken) -> None:
    job = make_job(steps=16, max_restarts=0, env={"JOB_OPTIMIZER": "zero", "JOB_STEP_S": "1"})
    job.start()
    job.wait_for_version(3, timeout_s=TIMEOUT_S / 2)
    asked = job.ttp("save")
    assert asked.returncode == 0, asked.stderr
    assert job.wait(TIMEOUT_S - 30) == 0, job.story()
    plain = unbroken(job)
    assert [r["weights"] for r in job.results()] == [r["weights"] for r in plain]
    assert job.log.read_text().count("use ttp.adapters.torch.ReplicatedOptimizer") == 1
    assert len(job.committed()) == 1 and job.starts() == [0]


@pytest.mark.slow
def test_torchs_own_has_no_copies_and_a_kill_is_refused_with_the_reason(make_job: MakeJob) -> None:
    hurt = make_job(steps=16, max_restarts=0, env={"JOB_OPTIMIZER": "zero"}, faults=[kill(4, "backward", 2)])
    assert hurt.run(TIMEOUT_S - 30) == 70, hurt.story()
    (incident,) = hurt.incidents()
    assert any("shard 'model-2' has no whole copy left: rank 2 gave no answer" in e.get("text", "") for e in incident)
