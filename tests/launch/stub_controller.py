"""A controller that only answers status requests and records reported faults; a program with a controller's flags.

If its run directory has a file ``drained``, it also gives verdicts: all is saved, and the host in that file is drained.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc

from ttp.errors import EXIT_BAD_CONFIG, EXIT_PORT_TAKEN
from ttp.launch.presence import may_be_bound
from ttp.wire.v1 import controller_pb2 as wire
from ttp.wire.v1.controller_pb2_grpc import ControllerServicer, add_ControllerServicer_to_server


class Stub(ControllerServicer):
    def __init__(self, run_dir: Path, busy: Path) -> None:
        self._faults = run_dir / "faults.jsonl"
        self._busy, self._drained = busy, run_dir / "drained"

    def GetStatus(self, request: wire.GetStatusRequest, context: grpc.ServicerContext) -> wire.GetStatusResponse:  # noqa: N802
        self._check(context)
        state = "frozen" if self._busy.exists() else "lost"
        ranks = [wire.RankStatus(rank=0, state=state)]
        return wire.GetStatusResponse(pid=os.getpid(), ranks=ranks, attached=state == "frozen")

    def ReportFault(  # noqa: N802
        self, request: wire.ReportFaultRequest, context: grpc.ServicerContext
    ) -> wire.ReportFaultResponse:
        self._check(context)
        said = {"ranks": list(request.ranks), "pids": list(request.pids), "reason": request.reason}
        said["kind"] = wire.FaultKind.Name(request.kind)
        said["pages"] = [[page.rank, page.version, page.data.decode()] for page in request.pages]
        with self._faults.open("a") as file:
            file.write(json.dumps(said) + "\n")
        return wire.ReportFaultResponse(accused=request.ranks)

    def Attach(self, request_iterator: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        context.abort(grpc.StatusCode.UNIMPLEMENTED, "a stub")

    def GetVerdict(self, request: wire.GetVerdictRequest, context: grpc.ServicerContext) -> wire.GetVerdictResponse:  # noqa: N802
        self._check(context)
        if not self._drained.exists():
            context.abort(grpc.StatusCode.UNIMPLEMENTED, "a stub")
        return wire.GetVerdictResponse(code=75, drained=[self._drained.read_text()])

    Look: Any = Attach
    Relay: Any = Attach
    SaveNow: Any = Attach
    WatchEvents: Any = Attach

    def _check(self, context: grpc.ServicerContext) -> None:
        given = dict(context.invocation_metadata()).get("ttp-token", "")
        if given != os.environ["TTP_TOKEN"]:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "wrong token")


def main() -> int:
    ends = {signal.SIGTERM, signal.SIGINT}  # they come together: handlers would interrupt each other
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)  # before gRPC makes threads
    parser = argparse.ArgumentParser()
    for flag in ("--port", "--bind", "--run-dir", "--owner-pid", "--abandoned-s"):
        parser.add_argument(flag)
    args = parser.parse_args()
    run_dir = Path(args.run_dir)
    if (run_dir / "refuse-to-start").exists():
        print("no luck today", file=sys.stderr)
        return int((run_dir / "refuse-to-start").read_text() or 3)
    server = grpc.server(futures.ThreadPoolExecutor(4), options=[("grpc.so_reuseport", 0)])
    add_ControllerServicer_to_server(Stub(run_dir, run_dir / "busy"), server)
    try:
        server.add_insecure_port(f"{args.bind or '0.0.0.0'}:{args.port}")
    except RuntimeError:
        print(f"port {args.port} is taken", file=sys.stderr)
        return EXIT_PORT_TAKEN if may_be_bound(args.bind, int(args.port)) else EXIT_BAD_CONFIG
    server.start()
    (run_dir / "started").open("a").write(f"{os.getpid()}\n")
    signal.sigwait(ends)
    server.stop(0).wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
