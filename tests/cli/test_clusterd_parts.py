"""The parts of ``ttp clusterd``: what it sees of a job, also of one that has ended, and whose words it passes on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Ttp
from tests.cli.fake_clusterd import FakeClusterD
from tests.cli.test_incidents import SAVED, write
from tests.ports import free_port
from tests.waiting import until
from ttp.cli import clusterd
from ttp.cli.clusterd import ClusterLink, Eyes, Words
from ttp.cli.connection import UnreachableError
from ttp.mindio import handlers
from ttp.mindio.clusterd import Accuse
from ttp.mindio.protocol.manager_messages import NoticeKind
from ttp.wire.v1 import controller_pb2 as wire
from ttp.wire.v1 import recover_pb2 as pb

SAVED_ON_HOSTS = [(at, kind, facts | {"host": "h"} if kind == "evidence" else facts) for at, kind, facts in SAVED]


class Job:
    """What a controller answers; None: it has ended."""

    def __init__(self) -> None:
        self.now: wire.GetStatusResponse | None = None

    def status(self) -> wire.GetStatusResponse:
        if self.now is None:
            raise UnreachableError("no ttp controller answers")
        return self.now

    def report_fault(self, ranks: list[int], host: str, reason: str) -> wire.ReportFaultResponse:
        self.status()
        return wire.ReportFaultResponse(accused=ranks, text="The job saves its newest step")


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Job:
    made = Job()

    @contextmanager
    def connected(_: object) -> Iterator[Job]:
        yield made

    monkeypatch.setattr(clusterd, "connected", connected)
    return made


def trains(save_dir: Path | None, *states: str, **incident: Any) -> wire.GetStatusResponse:
    ranks = [wire.RankStatus(rank=r, host="h", state=state) for r, state in enumerate(states or ("live", "live"))]
    where = "" if save_dir is None else str(save_dir)
    last = wire.IncidentStatus(**incident) if incident else None
    return wire.GetStatusResponse(world_size=len(ranks), ranks=ranks, save_dir=where, last_incident=last)


def test_how_a_job_ended_is_read_from_its_directory_when_no_controller_answers(job: Job, tmp_path: Path) -> None:
    """ClusterD has to hear of the dump even if the controller was quicker than the question."""
    eyes = Eyes("127.0.0.1", free_port(), None)
    assert eyes.look() is None, "there was no job"
    job.now = trains(tmp_path)
    assert eyes.look() is not None
    job.now = None
    assert eyes.look() is None, "it has ended without an incident"
    write(tmp_path, "one", SAVED_ON_HOSTS[:8])
    assert eyes.look() is None, "its incident is not over"
    write(tmp_path, "two", SAVED_ON_HOSTS)
    seen = eyes.look()
    assert seen is not None and (seen.incident, seen.stage, seen.saved, [*seen.lost]) == ("two", "closed", True, [3])
    assert eyes.look() == seen


def test_a_directory_that_cannot_be_read_says_nothing_about_a_job_that_has_ended(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    eyes = Eyes("127.0.0.1", free_port(), None)
    job.now = trains(tmp_path / "gone")
    eyes.look()
    job.now = None
    (tmp_path / "gone").write_text("not a directory")
    assert eyes.look() is None


def test_ranks_that_died_in_an_incident_that_is_over_are_told_from_its_file(job: Job, tmp_path: Path) -> None:
    """Between two looks a rank may have died, and the job may have been saved."""
    eyes = Eyes("127.0.0.1", free_port(), None)
    job.now = trains(tmp_path, "released", "lost", id="one", stage="closed", outcome="exit 75")
    seen = eyes.look()
    assert seen is not None and (seen.lost, seen.faulty) == (frozenset(), True), "without the file nobody is named"
    write(tmp_path, "one", SAVED_ON_HOSTS)
    seen = eyes.look()
    assert seen is not None and ([*seen.lost], seen.saved, seen.text) == ([3], True, "exit 75: saved version 12")


def test_a_fault_that_no_controller_hears_of_is_told_again(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    eyes = Eyes("127.0.0.1", free_port(), None)
    accusation = Accuse((1,), "ClusterD: a device is broken")
    assert not eyes.accuse(accusation) and "no ttp controller answers" in capsys.readouterr().err
    job.now = trains(None)
    assert eyes.accuse(accusation) and "ranks 1. The job saves" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------- a program with handlers


class FakeManager:
    """A manager that keeps what it is told, and whose controller calls what the test says."""

    attached = closed = False

    def __init__(self, **callbacks: Any) -> None:
        self.callbacks, self.notices = callbacks, list[Any]()

    def start(self) -> None:
        self.attached = True

    def wait_attached(self, _: float) -> bool:
        return self.attached

    def notify(self, notice: Any) -> None:
        self.notices.append(notice)

    def close(self) -> None:
        self.closed = True


def test_words_are_passed_on_in_both_directions(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such a job can also retry and recover: ClusterD and its controller decide, and this command does not."""
    made: list[FakeManager] = []

    def make(*_: object, **callbacks: Any) -> FakeManager:
        made.append(FakeManager(**callbacks))
        return made[-1]

    monkeypatch.setattr(handlers, "Manager", make)
    words = Words("job-1", ("127.0.0.1", free_port(), None))
    words.close()  # nobody was managed yet
    assert not words.pass_on(None, None)
    stop = pb.RecoverSignal(job_id="job-1", uuid="1", signal_type="stopTrain", actions=["stop_train"])
    assert not words.pass_on(stop, None) and not words.pass_on(stop, None), "a repeated signal is passed on once"
    (manager,) = made
    assert [notice.kind for notice in manager.notices] == [NoticeKind.STOP_TRAIN]
    assert capsys.readouterr().err.count("handlers of its own") == 1
    say = manager.callbacks
    say["report_fault_ranks"]({1: 0}, {})
    say["report_stop_complete"](0, "stopped", {1: 0})
    say["report_strategies"]({1: 0}, ["retry", "dump"])
    say["report_result"](0, "repaired", {1: 0}, "retry")
    said: list[Any] = words.pass_on(None, None)
    faults, stopped, strategies, result = said
    assert [f.rank_id for f in faults.fault_ranks] == ["1"] and stopped.status.info == "stopped"
    assert list(strategies.strategies) == ["retry", "dump"] and (result.strategy, result.status.code) == ("retry", 0)
    words.close()
    assert manager.closed


