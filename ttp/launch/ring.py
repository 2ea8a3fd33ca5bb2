"""Finds the controller that leads a job, for launchers and commands.

The ring is the list of a job's controllers: the home address and the standby controllers (``rank.failover``). Each rank
writes the ring to the run directory of its host whenever it changes. Launchers, the command line and managers read it
there, ask all controllers in it, and use the one that leads the job with the highest term. Before the first standby
controller has started there is no such file, and only the home address is known.
"""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ttp.aside import aside_or_here
from ttp.errors import GARBLED
from ttp.inbox import Inbox
from ttp.launch.presence import PROBE_S, ask_status
from ttp.launch.run_dir import make_private
from ttp.store.durable import replace_file
from ttp.wire.address import split

logger = logging.getLogger("ttp.launch")

FILE = "ring.json"
BYTES_MAX = 1 << 20
AFTER_FIRST_S = 0.3
"""Seconds to wait for other answers after a controller has answered that it leads: it may have been replaced."""


@dataclass(frozen=True, slots=True)
class Ring:
    """The controllers of one incarnation of a job. Addresses are ``host:port``.

    Args:
        run_id: the job's run id.
        incarnation: the job's incarnation.
        term: term of the controller that led when this was written.
        home: the address that the job was started with.
        address: address of the controller that led.
        standbys: addresses of the standby controllers.
    """

    run_id: str
    incarnation: int
    term: int
    home: str
    address: str
    standbys: tuple[str, ...]

    @property
    def places(self) -> tuple[str, ...]:
        """All addresses: first the controller that led, then the home address, then the standby controllers."""
        return tuple(dict.fromkeys((self.address, self.home, *self.standbys)))


def write_ring(run_dir: Path, ring: Ring) -> None:
    """Write ``ring.json``, unless it names a controller of a higher term in the same incarnation.

    Never raises: a full disk must not stop a training job.
    """
    known = read_ring(run_dir)
    same = known is not None and (known.run_id, known.incarnation) == (ring.run_id, ring.incarnation)
    if known is not None and same and known.term > ring.term:
        return
    path = run_dir / FILE
    try:
        make_private(run_dir)
        replace_file(path, json.dumps(asdict(ring)).encode())
    except OSError as problem:
        text = "cannot write %s (%s): launchers may not find a standby controller that takes over"
        logger.warning(text, path, problem)


def read_ring(run_dir: Path) -> Ring | None:
    """Read ``ring.json``; None: there is none, or it cannot be read."""
    try:
        with (run_dir / FILE).open("rb") as file:
            found = json.loads(file.read(BYTES_MAX))
        ring = Ring(
            run_id=str(found["run_id"]),
            incarnation=int(found["incarnation"]),
            term=int(found["term"]),
            home=str(found["home"]),
            address=str(found["address"]),
            standbys=tuple(str(place) for place in found["standbys"]),
        )
        for place in ring.places:
            split(place)
    except (OSError, RecursionError, *GARBLED):
        return None
    return ring


def forget_ring(run_dir: Path) -> None:
    """Remove ``ring.json``: a new job begins on this host."""
    with contextlib.suppress(OSError):
        (run_dir / FILE).unlink(missing_ok=True)


def places(run_dir: Path, home: str) -> tuple[str, ...]:
    """Return the addresses at which a job's controller may be, the likeliest first.

    Args:
        run_dir: run directory of the job on this host.
        home: the address that the job was started with.
    """
    ring = read_ring(run_dir)
    return tuple(dict.fromkeys((*(ring.places if ring is not None else ()), home)))


def reigning(around: Iterable[str], token: str, timeout_s: float = PROBE_S) -> tuple[str, Any] | None:
    """Ask all addresses at once, and return the address and status of the controller that leads.

    A controller with connected ranks is preferred to one without. Among several, the one with the newest incarnation
    and the highest term is taken: the others have been replaced and do not know it yet. Takes ``timeout_s`` seconds if
    no controller leads and some addresses do not answer.

    Args:
        around: addresses (``host:port``).
        token: the job's token.
        timeout_s: seconds that a controller may take to answer.

    Returns:
        Address and status (``GetStatusResponse``, without ranks); None if no controller answers.
    """
    found: list[tuple[str, Any]] = []
    ends = [time.monotonic() + timeout_s]
    for answered in ask_everybody(
        around, lambda host, port: ask_status(host, port, token, timeout_s), lambda: min(ends)
    ):
        found.append(answered)
        if answered[1].world_size:
            ends.append(time.monotonic() + AFTER_FIRST_S)
    return max(found, key=lambda one: _standing(one[1]), default=None)


def ask_everybody(
    around: Iterable[str], ask: Callable[[str, int], Any], ends: Callable[[], float]
) -> Iterator[tuple[str, Any]]:
    """Ask all controllers at once, and yield address and answer of each as the answers come.

    Args:
        around: addresses (``host:port``).
        ask: called with host and port, on a thread per address; returns the answer, or None for no answer.
        ends: returns when to stop waiting, in seconds of ``time.monotonic()``; called again after each answer.
    """
    asked = tuple(dict.fromkeys(around))
    answers: Inbox[tuple[str, Any]] = Inbox()
    for place in asked:
        aside_or_here(f"ttp-ask-{place}", partial(lambda p: answers.put((p, _ask(p, ask))), place))
    for _ in asked:
        try:
            place, answer = answers.get(timeout=ends() - time.monotonic())
        except queue.Empty:
            return
        if answer is not None:
            yield place, answer


def job_is_busy(around: Iterable[str], token: str) -> bool:
    """Return whether a rank is still connected and trains or saves. False if no controller answers."""
    found = reigning(around, token)
    return found is not None and found[1].attached


def rescue_goes_on(around: Iterable[str], token: str) -> bool:
    """Return whether an incident is open whose end is not known yet. False if no controller answers."""
    found = reigning(around, token)
    return found is not None and found[1].last_incident.stage not in ("", "released", "closed")


def _standing(status: Any) -> tuple[bool, bool, int, int]:
    """Return a key that sorts the statuses of controllers; the highest is that of the one that leads."""
    return status.attached, status.world_size > 0, status.incarnation, status.term


def _ask(place: str, ask: Callable[[str, int], Any]) -> Any:
    try:
        return ask(*split(place))
    except Exception as problem:
        logger.debug("%s cannot be asked: %s", place, problem)
        return None
