"""The relay of a host: the host's ranks open their streams to it, and it shares one stream to the controller.

The relay runs in the launcher's agent, or, without ttp's launcher, in the first rank of the host. Ranks find it by a
file in the run directory. Each rank names the controller that it wants, so failover works as without a relay. A rank
whose relay is gone connects to the controller directly. ``ttp.core.relay`` makes the decisions.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import itertools
import json
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from ttp.aside import aside
from ttp.config import Config
from ttp.core import messages as m
from ttp.core.relay import LineId, Relay, slot_s
from ttp.inbox import Inbox
from ttp.launch.relay_file import RELAYED, TO_KEY, file_of, host_of
from ttp.store.durable import replace_file
from ttp.wire import access, tls
from ttp.wire.address import split, target
from ttp.wire.channel import SERVER_OPTIONS, details_of, metadata, open_channel, stub
from ttp.wire.convert import order_to_wire, report_from_wire
from ttp.wire.limits import WireError
from ttp.wire.relay import PROTOCOL, frame_to_wire, mismatch, orders_from_wire
from ttp.wire.sockets import Sockets, peers
from ttp.wire.v1 import controller_pb2 as pb
from ttp.wire.v1 import controller_pb2_grpc as rpc

log = logging.getLogger("ttp.relay")

CLOSE_S = 1.0
LOOK_S = 0.05
"""Seconds for which one look at a controller's host is reused to answer all ranks."""
ABORTS_S = 1.0
"""Seconds that a controller may take to end a stream that it refuses."""
ACCEPT_S = 60.0
"""Seconds that a controller may take to accept the relay."""


@dataclass(slots=True)
class _Local:
    """The stream of one rank to this relay."""

    id: LineId
    orders: Inbox[m.Order | _Ended] = field(default_factory=Inbox)


@dataclass(frozen=True, slots=True)
class _Ended:
    """The end of a rank's stream: gRPC status and reason. ``code`` OK: it ended in good order."""

    code: Any = grpc.StatusCode.OK
    text: str = ""


