"""The controller's end of a relay's stream. The stream carries one *line* for each rank behind the relay.

The driver treats a line like the stream of a directly connected rank.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable

import grpc

from ttp.controller.connection import ORDERS_MAX, Peer
from ttp.controller.driver import Driver
from ttp.core import messages as m
from ttp.core.controller import events as ce
from ttp.core.layout import Rank
from ttp.core.relay import LineId, RelayEnd, folded
from ttp.wire.limits import WireError
from ttp.wire.relay import LINES_MAX, orders_to_wire, parse_frame
from ttp.wire.v1 import controller_pb2 as pb

log = logging.getLogger("ttp.controller")


class RelayedStream(Peer):
    """The line of one rank behind a relay; see ``Peer``.

    Args:
        id: the line's id, unique in this controller.
        line: the line's number at the relay.
        rank: the rank that has opened the line.
        link: the relay's stream.
    """

    __slots__ = ("_link", "line", "rank")

    def __init__(self, id: ce.ConnectionId, line: LineId, rank: Rank, link: RelayLink) -> None:
        super().__init__(id, link.peer)
        self.line, self.rank, self._link = line, rank, link

    def _accept(self, order: m.Order) -> bool:
        return self._link.put(self.line, order)

    def end(self) -> None:
        """See ``Peer``."""
        if not self.closing:
            self.closing = True
            self._link.end(self)


class RelayLink:
    """Splits a relay's frames into reports of ranks, and joins orders for these ranks into frames.

    Args:
        driver: receives the reports.
        cancel: ends the stream even if the relay does not read.
        peer: address of the relay, as gRPC writes it.
    """

    def __init__(self, driver: Driver, cancel: Callable[[], object], peer: str = "") -> None:
        self.peer = peer
        self._driver, self._cancel = driver, cancel
        self._end = RelayEnd(self._open, driver.disconnect)
        self._orders: list[tuple[LineId, m.Order | None]] = []
        self._wake = asyncio.Event()
        self._over = False
        log.debug("the relay at %s has opened a stream", peer)  # one per host

    # --------------------------------------------------------------------------------------------------------- inwards

    async def read(self, frames: AsyncIterator[bytes]) -> None:
        """Give the driver the reports of every frame until the stream ends."""
        try:
            async for data in frames:
                frame, problems = parse_frame(data)
                self._driver.feed_all(self._end.events(frame))
                for line, problem in problems.items():
                    self._refuse(line, problem)
        except WireError as problem:
            log.warning("a message of a relay cannot be parsed, so its stream is closed: %s", problem)
        except (grpc.RpcError, asyncio.CancelledError):
            pass  # the stream broke; the state machine decides what that means for each rank
        except Exception:
            if not self._driver.closed:  # a closed server makes grpc raise on every read
                log.exception("an error while the controller served a relay; the relay's stream is closed")
        finally:
            self.close()

    def _open(self, line: LineId, rank: Rank) -> RelayedStream:
        if len(self._end.lines) >= LINES_MAX:
            raise WireError(f"a relay may serve {LINES_MAX} ranks at most")
        return self._driver.admit(lambda id: RelayedStream(id, line, rank, self))

    def _refuse(self, line: LineId, problem: str) -> None:
        log.warning("the rank on line %s of a relay is refused: %s", line, problem)
        self._end.open(line, Rank(-1)).put(m.Refused(Rank(-1), m.RefusalCode.MALFORMED, problem))

    # -------------------------------------------------------------------------------------------------------- outwards

    def put(self, line: LineId, order: m.Order) -> bool:
        """Queue an order for ``line``. Return False if the relay does not read; then its stream is cancelled."""
        if len(self._orders) >= ORDERS_MAX:
            self._cancel()
            return False
        self._orders.append((line, order))
        self._wake.set()
        return True

    def end(self, line: RelayedStream) -> None:
        """End ``line`` once all orders queued for it have been sent."""
        self._orders.append((line.line, None))
        self._wake.set()
        asyncio.get_running_loop().call_soon(self._end.over, line)

    async def orders(self) -> AsyncIterator[pb.RelayOrders]:
        """Yield the frames to send. A frame holds all orders queued since the frame before it."""
        while not self._over:
            await self._wake.wait()
            self._wake.clear()
            orders, self._orders = self._orders, []
            if orders:
                yield orders_to_wire(folded(orders))
            self._over = self._over or self._driver.closed

    def close(self) -> None:
        """End the stream and every line in it."""
        self._over = True
        self._wake.set()
        self._end.close()
