"""Which controller a rank speaks to: the one it has, and when that is lost for good, the next one of the ring.

The ring is the same on every rank: the home address, then the standby controllers in the order in which they were
announced. A lost controller is tried again for a moment, as a reset connection is no death; then the ring is walked
from the lost one onwards, so that all ranks arrive at the same successor, and the home comes last.
"""

from __future__ import annotations

HOME = ""
"""The address that the job was started with."""


class Route:
    """Chooses the controller that one rank connects to. Times are seconds of the caller's clock.

    Args:
        failover_s: how long a lost controller is tried again before the next one is asked to take over.
    """

    def __init__(self, failover_s: float) -> None:
        self.standbys: tuple[str, ...] = ()
        self.address = HOME
        """Where the next attempt goes, or the present stream comes from."""
        self.takeover = False
        """The next attempt asks that controller to take over."""
        self._failover_s = failover_s
        self._current = HOME
        self._walked = 0
        self._moved = False

    @property
    def current(self) -> str:
        """The controller that has welcomed this rank last."""
        return self._current

    @property
    def others(self) -> list[str]:
        """The other controllers that stand by, in the order in which they would be asked to take over."""
        ring = self._ring()
        at = ring.index(self._current)
        return [address for address in (*ring[at + 1 :], *ring[:at]) if address != HOME]

    @property
    def went_round(self) -> bool:
        """Everybody was asked since the controller was lost; trivially so without standbys."""
        return not self.standbys or self.rounds > 0

    @property
    def rounds(self) -> int:
        """How often everybody was asked in vain; bounded, as it is used as an exponent."""
        return min(self._walked // len(self._ring()), 4)

    def announced(self, addresses: tuple[str, ...]) -> None:
        """The controller says who stands by."""
        self.standbys = addresses

    def knows(self, address: str) -> None:
        """Add a standby controller that nobody has announced yet."""
        if address and address not in self.standbys:
            self.standbys = (*self.standbys, address)

    def connected(self) -> None:
        """The controller at ``address`` has welcomed this rank."""
        self._current, self.takeover, self._walked, self._moved = self.address, False, 0, False

    def moved(self) -> None:
        """The controller at ``address`` says that another one is in charge: walk the ring from its beginning."""
        self._moved, self._walked = True, 0

    def lost(self, for_s: float) -> None:
        """An attempt, or the stream, came to nothing; choose where to go next.

        Args:
            for_s: seconds since there was a stream.
        """
        ring = self._ring()
        if len(ring) < 2 or (for_s < self._failover_s and not self._moved and not self.takeover):
            self.address, self.takeover = self._current, False
            return
        at = ring.index(self._current)
        self.address = ring[(at + 1 + self._walked) % len(ring)]
        self.takeover = True
        self._walked += 1

    def _ring(self) -> list[str]:
        return list(dict.fromkeys((HOME, *self.standbys, self._current)))
