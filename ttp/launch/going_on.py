"""How the launchers of several hosts agree that their ranks go on, and where these meet.

They tell each other in the store of the rendezvous, which all of them share: nobody waits for a new round. Each host's
launcher fills its own seats (``ttp.launch.seats``). What is written there is about one time of going on.

    place    host and port of a store that is new; the first node's launcher makes it
    going    ranks of some host were released to go on: for launchers that have no rank left
    left     how many hosts have no rank left
    anew     some launcher starts its ranks anew, so all have to
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

LOOK_S = 0.005
"""Where all are about to go on."""
SLOW_LOOK_S = 0.05
"""Where others save, which may take long; and how often one looks whether others start anew."""


class GoingOn:
    """One for each time of going on, on each host.

    Args:
        group: torch's worker group, of several hosts.
        rendezvous: what it was formed by.
        number: how often its ranks have gone on before; the same on all hosts.
    """

    def __init__(self, group: Any, rendezvous: Any, number: int) -> None:
        self._store, self._rendezvous = group.store, rendezvous
        self._hosts = int(group.group_world_size)
        self._key = f"ttp/again/{group.master_port}/{number}"

    def starts_anew(self) -> None:
        """This host does not go on. Never raises: the others see it by other means, later."""
        with contextlib.suppress(RuntimeError, OSError):
            self._store.set(f"{self._key}/anew", "1")

    def why_not(self) -> str:
        """Why no host can go on; empty: none has said so."""
        meet_anew = self._rendezvous.is_closed() or bool(self._rendezvous.num_nodes_waiting())
        return "another host starts its ranks anew" if self._said("anew") or meet_anew else ""

    def goes(self, place: tuple[str, int] | None) -> None:
        """Ranks of this host go on; ``place``: where all meet, of the first node."""
        self._store.set(f"{self._key}/going", "1")
        if place is not None:
            self._store.set(f"{self._key}/place", f"{place[1]} {place[0]}")

    def place(self, why_not_here: Callable[[], str]) -> tuple[str, int]:
        """Where the ranks meet; waits until the first node has said so.

        Args:
            why_not_here: asked meanwhile whether this host cannot go on.

        Raises:
            RuntimeError: they cannot go on.
        """
        asked_s = 0.0
        while not self._said("place"):
            reason = why_not_here()
            if time.monotonic() >= asked_s + SLOW_LOOK_S:
                asked_s, reason = time.monotonic(), reason or self.why_not()
            if reason:
                raise RuntimeError(reason)
            time.sleep(LOOK_S)
        port, host = self._store.get(f"{self._key}/place").decode().split(" ", 1)
        return host, int(port)

    def others_go(self, patience_s: float) -> bool:
        """Whether ranks of others go on, where no rank of this host is left: waits while they save."""
        until = time.monotonic() + patience_s
        left = self._store.add(f"{self._key}/left", 1)
        while left < self._hosts and time.monotonic() < until and not (self.why_not() or self._one_is_lost()):
            if self._said("going"):
                return True
            time.sleep(SLOW_LOOK_S)
            left = self._store.add(f"{self._key}/left", 0)
        return False

    def _said(self, what: str) -> bool:
        return bool(self._store.check([f"{self._key}/{what}"]))

    def _one_is_lost(self) -> bool:
        """Whether the rendezvous has not heard of a host for some seconds; on a busy machine that may live."""
        state = getattr(getattr(self._rendezvous, "_inner", None), "_state_holder", None)
        return state is not None and len(state.state.participants) < self._hosts
