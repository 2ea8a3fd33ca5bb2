"""The controller's gRPC server, with the access control of ``ttp.wire.access`` in front of all its services:
``ttp.wire.v1.Controller``, ``ttp.wire.v1.Manager``, health and reflection.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, cast

import grpc
import grpc.aio
from grpc_health.v1.health import SERVICE_NAME as HEALTH_SERVICE
from grpc_health.v1.health_pb2 import HealthCheckResponse
from grpc_reflection.v1alpha import reflection

from ttp._version import __version__
from ttp.config import Config
from ttp.controller.connection import Connection
from ttp.controller.driver import WATCH_MAX, Driver
from ttp.controller.relay_link import RelayLink
from ttp.core import messages as m
from ttp.core.controller import events as ce
from ttp.core.controller.fault_targets import fault_targets, meant_hosts, shown_hosts
from ttp.core.controller.incident import Incident
from ttp.core.controller.machine import ControllerMachine
from ttp.core.layout import Rank, ranks_text
from ttp.errors import EXIT_BAD_CONFIG
from ttp.launch.presence import LIVES
from ttp.mindio.manager_service import SERVICE as MANAGER_SERVICE
from ttp.mindio.manager_service import ManagerService
from ttp.wire import limits, tls
from ttp.wire.access import aio_guards, listening_address
from ttp.wire.address import target
from ttp.wire.channel import SERVER_OPTIONS
from ttp.wire.convert import enum_from_wire, enum_to_wire, order_to_wire, pages_from_wire, parse_report
from ttp.wire.limits import WireError
from ttp.wire.relay import PROTOCOL, mismatch
from ttp.wire.v1 import controller_pb2 as pb
from ttp.wire.v1 import controller_pb2_grpc as rpc
from ttp.wire.v1 import rounds_pb2_grpc

log = logging.getLogger("ttp.controller")

SERVICE = "ttp.wire.v1.Controller"

RAW = (f"/{SERVICE}/Attach", f"/{SERVICE}/Relay")
"""Methods whose handlers get their requests as bytes; see ``RawReports``."""
GRACE_S = 0.5
"""Seconds that streams may take to end when the controller stops."""


class ControllerService(rpc.ControllerServicer):
    """Translates between protobuf messages and the driver's events; decides nothing."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    async def Attach(self, request_iterator: AsyncIterator[Any], context: Any) -> AsyncIterator[pb.ControllerOrder]:
        """See the proto. Reports arrive as bytes; see ``RawReports``."""
        task = asyncio.current_task()
        assert task is not None
        connection = self._driver.connect(task.cancel, context.peer())
        reader = asyncio.create_task(self._read(request_iterator, connection))
        try:
            await context.send_initial_metadata(())
            while (order := await connection.next()) is not None:
                yield order_to_wire(order)
        finally:
            self._driver.disconnect(connection)
            reader.cancel()

    async def _read(self, reports: AsyncIterator[bytes], connection: Connection) -> None:
        greeted = False
        try:
            async for data in reports:
                if connection.closing:
                    break
                report = parse_report(data)
                if not (greeted or isinstance(report, m.Hello)):
                    raise WireError(f"the first message of a stream is a Hello, not a {type(report).__name__}")
                greeted = True
                self._driver.feed(ce.Received(connection.id, report), more=True)
        except WireError as problem:
            log.warning("stream %s is refused: %s", connection.id, problem)
            connection.put(m.Refused(Rank(-1), m.RefusalCode.MALFORMED, str(problem)))
        except (grpc.RpcError, asyncio.CancelledError):
            pass  # the stream broke; the state machine decides what that means
        except Exception:
            if not self._driver.closed:  # a closed server makes grpc raise on every read
                log.exception("an error while the controller handled a report of a rank; the rank's stream is closed")
        finally:
            self._driver.disconnect(connection)
            connection.end()

    async def Relay(self, request_iterator: AsyncIterator[Any], context: Any) -> AsyncIterator[pb.RelayOrders]:
        """See the proto. Frames arrive as bytes; see ``RawReports``."""
        problem = mismatch(context.invocation_metadata(), f"the relay at {context.peer()}")
        if problem:
            log.warning("a relay is refused: %s", problem)
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, problem)
        task = asyncio.current_task()
        assert task is not None
        link = RelayLink(self._driver, task.cancel, context.peer())
        reader = asyncio.create_task(link.read(request_iterator))
        try:
            await context.send_initial_metadata((PROTOCOL,))
            async for orders in link.orders():
                yield orders
        finally:
            reader.cancel()
            link.close()

    async def Look(self, request: pb.LookRequest, context: Any) -> pb.LookResponse:
        """See the proto."""
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this is a controller, not a relay")
        raise AssertionError

    async def GetStatus(self, request: pb.GetStatusRequest, context: Any) -> pb.GetStatusResponse:
        """See the proto."""
        return status_of(self._driver, brief=request.brief)

    async def WatchEvents(self, request: pb.WatchEventsRequest, context: Any) -> AsyncIterator[pb.Event]:
        """See the proto."""
        watch = self._driver.watch(request.replay)
        try:
            await context.send_initial_metadata(())
            while (h := await watch.queue.get()) is not None:
                yield pb.Event(
                    sequence=h.sequence,
                    unix_s=h.unix_s,
                    monotonic_s=h.monotonic_s,
                    kind=h.kind,
                    incident=h.incident,
                    json=h.facts,
                )
            if watch.lagging:
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"this watcher is {WATCH_MAX} events behind")
        finally:
            self._driver.unwatch(watch)

    async def ReportFault(self, request: pb.ReportFaultRequest, context: Any) -> pb.ReportFaultResponse:
        """See the proto."""
        if request.pids and len(request.pids) != len(request.ranks):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "pids and ranks must have the same length")
        try:
            kind = enum_from_wire(m.FaultKind, request.kind) if request.kind else m.FaultKind.OUTSIDE
            pages = pages_from_wire(request.pages)
            host, seat = limits.text("host", request.host), limits.text("seat", request.seat)
        except WireError as problem:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(problem))
        if request.recovered:
            return self._recovered(host)
        pid_of = dict(zip(map(Rank, request.ranks), request.pids or (0,) * len(request.ranks), strict=True))
        reason = limits.text("reason", request.reason)
        if request.exit_code == EXIT_BAD_CONFIG and self._are_of_this_launch(pid_of):
            self._driver.feed(ce.RankWasWrong(f"{ranks_text(pid_of)} {reason}"))
        exited = kind is m.FaultKind.EXITED and not request.drain
        between = self._driver.between_launches
        meant = fault_targets(self._driver.machine.job, pid_of, host, exited=exited, between=between)
        if not meant.ranks:
            return pb.ReportFaultResponse(text=meant.problem or "nothing was done: give a rank or a host")
        pids = tuple(pid_of.get(rank, 0) for rank in meant.ranks) if request.pids else ()
        if request.drain:
            members = self._driver.machine.job.members
            self._driver.feed(ce.HostsDrained(frozenset(members[rank].hello.host for rank in meant.ranks)))
        reason = reason or "reported from outside"
        self._driver.feed(ce.Accused(meant.ranks, kind, reason, pids, pages, seat))
        text = f"accused: {ranks_text(meant.ranks)}. The job saves its newest step and ends, to be started again"
        return pb.ReportFaultResponse(accused=meant.ranks, text=f"{text}. {meant.problem}" if meant.problem else text)

    def _recovered(self, host: str) -> pb.ReportFaultResponse:
        """Let a drained host start ranks again; ``host`` as in ``fault_targets``."""
        addresses = {member.hello.host: member.hello.address for member in self._driver.machine.job.members.values()}
        drained = {name: addresses.get(name, "") for name in self._driver.machine.drained_hosts}
        found = meant_hosts(drained, host)
        if len(found) != 1:
            text = f"{host!r:.200} names no drained host, or several (drained: {shown_hosts(drained) or 'none'})"
            return pb.ReportFaultResponse(text=f"{text}; nothing was done")
        self._driver.feed(ce.HostsDrained(frozenset(found), drained=False))
        return pb.ReportFaultResponse(text=f"{found[0]} may start ranks again", recovered=True)

    def _are_of_this_launch(self, pid_of: Mapping[Rank, int]) -> bool:
        """Return whether no reported rank has joined with another pid.

        Ranks that have not joined count as of this launch, because a rank may end before it joins.
        """
        members = self._driver.machine.job.members
        return all(rank not in members or members[rank].hello.pid == pid for rank, pid in pid_of.items())

    async def SaveNow(self, request: pb.SaveNowRequest, context: Any) -> pb.SaveNowResponse:
        """See the proto."""
        answer = await self._driver.save(limits.text("reason", request.reason), again=request.again)
        return pb.SaveNowResponse(saved=answer.saved, version=answer.version, path=answer.path, text=answer.text)

    async def GetVerdict(self, request: pb.GetVerdictRequest, context: Any) -> pb.GetVerdictResponse:
        """See the proto."""
        try:
            host = limits.text("host", request.host)
        except WireError as problem:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(problem))
        self._driver.feed(ce.LauncherSaid(host, request.starts, request.code))
        machine = self._driver.machine
        return pb.GetVerdictResponse(
            code=machine.verdict.code,
            text=machine.verdict.text,
            final=machine.verdict.final,
            incarnation=machine.job.incarnation,
            term=machine.job.term,
            hosts=machine.unheard_hosts,
            drained=machine.drained_hosts,
        )


