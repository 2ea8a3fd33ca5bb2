"""What the controller answers to launchers, managers and watchers, and to everybody while it ends."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.controller.conftest import Served, on_a_loop
from tests.core.talk import PATIENCE
from ttp.controller import connection as connecting
from ttp.controller import driver as driving
from ttp.controller import spans
from ttp.controller.__main__ import main
from ttp.controller.driver import Driver
from ttp.controller.journal import Journal, RecordedEvent
from ttp.controller.spans import SpanSender
from ttp.core import messages as m
from ttp.core.controller.events import Received
from ttp.core.layout import Layout, Rank
from ttp.testing import toy
from ttp.wire.v1 import controller_pb2 as pb


def ask(controller: Served, request: Any) -> Any:
    method = {pb.ReportFaultRequest: "ReportFault", pb.GetVerdictRequest: "GetVerdict", pb.LookRequest: "Look"}
    return getattr(controller.stub, method[type(request)])(request, metadata=controller.metadata, timeout=20)


def test_a_rank_that_ends_with_64_ends_the_job_with_64_unless_it_is_of_an_older_launch(controller: Served) -> None:
    """A wrong setting does not get better by a restart, so all launchers hear of it."""
    controller.rank(0, pid=100).expect(m.Welcome)
    for pid, code in ((99, 0), (100, 64)):
        ask(controller, pb.ReportFaultRequest(ranks=[0], pids=[pid], exit_code=64, kind=pb.FAULT_KIND_EXITED))
        assert ask(controller, pb.GetVerdictRequest()).code == code


@pytest.mark.parametrize(
    ("report", "text"),
    [
        ({"ranks": [0, 1], "pids": [100]}, "pids and ranks must have the same length"),
        ({"ranks": [0], "kind": 99}, "FaultKind 99 is not known"),
    ],
)
def test_fault_reports_that_make_no_sense_are_refused_in_words(
    controller: Served, report: dict[str, Any], text: str
) -> None:
    with pytest.raises(grpc.RpcError, match=text) as refused:
        ask(controller, pb.ReportFaultRequest(**report))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_who_takes_a_controller_for_a_relay_hears_what_it_is(controller: Served) -> None:
    with pytest.raises(grpc.RpcError, match="this is a controller, not a relay"):
        ask(controller, pb.LookRequest())


def test_a_watcher_that_falls_behind_hears_that_it_has_missed_events(
    controller: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It could otherwise not tell a quiet job from one of which it hears nothing."""
    monkeypatch.setattr(driving, "WATCH_MAX", 3)
    watch = controller.stub.WatchEvents(pb.WatchEventsRequest(), metadata=controller.metadata, timeout=20)
    watch.initial_metadata()

    async def record() -> None:
        for number in range(5):
            controller.driver._record("joined", "", {"rank": number})

    controller.do(record())
    with pytest.raises(grpc.RpcError, match="events behind") as dropped:
        list(watch)
    assert dropped.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


@on_a_loop
async def test_what_comes_while_the_controller_ends_is_ended_at_once(journal: Journal) -> None:
    """Nobody waits for a controller that handles no more events."""
    driver = Driver(PATIENCE, journal)
    driver.close()
    stream, watch = driver.connect(lambda: None), driver.watch(replay=0)
    saved = await driver.save("now", again=False)
    assert (await stream.next(), await watch.queue.get(), saved.saved) == (None, None, False)
    assert "this controller ends" in saved.text


@on_a_loop
async def test_a_rank_that_does_not_read_its_orders_is_cut_off_and_counts_as_lost(
    journal: Journal, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its stream is cancelled, or the orders for a rank that stands still would fill the controller's memory."""
    monkeypatch.setattr(connecting, "ORDERS_MAX", 1)
    driver, layout, cut = Driver(PATIENCE, journal), Layout.data_parallel(1), list[bool]()
    stream = driver.connect(lambda: cut.append(True))
    driver.machine.job.learn(layout)
    driver.feed(Received(stream.id, toy.hello(0, layout)))
    driver._send(stream.id, m.Freeze(Rank(0), 1, "i", "c", snapshot=False))
    await asyncio.sleep(0)
    assert not driver.machine.job.live
    assert cut == [True] and "does not read its orders" in caplog.text


def test_a_controller_without_a_port_says_how_to_give_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TTP_PORT", raising=False)
    assert main([]) == 64 and "give --port or set TTP_PORT" in capsys.readouterr().err


# --------------------------------------------------------------------------------------------------------------- traces


def recorded(kind: str, incident: str = "", **facts: object) -> RecordedEvent:
    return RecordedEvent(1, 1.0, 2.0, kind, incident, json.dumps(facts))


@pytest.fixture
def sender(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SpanSender:
    """Return a sender whose program writes its arguments and input to files, and fails."""
    told = f'cat > "{tmp_path}/$1.lines"; echo refused >&2; exit 1'
    monkeypatch.setattr(spans, "own_module", lambda _: ["sh", "-c", told, "sh"])
    return SpanSender([])


def send(sender: SpanSender, *story: RecordedEvent) -> None:
    sender._history = story
    sender.take(story[-1].kind, {"version": 7}, 0.0, 0.0)
    sender.close()


def test_a_trace_has_the_events_of_its_incident_and_a_restore_those_of_the_launches(
    sender: SpanSender, tmp_path: Path
) -> None:
    """An event that ends no incident sends nothing."""
    send(sender, recorded("opened", "one"), recorded("joined"))
    assert not list(tmp_path.iterdir())
    send(sender, recorded("opened", "one"), recorded("opened", "two"), recorded("closed", "one"))
    assert [line.count('"one"') for line in (tmp_path / "one.lines").read_text().splitlines()] == [1, 1]
    send(sender, recorded("released", "one"), recorded("joined"), recorded("restored"))
    lines = (tmp_path / "one.lines").read_text().split("\n")
    assert [json.loads(line)["kind"] for line in lines if line] == ["released", "restored"]


def test_that_traces_are_not_sent_is_said_once_and_stops_nothing(
    sender: SpanSender, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither a collector that refuses, nor a host on which no program can be started, may disturb a controller."""
    for incident in ("one", "two"):
        send(sender, recorded("closed", incident))
    monkeypatch.setattr(spans, "own_module", lambda _: ["/nowhere/python"])
    send(sender, recorded("closed", "three"))
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert said == ["sending incident one as an OpenTelemetry trace: not sent: refused"]
