"""Wraps torch's rendezvous: a base class to override single methods, and a static rendezvous with fresh stores."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from datetime import datetime, timedelta, timezone
from typing import Any, TypeVar

import torch.distributed
from torch.distributed.elastic.rendezvous.api import RendezvousInfo, RendezvousStoreInfo

from ttp.aside import aside_or_here

logger = logging.getLogger("ttp.launch")

SAY_S = 10.0
"""Seconds after which a launcher says that it waits for those of other hosts."""
SILENT = "the rendezvous does not answer: its host is lost, or not to be reached"
MISSING = (
    "they have not started yet, or one has left, as its log says. If it does not come back, end the job on all hosts "
    "with SIGTERM and start it again; what was saved stays"
)


def tell_later(what: Callable[[], str]) -> threading.Timer:
    """Say in ``SAY_S`` that this launcher waits for those of other hosts, unless the timer is cancelled before.

    Args:
        what: returns what to say beside that; nothing is said if that is empty.
    """

    def say() -> None:
        if text := what():
            logger.info("waiting for the launchers of other hosts (%.0f s so far): %s", SAY_S, text)

    late = threading.Timer(SAY_S, say)
    late.daemon = True
    with contextlib.suppress(RuntimeError):  # no room for another thread: a launcher that says nothing does as well
        late.start()
    return late


@contextlib.contextmanager
def told_if_late(what: Callable[[], str] = lambda: MISSING) -> Iterator[None]:
    """Say once that the block waits for the launchers of other hosts, if it does so for ``SAY_S``; torch says nothing.

    Args:
        what: as for ``tell_later``.
    """
    late = tell_later(what)
    try:
        yield
    finally:
        late.cancel()


Answer = TypeVar("Answer")


def asked_aside(question: Callable[[], Answer]) -> Future[Answer]:
    """Ask the rendezvous or one of its stores on another thread, because torch's C++ code does not stop to wait.

    If their host has lost its power, the answer comes when the kernel gives up, after a quarter of an hour. Torch's own
    time-outs do not hold there, and no signal reaches a thread that waits so.
    """
    answer: Future[Answer] = Future()

    def ask() -> None:
        try:
            answer.set_result(question())
        except Exception as problem:
            answer.set_exception(problem)

    aside_or_here("ttp-asks", ask)  # if it has to be here, the launcher waits, rather than that the job ends
    return answer


def serve_store(address: str) -> Any:
    """Serve a new store on a free port of this host. The server ends with the last reference to the store."""
    store: Any = torch.distributed.TCPStore  # type: ignore[attr-defined,unused-ignore] # in torch, not in its types
    return store(address, 0, is_master=True, wait_for_workers=False)


class WrappedRendezvous:
    """Passes every call on to the rendezvous inside. Subclasses define the methods that differ.

    Args:
        inner: torch's rendezvous, a ``RendezvousHandler``.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class OwnTime(datetime):
    """A time of this host's clock in place of one that another host has noted (``noted``), which is what is pickled."""

    noted: datetime

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.noted.__reduce_ex__(protocol)


class OwnClock:
    """Gives the state of torch's dynamic rendezvous the times of this host's clock.

    Torch compares times that other hosts have noted with the clock of this host, and drops hosts whose clocks differ.
    Here a keep-alive is as old as it has been known to this host, by the monotonic clock, and the round that waits for
    more hosts ends ``last_call`` after this host has learned of it. Times of other hosts go back to them as they came.

    All hosts rewrite one state, and whoever was too slow tries again: in a large job each microsecond per host counts.

    Args:
        held: torch's holder of the state.
        last_call: how long a round that has enough hosts waits for more.

    Raises:
        AttributeError: this torch has other names. Nothing is changed.
    """

    def __init__(self, held: Any, last_call: timedelta) -> None:
        self._held, self._last_call, self._stock_sanitize = held, last_call, held._sanitize
        self._seen_s = dict.fromkeys(_times(held.state), time.monotonic())  # when each noted time was first seen here
        held._sanitize = self.sanitize

    def sanitize(self) -> None:
        """Drop silent hosts from a state that was just read, as torch does, by this host's clock."""
        state, now_s, now = self._held.state, time.monotonic(), OwnTime.now(timezone.utc)
        nows = {True: now, False: now.replace(tzinfo=None)}  # older versions of torch note UTC without saying so
        self._seen_s = seen_s = {at: self._seen_s.get(at, now_s) for at in _times(state)}

        def here(at: datetime, later_s: float = 0.0) -> OwnTime:
            own = nows[at.tzinfo is not None] - timedelta(seconds=now_s - seen_s[at] - later_s)
            own.noted = at
            return own

        for node, at in state.last_heartbeats.items():
            state.last_heartbeats[node] = here(at)
        if state.deadline is not None:
            state.deadline = here(state.deadline, self._last_call.total_seconds())
        self._stock_sanitize()


