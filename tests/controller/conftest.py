from __future__ import annotations

import asyncio
import os
import socket
import threading
import uuid
from collections.abc import Callable, Coroutine, Iterator, Sequence
from functools import partial, wraps
from pathlib import Path
from typing import Any, TypeVar

import grpc
import pytest

from tests.core.talk import answers
from tests.forking import ForkedPython
from tests.making import making
from tests.ports import free_port
from tests.waiting import until
from ttp.config import Config
from ttp.controller.driver import Driver
from ttp.controller.journal import Journal
from ttp.controller.service import start_server, stop_server
from ttp.core import messages as m
from ttp.core.controller.events import ControllerTimeouts
from ttp.core.layout import Layout
from ttp.core.layout_messages import TellLayout
from ttp.mindio.protocol.handler_recovery import HandlerRecovery
from ttp.testing import toy
from ttp.wire.channel import metadata, open_channel, stub
from ttp.wire.convert import order_from_wire, report_to_wire
from ttp.wire.v1 import controller_pb2 as pb

T = TypeVar("T")


def on_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Make a test of a coroutine, which runs on an event loop of its own."""

    @wraps(test)
    def run(**given: Any) -> None:
        asyncio.run(asyncio.wait_for(test(**given), 60))

    return run


def outside(prefixes: tuple[str, ...] = ("TTP_",)) -> dict[str, str]:
    """Return this process' environment without settings of a job."""
    return {name: value for name, value in os.environ.items() if not name.startswith(prefixes)}


def ended(program: str | Path, arguments: Sequence[object], env: dict[str, str], folder: Path) -> tuple[int, str]:
    """Run ``python -m PROGRAM``, or a script, in ``folder`` to its end; return its exit code and what it printed."""
    log = folder / f"{uuid.uuid4()}.out"
    process = ForkedPython(program, arguments, env, log, cwd=folder)
    try:
        return process.wait(120), log.read_text() if log.exists() else ""
    finally:
        process.kill()


class Controller:
    """A real controller process."""

    def __init__(self, run_dir: Path, *args: str, token: str = "", wait: bool = True, **env: str) -> None:
        self.port = free_port()
        self.token = token
        self._log = run_dir / "controller.out"
        self._log.touch()
        arguments = ["--port", self.port, "--run-dir", run_dir, *args]
        self.process = ForkedPython("ttp.controller", arguments, {**outside(), "TTP_TOKEN": token, **env}, self._log)
        self.channel = open_channel("127.0.0.1", self.port)
        if wait:
            grpc.channel_ready_future(self.channel).result(timeout=60)
        self.stub = stub(self.channel)
        self.ranks: list[FakeRank] = []

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        return metadata(self.token)

    def rank(self, number: int, **changes: Any) -> FakeRank:
        rank = FakeRank(self, number, **changes)
        self.ranks.append(rank)
        return rank

    def job(self, **changes: Any) -> list[FakeRank]:
        """Have two ranks join, and wait until they train."""
        ranks = [self.rank(number, **changes) for number in (0, 1)]
        until(lambda: self.status().stage == "training")
        return ranks

    def status(self) -> pb.GetStatusResponse:
        response: pb.GetStatusResponse = self.stub.GetStatus(pb.GetStatusRequest(), metadata=self.metadata, timeout=10)
        return response

    def output(self) -> str:
        return self._log.read_text()

    def close(self) -> None:
        self.process.kill()  # first, or it would record that it has lost its ranks
        self.process.wait()
        for rank in self.ranks:
            rank.drop()
        self.channel.close()


class Served(Controller):
    """A controller's services on a thread of this process, for tests that need no process that can be ended."""

    def __init__(self, run_dir: Path, token: str = "") -> None:
        self.port, self.token = free_port(), token
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._journal = Journal(run_dir)
        self.driver, self._server = self.do(self._serve())
        self.channel = open_channel("127.0.0.1", self.port)
        self.stub = stub(self.channel)
        self.ranks: list[FakeRank] = []

    async def _serve(self) -> tuple[Driver, grpc.aio.Server]:
        host = socket.gethostname()  # as ranks name it: one of another host would start a standby controller
        driver = Driver(ControllerTimeouts(), self._journal, host, self.port, HandlerRecovery)
        return driver, await start_server(driver, Config(token=self.token), self.port)

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the thread of the controller, and return its result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    def close(self) -> None:
        self.do(stop_server(self._server, self.driver))
        for rank in self.ranks:
            rank.drop()
        self.channel.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)
        self._loop.close()
        self._journal.close(5)


class FakeRank:
    """A stream to the controller that sends what the test says."""

    def __init__(self, controller: Controller, number: int, **changes: Any) -> None:
        import queue

        self.number = number
        self._outbox: Any = queue.SimpleQueue()
        self._channel = open_channel("127.0.0.1", controller.port)
        self._call = stub(self._channel).Attach(iter(self._outbox.get, None), metadata=controller.metadata)
        greeting = hello(number, **changes)
        self.say(greeting)
        layout = changes.get("layout") or Layout.data_parallel(greeting.world_size)
        for part in answers(TellLayout(greeting.rank, layout.digest), layout):
            self.say(part)  # it need not read the question to answer it

    def say(self, report: m.Report) -> None:
        self._outbox.put(report_to_wire(report))

    def say_raw(self, message: pb.RankReport) -> None:
        self._outbox.put(message)

    def hear(self) -> m.Order:
        """Return the next order, skipping requests for the layout."""
        while isinstance(order := order_from_wire(next(self._call)), TellLayout):
            pass
        return order

    def expect(self, kind: type) -> Any:
        order = self.hear()
        while not isinstance(order, kind):
            order = self.hear()
        return order

    def ended(self) -> bool:
        """Whether the controller ends the stream."""
        return next(self._call, None) is None

    def drop(self) -> None:
        self._outbox.put(None)
        self._call.cancel()
        self._channel.close()


def hello(rank: int, world_size: int = 2, layout: Layout | None = None, **changes: Any) -> m.Hello:
    return toy.hello(rank, layout or Layout.data_parallel(world_size), **{"save_dir": "", "host": "host", **changes})


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    made = Journal(tmp_path)
    yield made
    made.close(5)


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[Served]:
    running = Served(tmp_path)
    yield running
    running.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    with making(partial(Controller, tmp_path), Controller.close) as start:
        yield start
