"""Converts between a relay's frames and protobuf. Reports and orders inside stay serialised: each is parsed alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from google.protobuf.message import DecodeError

from ttp.core import messages as m
from ttp.core.relay import Frame, LineId
from ttp.wire import limits
from ttp.wire.convert import WireError, order_from_wire, order_to_wire, parse_report, report_to_wire
from ttp.wire.v1 import controller_pb2 as pb

LINES_MAX = 4096
"""Ranks of one host, and more than any has."""


def frame_to_wire(frame: Frame) -> pb.RelayFrame:
    """Core frame -> protobuf."""
    reports = (
        pb.LineReport(line=line, report=None if report is None else report_to_wire(report).SerializeToString())
        for line, report in frame.reports
    )
    return pb.RelayFrame(reports=reports, beat=frame.beat, silent=frame.silent)


def parse_frame(data: bytes) -> tuple[Frame, dict[LineId, str]]:
    """Bytes of a relay's stream -> core frame, and what is wrong with which line: nothing of it follows in the frame.

    Raises:
        WireError: they are no frame.
    """
    limits.check_size(data)
    try:
        message = pb.RelayFrame.FromString(data)
    except DecodeError:
        raise WireError(f"{len(data)} bytes that are no frame of a relay") from None
    problems: dict[LineId, str] = {}
    reports: list[tuple[LineId, m.Report | None]] = []
    for item in message.reports:
        line = LineId(item.line)
        if line in problems:
            continue
        try:
            reports.append((line, parse_report(item.report) if item.HasField("report") else None))
        except WireError as problem:
            problems[line] = str(problem)
    silent = (LineId(line) for line in message.silent[:LINES_MAX])
    return Frame(tuple(reports), message.beat, tuple(silent)), problems


def orders_to_wire(orders: Iterable[tuple[list[LineId], m.Order | None]]) -> pb.RelayOrders:
    """Core orders, each for some lines -> protobuf."""
    return pb.RelayOrders(
        orders=(
            pb.LineOrder(lines=lines, order=None if order is None else order_to_wire(order).SerializeToString())
            for lines, order in orders
        )
    )


def orders_from_wire(message: pb.RelayOrders) -> Iterator[tuple[list[LineId], m.Order | None]]:
    """Protobuf -> core orders.

    Raises:
        WireError: an order is empty, or holds a value that this version does not know.
    """
    for item in message.orders:
        order = order_from_wire(pb.ControllerOrder.FromString(item.order)) if item.HasField("order") else None
        yield [LineId(line) for line in item.lines], order
