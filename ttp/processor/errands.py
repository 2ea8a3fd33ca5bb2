"""Tasks that a rank does on request of the controller: inspect a process or a host, start a standby controller."""

from __future__ import annotations

import logging
from collections.abc import Callable

from ttp.core import messages as m
from ttp.core.rank import events as ev
from ttp.launch.standby import own_address, reachable, start_standby
from ttp.processor.aside import aside
from ttp.processor.liveness import stacks
from ttp.processor.rank_job import RankJob

log = logging.getLogger("ttp.processor")

STACK_S = 3.0
"""Seconds that a process that hangs may take to report its stacks."""


class Errands:
    """Carries out requests, each on a thread of its own, because any of them may block.

    Args:
        job: the rank, and the directory of checkpoints for a controller that is started.
        put: takes the result of a request.
    """

    def __init__(self, job: RankJob, put: Callable[[ev.Event], None]) -> None:
        self._job, self._run_dir, self._put = job, job.config.resolved_run_dir(), put

    def run(self, order: m.TakeStack | m.Probe | m.StandBy) -> None:
        """Begin to carry out a request."""
        match order:
            case m.Probe():
                aside("ttp-probe", lambda: self._probe(order))
            case m.StandBy():
                aside("ttp-standby", self._start_standby)
            case m.TakeStack():
                aside("ttp-stack", lambda: self._take_stack(order))

    def _probe(self, order: m.Probe) -> None:
        found, text = reachable(order.address, self._job.config.port or 0)
        self._put(ev.Tell(m.Probed(order.rank, order.subject, found, text)))

    def _take_stack(self, order: m.TakeStack) -> None:
        text = stacks.take(order.pid, self._run_dir, STACK_S)
        self._put(ev.Tell(m.StackTaken(order.rank, order.incident, order.subject, text)))

    def _start_standby(self) -> None:
        try:
            config, env = self._job.config, self._job.env
            here = own_address(config, env.master_addr)
            address = start_standby(config, self._run_dir, here, str(self._job.save_dir))
        except Exception as problem:
            log.warning("cannot start a standby controller on this host: %s", problem)
            address = ""
        self._put(ev.StandbyStarted(address))
