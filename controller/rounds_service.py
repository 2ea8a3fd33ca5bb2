"""The gRPC face of the controller towards an outside manager: ``ttp.wire.v1.Manager``."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc

from ttp.controller.driver import Driver
from ttp.wire.limits import WireError
from ttp.wire.manager import call_to_wire, notice_from_wire, seconds
from ttp.wire.v1 import rounds_pb2 as pb
from ttp.wire.v1 import rounds_pb2_grpc as rpc

SERVICE = "ttp.wire.v1.Manager"


class ManagerService(rpc.ManagerServicer):
    """Translates between the wire and the driver; decides nothing."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    async def Attend(self, request: pb.AttendRequest, context: Any) -> AsyncIterator[pb.ManagerCall]:
        """See the proto."""
        try:
            wait_s = seconds(request.wait_s)
        except WireError as problem:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(problem))
        queue = self._driver.attend(wait_s)
        if queue is None:
            await context.abort(grpc.StatusCode.ALREADY_EXISTS, "another manager is attached to this controller")
            return
        try:
            await context.send_initial_metadata(())
            while (call := await queue.get()) is not None:
                yield call_to_wire(call)
        finally:
            self._driver.leave(queue)

    async def Notify(self, request: pb.Notice, context: Any) -> pb.NoticeAnswer:
        """See the proto."""
        try:
            notice = notice_from_wire(request)
        except WireError as problem:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(problem))
        problem_text = self._driver.notice(notice)
        return pb.NoticeAnswer(accepted=not problem_text, text=problem_text)
