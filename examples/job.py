"""``Job`` starts ``ttp run`` and follows the job from outside: output lines, controller events and end in one queue."""

from __future__ import annotations

import json
import os
import queue
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from ttp.launch.ports import hold_port
from ttp.wire.channel import metadata, open_channel, stub
from ttp.wire.v1 import controller_pb2 as pb

REPLAY = 10_000
"""Number of past events to ask a controller for."""
RETRY_S = 0.1
"""Seconds between two tries to connect to a controller."""


@dataclass(frozen=True)
class Output:
    """A line that the job printed."""

    text: str


@dataclass(frozen=True)
class Event:
    """An event that the controller recorded.

    Args:
        kind: kind of the event.
        monotonic_s: its time on the monotonic clock of this host, in seconds.
        incident: id of the incident; empty: the event belongs to none.
        facts: further facts.
    """

    kind: str
    monotonic_s: float
    incident: str
    facts: dict[str, Any]


@dataclass(frozen=True)
class Ended:
    """The end of the job."""

    exit_code: int


class Job:
    """Starts ``ttp run ARGUMENTS`` and follows the job.

    Args:
        folder: directory for the job's log (``job.log``) and its run directory.
        arguments: the arguments of ``ttp run``.
    """

    def __init__(self, folder: Path, arguments: Sequence[str]) -> None:
        self._holding = hold_port()
        self.port = int(self._holding.getsockname()[1])
        self.token = secrets.token_hex(16)
        self.log = folder / "job.log"
        self.news: queue.Queue[Output | Event | Ended] = queue.Queue()
        folder.mkdir(parents=True, exist_ok=True)
        ours = {"TTP_PORT": str(self.port), "TTP_TOKEN": self.token, "TTP_RUN_DIR": str(folder / "run")}
        with self.log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "ttp", "run", *arguments],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**clean_environment(), **ours},
            )
        self._over = threading.Event()
        for work in (self._read, self._watch):
            threading.Thread(target=work, daemon=True).start()

    def follow(self, timeout_s: float) -> Iterator[Output | Event | Ended]:
        """Yield output lines and events as they happen, and ``Ended`` at last.

        Raises:
            TimeoutError: the job was not over after ``timeout_s`` seconds, and has been stopped.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            try:
                news = self.news.get(timeout=max(0.0, deadline_s - time.monotonic()))
            except queue.Empty:
                self.stop()
                raise TimeoutError(f"the job was not over after {timeout_s:g} s; see {self.log}") from None
            yield news
            if isinstance(news, Ended):
                return

    def pids(self) -> dict[int, int]:
        """Return the process id of every rank, as the controller knows it."""
        with open_channel("127.0.0.1", self.port) as channel:
            status = stub(channel).GetStatus(pb.GetStatusRequest(), timeout=5, metadata=metadata(self.token))
        return {rank.rank: rank.pid for rank in status.ranks}

    def stop(self) -> None:
        """End the job, with SIGKILL if it does not end within 20 seconds."""
        self._over.set()
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(20)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._holding.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.news.put(Output(line.rstrip("\n")))
        code = self._process.wait()
        self._over.set()
        self.news.put(Ended(code))

    def _watch(self) -> None:
        """Put the controller's events into the queue.

        Each restart of the job may bring a new controller, so the method connects again and again. Events that a
        connection repeats are dropped.
        """
        seen: set[tuple[int, float]] = set()
        request = pb.WatchEventsRequest(replay=REPLAY)
        while not self._over.is_set():
            try:
                with open_channel("127.0.0.1", self.port) as channel:
                    for event in stub(channel).WatchEvents(request, metadata=metadata(self.token)):
                        if (event.sequence, event.unix_s) not in seen:
                            seen.add((event.sequence, event.unix_s))
                            facts = json.loads(event.json)
                            self.news.put(Event(event.kind, event.monotonic_s, event.incident, facts))
            except grpc.RpcError:
                self._over.wait(RETRY_S)


def clean_environment() -> dict[str, str]:
    """Return this process's environment without variables of another job, of the demo, and of ttp."""
    foreign = ("RANK", "STEP", "SEED", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    return {k: v for k, v in os.environ.items() if k not in foreign and not k.startswith(("TTP_", "TORCHELASTIC_"))}
