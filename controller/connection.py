"""One stream of a rank, as far as the controller writes to it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from ttp.core import messages as m
from ttp.core.controller.events import ConnectionId

ORDERS_MAX = 10_000
"""Orders that wait for a stream to be read. A rank has a handful of them; more means that nobody reads."""


class Peer(Protocol):
    """A stream of its own, or a line of a relay, as the driver sees it."""

    id: ConnectionId
    peer: str
    """Address of the other end, as gRPC names it."""
    closing: bool

    def put(self, order: m.Order) -> bool:
        """Queue an order; false: nobody reads them."""

    def end(self) -> None:
        """Nothing follows on what is queued."""


class Connection:
    """Orders on their way to one stream. Nothing here waits, and nothing grows without bound.

    Args:
        id: never used twice.
        cancel: ends the stream even if its peer does not read.
        peer: address of the other end, as gRPC names it.
    """

    def __init__(self, id: ConnectionId, cancel: Callable[[], object], peer: str = "") -> None:
        self.id, self.peer = id, peer
        self.closing = False
        """What comes in is not looked at any more."""
        self._cancel = cancel
        self._queue: asyncio.Queue[m.Order | None] = asyncio.Queue()

    def put(self, order: m.Order) -> bool:
        """Queue an order; a refusal is the last one. False: nobody reads them, and the stream is ended."""
        if self.closing:
            return True
        if self._queue.qsize() >= ORDERS_MAX:
            self.closing = True
            self._cancel()
            return False
        self._queue.put_nowait(order)
        if isinstance(order, m.Refused):
            self.end()
        return True

    def end(self) -> None:
        """Nothing follows on what is queued."""
        self.closing = True
        self._queue.put_nowait(None)

    async def next(self) -> m.Order | None:
        """The next order; ``None`` after the last."""
        return await self._queue.get()
