"""Every RPC of every service of ttp: whom it serves, and that a message of an older launch has no effect.

The RPCs come from the protos: a new one fails here until it is in the tables below.
"""

from __future__ import annotations

import importlib
import pkgutil
import queue
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

import ttp.wire.v1
from tests.controller.conftest import Controller
from tests.controller.conftest import hello as hello_of
from ttp.adapters.mindspore.barrier import _Heard
from ttp.config import Config
from ttp.core import messages as m
from ttp.core.layout import Rank
from ttp.launch.relay import RelayServer
from ttp.processor.copies.store import CopyStore
from ttp.processor.copies.transfer import Receiver
from ttp.processor.local_state.mirror import KeptPages
from ttp.wire.channel import metadata, open_channel
from ttp.wire.convert import order_from_wire, report_to_wire
from ttp.wire.relay import PROTOCOL
from ttp.wire.v1 import barrier_pb2, buddy_pb2, rounds_pb2
from ttp.wire.v1 import barrier_pb2_grpc as barrier_rpc
from ttp.wire.v1 import buddy_pb2_grpc as buddy_rpc
from ttp.wire.v1 import controller_pb2 as pb
from ttp.wire.v1 import controller_pb2_grpc as controller_rpc
from ttp.wire.v1 import rounds_pb2_grpc as rounds_rpc

TOKEN = "0123456789abcdef0123456789abcdef"
STRANGERS = {
    "no token": "",
    "a wrong token": "wrong",
    "the token of another job": "fedcba9876543210fedcba9876543210",
    "a part of the token": TOKEN[:-1],
    "more than the token": TOKEN + "0",
}
CONFIG = Config(token=TOKEN)
WAIT_S = 60.0


# -------------------------------------------------------------------------------------------------------- the services


@dataclass
class Served:
    """A running service: its channel, and whatever else its test needs."""

    channel: grpc.Channel
    what: Any = None


@contextmanager
def of_controller(folder: Path) -> Iterator[Served]:
    controller = Controller(folder, token=TOKEN)
    try:
        yield Served(controller.channel, controller)
    finally:
        controller.close()


@contextmanager
def at_port(server: Any) -> Iterator[Served]:
    with open_channel("127.0.0.1", server.port) as channel:
        try:
            yield Served(channel, server)
        finally:
            server.close()


def of_buddy(folder: Path) -> Any:
    receiver = Receiver(CONFIG, "job")
    receiver.rank, receiver.store = Rank(1), CopyStore(folder / "copies", 3)
    return at_port(receiver)


def of_barrier(folder: Path) -> Any:
    return at_port(_Heard([0], CONFIG))


def of_relay(folder: Path) -> Any:
    return at_port(RelayServer(CONFIG, folder))


SERVERS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "controller": ("ttp.wire.v1.Controller", of_controller),
    "manager": ("ttp.wire.v1.Manager", of_controller),
    "relay": ("ttp.wire.v1.Controller", of_relay),
    "buddy": ("ttp.wire.v1.Buddy", of_buddy),
    "barrier": ("ttp.wire.v1.Barrier", of_barrier),
}
"""Every server of ttp: the service of the protos that it serves, and how to run it."""


def rpcs() -> dict[str, Any]:
    """Return every method of the protos by its name on the wire, with its descriptor."""
    found = {}
    for module in pkgutil.iter_modules(ttp.wire.v1.__path__):
        if module.name.endswith("_pb2"):
            file = importlib.import_module(f"ttp.wire.v1.{module.name}").DESCRIPTOR
            for service in file.services_by_name.values():
                for method in service.methods:
                    found[f"/{service.full_name}/{method.name}"] = method
    return found


RPCS = rpcs()
KINDS = {
    (False, False): "unary_unary",
    (False, True): "unary_stream",
    (True, False): "stream_unary",
    (True, True): "stream_stream",
}


def streams(method: Any) -> tuple[bool, bool]:
    """Return whether requests and responses are streams. Read from the proto: older protobufs have no attribute."""
    from google.protobuf import descriptor_pb2

    proto = descriptor_pb2.MethodDescriptorProto()
    method.CopyToProto(proto)
    return proto.client_streaming, proto.server_streaming


def call(channel: grpc.Channel, name: str, token: str, data: bytes = b"") -> tuple[grpc.StatusCode, str]:
    """Return how an RPC with one message ends; OK after its first answer."""
    asks, answers = streams(RPCS[name])
    made = getattr(channel, KINDS[asks, answers])(name)
    given = {"metadata": metadata(token), "timeout": 5.0 if token == TOKEN else WAIT_S}
    try:
        said = made(iter([data]) if asks else data, **given)
        if answers:
            next(said, None)
    except grpc.RpcError as problem:
        return problem.code(), problem.details() or ""
    return grpc.StatusCode.OK, ""


@pytest.fixture(scope="module", params=SERVERS)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Served]]:
    service, start = SERVERS[request.param]
    with start(tmp_path_factory.mktemp("service")) as running:
        yield service, running


