"""Telling the controller from outside that a rank's process has ended."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from ttp.core.messages import Mirror
from ttp.launch.presence import channel_options, target

logger = logging.getLogger("ttp.launch")

TIMEOUT_S = 1.0
"""The stream that broke tells the same, only later: nobody retries."""


class FaultReporter:
    """Sends ``ReportFault``, fire and forget: never blocks, never raises. Opens its connection ahead of time.

    Args:
        address: host of the controller, as the ranks know it.
        port: its port.
        token: the job's shared secret; may be empty.
        pages_after: what is to be handed over when a rank has died; must not raise.
    """

    def __init__(
        self, address: str, port: int, token: str, pages_after: Callable[[int], Sequence[Mirror]] = lambda rank: ()
    ) -> None:
        from ttp.wire.tls import open_channel
        from ttp.wire.v1.controller_pb2_grpc import ControllerStub

        self._pages_after = pages_after
        self._metadata = (("ttp-token", token),)
        self._channel = open_channel(target(address, port), channel_options())
        self._channel.subscribe(lambda _state: None, try_to_connect=True)
        self._stub = ControllerStub(self._channel)

    def exited(self, rank: int, pid: int, reason: str) -> None:
        """Accuse ``rank``, whose process ``pid`` ended for ``reason``."""
        from ttp.wire.v1 import controller_pb2 as wire

        request = wire.ReportFaultRequest(ranks=[rank], pids=[pid], reason=reason, kind=wire.FAULT_KIND_EXITED)
        for page in self._pages_after(rank):
            request.pages.add(
                rank=page.rank,
                version=page.version,
                final=page.final,
                incarnation=page.incarnation,
                data=page.data,
            )
        try:
            call = self._stub.ReportFault.future(
                request, timeout=TIMEOUT_S, metadata=self._metadata, wait_for_ready=True
            )
            call.add_done_callback(lambda done: _note(rank, done))
        except Exception as problem:  # the rescue goes on without this witness
            logger.debug("cannot report the end of rank %d: %s", rank, problem)

    def close(self) -> None:
        """Drop the connection."""
        try:
            self._channel.close()
        except Exception as problem:
            logger.debug("closing the connection to the controller: %s", problem)


def _note(rank: int, call: Any) -> None:
    problem = call.exception() if not call.cancelled() else "cancelled"
    if problem is not None:
        logger.debug("the controller was not told of the end of rank %d: %s", rank, problem)
