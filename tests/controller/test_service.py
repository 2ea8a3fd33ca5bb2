"""The controller as a real process, with real streams to its peers."""

from __future__ import annotations

import json
import logging
import os
import queue
import re
import resource
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.controller.conftest import Controller, ended, hello
from tests.launch.conftest import Unread
from tests.waiting import until
from ttp._version import __version__
from ttp.cli.incident_reader import incident_files, read_incident
from ttp.cli.main import main as cli
from ttp.config import Config
from ttp.controller.__main__ import RING_CHECK_S, _why_not, main, parser, patience_of
from ttp.core import messages as m
from ttp.core.layout import Layout, Rank, Shard, Version
from ttp.errors import EXIT_BAD_CONFIG, EXIT_PORT_TAKEN
from ttp.launch.ring import Ring, write_ring
from ttp.polling import poll
from ttp.wire.channel import MESSAGE_BYTES_MAX
from ttp.wire.convert import order_from_wire, report_to_wire
from ttp.wire.v1 import controller_pb2 as pb


def frozen(rank: int, incident: str, version: int, **changes: Any) -> m.Frozen:
    return replace(m.Frozen(Rank(rank), incident, Version(version), m.Phase.IDLE, final=True), **changes)


def save_whatever_is_asked(rank: Any, order: m.Save) -> m.Commit:
    piece = m.Piece("__0_0.distcp", 1, "d", "shard", "model", Rank(rank.number))
    rank.say(m.Saved(Rank(rank.number), order.incident, order.generation, (piece,)))
    commit: m.Commit = rank.expect(m.Commit)
    rank.say(m.Committed(Rank(rank.number), order.incident, order.generation, f"/d/step_{order.version}", 1))
    return commit


def test_a_peer_of_another_major_version_is_refused_in_words(controller: Controller) -> None:
    stranger = controller.rank(0, protocol_major=m.PROTOCOL_MAJOR + 1, ttp_version="9.1")
    refused = stranger.expect(m.Refused)
    for said in (f"(ttp {__version__})", "(ttp 9.1): install the same ttp on every host", "TTP_ABANDONED_S"):
        assert refused.code is m.RefusalCode.PROTOCOL and said in refused.text
    assert stranger.ended()


def test_a_peer_of_another_minor_version_is_welcome(controller: Controller) -> None:
    stranger = controller.rank(0, protocol_minor=99, ttp_version="9.1")
    assert stranger.expect(m.Welcome).ttp_version == __version__  # it compares its own with the controller's


def test_a_message_without_content_ends_its_stream_and_nothing_else(controller: Controller) -> None:
    zero, one = controller.job()
    one.say_raw(pb.RankReport())
    assert one.expect(m.Refused).code is m.RefusalCode.MALFORMED
    assert zero.expect(m.Freeze)  # a rank that talks nonsense is a lost rank


def test_status_names_ranks_groups_and_stage(controller: Controller) -> None:
    controller.rank(0).expect(m.Welcome)
    status = controller.status()
    assert (status.stage, status.world_size, status.run_id) == ("forming", 2, "job")
    assert [(r.rank, r.state) for r in status.ranks] == [(0, "live"), (1, "missing")]
    assert [(g.name, list(g.ranks)) for g in status.groups] == [("model", [0, 1])]


def test_a_brief_status_says_of_all_ranks_together_whether_one_trains(controller: Controller) -> None:
    def brief() -> pb.GetStatusResponse:
        request = pb.GetStatusRequest(brief=True)
        answer: pb.GetStatusResponse = controller.stub.GetStatus(request, metadata=controller.metadata, timeout=10)
        return answer

    assert not brief().attached
    rank = controller.rank(0)
    rank.expect(m.Welcome)
    now = brief()
    assert (now.attached, now.world_size, len(now.ranks), len(now.groups)) == (True, 2, 0, 0)
    rank.drop()
    until(lambda: not brief().attached)


