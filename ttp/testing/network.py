"""Simulated gRPC streams: messages arrive late but in order, and a stream may break at any moment and lose messages.

A stream that is open neither loses nor reorders messages. Streams are independent of each other, and the two ends of
one learn of a break at different times. A share of the messages can be delivered twice, even after the stream ended.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from ttp.core import messages as m
from ttp.core.controller.events import ConnectionId, Received, StreamEnded
from ttp.core.controller.machine import ControllerMachine
from ttp.core.restore_messages import RestoreDecision
from ttp.testing.clock import Clock


class RankEnd(Protocol):
    """The rank's end of a stream."""

    def on_order(self, stream: Stream, order: Any) -> None:
        """Handle an order of the controller."""

    def on_down(self, stream: Stream | None) -> None:
        """Handle the end of the stream; None stands for a failed attempt to connect."""


class ControllerEnd(Protocol):
    """The controller's end of streams."""

    machine: ControllerMachine

    def on_event(self, event: Received | StreamEnded) -> None:
        """Handle a report of a rank, or the end of a stream."""


class Stream:
    """A bidirectional stream between a rank (or relay) and a controller.

    Args:
        clock: the virtual clock.
        rng: draws delays and repeats.
        rank: the rank's end.
        controller: the controller's end.
        connection: the stream's number at the controller.
        delay_s: largest usual delay of a message in seconds; one message in twenty takes up to ten times as long.
        repeats: share of the messages that arrive twice, from 0 to 1.
    """

    __slots__ = (
        "_clock", "_cut_down", "_cut_up", "_delay_s", "_held_until", "_last_down", "_last_up", "_rank", "_repeats",
        "_rng",        "connection", "controller", "open",
    )  # fmt: skip

    def __init__(
        self,
        clock: Clock,
        rng: random.Random,
        rank: RankEnd,
        controller: ControllerEnd,
        connection: ConnectionId,
        *,
        delay_s: float,
        repeats: float,
    ) -> None:
        self.connection = connection
        self.controller = controller
        self.open = True
        self._clock, self._rng, self._rank = clock, rng, rank
        self._delay_s, self._repeats = delay_s, repeats
        self._last_up = self._last_down = clock.now
        self._cut_up = self._cut_down = float("inf")
        self._held_until = 0.0

    def report(self, report: Any) -> None:
        """Send a report of the rank, or a frame of a relay."""
        if self.open:
            self._last_up = self._later(self._last_up)
            self._clock.at(self._last_up, self._arrive, self._last_up, report, True)

    def order(self, order: Any) -> None:
        """Send an order of the controller."""
        if self.open:
            self._last_down = self._later(self._last_down)
            self._clock.at(self._last_down, self._arrive, self._last_down, order, False)

    def end(self) -> None:
        """End the stream in good order: all messages that were sent arrive."""
        self._break(self._last_up, self._last_down, 0.0, 0.0)

    def cut(self, *, rank_learns_s: float, controller_learns_s: float) -> None:
        """Break the stream now. Messages in flight arrive only up to a random time.

        Args:
            rank_learns_s: seconds after that time when the rank learns of the break.
            controller_learns_s: likewise for the controller.
        """
        now = self._clock.now
        up = now + (self._rng.random() * self._delay_s if self._rng.random() < 0.5 else self._delay_s * 3)
        down = now + (self._rng.random() * self._delay_s if self._rng.random() < 0.5 else self._delay_s * 3)
        self._break(up, down, rank_learns_s, controller_learns_s)

    def hold(self, until: float) -> None:
        """Hold all messages until the time ``until``, when TCP would deliver them; a cut before then loses them."""
        self._held_until = until

    def _break(self, up: float, down: float, rank_learns_s: float, controller_learns_s: float) -> None:
        if not self.open:
            return
        self.open = False
        now = self._clock.now
        held = now < self._held_until
        self._cut_up, self._cut_down = (-1.0, -1.0) if held else (up, down)
        ended = StreamEnded(self.connection)
        self._clock.at(max(up, now) + controller_learns_s + 1e-6, self.controller.on_event, ended)
        self._clock.at(max(down, now) + rank_learns_s + 1e-6, self._rank.on_down, self)

    def _later(self, last: float) -> float:
        delay = self._delay_s * (self._rng.random() if self._rng.random() < 0.95 else 10 * self._rng.random())
        return max(last, self._clock.now + delay) + 1e-7

    def _arrive(self, at: float, message: Any, up: bool) -> None:
        """Deliver a message that is due at ``at``: a report (``up``), or an order."""
        now = self._clock.now
        if now < self._held_until:
            self._clock.at(self._held_until, self._arrive, at, message, up)
        elif at <= (self._cut_up if up else self._cut_down):
            take: Callable[[], None] = partial(self._rank.on_order, self, message)
            if up:
                take = partial(self.controller.on_event, Received(self.connection, message))
            take()
            if self._repeats and self._rng.random() < self._repeats and not isinstance(message, ONCE):
                self._clock.at(now + self._rng.random() * 20 * self._delay_s, take)


ONCE = (m.Hello, m.Welcome, m.Refused, RestoreDecision)
"""Messages that are never delivered twice: each is sent once per stream, so a repeat would break the protocol."""
