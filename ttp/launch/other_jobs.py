"""Finds other running jobs: one that saves to the same ``save_dir``, which is refused, or uses the same run directory.

Each controller leaves its host and port in the history of launches (``ttp.store.history``). Rank 0 of a launch asks the
controllers of other jobs whose last launch has no recorded end, or one after which the job may be started again. Only
an answer counts: the controller of a crashed job does not answer, so such a job can be resumed at once. See decision
67.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import queue
import socket
import time
from pathlib import Path
from typing import Any

from ttp.aside import aside
from ttp.config import Config, RankEnv
from ttp.errors import EXIT_NOT_SAVED, EXIT_SAVED, ConfigError, DirectoryInUseError
from ttp.inbox import Inbox
from ttp.launch.presence import LIVES, ask_status, controller_pid, is_local, listens, probe
from ttp.launch.run_dir import noted_port
from ttp.launch.token_file import read_token
from ttp.store.history import Launch, read_launches
from ttp.wire.access import LOOPBACK
from ttp.wire.address import split

log = logging.getLogger("ttp")

NO_ID = "none"
"""Run id of each job of torchrun that is given none: it identifies no job."""
ASKED_MAX = 3
"""Number of jobs, those launched last, whose controllers are asked."""
LOOK_S = 1.0
"""Seconds that a restart waits for answers; it waits for no job that is ending."""
OPEN = (None, EXIT_SAVED, EXIT_NOT_SAVED)
"""Codes of a launch whose job may go on."""
CONNECT_S = 1.0
ENDING_S = 60.0
"""Seconds to wait for a job that saves or ends, for example because a scheduler has started the next job early."""
_POLL_S = 0.5
TRAINS = frozenset({"waiting", "forming", "training"})
"""Stages of a job of which no rank has failed."""
NOT_ASKED = (
    "a controller listens at %s, where that of run %s was, which saves to %s and may not be over; it requires a token "
    "that this job does not have. If that job runs, stop it, or give this one a save_dir of its own"
)


def refuse_shared(save_dir: Path, config: Config, env: RankEnv) -> None:
    """Raise if another running job saves to ``save_dir``. Wait for a job that is ending. Called by rank 0.

    The other job is found if its controller can be reached and has the same secret, or runs on this host for this user.
    A restart looks once, for ``LOOK_S``, and only for a job that trains.

    Args:
        save_dir: absolute path.
        config: settings of the job.
        env: this rank. A process that joins a running job (a moved rank) has the run id of that job.

    Raises:
        DirectoryInUseError: another job saves there; the text says which, and what to do.
    """
    if not env.launch:
        refusal = _look(save_dir, config, env)
    else:
        found: Inbox[str] = Inbox()
        aside("ttp-other-jobs", lambda: found.put(_look(save_dir, config, env)))
        try:
            refusal = found.get(timeout=LOOK_S)
        except queue.Empty:
            return
    if refusal:
        raise DirectoryInUseError(refusal)


def _look(save_dir: Path, config: Config, env: RankEnv) -> str:
    """Return why the directory is refused; empty: no other job that runs was found."""
    newest: dict[tuple[str, str], Launch] = {}
    try:
        for launch in reversed(read_launches(save_dir)):
            if launch.run_id != env.run_id or env.run_id == NO_ID:
                newest.setdefault((launch.run_id, launch.controller), launch)
    except Exception as problem:
        log.debug("cannot look for other jobs in %s: %s", save_dir, problem)
    asked = [launch for launch in newest.values() if launch.code in OPEN and launch.controller]
    for launch in asked[:ASKED_MAX]:
        if (other := _await_end(launch, save_dir, config, env)) is not None:
            return _refusal(other, launch, save_dir)
    return ""


def _await_end(launch: Launch, save_dir: Path, config: Config, env: RankEnv) -> Any:
    """Return the status of a launch's job if it trains, or does not end within ``ENDING_S``; None: it does not run."""
    until = time.monotonic() + ENDING_S
    warned = False
    while (status := _status(launch, save_dir, config, env)) is not None:
        if _rank_0(status).state in LIVES and status.stage in TRAINS:
            return status
        if env.launch or time.monotonic() >= until:
            return None if env.launch else status
        if not warned:
            warned = True
            log.warning(
                "waiting up to %.0f s: the job that saves to %s now is ending or starts again", ENDING_S, save_dir
            )
        time.sleep(_POLL_S)
    return None


def _status(launch: Launch, save_dir: Path, config: Config, env: RankEnv) -> Any:
    """Ask the controller that led a launch for its status; return None if its job does not run, or cannot be asked."""
    try:
        status, listening = status_of_launch(launch, config)
        if status is not None:
            return status if _runs(status, launch, save_dir, env) and not _is_own(status, launch, config, env) else None
        if listening and refuses_to_say(launch, config):
            log.warning(NOT_ASKED, launch.controller, launch.run_id, save_dir)
    except Exception as problem:  # a failing check must not keep a job from starting
        log.debug("cannot ask the controller of an earlier launch at %s: %s", launch.controller, problem)
    return None


def status_of_launch(launch: Launch, config: Config) -> tuple[Any, bool]:
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


def _runs(status: Any, launch: Launch, save_dir: Path, env: RankEnv) -> bool:
    """Return whether a status is that of the launch's job, and its rank 0 lives, or its launcher may start it again.

    That launcher may be one of this job's own if both have no id: rank 0 ran on its host before.
    """
    same = status.run_id == launch.run_id and Path(status.save_dir).resolve() == save_dir.resolve()
    return same and (_rank_0(status).state in LIVES or (status.between_launches and launch.run_id != env.run_id))


def _rank_0(status: Any) -> Any:
    return next(each for each in status.ranks if each.rank == 0)


def _is_own(status: Any, launch: Launch, config: Config, env: RankEnv) -> bool:
    """Return whether a status is of this job, whose earlier launches have the same id if it has none.

    Its rank 0 is then this process, which goes on (perhaps under a standby controller), or its controller this job's.
    """
    if env.run_id != NO_ID:
        return False
    first = _rank_0(status)
    if (first.pid, first.host) == (os.getpid(), config.host or socket.gethostname()):
        return True
    if config.port != split(launch.controller)[1]:
        return False
    return bool(status.pid == controller_pid(env.master_addr, config.port, config.token))


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


def warn_of_job_in(run_dir: Path, port: int | None) -> None:
    """Log that another job of this user runs in a run directory that is about to be used by the job of ``port``."""
    noted = noted_port(run_dir)
    if noted in (None, port):
        return
    with contextlib.suppress(ConfigError):
        status = ask_status(LOOPBACK, noted, read_token(run_dir) or "")
        if status is not None and (status.between_launches or status.attached):
            log.warning(
                "a job with TTP_PORT=%d runs in the run directory %s: commands such as ttp status no longer find it "
                "there. Give each job on a host a TTP_RUN_DIR of its own", noted, run_dir
            )  # fmt: skip


def _refusal(status: Any, launch: Launch, save_dir: Path) -> str:
    first = _rank_0(status)
    now = f"stage {status.stage}, rank 0 is pid {first.pid} on {first.host}"
    if status.between_launches:
        now = "between two launches: its launchers start it again, or wait for those of other hosts"
    return (
        f"another job that runs now saves to {save_dir}: run {launch.run_id}, {now}, its controller is at "
        f"{launch.controller}. Give each job a save_dir of its own, or stop that job first"
    )