class HasHandlers(Eyes):
    """Sees a job whose program has handlers."""

    def look(self) -> None:
        self.has_handlers = True


def test_of_a_job_with_handlers_all_but_the_end_is_decided_elsewhere(ttp: Ttp, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = pb.RecoverStrategies(job_id="job-1", strategies=["recover"])
    heard: list[str] = []

    def pass_on(_: Words, signal: Any, __: object) -> list[Any]:
        heard.extend([] if signal is None else [signal.signal_type])
        return [] if signal is None else [answer]

    monkeypatch.setattr(clusterd, "Eyes", HasHandlers)
    monkeypatch.setattr(Words, "pass_on", pass_on)
    with FakeClusterD() as server:
        server.send("globalFault", "on_global_rank", faults=(1,))
        server.send("killMaster")
        arguments = ("--server", f"127.0.0.1:{server.port}", "--job-id", "job-1", "--port", free_port())
        assert ttp("clusterd", *arguments, "--every", "0.05").code == 0
        assert heard == ["globalFault"]
        assert list(server.hear("ReportRecoverStrategy").strategies) == ["recover"]


def test_what_clusterd_cannot_hear_now_is_sent_when_it_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    port = free_port()
    link = ClusterLink(f"127.0.0.1:{port}", "job-1")
    try:
        link.say(pb.RecoverResult(job_id="job-1", strategy="dump"))
        assert "cannot be reached" in capsys.readouterr().err
        with FakeClusterD(port) as server:
            until(lambda: link.next(0.05) is None and "ReportRecoverStatus" in server.names())
            assert server.names().count("ReportRecoverStatus") == 1
    finally:
        link.close()
