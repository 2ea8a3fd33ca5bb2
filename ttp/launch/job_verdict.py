"""Lets a launcher exit with the code of the whole job (the verdict), which it gets from the controller at its end."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from typing import Any

from ttp.aside import aside_or_here
from ttp.errors import EXIT_BAD_CONFIG, EXIT_NOT_SAVED, EXIT_SAVED, EXIT_TRAINED
from ttp.launch import presence
from ttp.launch.ring import Ring, ask_everybody

logger = logging.getLogger("ttp.launch")

ASK_S = 1.0
"""Seconds that a launcher waits for the job's verdict before it leaves with its own."""


def ask_verdict(around: Iterable[str], token: str, host: str, code: int, *, starts: bool = False) -> Any:
    """Tell the controllers that a launcher starts ranks or ends, and ask for the job's verdict.

    Args:
        around: places (``host:port``) where the controller may be.
        token: the job's token.
        host: name of this host, as its ranks give it.
        code: exit code that the launcher would exit with by itself.
        starts: the launcher starts ranks; False: it ends.

    Returns:
        The answer (``GetVerdictResponse``) of the controller that leads; None: no answer came within ``ASK_S``.
    """
    ends = time.monotonic() + ASK_S
    heard = ask_everybody(around, lambda address, port: _ask(address, port, token, host, code, starts), lambda: ends)
    return max((answer for _, answer in heard), key=_standing, default=None)


def say_start(around: Iterable[str], token: str, host: str) -> None:
    """Tell the controllers, on a thread if one can be started, that this launcher starts ranks now."""
    aside_or_here("ttp-say-start", lambda: ask_verdict(around, token, host, EXIT_TRAINED, starts=True))


def settled_code(own: int, answer: Any, known: Ring | None = None) -> int:
    """Return the exit code of a launcher whose own ranks ended with ``own``, and log it if it differs.

    If the verdict is 0 ("trained to the end"), 1 stays: a program that fails after training has failed. But 70 and 75
    become 0: ranks of other hosts have taken the places of this host's ranks, and have trained to the end.

    Args:
        own: exit code by the ranks of this host.
        answer: the job's verdict (``GetVerdictResponse``); None: no controller answered.
        known: the controller that led this host's ranks last. One that it has replaced may have lost all ranks (70),
            while they trained on.
    """
    if answer is None or not answer.HasField("code") or own == EXIT_BAD_CONFIG:
        return own
    job = int(answer.code)
    replaced = known is not None and (answer.incarnation, answer.term) < (known.incarnation, known.term)
    failed = job == EXIT_TRAINED and own not in (EXIT_NOT_SAVED, EXIT_SAVED)
    if job == own or failed or (replaced and own in (EXIT_TRAINED, EXIT_SAVED)):
        return own
    logger.warning(
        "the exit code is %d, the result of the whole job, instead of %d, the result of this host's ranks: %s",
        job,
        own,
        answer.text,
    )
    return job


def _standing(answer: Any) -> tuple[bool, bool, int, bool, int]:
    """Return a key that sorts answers: 64 first, then any verdict of the newest incarnation, then the highest term.

    A controller that led only some of the ranks may have saved nothing (70) while the others were saved.
    """
    known = answer.HasField("code")
    wrong, saved = known and answer.code == EXIT_BAD_CONFIG, known and answer.code != EXIT_NOT_SAVED
    return wrong, known, answer.incarnation, saved, answer.term


def _ask(address: str, port: int, token: str, host: str, code: int, starts: bool) -> Any:
    from ttp.wire.v1.controller_pb2 import GetVerdictRequest

    request = GetVerdictRequest(host=host, starts=starts, code=code)
    return presence.ask(address, port, token, "GetVerdict", request, ASK_S)