@pytest.mark.parametrize(
    "report",
    [
        pb.ReportFaultRequest(ranks=[1], seat="x" * 5000, host="host", drain=True),
        pb.ReportFaultRequest(host="h" * 5000),
        pb.ReportFaultRequest(host="h" * 5000, recovered=True),
        pb.ReportFaultRequest(ranks=[1], host="h\0"),
        pb.GetVerdictRequest(host="h" * 5000),
    ],
    ids=["seat", "host", "recovered", "nul", "verdict"],
)
def test_a_request_beyond_the_limits_is_refused_in_words_and_changes_nothing(
    controller: Controller, report: Any, caplog: pytest.LogCaptureFixture
) -> None:
    controller.job()
    ask = controller.stub.GetVerdict if isinstance(report, pb.GetVerdictRequest) else controller.stub.ReportFault
    with pytest.raises(grpc.RpcError) as refused:
        ask(report, metadata=controller.metadata, timeout=10)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT and len(refused.value.details() or "") < 500
    now = controller.stub.GetVerdict(pb.GetVerdictRequest(), metadata=controller.metadata, timeout=10)
    assert not now.drained and not controller.status().incidents_total
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_a_host_that_was_drained_is_taken_back_by_any_of_its_names(controller: Controller) -> None:
    hosts = ("n1.here.example", "n1.there.example")
    for rank, host in enumerate(hosts):
        controller.rank(rank, host=host, address=f"10.0.0.{rank}").expect(m.Welcome)
    until(lambda: controller.status().stage == "training")

    def ask(host: str, *, drain: bool = False, recovered: bool = False) -> pb.ReportFaultResponse:
        request = pb.ReportFaultRequest(host=host, drain=drain, recovered=recovered)
        answer: pb.ReportFaultResponse = controller.stub.ReportFault(request, metadata=controller.metadata, timeout=10)
        return answer

    assert not ask("n1.here.example", recovered=True).recovered
    for host in hosts:
        assert ask(host, drain=True).accused
    several = ask("n1", recovered=True)
    assert not several.recovered and "n1.here.example, n1.there.example" in several.text
    assert ask("10.0.0.0", recovered=True).recovered
    nothing = ask("10.0.0.0", recovered=True)
    assert not nothing.recovered and "n1.there.example" in nothing.text, "the hosts that are drained"
    assert ask("N1", recovered=True).recovered, "now the short name is unique"


def test_of_a_rank_that_a_new_controller_misses_its_end_can_be_told(controller: Controller) -> None:
    controller.rank(0, resume=True, incarnation=2, term_seen=1).expect(m.Welcome)

    def told(kind: Any) -> list[int]:
        request = pb.ReportFaultRequest(ranks=[1], reason="killed", kind=kind)
        return list(controller.stub.ReportFault(request, metadata=controller.metadata, timeout=10).accused)

    assert (told(pb.FAULT_KIND_OUTSIDE), told(pb.FAULT_KIND_EXITED)) == ([], [1])


def test_watchers_see_the_past_and_the_present(controller: Controller) -> None:
    controller.rank(0).expect(m.Welcome)
    watch = controller.stub.WatchEvents(pb.WatchEventsRequest(replay=10), metadata=controller.metadata, timeout=20)
    assert [next(watch).kind for _ in range(2)] == ["incarnation", "joined"]
    controller.rank(1)
    event = next(watch)
    assert (event.kind, json.loads(event.json)["rank"]) == ("joined", 1)
    watch.cancel()


@pytest.mark.parametrize(
    ("module", "arguments", "expected"), [("ttp.controller", [], EXIT_PORT_TAKEN), ("ttp", ["controller"], 64)]
)
def test_a_port_in_use_names_port_and_owner(module: str, arguments: list[str], expected: int, tmp_path: Path) -> None:
    """Only launchers get a code of its own, as they try again later."""
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        code, said = ended(module, [*arguments, "--port", port, "--run-dir", tmp_path], dict(os.environ), tmp_path)
    assert code == expected and f"port {port}" in said and f"pid {os.getpid()}" in said