def status_of(driver: Driver, *, brief: bool = False) -> pb.GetStatusResponse:
    """Return the present status of the job, its ranks and the last incident; ``brief``: without groups and ranks."""
    machine, now = driver.machine, time.monotonic()
    job = machine.job
    response = pb.GetStatusResponse(
        ttp_version=__version__,
        term=machine.job.term,
        run_id=job.run_id,
        incarnation=job.incarnation,
        world_size=job.layout.world_size if job.layout else 0,
        save_dir=machine.job.save_dir,
        framework=next((mb.hello.framework for mb in job.members.values()), ""),
        incidents_total=machine.rescue.total,
        false_alarms=machine.rescue.false_alarms,
        standbys=machine.standbys,
        copied_version=machine.copied_version,
        stage=machine.stage,
        pid=os.getpid(),
        uptime_s=now - driver.started_at,
        attached=any(rank_state(machine, rank) in LIVES for rank in job.live),
        between_launches=driver.between_launches,
        shared_names=job.shared_names,
    )
    if job.layout is not None and not brief:
        response.groups.extend(pb.ShardGroup(name=s, ranks=ranks) for s, ranks in job.layout.groups.items())
        response.ranks.extend(_rank_status(driver, Rank(r), now) for r in range(job.layout.world_size))
    incident = machine.incident or machine.rescue.last
    if incident is not None:
        response.last_incident.CopyFrom(_incident_status(incident, open_now=machine.incident is not None, now=now))
    return response


