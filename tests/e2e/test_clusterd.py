"""A real job under ``ttp run`` with faults that only ClusterD knows, and faults that it has to report to ClusterD."""

from __future__ import annotations

import pytest

from tests.cli.fake_clusterd import FakeClusterD
from tests.cli.test_clusterd import agent
from tests.e2e.harness import MakeJob
from tests.waiting import until

WAIT_S = 150


@pytest.mark.slow
@pytest.mark.timeout(4 * WAIT_S)
@pytest.mark.xdist_group("ttp")
def test_what_clusterd_hears_is_what_is_on_disk(make_job: MakeJob) -> None:
    """First ttp detects a killed rank; in the next launch ClusterD reports a broken device."""
    faults = [{"id": "killed", "rank": 1, "step": 3, "phase": "backward", "action": "kill", "when": "seen"}]
    job = make_job(ranks=2, steps=100_000, max_restarts=0, faults=faults).start()
    run_dir = str(job.directory / "run")  # the job's token is there
    with FakeClusterD() as clusterd, agent(job.port, clusterd.port, TTP_RUN_DIR=run_dir) as process:
        assert process.stderr is not None
        while "the job has 2 ranks on 1 hosts" not in process.stderr.readline():
            assert process.poll() is None, job.story()
        (job.directory / "seen").touch()
        assert [fault.rank_id for fault in clusterd.hear("ReportProcessFault").fault_ranks] == ["1"], job.story()
        clusterd.send("saveAndExit", "save_and_exit", node_rank_ids=["0"], uuid="first")
        first = clusterd.hear("ReportRecoverStatus")
        assert (first.strategy, first.status.code) == ("dump", 0), first
        assert job.wait(WAIT_S) == 75, job.story()
        saved = job.committed()
        assert len(saved) == 1

        job.start()
        until(lambda: len(job.starts()) >= 2, WAIT_S, job.story)
        clusterd.send("stopTrain", "stop_train", faults=(0, 1), uuid="second")
        assert clusterd.hear("ReportStopComplete").status.code == 0, job.story()
        clusterd.send("globalFault", "on_global_rank", faults=(0, 1), uuid="second")
        clusterd.hear("ReportRecoverStrategy")
        clusterd.send("changeStrategy", "change_strategy", faults=(0, 1), change_strategy="dump", uuid="second")
        second = clusterd.hear("ReportRecoverStatus", 2)
        assert (second.strategy, second.status.code) == ("dump", 0), second
        assert job.wait(WAIT_S) == 75, job.story()
        assert job.starts()[1] == saved[0] and job.committed()[-1] >= saved[0]
        assert clusterd.names().count("ReportProcessFault") == 1
        assert job.ttp("verify", str(job.directory / "checkpoints")).returncode == 0
