"""Whatever a peer sends, the machines do not raise, and their answers can be sent."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import strategies as st

from tests.core.talk import PATIENCE, answers, apart
from tests.fuzz.messages import ORDERS, REPORTS, changed, damaged
from tests.fuzz.profile import at_most, fuzz, jsonable
from ttp.core import messages as m
from ttp.core.controller.events import (
    Accused,
    Action,
    ConnectionId,
    Event,
    Received,
    Record,
    SaveRequested,
    Send,
    StreamEnded,
    Tick,
)
from ttp.core.controller.machine import ControllerMachine
from ttp.core.layout import WORLD_SIZE_MAX, Layout, Rank, Shard, Version
from ttp.core.layout_messages import TellLayout, in_parts
from ttp.core.rank import actions as act
from ttp.core.rank import events as ev
from ttp.core.rank.events import RankTimeouts
from ttp.core.rank.machine import ProcessorMachine
from ttp.core.relay import Frame, LineId
from ttp.core.restore_messages import Candidate, Reading, Restored, RestoreView
from ttp.mindio.protocol.handler_recovery import HandlerRecovery
from ttp.mindio.protocol.rank_side import RankRounds
from ttp.testing.toy import hello
from ttp.wire import limits
from ttp.wire.convert import order_from_wire, order_to_wire, parse_report, report_to_wire
from ttp.wire.limits import WireError
from ttp.wire.relay import frame_to_wire, parse_frame
from ttp.wire.v1 import controller_pb2 as pb

LAYOUT = Layout.data_parallel(3)
OTHER_LAYOUT = Layout(3, {Shard("a"): (Rank(0), Rank(1)), Shard("b"): (Rank(2),)})
HONEST = [ConnectionId(rank + 1) for rank in range(3)]
STRANGERS = [ConnectionId(10), ConnectionId(11)]


def machine() -> ControllerMachine:
    subject = ControllerMachine(PATIENCE, lambda n: f"i{n}", 0.0, program=HandlerRecovery)
    subject.job.learn(LAYOUT)
    return subject


def check(actions: list[Action]) -> list[Action]:
    """Do what the edges do with actions: send orders, and write records as JSON."""
    actions = apart(actions)
    for action in actions:
        if isinstance(action, Send):
            order_to_wire(action.order).SerializeToString()
        elif isinstance(action, Record):
            jsonable(action.facts)
    return actions


def said(report: m.Report) -> pb.RankReport:
    return report_to_wire(report)


GREETINGS = [said(hello(rank, LAYOUT)) for rank in range(3)]
PIECE = m.Piece("f", 1, "d", "shard", "model", Rank(0))
HONEST_REPORTS = [
    *GREETINGS,
    *(said(hello(rank, LAYOUT, resume=True, incarnation=1, term_seen=1)) for rank in range(3)),
    *(said(hello(rank, OTHER_LAYOUT)) for rank in range(3)),
    *(said(part) for rank in range(3) for part in answers(TellLayout(Rank(rank), OTHER_LAYOUT.digest), OTHER_LAYOUT)),
    said(m.Frozen(Rank(0), "i1", Version(3), m.Phase.IDLE, True)),
    said(m.Frozen(Rank(1), "i1", Version(4), m.Phase.IDLE, True)),
    said(m.Saved(Rank(0), "i1", 0, (PIECE,))),
    said(m.SaveFailed(Rank(0), "i1", 0, "no")),
    said(m.Committed(Rank(0), "i1", 0, "/save/x", 1)),
    said(m.Fault(Rank(0), Rank(1), m.FaultKind.EXITED, "gone", nonce="n1")),
    said(m.Fault(Rank(2), Rank(2), m.FaultKind.EXCEPTION, "oh")),
    said(m.Heartbeat(Rank(1), Version(9), m.Phase.IDLE)),
    said(RestoreView(Rank(1), (Candidate(Version(3), "d", "n"),), ("x",), (Reading("c", 1, 2),))),
    *(said(Restored(Rank(rank), Version(3), 9)) for rank in range(3)),
    said(m.Goodbye(Rank(2), m.GoodbyeReason.DONE, Version(3))),
]
SPOKEN = st.one_of(REPORTS, st.sampled_from(HONEST_REPORTS), st.sampled_from(HONEST_REPORTS).flatmap(changed))


def parsed(message: Any) -> m.Report | None:
    try:
        return parse_report(message if isinstance(message, bytes) else message.SerializeToString())
    except WireError as problem:
        assert str(problem)
        return None


def healthy() -> ControllerMachine:
    """Return the controller of a job of three ranks."""
    subject = machine()
    for connection, greeting in zip(HONEST, GREETINGS, strict=True):
        subject.on_event(Received(connection, parse_report(greeting.SerializeToString())), 0.0)
    return subject


# ------------------------------------------------------------------------------------------------------ the controller


@fuzz(damaged(REPORTS) | st.binary(max_size=100), examples=75)
def test_bytes_become_a_report_or_an_error_in_words(data: bytes) -> None:
    report = parsed(data)
    if report is not None:
        check(machine().on_event(Received(ConnectionId(1), report), 1.0))


RANKS = st.integers(-2, 4).map(Rank)
EVENTS = st.one_of(
    st.tuples(st.sampled_from([*HONEST, *STRANGERS]), SPOKEN),
    st.sampled_from([*HONEST, *STRANGERS]).map(StreamEnded),
    st.builds(SaveRequested, st.integers(0, 3), st.just("now")),
    st.builds(Accused, st.tuples(RANKS), st.sampled_from(m.FaultKind), st.just("seen"), st.just(())),
    st.sampled_from([0.0, 0.5, 2.0, 40.0, 400.0]),
)


@fuzz(st.lists(EVENTS, max_size=25), examples=60)
def test_no_sequence_of_reports_stops_the_controller(script: list[Any]) -> None:
    subject, now = healthy(), 0.0
    for step in script:
        event: Event = Tick()
        if isinstance(step, float):
            now += step
        elif isinstance(step, tuple):
            report = parsed(step[1])
            event = Tick() if report is None else Received(step[0], report)
        else:
            event = step
        check(subject.on_event(event, now))
        assert subject.stage
        assert subject.incident is None or subject.incident.cause
        due = subject.deadline()
        assert due is None or not math.isnan(due)
        assert len(subject.job.members) <= WORLD_SIZE_MAX


def test_a_fault_without_a_reason_has_a_cause() -> None:
    subject = healthy()
    report = parsed(pb.RankReport(fault=pb.Fault(kind=pb.FAULT_KIND_LOST)))
    assert report is not None
    check(subject.on_event(Received(HONEST[0], report), 0.0))
    assert subject.incident is not None and subject.incident.cause == "lost"


def presumes(report: m.Report, incarnation: int) -> bool:
    """Return whether the hello claims to be of the next launch, or of the job under another controller."""
    if not isinstance(report, m.Hello):
        return False
    moved = report.takeover and report.run_id == "job" and report.incarnation == incarnation
    return moved or report.incarnation > incarnation or report.launch > 0


def knows_a_secret(report: m.Report) -> bool:
    """Return whether the hello has the nonce of a rank: a process is identified by it."""
    return isinstance(report, m.Hello) and report.nonce in ("n0", "n1", "n2")


@fuzz(st.lists(st.tuples(st.sampled_from(STRANGERS), SPOKEN), max_size=20), examples=60)
def test_what_is_said_on_other_streams_does_not_touch_a_healthy_job(script: list[Any]) -> None:
    subject = healthy()
    for connection, message in script:
        report = parsed(message)
        if report is None or presumes(report, 1) or knows_a_secret(report):
            continue
        actions = check(subject.on_event(Received(connection, report), 1.0))
        assert not [a for a in actions if isinstance(a, Send) and a.connection in HONEST], report
        assert (subject.stage, subject.rescue.total) == ("training", 0), report
    for connection in STRANGERS:
        assert not [a for a in check(subject.on_event(StreamEnded(connection), 1.0)) if isinstance(a, Send)]
    rescue(subject)


@pytest.mark.parametrize(
    "change", [{"run_id": "another"}, {"incarnation": 0}, {"world_size": 0}, {"layout_digest": "x"}]
)
def test_a_stray_rank_does_not_make_a_controller_leave_its_job(change: dict[str, Any]) -> None:
    subject = healthy()
    stray = hello(0, LAYOUT, **{"takeover": True, "term_seen": 9, "incarnation": 1, "nonce": "stray", **change})
    actions = check(subject.on_event(Received(STRANGERS[0], stray), 1.0))
    assert not [a for a in actions if isinstance(a, Send) and a.connection in HONEST]
    assert subject.stage == "training"
    rescue(subject)


def rescue(subject: ControllerMachine, version: int = 5) -> None:
    """Check that the job of three ranks is saved as if no other stream existed."""
    actions = check(subject.on_event(StreamEnded(HONEST[2]), 2.0))
    assert [a.connection for a in actions if isinstance(a, Send) and isinstance(a.order, m.Freeze)] == HONEST[:2]
    assert subject.incident is not None
    incident = subject.incident.id
    for rank in (0, 1):
        frozen = m.Frozen(Rank(rank), incident, Version(version), m.Phase.IDLE, True)
        actions = check(subject.on_event(Received(HONEST[rank], frozen), 2.0))
    (save,) = [a.order for a in actions if isinstance(a, Send) and isinstance(a.order, m.Save)]
    assert save.version == version
    saved = m.Saved(save.rank, incident, save.generation, (replace(PIECE, writer=save.rank),))
    actions = check(subject.on_event(Received(HONEST[save.rank], saved), 2.0))
    (commit,) = [a.order for a in actions if isinstance(a, Send) and isinstance(a.order, m.Commit)]
    done = m.Committed(commit.rank, incident, commit.generation, "/save/step_5", 1)
    check(subject.on_event(Received(HONEST[commit.rank], done), 2.0))
    actions = check(subject.on_event(Tick(), 3.0)) + check(subject.on_event(Tick(), 10.0))
    released = [a for a in actions if isinstance(a, Send) and isinstance(a.order, m.Release)]
    assert [(a.connection, a.order.exit_code) for a in released if isinstance(a.order, m.Release)] == [
        (HONEST[0], 75),
        (HONEST[1], 75),
    ]


@pytest.mark.parametrize("name", ["launch", "term_seen", "version"])
def test_from_the_largest_number_that_is_believed_everything_can_be_counted_on(name: str) -> None:
    subject, most = machine(), limits.NUMBERS[name]
    for rank, connection in enumerate(HONEST):
        report = parsed(said(hello(rank, LAYOUT, **{name: most})))
        assert report is not None
        check(subject.on_event(Received(connection, report), 0.0))
    rescue(subject, most if name == "version" else 5)


@pytest.mark.parametrize("name", list(limits.NUMBERS))
def test_a_larger_number_is_refused_in_words(name: str) -> None:
    too_much = limits.NUMBERS[name] + 1
    text = f"{name} {too_much} is more than the maximum of {limits.NUMBERS[name]}"
    with pytest.raises(WireError, match=text):
        if name == "term":
            order_from_wire(pb.ControllerOrder(finished=pb.Finished(term=too_much)))
        else:
            parse_report(said(hello(0, LAYOUT, **{name: too_much})).SerializeToString())


# ---------------------------------------------------------------------------------------------------- memory and time


@pytest.mark.parametrize("world_size", [WORLD_SIZE_MAX, WORLD_SIZE_MAX + 1, 2**24, 2**31, 2**32 - 1])
def test_a_gigantic_world_is_refused_and_not_built(world_size: int) -> None:
    greeting = GREETINGS[1].SerializeToString()
    message = pb.RankReport.FromString(greeting)
    message.hello.world_size = world_size
    with at_most(1):
        report = parsed(message)
        actions = [] if report is None else machine().on_event(Received(ConnectionId(1), report), 0.0)
    assert not any(isinstance(a, Send) and isinstance(a.order, m.Welcome) for a in actions)


def test_a_digest_that_is_known_does_not_vouch_for_another_layout() -> None:
    """After a release the next hello begins the next incarnation."""
    subject = healthy()
    for connection in HONEST:
        subject.on_event(StreamEnded(connection), 1.0)
    changes: list[dict[str, Any]] = [{"world_size": 1 << 20}, {"world_size": 1, "nonce": "o"}]
    for change in changes:
        forged = hello(0, LAYOUT, **{"nonce": "other", "launch": 5, **change})
        (order,) = [
            a.order for a in check(subject.on_event(Received(ConnectionId(20), forged), 1.5)) if isinstance(a, Send)
        ]
        assert isinstance(order, m.Refused) and order.code is m.RefusalCode.MALFORMED


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def field(number: int, content: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(content)) + content


@pytest.mark.parametrize(
    "data",
    [
        field(5, b"\x22\x00" * 1_000_000),  # Saved, a million empty pieces
        field(1, b"\x5a\x00" * 1_000_000),  # Hello, a million empty groups
        b"\x0a\x00\x12\x00" * 500_000,  # a million reports, each in the place of the one before
        field(1, b"\x80\x20\x00" * 400_000),  # numbers that nobody knows
    ],
    ids=["pieces", "groups", "reports", "unknown"],
)
def test_a_message_of_many_parts_is_refused_before_it_is_built(data: bytes) -> None:
    assert len(data) > limits.FREE_BYTES
    with pytest.raises(WireError, match="has more than 262144 fields"):
        parse_report(data)


def test_a_large_message_of_few_parts_is_taken() -> None:
    piece = m.Piece("f", 1, "d", "shard", "model", Rank(0), "x" * (4 << 20))
    report = m.Saved(Rank(0), "i1", 0, (piece,))
    assert parse_report(report_to_wire(report).SerializeToString()) == report


def test_a_large_frame_of_a_relay_that_names_silent_ranks_is_taken() -> None:
    """Their numbers are packed like the fields of a message, but are none."""
    piece = m.Piece("f", 1, "d", "shard", "model", Rank(0), "x" * (1 << 20))
    reports = (((LineId(7),), m.Saved(Rank(0), "i1", 0, (piece,))),)
    for silent in range(1, 9):
        frame = Frame(reports, beat=True, silent=(LineId(silent),))
        assert parse_frame(frame_to_wire(frame).SerializeToString()) == (frame, {})


def test_a_billion_ranks_in_a_group_are_refused() -> None:
    message = pb.RankReport(layout_part=pb.LayoutPart(groups=[pb.ShardGroup(ranks=range(WORLD_SIZE_MAX + 1))]))
    with pytest.raises(WireError, match="ranks has 1048577 entries"):
        parse_report(message.SerializeToString())


def test_texts_are_cut_and_names_are_not() -> None:
    fault = m.Fault(Rank(0), Rank(0), m.FaultKind.EXCEPTION, "t" * 10**6, "d" * 10**6)
    report = parse_report(report_to_wire(fault).SerializeToString())
    assert isinstance(report, m.Fault) and len(report.text) + len(report.detail) < 3 * limits.TEXT_MAX
    view = RestoreView(Rank(0), (), ("reason",) * 10**5)
    report = parse_report(report_to_wire(view).SerializeToString())
    assert isinstance(report, RestoreView) and len(report.skipped) == limits.TEXTS_MAX
    with pytest.raises(WireError, match="host is 5000 characters long"):
        parse_report(said(hello(0, LAYOUT, host="h" * 5000)).SerializeToString())


@pytest.mark.parametrize("incident", ["../../etc/x", "a/b", "a\0b", "\n", "x" * 300])
def test_an_incident_cannot_name_a_file_elsewhere(incident: str) -> None:
    with pytest.raises(WireError, match="incident"):
        parse_report(said(hello(0, LAYOUT, incident=incident)).SerializeToString())


# ------------------------------------------------------------------------------------------------------- the processor

INCIDENTS = st.sampled_from(["i1", ""])
PROCESSOR_EVENTS = st.one_of(
    ORDERS,
    st.just(ev.StreamUp()),
    st.just(ev.StreamDown("gone")),
    st.builds(ev.Observed, st.integers(0, 9).map(Version), st.sampled_from(m.Phase)),
    st.builds(ev.Quiet, st.integers(0, 9).map(Version), st.sampled_from(m.Phase), st.booleans(), st.booleans()),
    st.builds(m.Saved, st.just(Rank(0)), INCIDENTS, st.integers(0, 3), st.just((PIECE,))).map(ev.Worked),
    st.builds(m.SaveFailed, st.just(Rank(0)), INCIDENTS, st.integers(0, 3), st.just("no")).map(ev.Worked),
    st.sampled_from([0.0, 0.5, 2.0, 40.0]),
)


@fuzz(st.lists(PROCESSOR_EVENTS, max_size=25), examples=60)
def test_no_sequence_of_orders_stops_a_processor(script: list[Any]) -> None:
    subject, now = ProcessorMachine(hello(0, LAYOUT), RankTimeouts(), 0.0, in_parts(LAYOUT)), 0.0
    subject.state.program = RankRounds()
    events: list[ev.Event] = [ev.StreamUp(), ev.OrderReceived(m.Welcome(Rank(0), 1, 1, "1"))]
    for event in [*events, *script]:
        if isinstance(event, float):
            now += event
            event = ev.Observed(Version(1), m.Phase.IDLE)  # noqa: PLW2901
        elif isinstance(event, pb.ControllerOrder):
            try:
                event = ev.OrderReceived(order_from_wire(event))  # noqa: PLW2901
            except WireError:
                continue
        for action in subject.on_event(event, now):
            if isinstance(action, act.Send):
                parse_report(report_to_wire(action.report).SerializeToString())
        due = subject.deadline()
        assert due is None or not math.isnan(due)