def rank_state(machine: ControllerMachine, rank: Rank) -> str:
    """Return a rank's state, as one of the words in ``ttp status`` and the metrics (``metrics.STATES``)."""
    member = machine.job.members.get(rank)
    if member is None:
        return "missing"
    if member.left or member.done:
        return "done" if member.done else "released"
    if rank not in machine.job.live:
        return "lost"
    if machine.incident is not None and machine.incident.ranks.answered(rank):
        return "frozen"
    return "broken" if member.broken else "live"


def _rank_status(driver: Driver, rank: Rank, now: float) -> pb.RankStatus:
    state, member = rank_state(driver.machine, rank), driver.machine.job.members.get(rank)
    if member is None:
        return pb.RankStatus(rank=rank, state=state)
    return pb.RankStatus(
        rank=rank,
        host=member.hello.host,
        pid=member.hello.pid,
        version=member.version,
        phase=cast("pb.Phase.ValueType", enum_to_wire(member.phase)),
        state=state,
        silent_s=max(0.0, now - member.last_seen),
        mark=member.mark,
        activity=member.activity,
        can_continue=member.hello.can_continue,
    )


def _incident_status(incident: Incident, *, open_now: bool, now: float) -> pb.IncidentStatus:
    plan = incident.draft.plan
    now_for = incident.waits_for or incident.why
    return pb.IncidentStatus(
        id=incident.id,
        stage=incident.stage.value if open_now else "closed",
        cause=incident.cause,
        version=plan.version if plan else 0,
        outcome=incident.outcome,
        reason=now_for if open_now or plan is None else plan.reason,
        path=incident.path,
        opened_unix_s=time.time() - (now - incident.opened_at),
    )


class RawReports(grpc.aio.ServerInterceptor):
    """Passes reports to the handlers as bytes, so that a handler can refuse an invalid report on the rank's stream."""

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any) -> Any:
        """Return the handler of a method; for methods in ``RAW``, one that does not parse its requests."""
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method not in RAW:
            return handler
        return grpc.stream_stream_rpc_method_handler(handler.stream_stream, None, handler.response_serializer)


async def _check(requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
    yield HealthCheckResponse(status=HealthCheckResponse.SERVING)


async def _watch_health(requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
    yield HealthCheckResponse(status=HealthCheckResponse.SERVING)
    await asyncio.Event().wait()  # until the caller or the server ends the stream


def _health() -> grpc.GenericRpcHandler:
    """Return the handlers of health checks. As these need no token, they read no request: all services are served."""
    made: dict[str, Any] = {
        name: grpc.stream_stream_rpc_method_handler(answer, None, HealthCheckResponse.SerializeToString)
        for name, answer in (("Check", _check), ("Watch", _watch_health))
    }
    return grpc.method_handlers_generic_handler(HEALTH_SERVICE, made)


async def start_server(driver: Driver, config: Config, port: int) -> grpc.aio.Server:
    """Start a server on ``port``. ``ttp.wire.access`` determines its address and who may call it.

    Raises:
        RuntimeError: the port cannot be bound.
        ConfigError: the TLS settings cannot be used, or the address is not loopback and there is no token.
    """
    where = target(listening_address(config), port)
    server = grpc.aio.server(options=SERVER_OPTIONS, interceptors=[*aio_guards(config), RawReports()])
    rpc.add_ControllerServicer_to_server(ControllerService(driver), server)
    rounds_pb2_grpc.add_ManagerServicer_to_server(ManagerService(driver), server)
    server.add_generic_rpc_handlers((_health(),))
    reflection.enable_server_reflection((SERVICE, MANAGER_SERVICE, HEALTH_SERVICE, reflection.SERVICE_NAME), server)
    tls.add_port(server, where)
    await server.start()
    return server


async def stop_server(server: grpc.aio.Server, driver: Driver) -> None:
    """Send all queued orders, then stop the server.

    Waits for the handlers to return, because gRPC logs an exception for each handler that still runs when the event
    loop ends.
    """
    driver.close()
    with contextlib.suppress(Exception):
        await server.stop(grace=GRACE_S)
    handlers = asyncio.all_tasks() - {asyncio.current_task()}
    if handlers:
        await asyncio.wait(handlers, timeout=GRACE_S)
