"""One verdict per job: from each launcher, from the controller, and afterwards from the files."""

from __future__ import annotations

import pytest

from tests.e2e.harness import Job, MakeJob, two_nodes

WAIT_S = 150


def codes(job: Job) -> list[int]:
    """Return the exit codes of all launchers."""
    job.run(WAIT_S)
    return [process.wait() for process in job.processes]


def verdict(job: Job) -> tuple[str, int]:
    done = job.ttp("verdict", str(job.directory / "checkpoints"))
    assert done.stderr, "why is said too"
    return done.stdout.strip(), done.returncode


@pytest.mark.slow
@pytest.mark.timeout(4 * WAIT_S)
@pytest.mark.xdist_group("ttp")
def test_two_launchers_that_saw_different_things_say_the_same(make_job: MakeJob) -> None:
    """The results of their own ranks are 1 (a rank was killed) and 75, then 64 and 75, then 0 and 0."""
    faults = [
        {"id": "killed", "rank": 1, "step": 3, "phase": "backward", "action": "kill"},
        {"id": "wrong", "rank": 1, "step": 5, "phase": "forward", "action": "misuse"},
    ]
    env = {"TTP_TOKEN": "secret"}
    job = make_job(ranks=2, steps=8, max_restarts=0, nodes=two_nodes(), hosts=["one", "two"], faults=faults, env=env)
    assert codes(job) == [75, 75], job.story()
    assert verdict(job) == ("saved", 75)
    assert codes(job) == [64, 64], job.story()
    assert verdict(job) == ("wrong", 64)
    assert codes(job) == [0, 0], job.story()
    assert verdict(job) == ("trained", 0)


@pytest.mark.timeout(3 * WAIT_S)
@pytest.mark.xdist_group("ttp")
def test_the_third_launch_that_brings_no_new_version_is_the_last(make_job: MakeJob) -> None:
    """Two launches are of one ``ttp run``, the third is of another, which has a restart left and does not use it."""
    faults = [{"id": f"r{n}", "rank": 0, "step": 0, "phase": "data", "action": "raise"} for n in range(5)]
    flags = ["--standalone", "--saved-exit-code", "130"]
    job = make_job(ranks=1, steps=4, max_restarts=1, faults=faults, flags=flags)
    assert codes(job) == [130], job.story()
    assert verdict(job) == ("saved", 75)
    assert codes(job) == [70], job.story()
    said = job.log.read_text()  # whole: the story of three launches may be cut
    assert "no progress: launch 3 in a row" in said and "the job is not started again" in said, job.story()
    assert verdict(job) == ("lost", 70)
    assert len(job.starts()) == 3, "a restart was left, and was not used"
