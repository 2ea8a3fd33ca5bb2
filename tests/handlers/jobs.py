"""Runs ``worker.py`` on some ranks, with a controller, and reads their output files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from tests.ports import free_port
from tests.waiting import until
from ttp.wire.channel import open_channel, stub
from ttp.wire.v1 import controller_pb2 as pb

WORKER = Path(__file__).with_name("worker.py")


def after(step: int) -> int:
    """Return the state of ``worker.py`` after so many steps."""
    value = 1
    for number in range(1, step + 1):
        value = (value * 31 + number) % 1_000_003
    return value


@dataclass
class Launched:
    """A job of real processes, which write JSON lines (``rank0.jsonl``) and their output to a directory."""

    directory: Path
    ranks: int = 4
    copies: int = 2
    steps: int = 8
    faults: list[dict[str, Any]] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list, kw_only=True)
    port: int = field(default=0, kw_only=True)

    @property
    def workers(self) -> list[subprocess.Popen[bytes]]:
        """The processes of the ranks."""
        return self.processes

    def environment(self) -> dict[str, str]:
        """The environment that all processes of the job share."""
        return {k: v for k, v in os.environ.items() if not k.startswith("TTP_")} | {
            "JOB_DIR": str(self.directory), "WORLD_SIZE": str(self.ranks), "MASTER_ADDR": "127.0.0.1",
            "TTP_PORT": str(self.port), "TTP_RUN_DIR": str(self.directory / "run"),
            "TTP_SAVE_DIR": str(self.directory / "saves"), "TTP_OT": "60",
        }  # fmt: skip

    def spawn(self, name: str, command: list[str], env: dict[str, str]) -> subprocess.Popen[bytes]:
        with (self.directory / f"{name}.out").open("wb") as out:
            return subprocess.Popen(command, env=env, stdout=out, stderr=subprocess.STDOUT)

    def wait(self, timeout_s: float = 250) -> list[int]:
        """Return the exit codes of all ranks."""
        deadline = time.monotonic() + timeout_s
        try:
            return [worker.wait(max(0.1, deadline - time.monotonic())) for worker in self.workers]
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


@dataclass
class Job(Launched):
    """One launch of a job with handlers. Its first process is the controller."""

    sets: list[list[dict[str, Any]]] = field(default_factory=list)

    def start(self) -> Job:
        self.directory.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        everybody = {"ranks": list(range(self.ranks)), "copies": self.copies}
        sets = self.sets or [[everybody]] * self.ranks
        base = self.environment() | {
            "JOB_STEPS": str(self.steps), "JOB_FAULTS": json.dumps(self.faults),
            "JOB_OPTIONS": json.dumps({"sets": sets, **self.options}), "TTP_ABANDONED_S": "20",
        }  # fmt: skip
        controller = [sys.executable, "-m", "ttp.controller", "--port", str(self.port), "--bind", "127.0.0.1"]
        self.processes.append(self.spawn("controller", controller, base))
        self.channel = open_channel("127.0.0.1", self.port)
        grpc.channel_ready_future(self.channel).result(timeout=60)
        for rank in range(self.ranks):
            env = base | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            self.processes.append(self.spawn(f"rank{rank}", [sys.executable, str(WORKER)], env))
        return self

    @property
    def workers(self) -> list[subprocess.Popen[bytes]]:
        return self.processes[1:]

    def run(self) -> list[int]:
        return self.start().wait()

    def stop(self) -> None:
        super().stop()
        self.channel.close()

    def order(self, rank: int, *but: str) -> list[str]:
        """Return what a rank did, in order, without its steps."""
        return [n["what"] for n in self.notes(rank) if n["what"] not in ("step", *but)]

    def save(self) -> pb.SaveNowResponse:
        answer: pb.SaveNowResponse = stub(self.channel).SaveNow(pb.SaveNowRequest(reason="test"), timeout=60)
        return answer
