"""Convert messages between managers and controllers to and from the protobuf messages of ``rounds.proto``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from ttp.core.layout import WORLD_SIZE_MAX, Rank
from ttp.mindio.protocol.manager_messages import CallKind, FaultOf, ManagerCall, Notice, NoticeKind, RankFault
from ttp.wire import limits
from ttp.wire.limits import WireError
from ttp.wire.v1 import rounds_pb2 as pb

_Kind = TypeVar("_Kind")

ATTACHED = ("ttp-attached", "1")
"""Metadata that a controller sends first to a manager that it accepts: gRPC gives a call that fails empty metadata."""
WAIT_MAX_S = 86_400.0
"""Largest time in seconds to wait for a manager."""


def notice_to_wire(notice: Notice) -> pb.Notice:
    """Convert a notice from core to protobuf."""
    return pb.Notice(
        what=notice.kind.value,
        faults=_faults_to_wire(notice.faults),
        seconds=notice.seconds,
        strategy=notice.strategy,
        params=notice.params,
    )


def notice_from_wire(message: pb.Notice) -> Notice:
    """Convert a notice from protobuf to core.

    Raises:
        WireError: the message is not valid.
    """
    return Notice(
        _known(NoticeKind, message.what, "notice from a manager"),
        _faults_from_wire(message.faults),
        seconds(message.seconds),
        limits.text("strategy", message.strategy),
        limits.text("params", message.params),
    )


def call_to_wire(call: ManagerCall) -> pb.ManagerCall:
    """Convert a call from core to protobuf."""
    return pb.ManagerCall(
        what=call.kind.value,
        faults=_faults_to_wire(call.faults),
        code=call.code,
        text=call.text,
        strategies=call.strategies,
        strategy=call.strategy,
    )


def call_from_wire(message: pb.ManagerCall) -> ManagerCall:
    """Convert a call from protobuf to core.

    Raises:
        WireError: the message is not valid.
    """
    kind = _known(CallKind, message.what, "call to a manager")
    faults = _faults_from_wire(message.faults)
    return ManagerCall(kind, faults, message.code, message.text, tuple(message.strategies), message.strategy)


def _known(kinds: Callable[[Any], _Kind], value: Any, what: str) -> _Kind:
    try:
        return kinds(value)
    except ValueError:
        raise WireError(f"{value!r:.80} is not a kind of {what}") from None


def seconds(value: float) -> float:
    """Check a time to wait, in seconds, and return it.

    Raises:
        WireError: it is not from 0 to ``WAIT_MAX_S``.
    """
    if not 0 <= value <= WAIT_MAX_S:
        raise WireError(f"{value} s is not a time from 0 to {WAIT_MAX_S:g} s")
    return value


def _faults_to_wire(faults: Iterable[RankFault]) -> list[pb.RankFault]:
    return [pb.RankFault(rank=fault.rank, kind=fault.kind.value, code=fault.code) for fault in faults]


def _faults_from_wire(messages: Iterable[pb.RankFault]) -> tuple[RankFault, ...]:
    faults: list[RankFault] = []
    for message in messages:
        if not 0 <= message.rank < WORLD_SIZE_MAX:
            raise WireError(f"{message.rank} is not a rank")
        kind = _known(FaultOf, message.kind, "fault: 0 memory, 1 process, 2 network")
        faults.append(RankFault(Rank(message.rank), kind, limits.text("code", message.code)))
    return tuple(faults)
