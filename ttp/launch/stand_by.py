"""Lets a spare host take the place of a lost one, under torch's dynamic rendezvous.

A host that stands by (``ttp run --stand-by``) reads the state of the rendezvous once a second without joining it. While
a job restarts, each of its hosts is in the rendezvous as a participant, or waits for the next round; only the place of
a lost host stays empty. If a place has been empty for ``VACANT_S`` while other hosts wait, the host that stands by
takes it, and from then on is like the others. The others wait ``TTP_RESCHEDULE_S`` for a host to take an empty place.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
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

from ttp.aside import aside
from ttp.errors import ConfigError
from ttp.launch.refusal import heard
from ttp.launch.rendezvous import SILENT, WrappedRendezvous, asked_aside, told_if_late

logger = logging.getLogger("ttp.launch")

LOOK_S = 1.0
VACANT_S = 2.0
"""Seconds for which a place has to be empty. Hosts that restart leave the round and enter the next one at once."""
LATE_S = 10.0
"""Seconds after which any host that stands by takes a place that is still empty, without waiting for its turn."""
LEAVE_S = 5.0
ANSWER_S = 1.0
"""Seconds that a launcher waits in each look at its workers for the rendezvous to say whether hosts want to join."""
GONE_S = 30.0
"""Seconds that a restart waits for a rendezvous that does not answer, as its host may be lost."""
AGAIN_MAX = 3
"""Starts in a row that lost hosts may end. Torch counts no restart then, and a host may only seem to be lost."""
ALONE_S = 10.0
"""Seconds for which ranks train without a launcher of another host before that is said: it may be lost with them."""
TURN_KEY = "ttp/turn"
"""Prefix of the key, one per round, that counts the hosts that want an empty place of that round."""


GONE = "the launcher that kept the rendezvous has gone"
SPARE = "another host has this one's place, and the job has ended or is out of reach: `ttp verdict` says which"

LAUNCHER_GONE = (
    "the launcher of %s has left the job, or was silent for too long. If it was killed (`ttp status` there says so), "
    "and ranks there train on, nothing starts them again after a failure: then write a checkpoint (ttp save), end the "
    "job on all hosts, and start it again"
)


class HostMissingError(RendezvousTimeoutError):
    """A host has not come in time; the log has said so."""


class Rescheduling(WrappedRendezvous):
    """Torch's dynamic rendezvous, with a limit on how long a restart waits for a missing host.

    Args:
        inner: torch's rendezvous, made for the number of hosts of the job.
        wait_s: seconds that a restart waits for a missing host; 0: as long as torch does.
        forms: returns whether the ranks of this host are still starting.
    """

    def __init__(self, inner: Any, wait_s: float, forms: Callable[[], bool] = lambda: False) -> None:
        super().__init__(inner)
        self._wait_s, self._forms = wait_s, forms
        self._met: RendezvousInfo | None = None
        self._seated = self._left = self._gone = False
        self._again = 0  # starts in a row that a lost host has ended
        self._asked: Future[int] | None = None
        self._there: set[Any] = set()  # the launchers of this round, and when all of them were there
        self._whole_s = 0.0

    def num_nodes_waiting(self) -> int:
        """Return how many hosts want to join, or 1 if one is lost while ranks start: if it is not 0, all start again.

        It is 0 if the rendezvous has gone: the workers need it only to start again. If torch's store goes while they
        start, it is 1, once: its host may be lost with ranks of the job, for which they would wait until torch's
        time-out.

        This host's workers are looked after meanwhile (``asked_aside``). A store of torch that has gone does not come
        back, and its C++ code writes a stack trace for each attempt, so it is not asked again.
        """
        if self._gone and self._is_c10d:
            return 0
        self._asked = asked = self._asked or asked_aside(self._inner.num_nodes_waiting)
        if not wait([asked], ANSWER_S).done:
            return 0
        self._asked = None
        try:
            waiting = asked.result()
        except RendezvousConnectionError:
            if self._gone:
                return 0
            self._gone, starting = True, self._is_c10d and self._forms()
            ends = "the ranks of this host, which are still starting, are ended, and the job with them"
            what = ends if starting else "the job trains on, but cannot be started again"
            logger.warning("the rendezvous has gone: %s%s", what, "" if self._is_c10d else " until it is back")
            if self._is_c10d:
                self.rest()
            return int(starting)
        self._gone = False
        return waiting or self._lost_at_the_start()

    @property
    def _is_c10d(self) -> bool:
        return bool(self._inner.get_backend() == "c10d")

    def _lost_at_the_start(self) -> int:
        """Return 1 if a host is lost since all met, and ranks of this host may be waiting for its ranks; else 0.

        They would wait until the time-out of their process group, half an hour by default. Once they have joined the
        job, its controller knows of the loss. A host whose keep-alives came late is lost for the others, and finds out.
        """
        there = self._inner._state_holder.state.participants
        if self._met is None or not self._forms():
            self._again = 0
            self._tell_of_launchers(set(there))
            return 0
        lost = self._inner._this_node not in there or len(there) < self._met.world_size
        if not lost or self._again == AGAIN_MAX:
            return 0
        self._again += 1
        logger.warning("a host is lost, or seemed to be, while the ranks are still starting: all start again")
        return 1

    def _tell_of_launchers(self, there: set[Any]) -> None:
        """Say once in a round that launchers of other hosts are missing, although this host's ranks do not fail.

        They may have been killed. Or their hosts are lost, and the job is saved now; or they have been drained; or
        their keep-alives came late, and they come again at the next restart.
        """
        now = time.monotonic()
        if self._met is not None and len(there) >= self._met.world_size:
            self._there, self._whole_s = there, now
        elif (gone := self._there - there - {self._inner._this_node}) and now - self._whole_s > ALONE_S:
            self._there = set()
            logger.warning(LAUNCHER_GONE, ", ".join(sorted(str(node.addr) for node in gone)))

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet the other hosts; from the second meeting on within ``wait_s``.

        Raises:
            HostMissingError: a host is missing.
            ConfigError: another host refused its settings and closed the rendezvous (``ttp.launch.refusal``).
            RendezvousConnectionError: the rendezvous does not answer, or has gone.
        """
        if self._gone and self._is_c10d:
            raise RendezvousConnectionError(GONE)
        if self._seated and not self._gone:  # torch would not return before the kernel gives up
            self._asked = self._asked or asked_aside(self._inner.num_nodes_waiting)
        if self._asked is not None and not wait([self._asked], GONE_S).done:
            raise RendezvousConnectionError(SILENT)
        self._asked = None  # the answer would be about the last round
        limited = self._seated and self._wait_s > 0
        if limited:
            self._inner.settings.timeout._set_timeouts(join=timedelta(seconds=self._wait_s))
        what = "TTP_RESCHEDULE_S" if limited else "--rdzv-conf join_timeout"
        within = f"{what}={self._inner.settings.timeout.join.total_seconds():g} s"
        try:
            with told_if_late(lambda: self._who_is_here(within)):
                info: RendezvousInfo = self._inner.next_rendezvous()
        except RendezvousClosedError:
            if not self._seated and (reason := heard(self._inner)):
                raise ConfigError(reason) from None
            raise
        except RendezvousTimeoutError as problem:
            logger.error(
                "a host is missing%s, and none has come within %s; the job ends here. What was saved stays: start the "
                "job again with all hosts",
                f" ({names})" if (names := self._who_is_missing()) else "",
                within,
            )
            raise HostMissingError from problem
        except RendezvousGracefulExitError:  # closed: torch would call that trained to the end, which is not known
            if self._seated:
                raise RendezvousConnectionError(SPARE) from None
            raise
        except RendezvousConnectionError:
            if self._is_spare():
                raise RendezvousConnectionError(SPARE) from None
            raise
        self._seated, self._met, self._there = True, info, set()
        return info

    def _who_is_here(self, within: str) -> str:
        state, hosts = self._inner._state_holder.state, self._inner.settings.max_nodes
        here = self._present()
        names = ", ".join(sorted({str(node.addr) for node in here}))
        if self._is_spare():
            others = ", ".join(sorted({str(node.addr) for node in state.participants}))
            return f"all {hosts} places are taken ({others}), and this host stands by until one of them is empty"
        if missing := self._who_is_missing():
            names += f"; missing: {missing}"
        return f"{len(here)} of {hosts} are here ({names}); the wait ends after {within}" if hosts > 1 else ""

    def _who_is_missing(self) -> str:
        """Return the addresses of hosts that were in the last round and have not come to the next one yet."""
        gone = self._there - {self._inner._this_node} - self._present() if self._there else ()
        return ", ".join(sorted({str(node.addr) for node in gone}))

    def _present(self) -> set[Any]:
        """Return the launchers that have come: those in a complete round train, save or are lost; others wait."""
        state = self._inner._state_holder.state
        return set(state.wait_list if state.complete else state.participants)

    def _is_spare(self) -> bool:
        """Return whether other hosts have all places of the present round, so that this one waits for another."""
        return self._inner._this_node in getattr(self._inner._state_holder.state, "redundancy_list", ())

    def leave(self) -> None:
        """Give up this host's place without closing the rendezvous for the other hosts."""
        self._left = True
        self._inner._stop_heartbeats()
        self._inner._op_executor.run(_RendezvousExitOp(), time.monotonic() + LEAVE_S)

    def rest(self) -> None:
        """Send no more keep-alives. An answer that comes while Python ends aborts the process, in torch's C++ code."""
        with contextlib.suppress(RuntimeError):  # no room for another thread
            stopping = aside("ttp-rests", self._inner._stop_heartbeats)
            stopping.join(LEAVE_S)  # the rendezvous may not answer any more

    def shutdown(self) -> bool:
        """See torch's ``RendezvousHandler.shutdown``. A host without a place does not close the rendezvous."""
        silent = (self._asked is not None and not self._asked.done()) or (self._gone and self._is_c10d)
        placed = self._seated and not (self._left or self._is_spare())
        return bool(self._inner.shutdown()) if placed and not silent else True


