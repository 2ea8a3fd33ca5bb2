"""Plays many ranks in one process: ``python -m benchmarks.controller_clients PORT FIRST COUNT WORLD PER_RELAY``.

The ranks say hello, send a heartbeat once a second with a growing version, and answer a freeze at once. With
``PER_RELAY`` 0 each rank has its own stream; otherwise ``PER_RELAY`` ranks share one. The process ends when its
standard input ends.

The process shares a machine with the measured controller, so it must be cheap: it writes gRPC's HTTP/2 frames by hand,
and serialises its answers in advance. The controller cannot tell these ranks and relays from real ones.
"""

from __future__ import annotations

import asyncio
import resource
import struct
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

from ttp.core import messages as m
from ttp.core.layout import Layout, Rank, Version
from ttp.core.layout_messages import LayoutPart, in_parts
from ttp.core.relay import ALIKE, Frame, LineId, folded, slot_s
from ttp.testing import toy
from ttp.wire.channel import metadata
from ttp.wire.convert import report_to_wire
from ttp.wire.relay import PROTOCOL, frame_to_wire
from ttp.wire.v1 import controller_pb2 as pb

TOKEN = "benchmark"
"""The job's token. A job on several hosts has one; without a token the controller asks the kernel for each caller."""
TOGETHER = 64
"""Number of streams that are opened at the same time."""
BEAT_S = 1.0
"""Seconds between two heartbeats of a rank."""
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, SETTINGS, PING, WINDOW_UPDATE = 0, 1, 4, 6, 8
ACK, END_HEADERS, STREAM, FRAME_MAX, WINDOW = 1, 4, 1, 16_384, (1 << 30).to_bytes(4, "big")
"""Constants of HTTP/2 (RFC 9113): preface, types of frames, flags, id of the stream, largest frame, window."""
SOME_INCIDENT = "x" * len("20261123-123456-1-abcd")
"""Placeholder for the id of an incident in prepared answers; it has the length of an id."""