class _Threads(concurrent.futures.Executor):
    """An executor that runs each call on a daemon thread of its own: a call lasts as long as a rank's stream."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> concurrent.futures.Future[Any]:
        """See ``concurrent.futures.Executor.submit``."""
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()

        def run() -> None:
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as problem:
                future.set_exception(problem)

        aside("ttp-relay", run)
        return future


class RelayServer(rpc.ControllerServicer):
    """The gRPC server of the relay, on loopback: ``Attach`` and ``Look`` for the ranks of this host.

    Args:
        config: the job's settings.
        run_dir: directory of the file by which ranks find the relay.
        accepted: called with the server's port whenever a stream from a rank, or to a controller, is established.

    Raises:
        RuntimeError: no port is free.
        ConfigError: TLS is asked for and not possible.
    """

    def __init__(self, config: Config, run_dir: Path, accepted: Callable[[int], None] = lambda port: None) -> None:
        self._config, self._accepted = config, accepted
        self._file = file_of(config, run_dir)
        self._lock = threading.Lock()
        self._uplinks: dict[str, _Uplink] = {}
        self._server = grpc.server(
            _Threads(),  # type: ignore[arg-type]  # the stubs ask for a pool; grpc takes any executor
            options=SERVER_OPTIONS,
            interceptors=access.guards(config),
        )
        rpc.add_ControllerServicer_to_server(self, self._server)
        self.port = tls.add_port(self._server, target(access.LOOPBACK, 0))
        self._server.start()
        replace_file(self._file, json.dumps({"port": self.port, "pid": os.getpid()}).encode())

    def close(self) -> None:
        """End all streams. Ranks that still run connect to the controller by themselves."""
        with contextlib.suppress(OSError, ValueError):
            if json.loads(self._file.read_text()).get("port") == self.port:
                self._file.unlink()
        self._server.stop(grace=None).wait(CLOSE_S)
        with self._lock:
            uplinks = list(self._uplinks.values())
        for uplink in uplinks:
            uplink.abort()

    def _not_here(self, request: Any, context: Any) -> Any:
        context.abort(grpc.StatusCode.UNIMPLEMENTED, "this is a relay, not a controller")

    Relay: Any = _not_here
    GetStatus = WatchEvents = ReportFault = SaveNow = GetVerdict = _not_here

    def Attach(self, request_iterator: Iterator[pb.RankReport], context: Any) -> Iterator[pb.ControllerOrder]:  # noqa: N802
        """See ``Controller.Attach`` in the proto. The metadata ``TO_KEY`` name the controller that the rank wants."""
        to = str(dict(context.invocation_metadata()).get(TO_KEY, ""))
        if not to:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"{TO_KEY} is missing: this is a relay, not a controller")
        uplink, local = self._open(to)
        context.add_callback(lambda: local.orders.put(_Ended()))
        try:
            problem = uplink.wait_accepted()
            if problem is not None:
                context.abort(problem.code, problem.text)
            context.send_initial_metadata(())  # raises if the rank has gone meanwhile
            self._accepted(self.port)
            aside("ttp-relay", lambda: _read(request_iterator, uplink, local))
            while not isinstance(order := local.orders.get(), _Ended):
                yield order_to_wire(order)
            if order.code is not grpc.StatusCode.OK:
                context.abort(order.code, order.text)
        finally:
            self._leave(uplink, local)

    def Look(self, request: Any, context: Any) -> pb.LookResponse:  # noqa: N802 - the name in the proto
        """See ``Controller.Look`` in the proto."""
        with self._lock:
            uplink = self._uplinks.get(str(dict(context.invocation_metadata()).get(TO_KEY, "")))
        return pb.LookResponse(silent_s=None if uplink is None else uplink.silent_s())

    def _open(self, to: str) -> tuple[_Uplink, _Local]:
        with self._lock:
            uplink = self._uplinks.get(to)
            if uplink is None or uplink.over:
                uplink = self._uplinks[to] = _Uplink(to, self._config, self._accepted)
            return uplink, uplink.open()

    def _leave(self, uplink: _Uplink, local: _Local) -> None:
        with self._lock:
            uplink.leave(local)
            if uplink.over and self._uplinks.get(uplink.to) is uplink:
                del self._uplinks[uplink.to]


def _read(reports: Iterator[pb.RankReport], uplink: _Uplink, local: _Local) -> None:
    """Pass a rank's reports on until its stream ends."""
    with contextlib.suppress(Exception):  # the stream broke: its end tells the rest
        for message in reports:
            try:
                report = report_from_wire(message)
            except WireError as problem:
                log.warning("cannot parse a message of a rank: %s", problem)
                break
            uplink.reported(local, report)
    local.orders.put(_Ended())


class _OtherProtocol(Exception):  # noqa: N818 - says what is the case
    """The controller and this relay speak different protocols; the text says what to do."""


