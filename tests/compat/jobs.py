"""Launches ``program.py`` on some ranks and reads their output files."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import psutil

from tests.handlers.jobs import Launched, after
from tests.ports import free_port
from ttp.compat.mindio.placing import tell_children
from ttp.wire.channel import open_channel, stub
from ttp.wire.v1 import controller_pb2 as pb

__all__ = ["Job", "after"]

PROGRAM = Path(__file__).with_name("program.py")


@dataclass
class Job(Launched):
    """One launch. Rank 0 starts the controller, as programs of the original do."""

    steps: int = 5
    env: dict[str, str] = field(default_factory=dict)
    hosts: str = ""
    """A letter for the host of each rank; none: all are on this one."""
    base: dict[str, str] = field(default_factory=dict, kw_only=True)
    """Environment of all processes."""
    manager: bool = False
    """A process of the cluster's manager starts the controller, not rank 0; it is the last of the processes."""

    def start(self) -> Job:
        self.directory.mkdir(parents=True, exist_ok=True)
        self.port = self.port or free_port()
        job = {"steps": self.steps, "copies": self.copies, "faults": self.faults, **self.options}
        base = self.environment() | {"JOB": json.dumps(job), "TTP_ABANDONED_S": "5"}
        base |= {"MINDX_TASK_ID": "task"} if self.manager else {}
        tell_children(base)
        self.base = base | self.env
        for rank in (*range(self.ranks), *([-1] if self.manager else [])):
            self.processes.append(self.launch(rank))
        return self

    def launch(self, rank: int, host: str = "") -> subprocess.Popen[bytes]:
        """Start a process of that rank; ``host``: on another host than the first one."""
        numbers = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        place = {"TTP_HOST": host, "TTP_RUN_DIR": str(self.directory / "run" / host)} if host else self._place(rank)
        return self.spawn(f"rank{rank}{host}", [sys.executable, str(PROGRAM)], self.base | place | numbers)

    def _place(self, rank: int) -> dict[str, str]:
        if not self.hosts or rank < 0:
            return {}
        return {"TTP_HOST": self.hosts[rank], "TTP_RUN_DIR": str(self.directory / "run" / self.hosts[rank])}

    @property
    def workers(self) -> list[subprocess.Popen[bytes]]:
        return self.processes[: self.ranks]

    def controllers(self) -> list[psutil.Process]:
        wanted = {"ttp.controller", str(self.port)}
        return [p for p in psutil.process_iter(["cmdline"]) if wanted <= set(p.info["cmdline"] or [])]

    def status(self, port: int = 0) -> pb.GetStatusResponse:
        """Return the status from the leading controller; an empty one if there is none."""
        with open_channel("127.0.0.1", port or self.port) as channel:
            try:
                answer: pb.GetStatusResponse = stub(channel).GetStatus(pb.GetStatusRequest(), timeout=5)
            except grpc.RpcError:
                return pb.GetStatusResponse()
        return answer

    def live_ranks(self, port: int = 0) -> int:
        """Return the number of live ranks that the leading controller sees."""
        return sum(rank.state == "live" for rank in self.status(port).ranks)

    def run(self) -> list[int]:
        return self.start().wait()

    def order(self, rank: int) -> list[str]:
        """Return the orders that a rank received, in order."""
        return [n["what"] for n in self.notes(rank) if n["what"] not in ("begin", "done")]
