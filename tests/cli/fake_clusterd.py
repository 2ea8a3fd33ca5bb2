"""ClusterD's ``Recover`` service, as far as a job's agent needs it: sends what a test says, records what it
receives.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from types import TracebackType
from typing import Any

import grpc

from ttp.inbox import Inbox
from ttp.wire.v1 import recover_pb2 as pb

WAIT_S = 60.0
REPORTS: dict[str, Any] = {
    "Init": pb.RecoverClient,
    "Register": pb.RecoverClient,
    "ReportStopComplete": pb.RecoverStopped,
    "ReportRecoverStrategy": pb.RecoverStrategies,
    "ReportRecoverStatus": pb.RecoverResult,
    "ReportProcessFault": pb.RecoverFaults,
}


class FakeClusterD:
    """A server on loopback. ``job_id``: the job that it manages.

    Args:
        port: the port; 0: any.
        codes: the codes with which it answers these calls, instead of 0.
    """

    job_id = "job-1"

    def __init__(self, port: int = 0, **codes: int) -> None:
        self._codes = codes
        self._signals: Inbox[pb.RecoverSignal | None] = Inbox()
        self._heard: list[tuple[str, Any]] = []
        self._changed = threading.Condition()
        self._server = grpc.server(futures.ThreadPoolExecutor(8))
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            name: grpc.unary_unary_rpc_method_handler(
                self._handler(name), kind.FromString, pb.RecoverAnswer.SerializeToString
            )
            for name, kind in REPORTS.items()
        }
        handlers["SubscribeProcessManageSignal"] = grpc.unary_stream_rpc_method_handler(
            self._subscribe, pb.RecoverClient.FromString, pb.RecoverSignal.SerializeToString
        )
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("Recover", handlers),))
        self.port = self._server.add_insecure_port(f"127.0.0.1:{port}")
        self._server.start()

    def send(self, kind: str, *actions: str, faults: tuple[int, ...] = (), **fields: Any) -> None:
        """Send a signal. A ``uuid`` makes it part of an earlier event."""
        named = [pb.RecoverFault(rank_id=str(rank), fault_type="1") for rank in faults]
        fields = {"uuid": "event", "job_id": self.job_id, **fields}
        self._signals.put(pb.RecoverSignal(signal_type=kind, actions=actions, fault_ranks=named, **fields))

    def hear(self, name: str, count: int = 1) -> Any:
        """Wait for the ``count``-th report of this name."""
        deadline_s = time.monotonic() + WAIT_S
        with self._changed:
            while len(found := [said for kind, said in self._heard if kind == name]) < count:
                left_s = deadline_s - time.monotonic()
                assert left_s > 0, f"no {name} {count} after {self._heard}"
                self._changed.wait(left_s)
            return found[count - 1]

    def names(self) -> list[str]:
        """Return the names of the reports, in order."""
        return [kind for kind, _ in self._heard]

    def _handler(self, name: str) -> Any:
        def handle(request: Any, _: grpc.ServicerContext) -> pb.RecoverAnswer:
            with self._changed:
                self._heard.append((name, request))
                self._changed.notify_all()
            return pb.RecoverAnswer(code=self._codes.get(name, 0), info=name)

        return handle

    def _subscribe(self, request: pb.RecoverClient, context: grpc.ServicerContext) -> Iterator[pb.RecoverSignal]:
        assert request.job_id == self.job_id
        with self._changed:
            self._heard.append(("Subscribe", request))
            self._changed.notify_all()
        while context.is_active():
            try:
                signal = self._signals.get(timeout=0.05)
            except queue.Empty:
                continue
            if signal is None:
                return
            yield signal

    def __enter__(self) -> FakeClusterD:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._signals.put(None)
        self._server.stop(0).wait()
