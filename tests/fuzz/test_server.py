"""A real controller among broken, hostile or foreign peers: it stays up and serves the others."""

from __future__ import annotations

import contextlib
import queue
import random
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from tests.controller.conftest import Controller, hello
from tests.core.talk import answers
from tests.waiting import until
from ttp.core import messages as m
from ttp.core.layout import Layout, Rank, Version
from ttp.core.layout_messages import TellLayout
from ttp.wire.channel import MESSAGE_BYTES_MAX, metadata, open_channel
from ttp.wire.convert import order_from_wire, report_to_wire
from ttp.wire.v1 import controller_pb2 as pb

pytestmark = pytest.mark.xdist_group("fuzz-server")  # one controller for all that only disturb it

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
GROWTH_MAX = 150 << 20
"""Bytes of resident memory. What one client can send at once, several times over."""
TOKEN = "sesame"


@pytest.fixture(scope="module")
def controller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Controller]:
    """A controller with a healthy job of two ranks."""
    running = Controller(tmp_path_factory.mktemp("controller"), token=TOKEN)
    running.job()
    yield running
    running.close()


@pytest.fixture(autouse=True)
def unharmed(controller: Controller) -> Iterator[None]:
    """Check that the job still trains, was not frozen, and that memory grew by no more than was sent."""
    process = psutil.Process(controller.process.pid)
    before = process.memory_info().rss
    yield
    status = controller.status()
    assert (status.stage, status.incidents_total, [r.state for r in status.ranks]) == ("training", 0, ["live", "live"])
    assert process.memory_info().rss - before < GROWTH_MAX
    for rank in controller.ranks[:2]:
        rank.say(m.Heartbeat(Rank(rank.number), Version(7), m.Phase.IDLE))
    until(lambda: [r.version for r in controller.status().ranks] == [7, 7])


def frame(kind: int, flags: int, stream: int, content: bytes) -> bytes:
    return struct.pack(">I", len(content))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + content


NOISE = random.Random(5)
RAW: dict[str, bytes] = {
    "nothing": b"",
    "noise": NOISE.randbytes(200_000),
    "HTTP/1": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 3,
    "an endless HTTP/1 header": b"GET / HTTP/1.1\r\nX: " + b"a" * 1_000_000,
    "TLS": bytes.fromhex("16030100") + NOISE.randbytes(500),
    "half a preface": PREFACE[:10],
    "noise after the preface": PREFACE + SETTINGS + NOISE.randbytes(100_000),
    "a frame of 16 MB": PREFACE + SETTINGS + b"\xff\xff\xff\x00\x00\x00\x00\x00\x01" + b"x" * 100_000,
    "data without a stream": PREFACE + SETTINGS + frame(0, 0, 1, b"x" * 1000) * 50,
    "pings": PREFACE + SETTINGS + frame(6, 0, 0, b"12345678") * 20_000,
    "settings": PREFACE + SETTINGS * 20_000,
    "headers without an end": PREFACE
    + SETTINGS
    + frame(1, 0, 1, b"\x40\x01a\x01b")
    + frame(9, 0, 1, b"\x40\x01a\x01b") * 9000,
    "streams opened and reset": PREFACE
    + SETTINGS
    + b"".join(frame(1, 4, 2 * i + 1, b"\x82") + frame(3, 0, 2 * i + 1, b"\0\0\0\x08") for i in range(5000)),
    "a window that is closed": PREFACE
    + frame(4, 0, 0, b"\x00\x04\x00\x00\x00\x00")
    + frame(8, 0, 0, b"\xff\xff\xff\xff"),
}


@pytest.mark.parametrize("what", list(RAW))
def test_bytes_that_are_not_grpc(controller: Controller, what: str) -> None:
    with socket.create_connection(("127.0.0.1", controller.port), 10) as peer:
        peer.settimeout(0.1)
        with contextlib.suppress(OSError):  # it hangs up when it has heard enough
            peer.sendall(RAW[what])
            while peer.recv(1 << 16):
                pass
        assert controller.status().stage == "training"


def test_many_connections_that_say_nothing(controller: Controller) -> None:
    with contextlib.ExitStack() as open_ones:
        for index in range(300):
            peer = open_ones.enter_context(socket.create_connection(("127.0.0.1", controller.port), 10))
            peer.sendall(PREFACE[: index % 25])
        assert controller.status().stage == "training"


