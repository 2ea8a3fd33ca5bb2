"""One bidirectional stream to the controller, on threads that never hold a lock of ttp while they wait."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import Any

import grpc

from ttp.core import messages as m
from ttp.launch.relay_file import TO_KEY
from ttp.processor.liveness import forks
from ttp.wire import channel as wire
from ttp.wire.access import LOOPBACK
from ttp.wire.address import target
from ttp.wire.convert import order_from_wire, report_to_wire
from ttp.wire.limits import WireError
from ttp.wire.v1 import controller_pb2 as pb

log = logging.getLogger("ttp.processor")

ASK_S = 1.0
"""Seconds that a relay may take to answer."""


class Stream:
    """A stream and its reader thread. ``on_down`` is called exactly once, after the last order.

    Args:
        address: host of the controller.
        port: its port.
        token: shared secret of the job; may be empty.
        on_up: called when the controller has accepted the stream.
        on_order: called with each order.
        on_down: called when the stream has ended, with the reason in words.
        within_s: seconds that the controller has to accept the stream; None: no limit.
        relay: port of this host's relay, through which to connect; None: directly.
    """

    def __init__(
        self,
        address: str,
        port: int,
        token: str,
        *,
        on_up: Callable[[], None],
        on_order: Callable[[m.Order], None],
        on_down: Callable[[str], None],
        within_s: float | None = None,
        relay: int | None = None,
    ) -> None:
        self._outbox: queue.SimpleQueue[pb.RankReport | None] = queue.SimpleQueue()
        self._on_up, self._on_order, self._on_down = on_up, on_order, on_down
        self._port, self._within_s = port if relay is None else relay, within_s
        self._said = wire.metadata(token)
        if relay is None:
            self._channel = wire.open_channel(address, port)
        else:
            self._channel = wire.open_channel(LOOPBACK, relay, wire.RELAY_OPTIONS)
            self._said += ((TO_KEY, target(address, port)),)
        self._call = wire.stub(self._channel).Attach(iter(self._outbox.get, None), metadata=self._said)
        self._thread = threading.Thread(target=self._read, name="ttp-stream", daemon=True)

    def start(self) -> None:
        """Open the stream; a call of ``on_up`` or ``on_down`` follows."""
        self._thread.start()

    def send(self, report: m.Report) -> None:
        """Queue a report. Does not block."""
        self._outbox.put(report_to_wire(report))

    def ask(self, then: Callable[[float | None], None]) -> None:
        """Ask the relay how many seconds its host has heard nothing of the controller's host.

        ``then`` is called with the answer on another thread; None: it is unknown, or the relay did not answer within
        ``ASK_S``.
        """

        def answered(call: Any) -> None:
            answer = call.result() if call.code() is grpc.StatusCode.OK else None
            then(answer.silent_s if answer is not None and answer.HasField("silent_s") else None)

        call = wire.stub(self._channel).Look.future(pb.LookRequest(), metadata=self._said, timeout=ASK_S)
        call.add_done_callback(answered)

    def finish(self, timeout_s: float) -> None:
        """Send no more, and wait up to ``timeout_s`` seconds until all reports have arrived."""
        self._outbox.put(None)
        if self._thread.is_alive():  # it is not if no thread could be started
            self._thread.join(timeout_s)
        self.abort()

    def abort(self) -> None:
        """Close the stream at once."""
        self._outbox.put(None)
        self._call.cancel()
        self._channel.close()

    def _wait_accepted(self) -> bool:
        """Wait for the controller's metadata, which it sends when it accepts the stream; False: the stream has ended.

        For gRPC a stream that has failed has empty metadata.
        """
        if self._within_s is None:
            self._call.initial_metadata()
        else:
            timer = threading.Timer(self._within_s, self._call.cancel)
            timer.daemon = True
            timer.start()
            try:
                self._call.initial_metadata()
            finally:
                timer.cancel()
        return bool(self._call.is_active())

    def _read(self) -> None:
        reason = "the controller ended the stream"
        try:
            if self._wait_accepted():
                forks.close_in_children(self._port)
                self._on_up()
            for message in self._call:
                try:
                    self._on_order(order_from_wire(message))
                except WireError as problem:
                    log.warning("cannot parse an order of the controller, it is ignored: %s", problem)
        except grpc.RpcError as problem:
            code = problem.code() if isinstance(problem, grpc.Call) else None
            reason = f"{code.name if code else 'UNKNOWN'}: {wire.details_of(problem)}"
        except Exception as problem:  # whatever fails, ``on_down`` is called below
            reason = repr(problem)
        self._outbox.put(None)
        self._on_down(reason)
