"""The second stream of a rank: to a controller that stands in while the leading one is silent.

See ``ttp.core.rank.stand_in``.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable

from ttp.aside import aside, aside_or_here
from ttp.core.rank import actions as act
from ttp.core.rank import events as ev
from ttp.processor.link.stream import Stream
from ttp.wire.address import split


class SecondStream:
    """Opens, uses and closes the second stream, one at a time. Events of a stream that was closed are dropped.

    Args:
        token: shared secret of the job; may be empty.
        put: takes the events of the stream; called on any thread.
        relay: returns the port of the relay of this host; None: it has none.
    """

    def __init__(self, token: str, put: Callable[[ev.Event], None], relay: Callable[[], int | None]) -> None:
        self._token, self._put, self._relay = token, put, relay
        self._numbers = itertools.count(1)
        self._wanted = 0
        """Number of the stream that is wanted now."""
        self._stream: Stream | None = None
        self._lock = threading.Lock()  # a stream that is closed while it is made does not stay

    def perform(self, action: act.ConnectAside | act.SendAside | act.CloseAside) -> None:
        """Open the stream, send on it, or close it. Called on one thread; does not wait for a network."""
        match action:
            case act.SendAside(report):
                if self._stream is not None:
                    self._stream.send(report)
                return
            case act.ConnectAside():
                self._close()
                number = self._wanted
                aside("ttp-connect", lambda: self._open(action, number))
            case act.CloseAside():
                self._close()

    def _close(self) -> None:
        with self._lock:
            self._wanted = next(self._numbers)
            before, self._stream = self._stream, None
        if before is not None:
            aside_or_here("ttp-connect", before.abort)

    def _open(self, action: act.ConnectAside, number: int) -> None:
        def put(event: ev.AsideEvent) -> None:
            if self._wanted == number:
                self._put(event)

        try:
            stream = Stream(
                *split(action.address),
                self._token,
                on_up=lambda: put(ev.AsideUp()),
                on_order=lambda order: put(ev.AsideOrder(order)),
                on_down=lambda reason: put(ev.AsideDown(reason)),
                within_s=action.within_s,
                relay=self._relay(),
            )
            with self._lock:
                if wanted := self._wanted == number:
                    self._stream = stream
            if wanted:
                stream.start()
            else:
                stream.abort()
        except Exception as problem:
            put(ev.AsideDown(repr(problem)))