class Peer:
    """A client that sends bytes as reports."""

    def __init__(self, controller: Controller, token: str = TOKEN) -> None:
        self.channel = open_channel("127.0.0.1", controller.port)
        self.outbox: Any = queue.SimpleQueue()
        attach: Any = self.channel.stream_stream("/ttp.wire.v1.Controller/Attach", None, pb.ControllerOrder.FromString)
        self.call = attach(iter(self.outbox.get, None), metadata=metadata(token), timeout=120)

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.outbox.put(None)
        self.call.cancel()
        self.channel.close()

    def refused(self) -> str:
        order = order_from_wire(next(self.call))
        assert isinstance(order, m.Refused) and order.code is m.RefusalCode.MALFORMED
        assert next(self.call, None) is None  # the stream ends
        return order.text


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (NOISE.randbytes(1000), "not a valid report"),
        (b"\x2a\x80\x89\x7a" + b"\x22\x00" * 1_000_000, "more than 262144 fields"),
        (report_to_wire(hello(0, term_seen=2**64 - 1)).SerializeToString(), "term_seen 18446744073709551615 is more"),
        (report_to_wire(hello(0, host="h" * 10_000)).SerializeToString(), "host is 10000 characters long"),
        (report_to_wire(hello(9)).SerializeToString(), "rank 9 is not in a world of 2"),
    ],
    ids=["noise", "many fields", "term", "name", "rank"],
)
def test_reports_that_make_no_sense_are_answered_in_words(controller: Controller, data: bytes, says: str) -> None:
    with Peer(controller) as peer:
        peer.outbox.put(data)
        assert says in peer.refused()


@pytest.mark.parametrize("count", [10_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_very_many_reports_for_a_rank_of_somebody_else(controller: Controller, count: int) -> None:
    beat = report_to_wire(m.Heartbeat(Rank(0), Version(99), m.Phase.TORN)).SerializeToString()
    with Peer(controller) as peer:
        for _ in range(count):
            peer.outbox.put(beat)
        peer.outbox.put(b"")
        status = controller.status()  # while they come in
        assert status.ranks[0].version != 99
        peer.refused()


@pytest.mark.parametrize("method", ["GetStatus", "WatchEvents", "ReportFault", "SaveNow", "GetVerdict", "Nothing"])
def test_noise_in_other_calls_is_an_error_of_grpc(controller: Controller, method: str) -> None:
    channel = open_channel("127.0.0.1", controller.port)
    path = f"/ttp.wire.v1.Controller/{method}"
    call: Any = (channel.unary_stream if method == "WatchEvents" else channel.unary_unary)(path)
    with pytest.raises(grpc.RpcError):
        next(call(b"\xff" * 1000, metadata=metadata(TOKEN), timeout=20))
    channel.close()


def test_a_fault_report_about_a_million_ranks_that_are_not_there(controller: Controller) -> None:
    request = pb.ReportFaultRequest(ranks=range(2, 1_000_000), host="nowhere", reason="r" * 1_000_000)
    answer = controller.stub.ReportFault(request, metadata=controller.metadata, timeout=30)
    assert not answer.accused and len(answer.text) < 2000


@pytest.mark.slow
def test_a_message_above_the_limit_is_refused(controller: Controller) -> None:
    unlimited = [("grpc.max_send_message_length", -1)]
    with grpc.insecure_channel(f"127.0.0.1:{controller.port}", unlimited) as channel:
        attach: Any = channel.stream_stream("/ttp.wire.v1.Controller/Attach")
        with pytest.raises(grpc.RpcError) as caught:
            next(attach(iter([bytes(MESSAGE_BYTES_MAX + 1)]), metadata=metadata(TOKEN), timeout=60))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.slow
def test_a_rank_that_never_reads_is_dropped(tmp_path: Path) -> None:
    """It repeats its hello without reading the answers, of which at most some thousands are queued."""
    greeting, layout = hello(0), Layout.data_parallel(2)
    told = answers(TellLayout(Rank(0), layout.digest), layout)
    said = [report_to_wire(report).SerializeToString() for report in (greeting, *told)]
    with contextlib.closing(Controller(tmp_path)) as alone:
        with Peer(alone, token="") as peer:
            for report in [*said, *said[:1] * 60_000]:
                peer.outbox.put(report)
            until(lambda: "does not read its orders" in alone.output(), timeout_s=120)
        assert alone.status().stage in ("forming", "waiting")
