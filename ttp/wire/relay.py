"""Converts the frames of relays between the core's values and protobuf.

Each report and order inside a frame is serialised separately, so that a malformed one does not spoil the others. A
report that many ranks send with the same bytes is parsed once.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator

from google.protobuf.message import DecodeError

from ttp._version import __version__
from ttp.core import messages as m
from ttp.core.relay import Frame, LineId, Lines
from ttp.wire import limits
from ttp.wire.convert import order_from_wire, order_to_wire, parse_report, report_to_wire
from ttp.wire.limits import WireError
from ttp.wire.v1 import controller_pb2 as pb

PROTOCOL = ("ttp-protocol", str(m.PROTOCOL_MAJOR))
"""Metadata that both ends of a relay's stream send first, because frames of another protocol cannot be parsed."""
LINES_MAX = 4096
"""Most ranks behind one relay: more than any host has."""
ALIKE_MAX, ALIKE_BYTES_MAX = 64, 1 << 14
"""Number of parsed reports that are cached, and the most bytes of a report that is cached."""


def mismatch(metadata: Iterable[tuple[str, str | bytes]] | None, who: str) -> str:
    """Return why the peer's protocol cannot be used; empty if it can.

    Args:
        metadata: the metadata with which the peer began its stream.
        who: name of the peer in the message.
    """
    name, mine = PROTOCOL
    theirs = dict(metadata or ()).get(name)
    return (
        ""
        if theirs == mine
        else f"{who} speaks {f'protocol {theirs!s}' if theirs else 'an older protocol'}, and this process "
        f"speaks protocol {mine} (ttp {__version__}): install the same ttp on every host"
    )


def frame_to_wire(frame: Frame) -> pb.RelayFrame:
    """Convert a core frame to protobuf."""
    reports = (
        pb.LineReport(lines=lines, report=None if report is None else report_to_wire(report).SerializeToString())
        for lines, report in frame.reports
    )
    return pb.RelayFrame(reports=reports, beat=frame.beat, silent=frame.silent)


def parse_frame(data: bytes) -> tuple[Frame, dict[LineId, str]]:
    """Parse the bytes of a relay's stream into a core frame.

    Returns:
        The frame, and for each line with a malformed report what is wrong with that report. The frame does not contain
        what such a line sent after the malformed report.

    Raises:
        WireError: the bytes are not a frame, or it has more lines than a host can have.
    """
    limits.check_size(data)
    try:
        message = pb.RelayFrame.FromString(data)
    except DecodeError:
        raise WireError(f"{len(data)} bytes are not a valid frame of a relay") from None
    problems: dict[LineId, str] = {}
    reports: list[tuple[Lines, m.Report | None]] = []
    for item in message.reports:
        lines = tuple(map(LineId, item.lines))
        if len(lines) > LINES_MAX:
            raise WireError(f"more than {LINES_MAX} ranks")
        if not problems.keys().isdisjoint(lines):
            lines = tuple(line for line in lines if line not in problems)
        try:
            reports.append((lines, _parse(item.report) if item.HasField("report") else None))
        except WireError as problem:
            problems |= dict.fromkeys(lines, str(problem))
    silent = (LineId(line) for line in message.silent[:LINES_MAX])
    return Frame(tuple(reports), message.beat, tuple(silent)), problems


def _parse(data: bytes) -> m.Report:
    return _parsed(data) if len(data) <= ALIKE_BYTES_MAX else parse_report(data)


_parsed = functools.lru_cache(ALIKE_MAX)(parse_report)


def orders_to_wire(orders: Iterable[tuple[Lines, m.Order | None]]) -> pb.RelayOrders:
    """Convert core orders, each with the lines that receive it, to protobuf."""
    return pb.RelayOrders(
        orders=(
            pb.LineOrder(lines=lines, order=None if order is None else order_to_wire(order).SerializeToString())
            for lines, order in orders
        )
    )


def orders_from_wire(message: pb.RelayOrders) -> Iterator[tuple[Lines, m.Order | None]]:
    """Convert protobuf orders to core orders, each with the lines that receive it.

    Raises:
        WireError: an order is empty, or has a value that this version does not know.
    """
    for item in message.orders:
        order = order_from_wire(pb.ControllerOrder.FromString(item.order)) if item.HasField("order") else None
        yield tuple(map(LineId, item.lines)), order