def test_it_opens_as_many_connections_as_the_system_lets_it(start: Any) -> None:
    """Each stream and each stranger takes a descriptor, the incident's file takes one, and shells allow 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard // 2, hard))
    try:
        controller = start()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert resource.prlimit(controller.process.pid, resource.RLIMIT_NOFILE) == (hard, hard)


def test_a_port_that_is_none(tmp_path: Path) -> None:
    code, said = ended("ttp.controller", ["--port", 70000, "--run-dir", tmp_path], dict(os.environ), tmp_path)
    assert code == 64 and "from 1 to 65535" in said


@pytest.mark.parametrize(
    ("flag", "value"),
    [("--abandoned-s", "nan"), ("--abandoned-s", "inf"), ("--abandoned-s", "-5"), ("--abandoned-s", "0"),
     ("--orphan-s", "nan"), ("--run-dir", "/proc/none"), ("--run-dir", __file__)],
)  # fmt: skip
def test_options_that_cannot_be(flag: str, value: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:  # no controller runs, whatever it takes
        port = str(taken.getsockname()[1])
        assert cli(["controller", "--port", port, "--bind", "127.0.0.1", "--run-dir", str(tmp_path), flag, value]) == 64
    assert f"'{value}'" in capfd.readouterr().err


def test_the_controller_ends_when_the_job_is_over(start: Any) -> None:
    controller = start()
    ranks = controller.job()
    for rank in ranks:
        rank.say(m.Goodbye(Rank(rank.number), m.GoodbyeReason.DONE, Version(3)))
    for rank in ranks:
        assert rank.expect(m.Finished)
    assert controller.process.wait(60) == 0


def test_a_log_on_a_full_disk_does_not_change_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as log:
        log.setattr(sys, "stderr", Unread())
        code = main(["--port", "0"])
    assert code == EXIT_BAD_CONFIG


def test_the_controller_ends_when_it_is_abandoned(start: Any) -> None:
    controller = start("--abandoned-s", "0.5", wait=False)
    assert controller.process.wait(60) == 0
    assert "no rank was connected" in controller.output()


def test_one_that_stands_by_for_ever_does_not_wait_for_a_rank_for_ever() -> None:
    """A job whose first host dies before its first update has nothing to save, and its standbys must end, too."""
    args = parser().parse_args(["--abandoned-s", "2592000"])
    patience = patience_of(Config.from_env({"TTP_ABANDONED_S": "90"}), args)
    assert (patience.abandoned_s, patience.forming_s) == (2592000, 90)


def test_the_controller_ends_with_its_launcher(start: Any) -> None:
    owner = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    controller = start("--owner-pid", str(owner.pid))
    assert controller.status().stage == "waiting"
    owner.kill()
    owner.wait()
    assert controller.process.wait(60) == 0


@pytest.mark.parametrize("how", ["reaped", "not reaped", "no launcher", "a standby"])
def test_a_job_is_between_two_launches_while_the_launcher_of_its_controller_lives(how: str, start: Any) -> None:
    """A launcher that is killed and that nobody waits for keeps its pid."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as owner:
        kept = ["--owner-pid", str(owner.pid)] * (how != "no launcher") + ["--orphan-s", "60"] * (how == "a standby")
        controller = start(*kept)
        ranks = controller.job()
        assert not controller.status().between_launches
        for rank in ranks:
            rank.drop()
        until(lambda: controller.status().stage == "waiting", every_s=0.2)  # comes after ten seconds
        assert controller.status().between_launches == ("reaped" in how)
        owner.kill()
        if how == "not reaped":
            assert controller.process.wait(60) == 0
    if how == "reaped":
        assert controller.process.wait(60) == 0


def test_sigterm_ends_the_controller(start: Any) -> None:
    controller = start()
    controller.process.send_signal(signal.SIGTERM)
    assert controller.process.wait(60) == 0


def test_sigterm_ends_it_only_when_its_ranks_have_left(start: Any) -> None:
    """SLURM sends SIGTERM to all processes of a step at once, and ranks that end then still have to be saved."""
    controller = start()
    zero, _ = controller.job()
    controller.process.send_signal(signal.SIGTERM)
    zero.say(m.Fault(Rank(0), Rank(0), m.FaultKind.PREEMPTED, "SIGTERM"))
    zero.expect(m.Freeze)
    assert controller.process.poll() is None
    controller.process.send_signal(signal.SIGINT)
    assert controller.process.wait(60) == 0


def test_one_that_stood_still_while_its_ranks_went_elsewhere_records_no_loss(start: Any, tmp_path: Path) -> None:
    """The incident of a job that trained on said "exit 70". Of an earlier job on this port the ring says nothing."""
    ring = Ring("job", 1, 7, "home:1", "elsewhere:1", ("elsewhere:1",))
    write_ring(tmp_path, ring)
    controller = start(TTP_GRACE_S="600")
    ranks = controller.job(save_dir=str(tmp_path))
    for rank in ranks:
        rank.drop()
    until(lambda: controller.status().stage == "freezing")
    assert not poll(lambda: controller.status().stage != "freezing", 2 * RING_CHECK_S, 0.1)
    write_ring(tmp_path, replace(ring, term=8))
    until(lambda: [read_incident(p).outcome for p in incident_files(tmp_path)] == ["another controller leads the job"])
    assert not read_incident(*incident_files(tmp_path)).accusations


def test_a_lost_rank_is_saved_from_its_replica(controller: Controller, tmp_path: Path) -> None:
    """And the incident file tells the whole story."""
    zero, one = controller.job(save_dir=str(tmp_path))
    assert zero.expect(m.Welcome).incarnation == one.expect(m.Welcome).incarnation == 1
    one.drop()
    freeze = zero.expect(m.Freeze)
    assert freeze.incident and not freeze.snapshot
    zero.say(frozen(0, freeze.incident, 4))
    save = zero.expect(m.Save)
    assert (save.version, save.order.shards, save.order.pages) == (4, ("model",), (0, 1))
    commit = save_whatever_is_asked(zero, save)
    assert commit.version == 4 and len(commit.pieces) == 1
    assert zero.expect(m.Release).exit_code == 75
    incident = controller.status().last_incident
    assert (incident.version, incident.path) == (4, "/d/step_4")
    zero.say(m.Goodbye(Rank(0), m.GoodbyeReason.RELEASED, Version(4)))
    zero.drop()
    path = tmp_path / "incidents" / f"{freeze.incident}.jsonl"
    until(lambda: path.exists() and "closed" in path.read_text())
    events = [json.loads(line) for line in path.read_text().splitlines()]
    told = [e["kind"] for e in events]
    assert told == ["opened", "evidence", "answer", "plan", "saved", "commit", "committed", "released", "closed"]
    assert all(e["monotonic_s"] > 0 and e["unix_s"] > 1e9 for e in events)
    assert "version 4 is the newest" in events[3]["reason"]


