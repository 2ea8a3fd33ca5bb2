"""The outgoing half of one rank's stream: orders that wait to be sent."""

from __future__ import annotations

import abc
import asyncio
from collections.abc import Callable

from ttp.core import messages as m
from ttp.core.controller.events import ConnectionId

ORDERS_MAX = 10_000
"""Most orders that may wait for one stream. A healthy rank has a few waiting; more mean that the rank does not read."""


class Peer(abc.ABC):
    """The outgoing half of a rank's stream, as the driver uses it: the rank's own stream, or its line in a relay's.

    Args:
        id: the stream's id, unique in this controller.
        peer: address of the other end, as gRPC writes it.
    """

    __slots__ = ("closing", "id", "peer")

    def __init__(self, id: ConnectionId, peer: str) -> None:
        self.id, self.peer = id, peer
        self.closing = False
        """Whether the stream is ending: further orders are not queued, and further reports are ignored."""

    def put(self, order: m.Order) -> bool:
        """Queue an order. After a ``Refused`` the stream ends.

        Returns:
            False if the peer does not read its orders; then the stream is cancelled.
        """
        if self.closing:
            return True
        if not self._accept(order):
            self.closing = True
            return False
        if isinstance(order, m.Refused):
            self.end()
        return True

    @abc.abstractmethod
    def _accept(self, order: m.Order) -> bool:
        """Queue an order. If ``ORDERS_MAX`` orders are already waiting, cancel the stream and return False."""

    @abc.abstractmethod
    def end(self) -> None:
        """End the stream once all queued orders have been sent."""


class Connection(Peer):
    """The bounded queue of orders for one stream. No method but ``next`` waits.

    Args:
        id: the stream's id, unique in this controller.
        cancel: ends the stream even if its peer does not read.
        peer: address of the other end, as gRPC writes it.
    """

    __slots__ = ("_cancel", "_orders", "_reader")

    def __init__(self, id: ConnectionId, cancel: Callable[[], object], peer: str = "") -> None:
        super().__init__(id, peer)
        self._cancel = cancel
        self._orders: list[m.Order | None] = []  # an ``asyncio.Queue`` would take 3 KiB for each of ten thousand ranks
        self._reader: asyncio.Future[None] | None = None

    def _accept(self, order: m.Order) -> bool:
        if len(self._orders) >= ORDERS_MAX:
            self._cancel()
            return False
        self._put(order)
        return True

    def end(self) -> None:
        """See ``Peer``."""
        self.closing = True
        self._put(None)

    def _put(self, order: m.Order | None) -> None:
        self._orders.append(order)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def next(self) -> m.Order | None:
        """Wait for the next order; return None after the last one."""
        while not self._orders:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        return self._orders.pop(0)