def test_every_service_is_here() -> None:
    assert {name.split("/")[1] for name in RPCS} == {service for service, _ in SERVERS.values()}
    assert set(RPCS) == set(REPLAYS), "what does a message of an older launch do there?"


def test_nobody_is_served_without_the_token_of_the_job(served: tuple[str, Served]) -> None:
    service, running = served
    names = [name for name in RPCS if name.split("/")[1] == service]
    for name in names:
        for who, token in STRANGERS.items():
            code, details = call(running.channel, name, token)
            assert code is grpc.StatusCode.UNAUTHENTICATED, f"{name} serves {who}: {code} {details}"
            assert TOKEN not in details and "TTP_TOKEN" in details
        code, details = call(running.channel, name, TOKEN)
        assert code is not grpc.StatusCode.UNAUTHENTICATED, f"{name} does not serve the job: {details}"


def test_a_server_has_no_service_that_is_not_here(served: tuple[str, Served]) -> None:
    """Except health, which reveals nothing, and reflection, which requires the token."""
    _, running = served
    if not isinstance(running.what, Controller):
        return  # they have one service, and no reflection
    ask: Any = reflection_pb2_grpc.ServerReflectionStub
    stub = ask(running.channel)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    with pytest.raises(grpc.RpcError) as refused:
        next(stub.ServerReflectionInfo(iter([request]), timeout=WAIT_S))
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    answer = next(stub.ServerReflectionInfo(iter([request]), timeout=WAIT_S, metadata=metadata(TOKEN)))
    names = {entry.name for entry in answer.list_services_response.service}
    assert names - {name.split("/")[1] for name in RPCS} == {
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
    }


# ------------------------------------------------------------------------------------------ messages of an older launch


@pytest.fixture
def second_launch(tmp_path: Path) -> Iterator[Any]:
    """Return a job in its second launch; all launches have the same token."""
    with of_controller(tmp_path) as running:
        controller: Controller = running.what
        ranks = [controller.rank(number, launch=1, nonce=f"new-{number}", pid=2000 + number) for number in range(2)]
        for rank in ranks:
            rank.expect(m.Welcome)
        yield SimpleNamespace(controller=controller, ranks=ranks, metadata=metadata(TOKEN), folder=tmp_path)


def unchanged(job: Any, act: Callable[[], Any]) -> Any:
    """Return the result of ``act``, after checking that the job has not changed."""
    before = job.controller.status()
    returned = act()
    after = job.controller.status()
    for status in (before, after):
        status.uptime_s = status.last_incident.opened_unix_s = 0
        for rank in status.ranks:
            rank.silent_s = 0
    assert before == after
    return returned


def attach(job: Any) -> None:
    old = job.controller.rank(0, launch=0, nonce="old", pid=1000)
    order = unchanged(job, lambda: old.expect(m.Refused))
    assert order.code in (m.RefusalCode.FENCED, m.RefusalCode.OTHER_JOB, m.RefusalCode.RANK_TAKEN), order


def relay(job: Any) -> None:
    """Attach the same rank behind a relay of its host."""
    hello = report_to_wire(hello_of(0, launch=0, nonce="old", pid=1000)).SerializeToString()
    frame = pb.RelayFrame(reports=[pb.LineReport(lines=[1], report=hello)])
    frames: queue.SimpleQueue[Any] = queue.SimpleQueue()
    frames.put(frame)

    def refused() -> m.Order:
        said = (*job.metadata, PROTOCOL)
        for answer in job.controller.stub.Relay(iter(frames.get, None), metadata=said, timeout=WAIT_S):
            for one in answer.orders:
                if isinstance(order := order_from_wire(pb.ControllerOrder.FromString(one.order)), m.Refused):
                    frames.put(None)
                    return order
        raise AssertionError("it is not refused")

    order: Any = unchanged(job, refused)
    assert order.code in (m.RefusalCode.FENCED, m.RefusalCode.OTHER_JOB, m.RefusalCode.RANK_TAKEN), order


def report_fault(job: Any) -> None:
    """The report names the process that ended, which is not of this launch."""
    request = pb.ReportFaultRequest(ranks=[0], pids=[1000], reason="signal 9", kind=pb.FAULT_KIND_EXITED)
    unchanged(job, lambda: job.controller.stub.ReportFault(request, metadata=job.metadata, timeout=WAIT_S))


def get_verdict(job: Any) -> None:
    """The result of an old launcher, and an exit with 64 of an old process, end nothing."""
    stub = job.controller.stub
    request = pb.GetVerdictRequest(host="one", code=75)
    unchanged(job, lambda: stub.GetVerdict(request, metadata=job.metadata, timeout=WAIT_S))
    wrong = pb.ReportFaultRequest(ranks=[0], pids=[1000], exit_code=64, kind=pb.FAULT_KIND_EXITED)
    unchanged(job, lambda: stub.ReportFault(wrong, metadata=job.metadata, timeout=WAIT_S))
    assert stub.GetVerdict(request, metadata=job.metadata, timeout=WAIT_S).code != 64


def reads_only(job: Any) -> None:
    """The request has no launch, and changes nothing."""
    unchanged(job, job.controller.status)