def test_a_hello_is_needed_first(controller: Controller) -> None:
    zero = controller.rank(0)
    zero.expect(m.Welcome)
    zero.say(m.Heartbeat(Rank(1), Version(9), m.Phase.IDLE))  # speaks for a rank that never said hello
    zero.say(hello(1))
    until(lambda: len(controller.status().ranks) == 2 and controller.status().stage == "training")
    assert [r.version for r in controller.status().ranks] == [0, 0]


def test_a_stream_that_does_not_begin_with_a_hello_is_ended_in_words(controller: Controller) -> None:
    outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    outbox.put(report_to_wire(m.Heartbeat(Rank(1), Version(9), m.Phase.IDLE)))
    call = controller.stub.Attach(iter(outbox.get, None), metadata=controller.metadata, timeout=10)
    (refused,) = map(order_from_wire, call)
    outbox.put(None)
    assert isinstance(refused, m.Refused)
    assert refused.text == "the first message of a stream is a Hello, not a Heartbeat"


def test_a_controller_that_is_ended_ends_its_streams_and_accuses_nobody(start: Any) -> None:
    """If it cut its handlers off, grpc would log an exception for each."""
    controller = start()
    ranks = controller.job()
    for rank in ranks:
        assert isinstance(rank.hear(), m.Welcome)
    events = controller.stub.WatchEvents(pb.WatchEventsRequest(), metadata=controller.metadata)
    events.initial_metadata()
    asked = controller.stub.SaveNow.future(pb.SaveNowRequest(), metadata=controller.metadata)
    for rank in ranks:
        while not isinstance(rank.hear(), m.Freeze):
            pass
    controller.process.send_signal(signal.SIGINT)
    assert "this controller ends" in asked.result(timeout=30).text
    assert [event.kind for event in events if event.kind != "opened"] == ["evidence"], "it ends, and with the request"
    for rank in ranks:
        with pytest.raises(StopIteration):
            rank.hear()
    assert controller.process.wait(30) == 0
    assert "ERROR" not in controller.output() and "Traceback" not in controller.output()


def test_a_port_that_cannot_be_used_for_another_reason_than_its_owner() -> None:
    assert _why_not("192.0.2.1", 1).startswith("TTP_BIND=192.0.2.1 is not an address of this host")
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        port = held.getsockname()[1]
        assert re.fullmatch(r"it is in use by .*pid.*\. Choose another TTP_PORT\.", _why_not("127.0.0.1", port))


def test_a_port_that_only_root_may_use() -> None:
    if int(Path("/proc/sys/net/ipv4/ip_unprivileged_port_start").read_text()) <= 1:
        pytest.skip("every user may use every port here")
    ours, theirs = os.pipe()
    if not (child := os.fork()):
        if not os.getuid():
            os.setresuid(65534, 65534, 65534)
        os.write(theirs, _why_not("127.0.0.1", 1).encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(theirs)
    with os.fdopen(ours) as said:
        assert said.read().startswith("this user may not listen there")


@pytest.mark.slow
def test_an_order_to_commit_may_be_larger_than_any_report(controller: Controller) -> None:
    """It carries the tables of all pieces: 200 bytes for each tensor, in each of a thousand shards."""
    layout = Layout(2, {Shard("a"): (Rank(0),), Shard("b"): (Rank(1),)})
    ranks = controller.job(layout=layout)
    asked = controller.stub.SaveNow.future(pb.SaveNowRequest(), metadata=controller.metadata, timeout=60)
    for rank in ranks:
        rank.say(frozen(rank.number, rank.expect(m.Freeze).incident, 3))
    table = "x" * (MESSAGE_BYTES_MAX // 2)
    for rank in ranks:
        save = rank.expect(m.Save)
        piece = m.Piece(f"{rank.number}", 1, "d", "shard", save.order.shards[0], Rank(rank.number), table)
        rank.say(m.Saved(Rank(rank.number), save.incident, save.generation, (piece,)))
    commit = ranks[0].expect(m.Commit)
    assert [len(piece.table) for piece in commit.pieces] == [len(table)] * 2
    ranks[0].say(m.Committed(Rank(0), commit.incident, commit.generation, "/d/step_3", 1))
    assert asked.result().saved
