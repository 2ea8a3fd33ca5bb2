"""How the launchers of several hosts agree that their ranks go on (``ttp.launch.again``), and where these ranks meet.

They use the store of the rendezvous, which all launchers share, so that no new round of the rendezvous is needed. Each
launcher starts the dead ranks of its own host (``ttp.launch.seats``). Each continuation has keys of its own in the
store::

    place    host and port of a new store, made by the first node's launcher, where the ranks meet
    going    set when ranks of some host were released to go on; read by launchers whose ranks are all dead
    left     number of hosts whose ranks are all dead
    anew     set when some launcher starts its ranks anew, so that all launchers have to
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from concurrent.futures import wait
from typing import Any

from ttp.launch.rendezvous import SILENT, Answer, asked_aside

LOOK_S = 0.005
"""Seconds between two looks at the store while ranks are about to go on."""
SLOW_LOOK_S = 0.05
"""Seconds between two looks at the store while other hosts save, and between two checks of ``anew``."""
ANSWER_S = 10.0
"""Seconds that a launcher waits for an answer of the store. After that it takes the store's host for lost."""


class GoingOn:
    """What one host's launcher writes to and reads from the store during one continuation.

    Args:
        group: torch's worker group, which spans several hosts.
        rendezvous: torch's rendezvous, which formed the group.
        number: how often the group's ranks have gone on before; the same on all hosts.
    """

    def __init__(self, group: Any, rendezvous: Any, number: int) -> None:
        self._store, self._rendezvous = group.store, rendezvous
        self._hosts = int(group.group_world_size)
        self._key = f"ttp/again/{group.master_port}/{number}"
        self._silent = False

    def starts_anew(self) -> None:
        """Tell the other hosts that this one starts its ranks anew. Never raises; on failure they notice it later."""
        with contextlib.suppress(RuntimeError, OSError):
            self._say("anew")

    def why_not(self) -> str:
        """Return why the hosts cannot go on; empty if no host has reported a reason."""
        with contextlib.suppress(TimeoutError):
            meet_anew = self._asked(self._rendezvous.is_closed) or bool(self._rendezvous.num_nodes_waiting())
            return "another host restarts all of its ranks" if self._said("anew") or meet_anew else ""
        return SILENT

    def goes(self, place: tuple[str, int] | None) -> None:
        """Tell the other hosts that ranks of this one go on.

        Args:
            place: host and port where all ranks meet, if this is the first node; None elsewhere.

        Raises:
            TimeoutError: the store does not answer.
        """
        self._say("going")
        if place is not None:
            self._say("place", f"{place[1]} {place[0]}")

    def place(self, why_not_here: Callable[[], str]) -> tuple[str, int]:
        """Wait until the first node has announced where the ranks meet. Returns host and port.

        Args:
            why_not_here: called again and again; returns why this host cannot go on, or empty if it can.

        Raises:
            RuntimeError: the ranks cannot go on.
            TimeoutError: the store does not answer.
        """
        asked_s = 0.0
        while not self._said("place"):
            reason = why_not_here()
            if time.monotonic() >= asked_s + SLOW_LOOK_S:
                asked_s, reason = time.monotonic(), reason or self.why_not()
            if reason:
                raise RuntimeError(reason)
            time.sleep(LOOK_S)
        port, host = self._asked(lambda: self._store.get(f"{self._key}/place")).decode().split(" ", 1)
        return host, int(port)

    def others_go(self, patience_s: float) -> bool:
        """Wait until ranks of another host go on; called when all ranks of this host are dead.

        Args:
            patience_s: how long to wait at most, in seconds.

        Returns:
            False if no host goes on: all ranks of the job are dead, a host starts anew or is lost, or time is up.
        """
        until = time.monotonic() + patience_s
        with contextlib.suppress(TimeoutError):
            left = self._count_left(1)
            while left < self._hosts and time.monotonic() < until and not (self.why_not() or self._one_is_lost()):
                if self._said("going"):
                    return True
                time.sleep(SLOW_LOOK_S)
                left = self._count_left(0)
        return False

    def _count_left(self, more: int) -> int:
        return self._asked(lambda: int(self._store.add(f"{self._key}/left", more)))

    def _say(self, what: str, value: str = "1") -> None:
        self._asked(lambda: self._store.set(f"{self._key}/{what}", value))

    def _said(self, what: str) -> bool:
        return self._asked(lambda: bool(self._store.check([f"{self._key}/{what}"])))

    def _asked(self, question: Callable[[], Answer]) -> Answer:
        """Return the answer of the store's host. Raises ``TimeoutError`` if none comes, or none has come before."""
        if not self._silent:
            answer = asked_aside(question)
            self._silent = not wait([answer], ANSWER_S).done
        if self._silent:
            raise TimeoutError(SILENT)
        return answer.result()

    def _one_is_lost(self) -> bool:
        """Return whether the rendezvous has not heard from a host for some seconds. A busy host may still live."""
        state = getattr(getattr(self._rendezvous, "_inner", None), "_state_holder", None)
        return state is not None and len(state.state.participants) < self._hosts