def watch(job: Any) -> None:
    """Like ``reads_only``."""
    request = pb.WatchEventsRequest(replay=10)
    unchanged(job, lambda: next(job.controller.stub.WatchEvents(request, metadata=job.metadata, timeout=WAIT_S)))


def save_now(job: Any) -> None:
    """The request has no launch: the newest step of this launch is saved, if any, and training goes on."""
    answer = job.controller.stub.SaveNow(pb.SaveNowRequest(), metadata=job.metadata, timeout=WAIT_S)
    assert not answer.saved and job.controller.status().incarnation


def attend(job: Any) -> None:
    """The request has no launch: the manager attaches to the running job, which does not change."""
    stub = rounds_rpc.ManagerStub(job.controller.channel)
    call = unchanged(job, lambda: stub.Attend(rounds_pb2.AttendRequest(wait_s=1), metadata=job.metadata))
    call.cancel()


def notify(job: Any) -> None:
    """The notice answers a question that is not open."""
    stub = rounds_rpc.ManagerStub(job.controller.channel)
    notice = rounds_pb2.Notice(what="strategy", strategy="dump")
    answer = unchanged(job, lambda: stub.Notify(notice, metadata=job.metadata, timeout=WAIT_S))
    assert not answer.accepted and answer.text


def offer(job: Any) -> None:
    """The request has no launch: no ranks are to be moved."""
    stub = rounds_rpc.ManagerStub(job.controller.channel)
    offered = rounds_pb2.PlaceOffered(host="other", store="127.0.0.1:1")
    taken = unchanged(job, lambda: stub.Offer(offered, metadata=job.metadata, timeout=WAIT_S))
    assert not taken.ranks and taken.world_size == 2


def store(job: Any) -> None:
    with of_buddy(job.folder) as running:
        begin = buddy_pb2.StoreBegin(of=0, version=10, incarnation=2, run_id="job", size=1)
        stub = buddy_rpc.BuddyStub(running.channel)
        for old in (begin, buddy_pb2.StoreBegin(of=0, version=10, incarnation=3, run_id="another", size=1)):
            with pytest.raises(grpc.RpcError, match="another job or another launch") as refused:
                stub.Store(iter([buddy_pb2.StoreRequest(begin=old)]), metadata=job.metadata, timeout=WAIT_S)
            assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert not list((job.folder / "copies").rglob("*.*"))


def keep(job: Any) -> None:
    with of_buddy(job.folder) as running:
        running.what.keep = KeptPages(job.folder / "pages", 1, 3).store
        stub = buddy_rpc.BuddyStub(running.channel)
        for incarnation, run_id in ((2, "job"), (3, "another")):
            page = buddy_pb2.KeepRequest(of=0, keeper=1, version=9, incarnation=incarnation, run_id=run_id, data=b"x")
            assert stub.Keep(page, metadata=job.metadata, timeout=WAIT_S).refused
        assert not list((job.folder / "pages").rglob("*"))


def come(job: Any) -> None:
    with of_barrier(job.folder) as running:
        stub = barrier_rpc.BarrierStub(running.channel)
        for secret in (bytes(16), b""):
            old = [barrier_pb2.Arrival(rank=0, secret=secret), barrier_pb2.Arrival(update=1)]
            with pytest.raises(grpc.RpcError, match="of this launch") as refused:
                stub.Come(iter(old), metadata=job.metadata, timeout=WAIT_S)
            assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
        assert not running.what.sources[0].here


def look(job: Any) -> None:
    """The request has no launch, changes nothing, and is for relays: a controller does not serve it."""
    with pytest.raises(grpc.RpcError) as refused:
        unchanged(job, lambda: job.controller.stub.Look(pb.LookRequest(), metadata=job.metadata, timeout=WAIT_S))
    assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
    with of_relay(job.folder) as running:
        stub = controller_rpc.ControllerStub(running.channel)
        assert not stub.Look(pb.LookRequest(), metadata=job.metadata, timeout=WAIT_S).HasField("silent_s")


REPLAYS: dict[str, Callable[[Any], None]] = {
    "/ttp.wire.v1.Controller/Attach": attach,
    "/ttp.wire.v1.Controller/Relay": relay,
    "/ttp.wire.v1.Controller/Look": look,
    "/ttp.wire.v1.Controller/GetStatus": reads_only,
    "/ttp.wire.v1.Controller/WatchEvents": watch,
    "/ttp.wire.v1.Controller/ReportFault": report_fault,
    "/ttp.wire.v1.Controller/SaveNow": save_now,
    "/ttp.wire.v1.Controller/GetVerdict": get_verdict,
    "/ttp.wire.v1.Manager/Attend": attend,
    "/ttp.wire.v1.Manager/Notify": notify,
    "/ttp.wire.v1.Manager/Offer": offer,
    "/ttp.wire.v1.Buddy/Store": store,
    "/ttp.wire.v1.Buddy/Keep": keep,
    "/ttp.wire.v1.Barrier/Come": come,
}


def test_a_message_of_an_older_launch_changes_nothing(second_launch: Any) -> None:
    for replay in REPLAYS.values():
        replay(second_launch)
