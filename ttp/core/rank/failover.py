"""Chooses the controller that a rank connects to: the present one or, if that is lost, the next one of the ring.

The ring is the same on every rank: the home address, then the standby controllers in the order in which they were
announced. A lost controller is tried again for a moment, because a reset connection does not mean that it is dead. Then
the rank walks along the ring from the lost controller on, so that all ranks come to the same successor.
"""

from __future__ import annotations

HOME = ""
"""The address that the job was started with."""


class Route:
    """Chooses the controller that one rank connects to. Times are seconds of the caller's clock.

    Args:
        failover_s: seconds for which a lost controller is tried again before the next one is asked to take over.
    """

    def __init__(self, failover_s: float) -> None:
        self.standbys: tuple[str, ...] = ()
        """The standby controllers, as the controller has announced them last."""
        self.address = HOME
        """The address of the next attempt, or of the present stream."""
        self.takeover = False
        """Whether the next attempt asks that controller to take over."""
        self._failover_s = failover_s
        self.current = HOME
        """The address of the controller that has welcomed this rank last."""
        self._walked = 0
        self._moved = False

    @property
    def others(self) -> list[str]:
        """The other standby controllers, in the order in which they would be asked to take over; without the home."""
        ring = self._ring()
        at = ring.index(self.current)
        return [address for address in (*ring[at + 1 :], *ring[:at]) if address != HOME]

    @property
    def went_round(self) -> bool:
        """Whether every controller was tried since the present one was lost; always true without standbys."""
        return not self.standbys or self.rounds > 0

    @property
    def rounds(self) -> int:
        """How often the whole ring was tried in vain; at most 4, because it is used as an exponent."""
        return min(self._walked // len(self._ring()), 4)

    def knows(self, address: str) -> None:
        """Add a standby controller at ``address``, unless it is known; an empty address is ignored."""
        if address and address not in self.standbys:
            self.standbys = (*self.standbys, address)

    def connected(self) -> None:
        """Note that the controller at ``address`` has welcomed this rank."""
        self.current, self.takeover, self._walked, self._moved = self.address, False, 0, False

    def moved(self) -> None:
        """Note that the controller at ``address`` says that another one leads: walk along the ring from its start."""
        self._moved, self._walked = True, 0

    def lost(self, for_s: float) -> None:
        """Choose the next address, because an attempt failed or the stream ended.

        Args:
            for_s: seconds since the last stream ended.
        """
        ring = self._ring()
        if len(ring) < 2 or (for_s < self._failover_s and not self._moved):
            self.address, self.takeover = self.current, False
            return
        at = ring.index(self.current)
        self.address = ring[(at + 1 + self._walked) % len(ring)]
        self.takeover = True
        self._walked += 1

    def _ring(self) -> list[str]:
        return list(dict.fromkeys((HOME, *self.standbys, self.current)))
