"""``ttp clusterd`` between a server with ClusterD's service and a real controller."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from tests.cli.conftest import REPOSITORY, Controller, Ttp
from tests.cli.fake_clusterd import FakeClusterD
from tests.ports import free_port
from ttp.mindio.clusterd import Accuse, Bridge, Seen
from ttp.wire.v1 import recover_pb2 as pb

Start = Callable[..., Controller]


@contextmanager
def agent(port: int, clusterd: int, **env: str) -> Iterator[subprocess.Popen[str]]:
    """Run ``ttp clusterd`` between the two."""
    command = [sys.executable, "-m", "ttp.cli", "clusterd", "--server", f"127.0.0.1:{clusterd}", "--port", str(port)]
    process = subprocess.Popen(
        [*command, "--job-id", FakeClusterD.job_id, "--address", "127.0.0.1"],
        cwd=REPOSITORY,
        env=os.environ | env,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_all_rounds_of_a_device_that_broke(start: Start) -> None:
    controller = start()
    controller.form(2)
    with FakeClusterD() as clusterd, agent(controller.port, clusterd.port) as process:
        clusterd.hear("Subscribe")
        clusterd.send("keep-alive")
        clusterd.send("stopTrain", "stop_train", faults=(1,))
        stopped = clusterd.hear("ReportStopComplete")
        assert (stopped.status.code, [f.rank_id for f in stopped.fault_ranks]) == (0, ["1"])
        clusterd.send("globalFault", "on_global_rank", faults=(1,))
        assert list(clusterd.hear("ReportRecoverStrategy").strategies) == ["dump", "exit"]
        clusterd.send("changeStrategy", "change_strategy", faults=(1,), change_strategy="dump")
        result = clusterd.hear("ReportRecoverStatus")
        assert (result.job_id, result.strategy, result.status.code) == (clusterd.job_id, "dump", 0), result
        assert clusterd.names().count("ReportStopComplete") == 1
        clusterd.send("killMaster")
        assert process.wait(30) == 0


def test_a_job_that_cannot_save_is_no_dump(start: Start) -> None:
    """ClusterD may start after the job, and be down for a while."""
    controller = start()
    controller.form(2, saves=False)
    port = free_port()
    with agent(controller.port, port) as process:
        assert process.stderr is not None and "cannot be reached" in process.stderr.readline()
        with FakeClusterD(port) as clusterd:
            clusterd.hear("Subscribe")
        with FakeClusterD(port) as clusterd:
            clusterd.hear("Subscribe")
            clusterd.send("saveAndExit", "save_and_exit", node_rank_ids=["1"])
            result = clusterd.hear("ReportRecoverStatus")
            assert (result.strategy, result.status.code) == ("dump", 407), result


def test_switched_off(ttp: Ttp, monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeClusterD(Init=403) as clusterd:
        said = ttp("clusterd", "--server", f"127.0.0.1:{clusterd.port}", "--job-id", "job-1", "--port", free_port())
        assert said.code == 1 and "process-recover-enable=on" in said.err
        monkeypatch.setenv("MINDX_SERVER_IP", f"127.0.0.1:{clusterd.port}")
        monkeypatch.setenv("MINDX_TASK_ID", "job-1")
        said = ttp("clusterd", "--port", free_port())
        assert said.code == 1 and "process-recover-enable=on" in said.err
    monkeypatch.delenv("MINDX_SERVER_IP")
    assert ttp("clusterd", "--job-id", "x").code == 64


# ---------------------------------------------------------------------------------------------- decisions, without I/O

JOB = Seen(hosts=((0, 1), (2, 3)), incident="old", stage="closed")
UUIDS = iter(range(1000))


def signal(kind: str, *actions: str, faults: tuple[int, ...] = (), **fields: object) -> pb.RecoverSignal:
    named = [pb.RecoverFault(rank_id=str(rank), fault_type="1") for rank in faults]
    known = {"uuid": str(next(UUIDS)), "job_id": "j", "signal_type": kind, **fields}
    return pb.RecoverSignal(actions=actions, fault_ranks=named, **known)  # type: ignore[arg-type]


def seen(incident: str, stage: str, *, lost: tuple[int, ...] = (), saved: bool = False, faulty: bool = True) -> Seen:
    return Seen(JOB.hosts, incident, stage, faulty, frozenset(lost), saved, "words")


@pytest.fixture
def bridge() -> Bridge:
    made = Bridge("j")
    assert made.look(JOB, 0.0) == []
    return made


def test_a_fault_is_accused_until_the_job_knows_of_it(bridge: Bridge) -> None:
    stop = signal("stopTrain", "stop_train", faults=(3,))
    assert bridge.signal(stop, 1.0) == [] and bridge.signal(stop, 1.1) == []
    (accusation,) = bridge.look(JOB, 1.0)
    assert isinstance(accusation, Accuse) and accusation.ranks == (2, 3), "the whole host goes"
    assert bridge.look(JOB, 1.2) == []
    assert len(bridge.look(JOB, 3.5)) == 1, "again: it was not heard"
    bridge.believed()
    assert bridge.look(JOB, 7.0) == []
    assert bridge.look(seen("new", "freezing"), 7.6) == []
    (stopped,) = bridge.look(seen("new", "saving"), 7.7)
    assert isinstance(stopped, pb.RecoverStopped) and stopped.status.code == 0


def test_a_global_fault_without_a_stop_before_it_accuses_too(bridge: Bridge) -> None:
    (can,) = bridge.signal(signal("globalFault", "on_global_rank", faults=(3,)), 1.0)
    assert isinstance(can, pb.RecoverStrategies) and list(can.strategies) == ["dump", "exit"]
    (accusation,) = bridge.look(JOB, 1.0)
    assert isinstance(accusation, Accuse) and accusation.ranks == (2, 3)


def test_without_a_job_nothing_is_stopped(bridge: Bridge) -> None:
    bridge.signal(signal("stopTrain", "stop_train", faults=(3,)), 1.0)
    assert bridge.look(None, 60.0) == []
    (stopped,) = bridge.look(Seen(), 62.0)
    assert isinstance(stopped, pb.RecoverStopped) and stopped.status.code == 404


def test_ranks_that_died_are_told_and_what_comes_of_it_accuses_nobody_again(bridge: Bridge) -> None:
    """ClusterD may repeat ttp's own report after the launcher has restarted the job, which is healthy then."""
    (faults,) = bridge.look(seen("i1", "freezing", lost=(1,)), 1.0)
    assert isinstance(faults, pb.RecoverFaults) and [f.rank_id for f in faults.fault_ranks] == ["1"]
    assert bridge.look(seen("i1", "saving", lost=(1,)), 1.1) == []
    assert bridge.look(seen("i1", "closed", saved=True), 2.0) == []
    bridge.signal(signal("stopTrain", "stop_train", faults=(1,)), 3.0)
    (stopped,) = bridge.look(seen("i1", "closed", saved=True), 3.0)
    assert isinstance(stopped, pb.RecoverStopped) and stopped.status.code == 0
    bridge.signal(signal("saveAndExit", "save_and_exit", node_rank_ids=["0"]), 4.0)
    (result,) = bridge.look(seen("i1", "closed", saved=True), 4.0)
    assert isinstance(result, pb.RecoverResult) and result.status.code == 0
    bridge.signal(signal("stopTrain", "stop_train", faults=(1,)), 9.0)  # another event
    (accusation,) = bridge.look(seen("i1", "closed", saved=True), 9.0)
    assert isinstance(accusation, Accuse) and accusation.ranks == (0, 1)


