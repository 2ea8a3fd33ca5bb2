"""How a launcher's reporter of deaths finds the controller that accepts a report, and what it keeps open."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.launch.stub_controller import Stub
from tests.waiting import until
from ttp.config import Config
from ttp.launch.fault_report import LAST_S, FaultReporter
from ttp.launch.host import Host
from ttp.wire.v1 import controller_pb2 as wire
from ttp.wire.v1.controller_pb2_grpc import add_ControllerServicer_to_server


class Hearing(Stub):
    """A controller that accepts reports once it leads."""

    def __init__(self) -> None:
        self.leads, self.asked = False, 0
        self.heard: list[wire.ReportFaultRequest] = []

    def ReportFault(  # noqa: N802 - the name is that of the call in the .proto file
        self, request: wire.ReportFaultRequest, _: grpc.ServicerContext
    ) -> wire.ReportFaultResponse:
        self.asked += 1
        self.heard.append(request)
        return wire.ReportFaultResponse(accused=request.ranks if self.leads else (), text="it does not lead")


@pytest.fixture
def serve() -> Iterator[Callable[[], tuple[str, Hearing]]]:
    """Return a function that starts a controller, and returns its address and what answers there."""
    servers = []

    def start() -> tuple[str, Hearing]:
        server, hearing = grpc.server(futures.ThreadPoolExecutor(2)), Hearing()
        add_ControllerServicer_to_server(hearing, server)
        servers.append(server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        return f"127.0.0.1:{port}", hearing

    yield start
    for server in servers:
        server.stop(0).wait()


def closed(leader: Any) -> bool:
    try:
        leader.stub.ReportFault.future(wire.ReportFaultRequest()).cancel()
    except ValueError:
        return True
    return False


def test_a_controller_that_leads_no_more_keeps_no_connection() -> None:
    """A launcher outlives many launches, each with standby controllers at other ports."""
    home, first, second = (f"127.0.0.1:{port}" for port in (1, 2, 3))
    ring: list[tuple[str, ...]] = [(first, home)]
    reporter = FaultReporter(lambda: ring[0], home, "")
    try:
        until(lambda: reporter._leader.place == first)
        before: Any = reporter._leader
        ring[0] = (second, first, home)
        until(lambda: reporter._leader.place == second)
        until(lambda: closed(before))
        assert not before.channel._connectivity_state.polling, "grpc's thread that watched it would have raised"
    finally:
        reporter.close()


def test_a_connection_that_stands_is_not_watched(serve: Callable[[], tuple[str, Hearing]]) -> None:
    """The thread that watched it printed an exception when a launcher ended: "Cannot monitor channel state"."""
    place, _ = serve()
    reporter = FaultReporter(lambda: (place,), place, "")
    channel: Any = reporter._leader.channel
    try:
        until(lambda: not channel._connectivity_state.polling)
    finally:
        reporter.close()


def test_a_report_reaches_the_controller_that_leads_now(serve: Callable[[], tuple[str, Hearing]]) -> None:
    """The one that led last has died with its host, and its successor does not know yet that it leads."""
    place, successor = serve()
    dead = "127.0.0.1:1"
    reporter = FaultReporter(lambda: (dead, place), dead, "")
    try:
        reporter.exited(3, 77, "killed")
        until(lambda: successor.asked > 1)
        successor.leads = True
        until(lambda: reporter._unheard == 0)
        began = time.monotonic()
    finally:
        reporter.close()
    assert time.monotonic() - began < LAST_S


def test_a_report_that_every_controller_has_heard_keeps_no_launcher(serve: Callable[[], tuple[str, Hearing]]) -> None:
    place, refuses = serve()
    reporter = FaultReporter(lambda: (place,), place, "")
    reporter.exited(3, 77, "killed")
    until(lambda: reporter._unheard == 0)
    reporter.close()
    assert refuses.asked


def test_an_incident_says_why_a_launcher_stops_its_ranks(
    serve: Callable[[], tuple[str, Hearing]], tmp_path: Path
) -> None:
    """A host joined an elastic job, and its incident said "asked to end by SIGTERM (preemption, ...)"."""
    place, leader = serve()
    leader.leads = True
    host = Host(Config(port=int(place.rpartition(":")[2])), tmp_path / "run")
    host.before_workers("127.0.0.1", first_node=False)
    host.say_why([1], "a host joins")
    assert [(list(r.ranks), r.reason, r.kind) for r in leader.heard] == [
        ([1], "a host joins", wire.FAULT_KIND_PREEMPTED)
    ]
    host.close(several_nodes=False, code=0)