class StandBy(Rescheduling):
    """A ``Rescheduling`` rendezvous that waits outside and joins only when a host of the job is missing.

    Args:
        inner: torch's rendezvous, made for the number of hosts of the job.
        wait_s: see ``Rescheduling``.
        prepare: called once a second while this host waits, with a store that the hosts of the job share.
        forms: see ``Rescheduling``.

    Raises:
        ConfigError: this kind of rendezvous cannot be joined later.
    """

    def __init__(
        self, inner: Any, wait_s: float, prepare: Callable[[Any], None], forms: Callable[[], bool] = lambda: False
    ) -> None:
        if not is_dynamic(inner):
            raise ConfigError(
                f"--stand-by needs a rendezvous that hosts may join later, and {inner.get_backend()} is not one: start "
                "all hosts of the job with --rdzv-backend c10d and the same --rdzv-endpoint and --rdzv-id"
            )
        super().__init__(inner, wait_s, forms)
        self._prepare = prepare
        self._turn = 0

    def next_rendezvous(self) -> RendezvousInfo:
        """If this host has no place yet, wait until a host is missing. Then meet the others.

        Raises:
            RendezvousGracefulExitError: the job has ended and did not need this host, or the rendezvous cannot be
                reached any more.
        """
        if self._seated:
            return super().next_rendezvous()
        try:
            self._wait()
            return super().next_rendezvous()
        except RendezvousConnectionError as problem:  # the host that serves it may leave first when the job ends
            logger.warning("the rendezvous no longer answers: this host stops standing by. %s", problem)
            raise RendezvousGracefulExitError from problem
        except RendezvousClosedError as problem:  # also after this host began to enter: another one may have come first
            logger.info("the job has ended without this host, which stood by")
            raise RendezvousGracefulExitError from problem

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
        raise RendezvousClosedError

    def _may_enter(self, empty: int, for_s: float) -> bool:
        """Return whether this host may take one of ``empty`` places, which have been empty for ``for_s`` seconds.

        Hosts that stand by take turns: as many enter as places are empty, or any host after ``LATE_S``.
        """
        if for_s < VACANT_S:
            self._turn = 0
            return False
        if not self._turn:
            meeting = self._inner._state_holder.state
            self._turn = self._inner._get_store().add(f"{TURN_KEY}/{meeting.round + meeting.complete}", 1)
        return self._turn <= empty or for_s >= LATE_S


def pass_barrier(store: Any, hosts: int) -> None:
    """Pass the barrier at which torch's agents wait for each other at the end of the job, without waiting there.

    Args:
        store: the store of the launch.
        hosts: number of hosts of the job.
    """
    from torch.distributed.elastic.agent.server.api import _TERMINAL_STATE_SYNC_ID
    from torch.distributed.elastic.utils.store import _barrier_nonblocking

    _barrier_nonblocking(store, hosts, _TERMINAL_STATE_SYNC_ID)


def is_dynamic(rendezvous: Any) -> bool:
    """Return whether this is torch's dynamic rendezvous, which hosts may join later."""
    return hasattr(rendezvous, "_state_holder")


def vacancies(state: Any, hosts: int) -> int:
    """Return how many hosts are missing while the hosts of a restarting job meet; 0 if they do not meet now.

    Before the job has formed for the first time the result is 0, too.

    Args:
        state: state of torch's dynamic rendezvous; torch removes silent hosts from it.
        hosts: number of hosts of the job.
    """
    there = len(set(state.participants) | set(state.wait_list))
    formed_once = state.complete or state.round > 0
    meeting = not state.complete or bool(state.wait_list)
    return max(0, hosts - there) if formed_once and meeting and there else 0
