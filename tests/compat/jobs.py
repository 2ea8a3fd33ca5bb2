"""Launches ``program.py`` on some ranks and reads their output files."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import psutil

from tests.forking import ForkedPython
from tests.ports import free_port
from tests.waiting import until
from ttp.compat.mindio.placing import tell_children
from ttp.wire.channel import open_channel, stub
from ttp.wire.v1 import controller_pb2 as pb

PROGRAM = Path(__file__).with_name("program.py")


def after(step: int) -> int:
    """Return the state of ``program.py`` after so many steps."""
    value = 1
    for number in range(1, step + 1):
        value = (value * 31 + number) % 1_000_003
    return value


@dataclass
class Job:
    """One launch, whose processes write JSON lines (``rank0.jsonl``) and their output to a directory.

    Rank 0 starts the controller, as programs of the original do.
    """

    directory: Path
    ranks: int = 4
    copies: int = 2
    steps: int = 5
    faults: list[dict[str, Any]] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    hosts: str = ""
    """A letter for the host of each rank; none: all are on this one."""
    manager: bool = False
    """A process of the cluster's manager starts the controller, not rank 0; it is the last of the processes."""
    port: int = 0
    base: dict[str, str] = field(default_factory=dict)
    """Environment of all processes."""
    processes: list[ForkedPython] = field(default_factory=list)

    def start(self) -> Job:
        self.directory.mkdir(parents=True, exist_ok=True)
        self.port = self.port or free_port()
        job = {"steps": self.steps, "copies": self.copies, "faults": self.faults, **self.options}
        base = {k: v for k, v in os.environ.items() if not k.startswith("TTP_")} | {
            "JOB": json.dumps(job), "JOB_DIR": str(self.directory), "WORLD_SIZE": str(self.ranks),
            "MASTER_ADDR": "127.0.0.1", "TTP_PORT": str(self.port), "TTP_RUN_DIR": str(self.directory / "run"),
            "TTP_SAVE_DIR": str(self.directory / "saves"), "TTP_OT": "60", "TTP_ABANDONED_S": "5",
        }  # fmt: skip
        base |= {"MINDX_TASK_ID": "task"} if self.manager else {}
        tell_children(base)
        self.base = base | self.env
        for rank in (*range(self.ranks), *([-1] if self.manager else [])):
            self.processes.append(self.launch(rank))
        return self

    def launch(self, rank: int, host: str = "") -> ForkedPython:
        """Start a process of that rank; ``host``: on another host than the first one."""
        numbers = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        place = {"TTP_HOST": host, "TTP_RUN_DIR": str(self.directory / "run" / host)} if host else self._place(rank)
        return ForkedPython(PROGRAM, [], self.base | place | numbers, self.directory / f"rank{rank}{host}.out")

    def _place(self, rank: int) -> dict[str, str]:
        if not self.hosts or rank < 0:
            return {}
        return {"TTP_HOST": self.hosts[rank], "TTP_RUN_DIR": str(self.directory / "run" / self.hosts[rank])}

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

    def wait(self, timeout_s: float = 250) -> list[int]:
        """Return the exit codes of all ranks."""
        deadline = time.monotonic() + timeout_s
        try:
            return [each.wait(max(0.1, deadline - time.monotonic())) for each in self.processes[: self.ranks]]
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the job does not end:\n{self.story()}") from None

    def until(self, condition: Callable[[], bool], timeout_s: float = 200) -> None:
        until(condition, timeout_s, self.story, 0.02)

    def stop(self) -> None:
        for process in reversed(self.processes):
            if process.poll() is None:
                process.kill()
            process.wait()

    def notes(self, rank: int) -> list[dict[str, Any]]:
        path = self.directory / f"rank{rank}.jsonl"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [json.loads(line) for line in lines]

    def of(self, what: str) -> dict[int, list[dict[str, Any]]]:
        """Return the notes of one kind, by rank, without ranks that have none."""
        found = {rank: [n for n in self.notes(rank) if n["what"] == what] for rank in range(self.ranks)}
        return {rank: notes for rank, notes in found.items() if notes}

    def part(self, step: int, rank: int) -> Any:
        return json.loads((self.directory / f"part-{step}-{rank}.tmp").read_text())

    def story(self) -> str:
        return "\n".join(f"--- {p.name}\n{p.read_text()[-3000:]}" for p in sorted(self.directory.glob("*.out")))

    def order(self, rank: int) -> list[str]:
        """Return the orders that a rank received, in order."""
        return [n["what"] for n in self.notes(rank) if n["what"] not in ("begin", "done")]
