"""``python -m benchmarks.controller_clients PORT FIRST COUNT WORLD PER_RELAY``: many ranks in one process.

They say hello, beat once a second with a version that grows, and answer a freeze at once. With ``PER_RELAY`` 0 each has
a stream of its own, else so many share one. It ends with its standard input.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import sys
import time
from typing import Any

import grpc.aio

from ttp.core import messages as m
from ttp.core.controller.layout_exchange import in_parts
from ttp.core.layout import Layout, Rank, Version
from ttp.core.layout_messages import LayoutPart, TellLayout
from ttp.core.relay import LineId, Relay, ordered
from ttp.wire.channel import CLIENT_OPTIONS
from ttp.wire.convert import order_from_wire, report_to_wire
from ttp.wire.relay import frame_to_wire, orders_from_wire
from ttp.wire.v1.controller_pb2_grpc import ControllerStub

TOGETHER = 64
"""Streams that are opened at a time."""
BEAT_S = 1.0


class Ranks:
    """Some ranks and their stream.

    Args:
        ranks: who they are.
        layout: of the job.
    """

    def __init__(self, ranks: range, layout: Layout) -> None:
        self._ranks, self._layout = ranks, layout
        self._writing = asyncio.Lock()
        self._call: Any = None

    async def open(self, stub: Any) -> None:
        """Say hello; returns when the controller has accepted the stream."""
        self._call = self._attach(stub)
        await self._say([hello(rank, self._layout) for rank in self._ranks])
        await self._call.initial_metadata()

    async def beat(self, version: int) -> None:
        """One beat of each."""
        await self._say([m.Heartbeat(Rank(r), Version(version), m.Phase.IDLE) for r in self._ranks], beats=True)

    async def listen(self) -> None:
        """Answer what has to be answered, until the stream ends."""
        with contextlib.suppress(grpc.RpcError, asyncio.CancelledError):
            async for message in self._call:
                for order in self._orders(message):
                    if isinstance(order, TellLayout):
                        parts = in_parts(self._layout)
                        count, digest = len(parts), order.digest
                        await self._say([LayoutPart(order.rank, digest, i, count, p) for i, p in enumerate(parts)])
                answers = [
                    m.Frozen(order.rank, order.incident, Version(7), m.Phase.IDLE, final=True)
                    for order in self._orders(message)
                    if isinstance(order, m.Freeze)
                ]
                if answers:
                    await self._say(answers)

    def _attach(self, stub: Any) -> Any:
        return stub.Attach()

    def _orders(self, message: Any) -> list[m.Order]:
        return [order_from_wire(message)]

    async def _say(self, reports: list[Any], *, beats: bool = False) -> None:
        async with self._writing:
            for report in reports:
                await self._call.write(report_to_wire(report))


class Relayed(Ranks):
    """Ranks that share a stream; their lines are named by their ranks."""

    def __init__(self, ranks: range, layout: Layout) -> None:
        super().__init__(ranks, layout)
        self._relay = Relay(BEAT_S)

    def _attach(self, stub: Any) -> Any:
        return stub.Relay()

    def _orders(self, message: Any) -> list[m.Order]:
        return [
            ordered(order, Rank(line))
            for lines, order in orders_from_wire(message)
            if order is not None
            for line in lines
        ]

    async def _say(self, reports: list[Any], *, beats: bool = False) -> None:
        now = time.monotonic()
        for report in reports:
            self._relay.reported(LineId(report.rank), report, now)
        frame = self._relay.take(now + BEAT_S if beats else now)
        if frame is not None:
            async with self._writing:
                await self._call.write(frame_to_wire(frame))


def hello(rank: int, layout: Layout) -> m.Hello:
    """Of a rank that starts, eight on a host."""
    return m.Hello(
        Rank(rank), m.PROTOCOL_MAJOR, m.PROTOCOL_MINOR, "bench", "job", 0, 0, f"n{rank}", layout.world_size,
        layout.digest, f"host{rank // 8}", 1000 + rank, rank % 8, "", "bench", Version(0), m.Phase.IDLE,
        Version(0), 0, "", False, False,
    )  # fmt: skip


async def serve(port: int, first: int, count: int, world: int, per_relay: int) -> None:
    """Open all streams, then beat until the standard input ends."""
    layout, kind, size = Layout.data_parallel(world), Relayed if per_relay else Ranks, per_relay or 1
    streams = [kind(range(at, min(at + size, first + count)), layout) for at in range(first, first + count, size)]
    for at in range(0, len(streams), TOGETHER):
        stubs = [
            ControllerStub(grpc.aio.insecure_channel(f"127.0.0.1:{port}", CLIENT_OPTIONS)) for _ in range(TOGETHER)
        ]
        part = streams[at : at + TOGETHER]
        await asyncio.gather(*(stream.open(stub) for stream, stub in zip(part, stubs, strict=False)))
        tasks.extend(asyncio.create_task(stream.listen()) for stream in part)
    over = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
    for version in range(1, 1 << 30):
        begin = time.monotonic()
        for at, stream in enumerate(streams):
            with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):
                await stream.beat(version)
            await asyncio.sleep(max(0.0, begin + BEAT_S * (at + 1) / len(streams) - time.monotonic()))
        if over.done():
            return


tasks: list[asyncio.Task[None]] = []

if __name__ == "__main__":
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    asyncio.run(serve(*map(int, sys.argv[1:])))
