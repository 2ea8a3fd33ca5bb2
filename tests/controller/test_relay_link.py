"""A relay's stream into a controller, frame by frame: what is wrong with one rank, or with the relay, stays there."""

from __future__ import annotations

import logging
import queue
from collections.abc import Iterator
from typing import Any

import pytest

from tests.controller.conftest import Served, hello
from tests.core.talk import answers
from ttp.controller import relay_link, service
from ttp.controller.relay_link import RelayLink
from ttp.core import messages as m
from ttp.core.layout import Layout, Rank
from ttp.core.layout_messages import TellLayout
from ttp.core.relay import Frame, LineId
from ttp.wire.relay import LINES_MAX, PROTOCOL, frame_to_wire, orders_from_wire
from ttp.wire.v1 import controller_pb2 as pb

ZERO, ONE, TWO = LineId(0), LineId(1), LineId(2)


def joining(*ranks: int) -> pb.RelayFrame:
    """Return a frame in which these ranks join, each on the line of its number."""
    layout = Layout.data_parallel(3)
    said: list[tuple[int, m.Report]] = [(rank, hello(rank, layout=layout)) for rank in ranks]
    said += [(rank, part) for rank in ranks for part in answers(TellLayout(Rank(rank), layout.digest), layout)]
    return frame_to_wire(Frame(tuple(((LineId(rank),), report) for rank, report in said)))


def malformed(line: LineId) -> pb.RelayFrame:
    return pb.RelayFrame(reports=[pb.LineReport(lines=[line], report=pb.RankReport().SerializeToString())])


class Stream:
    """A relay's stream: sends what the test says, and yields each order with its line."""

    def __init__(self, controller: Served) -> None:
        self._frames: queue.SimpleQueue[Any] = queue.SimpleQueue()
        metadata = (*controller.metadata, PROTOCOL)
        self._call = controller.stub.Relay(iter(self._frames.get, None), metadata=metadata, timeout=20)
        self._orders = self._heard()

    def say(self, frame: pb.RelayFrame) -> None:
        self._frames.put(frame)

    def _heard(self) -> Iterator[tuple[LineId, m.Order | None]]:
        for message in self._call:
            for lines, order in orders_from_wire(message):
                yield from ((line, order) for line in lines if not isinstance(order, TellLayout))

    def expect(self, kind: type) -> tuple[LineId, Any]:
        return next((line, order) for line, order in self._orders if isinstance(order, kind))

    def rest(self) -> list[tuple[LineId, m.Order | None]]:
        return list(self._orders)

    def end(self) -> None:
        self._frames.put(None)


@pytest.fixture
def relay(controller: Served) -> Iterator[Stream]:
    stream = Stream(controller)
    yield stream
    stream.end()


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


def test_a_malformed_report_ends_the_line_of_its_rank_only(relay: Stream) -> None:
    """The rank hears why. Others behind the same relay are served as ever, also on a line of its number."""
    relay.say(joining(0))
    relay.expect(m.Welcome)
    relay.say(malformed(ONE))
    line, refused = relay.expect(m.Refused)
    assert (line, refused.code) == (ONE, m.RefusalCode.MALFORMED)
    relay.say(joining(1, 2))
    assert {relay.expect(m.Welcome)[0] for _ in range(2)} == {ONE, TWO}


def test_a_frame_that_cannot_be_parsed_ends_the_stream_and_its_ranks_may_join_without_it(
    controller: Served, relay: Stream, caplog: pytest.LogCaptureFixture
) -> None:
    relay.say(joining(0))
    relay.expect(m.Welcome)
    too_many = pb.LineReport(lines=range(10, 10 + LINES_MAX + 1))
    relay.say(pb.RelayFrame(reports=[too_many]))
    relay.rest()  # which ends with the stream
    assert controller.rank(0).expect(m.Welcome)
    assert "a message of a relay cannot be parsed" in caplog.text and not errors(caplog)


def test_a_relay_opens_no_more_lines_than_a_host_has_ranks(
    relay: Stream, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(relay_link, "LINES_MAX", 2)
    relay.say(joining(0, 1, 2))
    relay.rest()
    assert "a relay may serve 2 ranks at most" in caplog.text


def fail(_: bytes) -> Any:
    raise ZeroDivisionError


def test_an_error_of_the_controller_costs_the_stream_and_not_the_controller(
    controller: Served, relay: Stream, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(relay_link, "parse_frame", fail)
        broken.setattr(service, "parse_report", fail)
        relay.say(joining(0))
        assert not relay.rest() and controller.rank(1).ended()
    assert len(errors(caplog)) == 2 and all("the controller" in text for text in errors(caplog))
    assert controller.rank(1).expect(m.Welcome)


def test_a_stream_that_fails_because_the_controller_ends_is_no_error(
    controller: Served, relay: Stream, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A closed server of gRPC raises on every read."""
    monkeypatch.setattr(controller.driver, "closed", True)
    monkeypatch.setattr(relay_link, "parse_frame", fail)
    monkeypatch.setattr(service, "parse_report", fail)
    relay.say(joining(0))
    assert not relay.rest() and controller.rank(1).ended()
    assert not errors(caplog)


def test_a_relay_that_does_not_read_is_cut_off_instead_of_filling_the_memory(
    controller: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay_link, "ORDERS_MAX", 2)
    cut: list[bool] = []

    async def run() -> list[bool]:
        link = RelayLink(controller.driver, lambda: cut.append(True))
        line = link._open(ONE, Rank(1))
        order = m.Freeze(Rank(1), 1, "i", "c", snapshot=False)
        put = [line.put(order) for _ in range(4)]
        line.end()
        assert link._orders == [(ONE, order)] * 2
        return put

    assert controller.do(run()) == [True, True, False, True], "what comes after the cut is dropped"
    assert cut == [True]
