"""Lets a host with wrong settings stop the other hosts, which would wait for it in torch's rendezvous for minutes.

The host writes the reason to the rendezvous' store and closes the rendezvous. It then waits until all hosts have read
the reason, because one of the hosts serves the store. If the job has formed before, nothing is done: the job may be
running, or may find another host.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from typing import Any

from ttp.launch.rendezvous import keep_own_time

logger = logging.getLogger("ttp.launch")

BACKEND = "c10d"
TELL_S = 30.0
REASON_KEY = "ttp/refused"
HEARD_KEY = "ttp/refused_heard_by"
LOOK_S = 0.2


def tell(flags: Any, hosts: int, text: str) -> None:
    """Tell the other hosts of a job that it cannot form. Waits at most ``TELL_S`` for them to read it; never raises.

    Args:
        flags: torchrun's arguments.
        hosts: number of hosts of the job.
        text: which host is refused, and why.
    """
    if flags.rdzv_backend != BACKEND or not flags.rdzv_endpoint:
        return
    with contextlib.suppress(OSError):  # nobody may read it any more
        print(f"ttp run: telling the other hosts to stop too (up to {TELL_S:g} s)", file=sys.stderr, flush=True)
    try:
        _tell(flags, hosts, text, time.monotonic() + TELL_S)
    except Exception as problem:  # no store, or it is gone: this host leaves with its own message
        logger.info("the other hosts have not been told: %s", problem)


def _tell(flags: Any, hosts: int, text: str, ends: float) -> None:
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler
    from torch.distributed.elastic.rendezvous.utils import _parse_rendezvous_config

    settings = _parse_rendezvous_config(flags.rdzv_conf) | {"read_timeout": str(int(TELL_S))}
    parameters = RendezvousParameters(
        BACKEND, flags.rdzv_endpoint, flags.rdzv_id, hosts, hosts, flags.local_addr, **settings
    )
    backend, store = create_backend(parameters)
    meeting: Any = create_handler(store, backend, parameters)
    keep_own_time(meeting)
    held = meeting._state_holder
    held.sync()
    if _has_formed(held.state):
        return
    common = meeting._get_store()
    if not held.state.closed:
        common.set(REASON_KEY, text)
    while not held.state.closed and time.monotonic() < ends:  # set_closed() is too slow on a busy host: a beat of
        held.state.closed = True  # another host, which rewrites the state, comes each time before it has written
        held.mark_dirty()
        held.sync()
        if _has_formed(held.state):
            return
    heard = common.add(HEARD_KEY, 1)
    while heard < hosts and time.monotonic() < ends:
        time.sleep(LOOK_S)
        heard = common.add(HEARD_KEY, 0)


def _has_formed(state: Any) -> bool:
    return bool(state.complete or state.round)


def heard(rendezvous: Any) -> str:
    """Return the text that another host has left with ``tell``; empty: there is none, or it cannot be read.

    Never raises.

    Args:
        rendezvous: torch's dynamic rendezvous, which is closed.
    """
    try:
        store = rendezvous._get_store()
        return str(store.get(REASON_KEY).decode()) if store.check([REASON_KEY]) else ""
    except Exception as problem:  # the host that keeps the store is gone, or torch keeps it elsewhere
        logger.info("cannot find out whether another host was refused: %s", problem)
        return ""
