"""Tasks that a rank does on request of the controller: inspect a process or a host, start a standby controller."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from ttp.aside import aside
from ttp.core import messages as m
from ttp.core.rank import events as ev
from ttp.launch.presence import PROBE_S, listens
from ttp.launch.standby import own_address, reachable, start_standby
from ttp.processor.liveness import stacks
from ttp.processor.rank_job import RankJob
from ttp.wire.address import split

log = logging.getLogger("ttp.processor")

STACK_S = 3.0
"""Seconds that a process that hangs may take to report its stacks."""

LOOK_S = 10.0
"""Seconds between two looks at a standby controller: nothing else notices that it has ended, until it is needed."""
AGAIN_MAX_S = 600.0
"""Longest wait in seconds, after failures, until a standby controller is started again."""


class Errands:
    """Carries out requests, each on a thread of its own, because any of them may block.

    Args:
        job: the rank, and the directory of checkpoints for a controller that is started.
        put: takes the result of a request.
    """

    def __init__(self, job: RankJob, put: Callable[[ev.Event], None]) -> None:
        self._job, self._run_dir, self._put = job, job.config.resolved_run_dir(), put
        self._over = threading.Event()
        self._standby = ""  # where it serves; empty: it could not be started
        self._keeps = threading.Lock()  # held by the thread that keeps the standby controller running

    def end(self) -> None:
        """Keep no standby controller any more: this rank has left its job."""
        self._over.set()

    def run(self, order: m.TakeStack | m.Probe | m.StandBy) -> None:
        """Begin to carry out a request."""
        match order:
            case m.Probe():
                aside("ttp-probe", lambda: self._probe(order))
            case m.StandBy():
                aside("ttp-standby", self._keep_standby)
            case m.TakeStack():
                aside("ttp-stack", lambda: self._take_stack(order))

    def _probe(self, order: m.Probe) -> None:
        found, text = reachable(order.address, self._job.config.port or 0)
        self._put(ev.Tell(m.Probed(order.rank, order.subject, found, text)))

    def _take_stack(self, order: m.TakeStack) -> None:
        text = stacks.take(order.pid, self._run_dir, STACK_S)
        self._put(ev.Tell(m.StackTaken(order.rank, order.incident, order.subject, text)))

    def _keep_standby(self) -> None:
        """Start a standby controller for as long as this rank is in its job, and again if it ends or does not start."""
        self._start_standby()
        if not self._keeps.acquire(blocking=False):
            return
        pause_s = LOOK_S
        while not self._over.wait(pause_s):
            before = self._standby
            if before and listens(*split(before), PROBE_S):
                continue
            self._start_standby()
            if before and self._standby:
                log.warning("the standby controller of this host had ended; another one runs at %s", self._standby)
            pause_s = LOOK_S if self._standby else min(2 * pause_s, AGAIN_MAX_S)

    def _start_standby(self) -> None:
        config = self._job.config
        try:
            here = own_address(config, self._job.env.master_addr)
            self._standby = start_standby(config, self._run_dir, here, str(self._job.save_dir))
        except Exception as problem:
            log.warning("cannot start a standby controller on this host: %s", problem)
            self._standby = ""
        self._put(ev.StandbyStarted(self._standby))
