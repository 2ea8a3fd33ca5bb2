"""What a stream costs the controller: resident memory, CPU at one heartbeat a second."""

from __future__ import annotations

import time

import grpc
import psutil

from benchmarks.result import Result
from benchmarks.world import controller, scratch
from ttp.core import messages as m
from ttp.core.layout import Layout, Rank, Version
from ttp.wire.channel import CLIENT_OPTIONS, stub
from ttp.wire.convert import report_to_wire
from ttp.wire.v1 import controller_pb2 as pb


class Speaker:
    """One rank's stream, without a thread: reports go out when they are asked for."""

    def __init__(self, port: int, hello: m.Hello) -> None:
        import queue

        self._outbox: queue.SimpleQueue[pb.RankReport | None] = queue.SimpleQueue()
        self.rank = hello.rank
        self.channel = grpc.insecure_channel(f"127.0.0.1:{port}", options=CLIENT_OPTIONS)
        self.call = stub(self.channel).Attach(iter(self._outbox.get, None))
        self._outbox.put(report_to_wire(hello))

    def beat(self) -> None:
        """One heartbeat."""
        self._outbox.put(report_to_wire(m.Heartbeat(self.rank, Version(1), m.Phase.IDLE)))

    def close(self) -> None:
        """End the stream."""
        self._outbox.put(None)
        self.call.cancel()
        self.channel.close()


def run(quick: bool) -> list[Result]:
    """``streams`` ranks on connections of their own, a beat a second."""
    streams, seconds = (8, 1) if quick else (256, 10)
    layout = Layout.data_parallel(streams)
    with scratch() as directory, controller(directory) as (port, service, pid):
        process = psutil.Process(pid)
        service.GetStatus(pb.GetStatusRequest())
        empty = process.memory_info().rss
        speakers = [Speaker(port, _hello(rank, layout)) for rank in range(streams)]
        while service.GetStatus(pb.GetStatusRequest()).stage != "training":
            time.sleep(0.1)
        before, begin = process.cpu_times(), time.monotonic()
        for _ in range(seconds):
            for speaker in speakers:
                speaker.beat()
            time.sleep(1.0)
        after, took = process.cpu_times(), time.monotonic() - begin
        resident = process.memory_info().rss
        for speaker in speakers:
            speaker.close()
    cpu_ms = (after.user + after.system - before.user - before.system) * 1e3 / took / streams
    how = f"{streams} streams, {seconds} s"
    return [
        Result("controller, resident per stream", (resident - empty) / streams / 1024, "KiB", 48.0, how),
        Result("controller, CPU per stream and second", cpu_ms, "ms", 0.1, how),
    ]


def _hello(rank: int, layout: Layout) -> m.Hello:
    return m.Hello(
        Rank(rank), m.PROTOCOL_MAJOR, m.PROTOCOL_MINOR, "bench", "job", 0, 0, f"n{rank}", layout.world_size,
        layout.digest, f"host{rank // 8}", 1000 + rank, rank % 8, "", "bench", Version(0), m.Phase.IDLE,
        Version(0), 0, "", False, False,
    )  # fmt: skip