class Ranks(asyncio.Protocol):
    """Ranks on one stream: a single rank, or the ranks behind a relay, whose lines are numbered by rank.

    Args:
        ranks: the ranks.
        layout: the layout of the job.
        relayed: whether the stream is that of a relay.
    """

    transport: asyncio.Transport

    def __init__(self, ranks: range, layout: Layout, *, relayed: bool) -> None:
        self.accepted = asyncio.get_running_loop().create_future()
        self.ranks, self._layout, self._relayed = ranks, layout, relayed
        self._read = self._message = b""
        self._answer = self._answers(SOME_INCIDENT)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Open the HTTP/2 stream and say hello for all ranks."""
        self.transport = cast(asyncio.Transport, transport)
        service = b"/ttp.wire.v1.Controller/" + (b"Relay" if self._relayed else b"Attach")
        head = {b":method": b"POST", b":scheme": b"http", b":path": service, b":authority": b"localhost"}
        head |= {b"content-type": b"application/grpc", b"te": b"trailers", PROTOCOL[0].encode(): PROTOCOL[1].encode()}
        head |= {k.encode(): v.encode() for k, v in metadata(TOKEN)}
        block = b"".join(b"\0%c%b%c%b" % (len(k), k, len(v), v) for k, v in head.items())
        window = frame(WINDOW_UPDATE, 0, 0, WINDOW) + frame(WINDOW_UPDATE, 0, STREAM, WINDOW)
        self.transport.write(PREFACE + frame(SETTINGS, 0, 0) + frame(HEADERS, END_HEADERS, STREAM, block) + window)
        self.transport.write(self._said([hello(rank, self._layout) for rank in self.ranks]))

    def beat(self, version: int) -> None:
        """Send one heartbeat of each rank."""
        beats = [m.Heartbeat(Rank(r), Version(version), m.Phase.IDLE) for r in self.ranks]
        self.transport.write(self._said(beats, beat=True))

    def data_received(self, data: bytes) -> None:
        """Handle the frames that have arrived, and answer orders, settings and pings."""
        read = self._read + data
        while len(read) >= 9 and len(read) >= 9 + (size := int.from_bytes(read[:3], "big")):
            kind, flags, content, read = read[3], read[4], read[9 : 9 + size], read[9 + size :]
            if kind == DATA:
                self._heard(content)
            elif kind == HEADERS and not self.accepted.done():
                self.accepted.set_result(None)
            elif kind in (SETTINGS, PING) and not flags & ACK:
                self.transport.write(frame(kind, ACK, 0, content if kind == PING else b""))
        self._read = read

    def _heard(self, content: bytes) -> None:
        message = self._message + content
        while len(message) >= 5 and len(message) >= 5 + (size := int.from_bytes(message[1:5], "big")):
            one, message = message[5 : 5 + size], message[5 + size :]
            if self._relayed:
                for item in pb.RelayOrders.FromString(one).orders:
                    self._told(pb.ControllerOrder.FromString(item.order))
            else:
                self._told(pb.ControllerOrder.FromString(one))
        self._message = message

    def _told(self, order: pb.ControllerOrder) -> None:
        match order.WhichOneof("order"):
            case "freeze":
                incident = order.freeze.incident
                same = len(incident) == len(SOME_INCIDENT)
                answer = self._answer.replace(SOME_INCIDENT.encode(), incident.encode()) if same else None
                self.transport.write(answer or self._answers(incident))
            case "tell_layout":
                parts, digest = in_parts(self._layout), order.tell_layout.digest
                rank = Rank(order.tell_layout.rank)
                said = [LayoutPart(rank, digest, i, len(parts), p) for i, p in enumerate(parts)]
                self.transport.write(self._said(said))

    def _answers(self, incident: str) -> bytes:
        return self._said([m.Frozen(Rank(r), incident, Version(7), m.Phase.IDLE, final=True) for r in self.ranks])

    def _said(self, reports: Sequence[m.Report], *, beat: bool = False) -> bytes:
        if not self._relayed:
            return b"".join(said(report_to_wire(report).SerializeToString()) for report in reports)
        lines = ((LineId(r.rank), replace(r, rank=m.SEVERAL) if isinstance(r, ALIKE) else r) for r in reports)
        return said(frame_to_wire(Frame(tuple(folded(lines)), beat)).SerializeToString())


def frame(kind: int, flags: int, stream: int, content: bytes = b"") -> bytes:
    """Return one frame of HTTP/2."""
    return struct.pack("!I", len(content))[1:] + struct.pack("!BBI", kind, flags, stream) + content


def said(message: bytes) -> bytes:
    """Return one gRPC message, in HTTP/2 frames."""
    whole = b"\0" + len(message).to_bytes(4, "big") + message
    parts = (whole[at : at + FRAME_MAX] for at in range(0, len(whole), FRAME_MAX))
    return b"".join(frame(DATA, 0, STREAM, part) for part in parts)


def hello(rank: int, layout: Layout) -> m.Hello:
    """Return the hello of a starting rank; eight ranks share a host."""
    return toy.hello(rank, layout, host=host_of(rank), local_rank=rank % 8, save_dir="")


def host_of(rank: int) -> str:
    """Return the name of the host of a rank."""
    return f"host{rank // 8}"


async def serve(port: int, first: int, count: int, world: int, per_relay: int) -> None:
    """Open all streams, then send heartbeats until the standard input ends.

    Args:
        port: the controller's port.
        first: the first rank of this process.
        count: number of ranks of this process.
        world: number of ranks of the job.
        per_relay: number of ranks per relay; 0: no relays.
    """
    layout, size, loop = Layout.data_parallel(world), per_relay or 1, asyncio.get_running_loop()
    streams: list[Ranks] = []
    for begin in range(first, first + count, size * TOGETHER):
        part = [
            Ranks(range(at, min(at + size, first + count)), layout, relayed=per_relay > 0)
            for at in range(begin, min(begin + size * TOGETHER, first + count), size)
        ]
        for stream in part:
            await loop.create_connection(lambda stream=stream: stream, "127.0.0.1", port)  # type: ignore[misc]
        await asyncio.gather(*(stream.accepted for stream in part))
        streams += part
    over = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
    moments = [BEAT_S * at / len(streams) for at in range(len(streams))]
    if per_relay:  # relays send at moments that follow from their host's name
        moments = [BEAT_S - slot_s(host_of(stream.ranks[0]), BEAT_S) for stream in streams]
    due = sorted(zip(moments, streams, strict=True), key=lambda item: item[0])
    began = (time.time() // BEAT_S) * BEAT_S
    for version in range(1, 1 << 30):
        for moment, stream in due:
            if (wait_s := began + version * BEAT_S + moment - time.time()) > 0:
                await asyncio.sleep(wait_s)
            stream.beat(version)
        if over.done():
            return


if __name__ == "__main__":
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    asyncio.run(serve(*map(int, sys.argv[1:])))