def test_a_fault_elsewhere_is_another_one(bridge: Bridge) -> None:
    bridge.look(seen("i1", "freezing", lost=(1,)), 1.0)
    bridge.look(seen("i1", "closed", saved=True), 2.0)
    bridge.signal(signal("saveAndExit", "save_and_exit", node_rank_ids=["1"]), 3.0)
    (accusation,) = bridge.look(seen("i1", "closed", saved=True), 3.0)
    assert isinstance(accusation, Accuse) and accusation.ranks == (2, 3)
    (result,) = bridge.look(seen("i2", "released", saved=False), 4.0)
    assert isinstance(result, pb.RecoverResult) and result.status.code == 407


def test_a_dump_of_which_nobody_knows_is_none(bridge: Bridge) -> None:
    bridge.signal(signal("saveAndExit", "save_and_exit"), 1.0)
    (accusation,) = bridge.look(JOB, 1.0)
    assert isinstance(accusation, Accuse) and accusation.ranks == (0, 1, 2, 3), "nobody is named: everybody is meant"
    bridge.look(seen("new", "saving"), 2.0)
    assert bridge.look(None, 300.0) == []
    (result,) = bridge.look(None, 362.0)
    assert isinstance(result, pb.RecoverResult) and result.status.code == 407


def test_a_checkpoint_on_request_is_no_dump(bridge: Bridge) -> None:
    """It comes between the signal and the accusation; training goes on after it."""
    bridge.signal(signal("saveAndExit", "save_and_exit", node_rank_ids=["0"]), 1.0)
    (accusation,) = bridge.look(seen("snapshot", "saving", faulty=False), 1.0)
    assert isinstance(accusation, Accuse)
    assert bridge.look(seen("snapshot", "closed", saved=True, faulty=False), 1.5) == []
    (result,) = bridge.look(seen("real", "released", saved=True), 2.0)
    assert isinstance(result, pb.RecoverResult) and result.status.code == 0


