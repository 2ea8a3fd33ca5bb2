"""Finds other running jobs: one that saves to the same ``save_dir``, which is refused, or uses the same run directory.

Each controller leaves its host and port in the history of launches (``ttp.store.history``). Rank 0 of a new job asks
the controllers of the last launches that have no recorded end. Only an answer counts: the controller of a crashed job
does not answer, so such a job can be resumed at once. See decision 67.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from pathlib import Path
from typing import Any

from ttp.config import Config
from ttp.errors import ConfigError, DirectoryInUseError
from ttp.launch.presence import LIVES, ask_status, is_local, listens, probe
from ttp.launch.token_file import read_token
from ttp.store.history import Launch, read_launches
from ttp.wire.access import LOOPBACK
from ttp.wire.address import split

log = logging.getLogger("ttp")

NO_ID = "none"
"""Run id of each job of torchrun that is given none: it identifies no job."""
ASKED_MAX = 3
"""Number of launches, the newest ones, whose controllers are asked."""
CONNECT_S = 1.0
ENDING_S = 60.0
"""Seconds to wait for a job that saves or ends, for example because a scheduler has started the next job early."""
_POLL_S = 0.5
_TRAINS = frozenset({"waiting", "forming", "training"})
NOT_ASKED = (
    "a controller listens at %s, where that of run %s was, which has recorded no end and saves to %s; it requires a "
    "token that this job does not have. If that job runs, stop it, or give this one a save_dir of its own"
)


def refuse_shared(save_dir: Path, config: Config, run_id: str) -> None:
    """Raise if another running job saves to ``save_dir``. Wait for a job that is ending. Called by rank 0.

    The other job is found if its controller can be reached and has the same secret, or runs on this host for this user.

    Args:
        save_dir: absolute path.
        config: settings of the new job.
        run_id: the new job. A process that joins a running job (a moved rank) has the run id of that job.

    Raises:
        DirectoryInUseError: another job saves there; the text says which, and what to do.
    """
    try:
        others = [launch for launch in read_launches(save_dir) if launch.run_id != run_id or run_id == NO_ID]
        open_ended = [launch for launch in others if launch.code is None and launch.controller]
    except Exception as problem:
        log.debug("cannot look for other jobs in %s: %s", save_dir, problem)
        return
    for launch in open_ended[: -ASKED_MAX - 1 : -1]:
        if (other := _await_end(launch, save_dir, config)) is not None:
            raise DirectoryInUseError(_refusal(other, launch, save_dir))


def _await_end(launch: Launch, save_dir: Path, config: Config) -> Any:
    """Return the status of a launch's job if it trains, or does not end within ``ENDING_S``; None: it does not run."""
    until = time.monotonic() + ENDING_S
    warned = False
    while (status := _status(launch, save_dir, config)) is not None:
        if status.stage in _TRAINS or time.monotonic() >= until:
            return status
        if not warned:
            warned = True
            log.warning("waiting up to %.0f s: the job that saves to %s now is ending", ENDING_S, save_dir)
        time.sleep(_POLL_S)
    return None


def _status(launch: Launch, save_dir: Path, config: Config) -> Any:
    """Ask the controller that led a launch for its status; return None if its job does not run, or cannot be asked."""
    try:
        status, listening = status_of(launch, config)
        if status is not None:
            return status if _runs(status, launch, save_dir) else None
        if listening and refuses_to_say(launch, config):
            log.warning(NOT_ASKED, launch.controller, launch.run_id, save_dir)
    except Exception as problem:  # a failing check must not keep a job from starting
        log.debug("cannot ask the controller of an earlier launch at %s: %s", launch.controller, problem)
    return None


def status_of(launch: Launch, config: Config) -> tuple[Any, bool]:
    """Ask for the status where the controller of ``launch`` was; return it, or None, and whether something listens.

    Raises:
        ValueError: ``launch`` has no such address.
    """
    host, port = split(launch.controller)
    addresses = dict.fromkeys((LOOPBACK, host) if is_local(host) else (host,))
    served = [address for address in addresses if listens(address, port, CONNECT_S)]
    asked = (ask_status(host, port, token, brief=False) for host in served for token in _tokens(config, port))
    return next((status for status in asked if status is not None), None), bool(served)


def refuses_to_say(launch: Launch, config: Config) -> bool:
    """Return whether a controller listens where the launch had its own, and requires a token that is not known here."""
    try:
        host, port = split(launch.controller)
        tokens = _tokens(config, port)
        addresses = (LOOPBACK, host) if is_local(host) else (host,)
        return any(all(probe(where, port, token) == "refused" for token in tokens) for where in addresses)
    except (ValueError, ConfigError):
        return False


def _runs(status: Any, launch: Launch, save_dir: Path) -> bool:
    """Return whether a status is that of the launch's job, and rank 0 of the job lives."""
    same = status.run_id == launch.run_id and Path(status.save_dir).resolve() == save_dir.resolve()
    return same and any(each.rank == 0 and each.state in LIVES for each in status.ranks)


def _tokens(config: Config, port: int) -> list[str]:
    """Return the secrets to try: this job's, and those that launchers left on this host for a job with ``port``."""
    found: list[str | None] = [config.token]
    for run_dir in (None, config.run_dir):
        with contextlib.suppress(ConfigError):
            found.append(read_token(dataclasses.replace(config, port=port, run_dir=run_dir).resolved_run_dir()))
    return list(dict.fromkeys(token or "" for token in found))


def is_of_another_job(run_dir: Path, token: str, port: int) -> bool:
    """Return whether another job of this user uses the run directory: its token is there, and its port is in use."""
    try:
        found = read_token(run_dir)
    except ConfigError:
        return False
    return found not in (None, token) and listens(LOOPBACK, port, CONNECT_S)


def _refusal(status: Any, launch: Launch, save_dir: Path) -> str:
    (first,) = [each for each in status.ranks if each.rank == 0]
    return (
        f"another job that runs now saves to {save_dir}: run {launch.run_id}, stage {status.stage}, rank 0 is pid "
        f"{first.pid} on {first.host}, its controller is at {launch.controller}. Give each job a save_dir "
        "of its own, or stop that job first"
    )