def keep_own_time(rendezvous: Any) -> None:
    """Let this host judge the others in torch's dynamic rendezvous by its own clock (``OwnClock``)."""
    OwnClock(rendezvous._state_holder, rendezvous.settings.timeout.last_call)


def _times(state: Any) -> list[datetime]:
    return [*state.last_heartbeats.values(), *([] if state.deadline is None else [state.deadline])]


# --------------------------------------------------------------------------------------- a fresh store for each restart
#
# Under torch's static rendezvous the workers use the agent's own store, on the port that the user gave, and torch no
# longer prefixes their keys with the attempt. (torch/distributed/rendezvous.py says "We create a new TCPStore for every
# retry", but that is not so here.) A restarted gloo job finds the addresses of its dead predecessor in the store, and
# hangs or fails. So from the second attempt on the first node's agent serves a new store on a free port, and announces
# the port in the old store. The new store outlives rank 0, as torch's own does. The first attempt uses torch's store.
#
# Torch's agents do not wait for one another there either, as they find what all of them wrote in the first attempt. If
# the launcher of another host has left, the ranks of this host wait for its ranks until torch's time-out. So each
# launcher notes every restart in the store, and says which hosts have not come to it.

KEY = "ttp/workers_store_port"
CAME = "ttp/came"


class FreshStoreRendezvous(WrappedRendezvous):
    """Torch's static rendezvous, with a new store for the workers after each restart.

    Args:
        inner: torch's rendezvous.
        master_addr: address of the first node, which serves the stores.
    """

    def __init__(self, inner: Any, master_addr: str) -> None:
        super().__init__(inner)
        self._master_addr = master_addr
        self._attempt = 0
        self._late = threading.Timer(0.0, lambda: None)  # never started
        self._store: Any = None  # keeps the store's server running: it ends with the last reference

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet the other nodes. From the second meeting on, return a new store for the workers."""
        info = self._inner.next_rendezvous()
        attempt, self._attempt = self._attempt, self._attempt + 1
        if attempt == 0:
            return info
        info.store.set(f"{CAME}/{attempt}/{info.rank}", "")
        self._late.cancel()
        self._late = tell_later(lambda: missing_nodes(info.store, attempt, info.world_size))
        port = self._agree_on_port(info, f"{KEY}/{attempt}")
        where = RendezvousStoreInfo(self._master_addr, port)
        return RendezvousInfo(info.store, info.rank, info.world_size, where)

    def _agree_on_port(self, info: RendezvousInfo, key: str) -> int:
        """Return the port of the new store. All nodes use the same key: each of them restarts after each release."""
        if info.rank == 0:
            self._store = serve_store(self._master_addr)
            info.store.set(key, str(self._store.port))
        return int(info.store.get(key))


def missing_nodes(store: Any, attempt: int, nodes: int) -> str:
    """Return which nodes of a static rendezvous have not come to a restart, and what to do; empty: all have come."""
    try:
        missing = [str(node) for node in range(nodes) if not store.check([f"{CAME}/{attempt}/{node}"])]
    except RuntimeError:  # the first node's store is gone, which torch reports
        return ""
    return f"node {', '.join(missing)} (--node-rank) has not started its ranks again: {MISSING}" if missing else ""


def give_fresh_stores(spec: Any) -> None:
    """Give a worker spec with a static rendezvous a new store after each restart; other specs stay as they are."""
    if spec.rdzv_handler.get_backend() != "static" or not spec.master_addr:
        return
    spec.rdzv_handler = FreshStoreRendezvous(spec.rdzv_handler, spec.master_addr)
    # Torch prefers this field to the rendezvous' port. Without it torch uses that port, which is the same one in the
    # first attempt.
    spec.master_port = None