class _Uplink:
    """The stream to one controller. Only the thread on which gRPC reads the frames uses its state machine.

    Args:
        to: host:port of the controller.
        config: the job's settings.
        accepted: see ``RelayServer``.
    """

    def __init__(self, to: str, config: Config, accepted: Callable[[int], None]) -> None:
        self.to, self.over = to, False
        self._ids = itertools.count(1)
        self._lines: dict[LineId, _Local] = {}
        slot = slot_s(host_of(config), config.heartbeat_s)
        self._machine = Relay(config.heartbeat_s, time.time() - time.monotonic() + slot)
        self._inbox: Inbox[Callable[[], None] | None] = Inbox()
        self._answered = threading.Event()
        self._problem: _Ended | None = None
        self._host, self._port = split(to)
        self._looking = threading.Lock()
        self._sockets = Sockets()
        self._peers: tuple[str, ...] = ()
        self._looked_at = float("-inf")
        self._silent_s: float | None = None
        self._note = accepted
        self._channel = open_channel(self._host, self._port)
        self._call: Any = stub(self._channel).Relay(self._frames(), metadata=(*metadata(config.token), PROTOCOL))
        aside("ttp-relay-up", self._read)

    def open(self) -> _Local:
        """Add a rank. Returns its stream."""
        local = _Local(LineId(next(self._ids)))
        self._lines[local.id] = local
        return local

    def leave(self, local: _Local) -> None:
        """Remove a rank. With the last one the stream ends."""
        self._lines.pop(local.id, None)
        self._inbox.put(lambda: self._machine.ended(local.id, time.monotonic()))
        if not self._lines:
            self.over = True
            self._inbox.put(None)

    def reported(self, local: _Local, report: m.Report) -> None:
        """Pass a rank's report on."""
        self._inbox.put(lambda: self._machine.reported(local.id, report, time.monotonic()))

    def wait_accepted(self) -> _Ended | None:
        """Wait until the controller has accepted the stream. Returns why it has not, else None."""
        if not self._answered.wait(ACCEPT_S):
            return _Ended(grpc.StatusCode.UNAVAILABLE, f"{RELAYED}no controller answers at {self.to}")
        return self._problem

    def silent_s(self) -> float | None:
        """Return the seconds since the last packet from the controller's host; None: unknown. See ``LOOK_S``."""
        with self._looking:
            if time.monotonic() > self._looked_at + LOOK_S:
                self._looked_at, self._silent_s = time.monotonic(), self._sockets.heard_of(self._peers)
            return self._silent_s

    def abort(self) -> None:
        """End the stream at once."""
        self._inbox.put(None)
        self._call.cancel()
        self._channel.close()

    def _frames(self) -> Iterator[pb.RelayFrame]:
        """Yield the frames for the controller. Reports that wait in the inbox are sent together."""
        going_on = True
        while going_on:
            due = self._machine.deadline()
            with contextlib.suppress(queue.Empty):
                item = self._inbox.get(timeout=None if due is None else due - time.monotonic())
                while item is not None:
                    item()
                    item = self._inbox.get_nowait()
                going_on = False
            frame = self._machine.take(time.monotonic())
            if frame is not None:
                yield frame_to_wire(frame)

    def _read(self) -> None:
        """Pass each order on to the ranks that it names, until the stream ends."""
        end = _Ended(grpc.StatusCode.UNAVAILABLE, f"{RELAYED}the controller ended the stream")
        try:
            self._check_protocol()
            self._note(self._port)
            self._answered.set()
            with contextlib.suppress(RuntimeError):  # no thread can be started: nobody stands in for this controller
                aside("ttp-relay-find", self._find)
            for message in self._call:
                self._pass_on(message)
        except grpc.RpcError as problem:
            code = problem.code() if isinstance(problem, grpc.Call) else grpc.StatusCode.UNAVAILABLE
            code = grpc.StatusCode.UNAVAILABLE if code in (None, grpc.StatusCode.OK) else code
            end = _Ended(code, f"{RELAYED}{details_of(problem)}")
        except _OtherProtocol as problem:
            end = _Ended(grpc.StatusCode.FAILED_PRECONDITION, f"{RELAYED}{problem}")
        except Exception as problem:  # ranks have to hear of every end
            log.exception("an error in the relay of this host")
            end = _Ended(grpc.StatusCode.INTERNAL, repr(problem))
        self.over, self._problem = True, end
        self._answered.set()
        for local in list(self._lines.values()):
            local.orders.put(end)
        self._inbox.put(None)
        self._channel.close()

    def _find(self) -> None:
        """Find the addresses of the controller. May take as long as the name service does, and orders must not wait."""
        self._peers = peers(self._host, self._port)

    def _check_protocol(self) -> None:
        """Wait until the controller accepts the stream, and compare the protocols.

        Raises:
            grpc.RpcError: the controller refuses the stream, or there is none.
            _OtherProtocol: it accepts, but speaks another protocol.
        """
        problem = mismatch(self._call.initial_metadata(), f"the controller at {self.to}")
        if not problem:
            return
        timer = threading.Timer(ABORTS_S, self._call.cancel)  # a controller that refuses ends the stream before
        timer.daemon = True
        timer.start()
        try:
            next(self._call, None)
        except grpc.RpcError as end:
            if isinstance(end, grpc.Call) and end.code() is not grpc.StatusCode.CANCELLED:
                raise
        raise _OtherProtocol(problem)

    def _pass_on(self, message: pb.RelayOrders) -> None:
        try:
            for lines, order in orders_from_wire(message):
                if order is None:
                    for line in lines:
                        self._inbox.put(functools.partial(self._machine.closed, line))
                elif isinstance(order, m.Freeze):
                    self._inbox.put(functools.partial(self._machine.told, tuple(lines), order))
                for local in filter(None, map(self._lines.get, lines)):
                    local.orders.put(_Ended() if order is None else order)
        except WireError as problem:
            log.warning("cannot parse orders of the controller: %s", problem)
