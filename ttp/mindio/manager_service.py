"""The controller's gRPC service for an outside manager, ``ttp.wire.v1.Manager``; one manager can be attached."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc

from ttp.controller.driver import Driver
from ttp.core.controller.events import ProgramAction
from ttp.mindio.manager_wire import ATTACHED, call_to_wire, notice_from_wire, seconds
from ttp.mindio.protocol import manager_messages as mm
from ttp.wire import limits
from ttp.wire.limits import WireError
from ttp.wire.v1 import rounds_pb2 as pb
from ttp.wire.v1 import rounds_pb2_grpc as rpc

SERVICE = "ttp.wire.v1.Manager"


class ManagerService(rpc.ManagerServicer):
    """Translates requests to events for the driver, and carries out actions of ``HandlerRecovery``.

    Args:
        driver: the controller's driver.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._calls: asyncio.Queue[mm.ManagerCall | None] | None = None
        # What the machine answers to the event that is fed to it: ``feed`` performs all actions before it returns.
        self._problem = ""
        self._taken: tuple[int, ...] = ()
        driver.perform_program, driver.on_close = self._perform, self._close

    def _perform(self, action: ProgramAction) -> None:
        match action:
            case mm.CallManager(call) if self._calls is not None:
                self._calls.put_nowait(call)
            case mm.AnswerNotice(problem):
                self._problem = problem
            case mm.TakePlace(ranks):
                self._taken = ranks

    def _close(self) -> None:
        if self._calls is not None:
            self._calls.put_nowait(None)

    async def Attend(self, request: pb.AttendRequest, context: Any) -> AsyncIterator[pb.ManagerCall]:
        """See ``Manager.Attend`` in the proto."""
        try:
            wait_s = seconds(request.wait_s)
        except WireError as problem:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(problem))
        if self._calls is not None or self._driver.closed:
            await context.abort(grpc.StatusCode.ALREADY_EXISTS, "another manager is attached to this controller")
            return
        queue: asyncio.Queue[mm.ManagerCall | None] = asyncio.Queue()
        self._calls = queue
        self._driver.feed(mm.ManagerCame(wait_s))
        try:
            await context.send_initial_metadata((ATTACHED,))
            while (call := await queue.get()) is not None:
                yield call_to_wire(call)
        finally:
            self._calls = None
            self._driver.feed(mm.ManagerLeft())

    async def Notify(self, request: pb.Notice, context: Any) -> pb.NoticeAnswer:
        """See ``Manager.Notify`` in the proto."""
        try:
            notice = notice_from_wire(request)
        except WireError as problem:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(problem))
        self._problem = "this controller ends"
        self._driver.feed(mm.Noticed(notice))
        return pb.NoticeAnswer(accepted=not self._problem, text=self._problem)

    async def Offer(self, request: pb.PlaceOffered, context: Any) -> pb.PlaceTaken:
        """See ``Manager.Offer`` in the proto."""
        self._taken = ()
        try:
            self._driver.feed(mm.PlaceOffered(limits.text("host", request.host), limits.text("store", request.store)))
        except WireError as problem:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(problem))
        layout = self._driver.machine.job.layout
        return pb.PlaceTaken(ranks=self._taken, world_size=0 if layout is None else layout.world_size)
