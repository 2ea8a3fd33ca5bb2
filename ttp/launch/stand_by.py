"""Hosts that take the place of lost ones, under torch's dynamic rendezvous.

A host that stands by (``ttp run --stand-by``) looks at the rendezvous once a second without being part of it. While
hosts that have failed meet again, each of them is a participant, or waits for the next round; only the place of a host
that is gone stays empty. A place that has been empty for ``VACANT_S`` while others wait is taken; from then on the host
is like the others. The others wait ``TTP_RESCHEDULE_S`` for a host in the place of a lost one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousGracefulExitError,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.api import RendezvousInfo
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _RendezvousExitOp

from ttp.errors import ConfigError
from ttp.launch.refusal import heard
from ttp.launch.rendezvous import WrappedRendezvous

logger = logging.getLogger("ttp.launch")

LOOK_S = 1.0
VACANT_S = 2.0
"""Seconds a place has to be empty: hosts that restart leave the round and enter the next one at once."""
LATE_S = 10.0
LEAVE_S = 5.0
TURN_KEY = "ttp/turn"
"""Key with the number of the round that is about to form: a host not needed in one round comes first in a later one."""


class Rescheduling(WrappedRendezvous):
    """Torch's dynamic rendezvous, for hosts that have to do without a lost one for a while.

    Args:
        inner: torch's rendezvous; with the number of hosts of the job.
        wait_s: seconds that hosts that meet again wait for a missing one; 0: as torch does.
    """

    def __init__(self, inner: Any, wait_s: float) -> None:
        super().__init__(inner)
        self._wait_s = wait_s
        self._seated = self._left = False

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet the others; from the second time on within the limit.

        Raises:
            RendezvousTimeoutError: a host is missing.
            ConfigError: a host that is waited for was refused.
        """
        if self._seated and self._wait_s:
            self._inner.settings.timeout._set_timeouts(join=timedelta(seconds=self._wait_s))
        try:
            info = super().next_rendezvous()
        except RendezvousClosedError:
            if not self._seated and (reason := heard(self._inner)):
                raise ConfigError(reason) from None
            raise
        except RendezvousTimeoutError:
            logger.error(
                "a host is missing, and none has taken its place within TTP_RESCHEDULE_S=%g s; the job ends here. What "
                "was saved stays: start it again with all its hosts",
                self._wait_s,
            )
            raise
        self._seated = True
        return info

    def leave(self) -> None:
        """Give up this host's place; the rendezvous goes on without it."""
        self._left = True
        self._inner._stop_heartbeats()
        self._inner._op_executor.run(_RendezvousExitOp(), time.monotonic() + LEAVE_S)

    def shutdown(self) -> bool:
        """See torch's ``RendezvousHandler.shutdown``. A host without a place does not end the others' rendezvous."""
        return super().shutdown() if self._seated and not self._left else True


class StandBy(Rescheduling):
    """A ``Rescheduling`` rendezvous that is entered when a host of the job is missing.

    Args:
        inner: torch's rendezvous; with the number of hosts of the job.
        wait_s: see ``Rescheduling``.
        prepare: called now and then with a store that the hosts of the job share.

    Raises:
        ConfigError: this kind of rendezvous lets no host in later.
    """

    def __init__(self, inner: Any, wait_s: float, prepare: Callable[[Any], None]) -> None:
        if not is_dynamic(inner):
            raise ConfigError(
                f"--stand-by needs a rendezvous that hosts may enter later, and {inner.get_backend()} is none: start "
                "all hosts of the job with --rdzv-backend c10d and the same --rdzv-endpoint and --rdzv-id"
            )
        super().__init__(inner, wait_s)
        self._prepare = prepare
        self._turn = 0

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait until a host is missing, if this one has no place yet; then meet the others.

        Raises:
            RendezvousGracefulExitError: the job has ended and did not need this host, or cannot be reached any more.
        """
        if not self._seated:
            try:
                self._wait()
            except RendezvousConnectionError as problem:  # its host may be the first to leave a job that ended
                logger.warning("the rendezvous does not answer any more: this host stands by no longer. %s", problem)
                raise RendezvousGracefulExitError from problem
        return super().next_rendezvous()

    def _wait(self) -> None:
        hosts = self._inner.settings.max_nodes
        logger.info("standing by: this host takes the place of one of the job's %d hosts when it is lost", hosts)
        since: float | None = None
        while not self._inner.is_closed():
            now = time.monotonic()
            empty = vacancies(self._inner._state_holder.state, hosts)
            since = None if not empty else now if since is None else since
            if since is not None and self._may_enter(empty, now - since):
                logger.warning("a host of the job is missing, and this one takes its place")
                return
            self._prepare(self._inner._get_store())
            time.sleep(LOOK_S)
        logger.info("the job has ended without this host, which stood by")
        raise RendezvousGracefulExitError

    def _may_enter(self, empty: int, for_s: float) -> bool:
        """Return whether it is this host's turn: as many enter as places are empty. A late host is not waited for."""
        if for_s < VACANT_S:
            self._turn = 0
            return False
        if not self._turn:
            meeting = self._inner._state_holder.state
            self._turn = self._inner._get_store().add(f"{TURN_KEY}/{meeting.round + meeting.complete}", 1)
        return self._turn <= empty or for_s >= LATE_S


def pass_barrier(store: Any, hosts: int) -> None:
    """Be counted where all hosts wait for each other at the end of the job, without waiting."""
    from torch.distributed.elastic.agent.server.api import _TERMINAL_STATE_SYNC_ID
    from torch.distributed.elastic.utils.store import _barrier_nonblocking

    _barrier_nonblocking(store, hosts, _TERMINAL_STATE_SYNC_ID)


def is_dynamic(rendezvous: Any) -> bool:
    """Return whether hosts may enter torch's rendezvous later."""
    return hasattr(rendezvous, "_state_holder")


def vacancies(state: Any, hosts: int) -> int:
    """Return how many hosts are missing where the others of a job meet again; 0 before its first complete meeting.

    Args:
        state: state of torch's dynamic rendezvous; hosts that are silent there are not in it.
        hosts: number of hosts of the job.
    """
    there = len(set(state.participants) | set(state.wait_list))
    formed_once = state.complete or state.round > 0
    meeting = not state.complete or bool(state.wait_list)
    return max(0, hosts - there) if formed_once and meeting and there else 0