def test_a_death_that_came_and_went_between_two_looks_is_told_once(bridge: Bridge) -> None:
    (faults,) = bridge.look(seen("quick", "closed", lost=(2,), saved=True), 1.0)
    assert isinstance(faults, pb.RecoverFaults)
    assert bridge.look(seen("quick", "closed", lost=(2,), saved=True), 1.2) == []
    late = Bridge("j")
    assert late.look(seen("before", "closed", lost=(2,), saved=True), 1.0) == [], "it is over since long"


def test_what_ttp_does_not_do_is_refused(bridge: Bridge) -> None:
    (paused,) = bridge.signal(signal("stopTrain", "pause_train", faults=(1,)), 1.0)
    assert isinstance(paused, pb.RecoverStopped) and paused.status.code == 499
    (retried,) = bridge.signal(signal("changeStrategy", "change_strategy", change_strategy="retry"), 1.0)
    assert isinstance(retried, pb.RecoverResult) and (retried.status.code, retried.strategy) == (406, "retry")
    for other in (
        signal("stopTrain", "stop_train", faults=(1,), job_id="another"),
        signal("changeStrategy", "change_strategy", change_strategy="exit"),
        signal("hot-switch", "hot switch"),
        signal("keep-alive"),
        signal("of a later version", "unknown"),
    ):
        assert bridge.signal(other, 1.0) == []
    assert bridge.look(JOB, 1.0) == []


def test_rubbish_in_a_signal_is_passed_over(bridge: Bridge) -> None:
    bad = [pb.RecoverFault(rank_id=text) for text in ("", "-1", "x", "99999999999999999999", "1")]
    bridge.signal(pb.RecoverSignal(job_id="j", signal_type="stopTrain", actions=["stop_train"], fault_ranks=bad), 1.0)
    (accusation,) = bridge.look(JOB, 2.0)
    assert isinstance(accusation, Accuse) and accusation.ranks == (0, 1)


def test_a_controller_that_asks_for_a_token_is_told_of(start: Start) -> None:
    controller = start(token="of the job alone")
    with FakeClusterD() as clusterd, agent(controller.port, clusterd.port) as process:
        assert process.stderr is not None
        while "TTP_TOKEN" not in process.stderr.readline():
            assert process.poll() is None
