"""Starts dead workers of torch's agent alone while the others go on in their processes (``TTP_CONTINUITY=keep``).

A *seat* is the place of one rank on this host. After a failure the survivors go on (``ttp.processor.continuing``), and
this module starts a new worker in each seat whose worker has died. If that fails or takes too long, all workers are
started anew. Nothing is lost then: ranks were told to go on only after the checkpoint was on disk, and a rank that goes
on may be killed until it begins an update.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from torch.distributed.elastic.multiprocessing import SignalException

from ttp.config import KEEP, Config
from ttp.core.controller.continuing import SEAT_READY
from ttp.launch.again import NextLaunch
from ttp.launch.going_on import GoingOn
from ttp.launch.held_signals import signals_held
from ttp.launch.host import Host
from ttp.launch.rendezvous import serve_store
from ttp.launch.warm.torch_workers import forking, start_worker
from ttp.launch.warm.worker import ForkedWorker
from ttp.launch.worker_stops import Workers
from ttp.wire.address import target

if TYPE_CHECKING:
    from ttp.launch.agent import TtpAgent

logger = logging.getLogger("ttp.launch")

LATE_S = 2.0
"""Seconds that the launcher allows a worker beyond its deadline, which the worker itself watches."""


class Seats:
    """Refills the seats of this launcher's workers. A launcher has one object.

    Args:
        agent: torch's agent.
        host: ttp's services for this host.
        config: says whether survivors go on, how long that may take, and how often it may happen.
    """

    def __init__(self, agent: TtpAgent, host: Host, config: Config) -> None:
        self._agent, self._host = agent, host
        self._wanted, self._within_s = config.continuity == KEEP, config.continue_s
        self._patience_s = config.rescue_patience_s
        self._most = config.continue_max  # each continuation leaves threads and descriptors of old connections behind
        self._hosts: GoingOn | None = None  # agreement with the other hosts; None: the job has one host
        self._store: Any = None  # keeps the store's server running: it ends with the last reference
        self._next: NextLaunch | None = None
        self._early: dict[int, Any] = {}  # torch's handlers of workers that were started early and wait, by rank
        host.seat = self._say
        self.begin()

    def begin(self) -> None:
        """Reset the state, and tell workers that this launcher can start them alone, before all are started anew."""
        self._done, self._filling, self._failed, self._launch = 0, False, "", 0
        self._next_time()
        if self._wanted and isinstance(self._agent._worker_group.spec.entrypoint, str):  # else torch starts them
            self._host.again.serve(os.getpid())

    def _next_time(self) -> None:
        group: Any = self._agent._worker_group
        several = self._wanted and (group.group_world_size or 1) > 1
        self._hosts = GoingOn(group, group.spec.rdzv_handler, self._done) if several else None

    def look(self, workers: Workers) -> None:
        """Fail if ranks take too long to go on. Let ranks go on if none of this host has failed. Call it often.

        A rank that has exited with 0 in its training has not failed for torch's agent, so it is replaced here.
        """
        self._settle(workers)
        if not self._filling:
            marks = self._marked(workers) if self._wanted else {}
            living = {worker.pid for worker in workers.values() if worker.poll() is None} if marks else set()
            if living and living <= marks.keys() and not any(worker.poll() for worker in workers.values()):
                self.fill(workers)
        elif min(self._going(workers).values(), default=math.inf) + LATE_S < time.monotonic():
            self.fail(workers, "going on took too long (TTP_CONTINUE_S)")
        elif self._hosts is not None and (reason := self._hosts.why_not()):
            self.fail(workers, reason)

    def _settle(self, workers: Workers) -> None:
        """Note if the workers that went on train again. They may have been released once more since then."""
        if self._filling and not self._going(workers):
            self._filling = False
            self._next_time()
            self._host.leases.sweep()
            logger.info("all ranks train again; those that did not die have kept their processes")

    def _say(self) -> str:
        """Return, for a death report, ``SEAT_READY`` or the reason why the dead worker cannot be started alone."""
        try:
            return self.why_not(self._agent._workers()) or SEAT_READY
        except Exception as problem:
            return repr(problem)

    def why_not(self, workers: Workers) -> str:
        """Return why a dead worker could not be started alone; empty if it could."""
        agent, pcontext = self._agent, self._agent._pcontext
        reasons = {
            self._failed: bool(self._failed),
            "the job has several hosts": self._hosts is None and (agent._worker_group.group_world_size or 1) > 1,
            "ranks were going on already": bool(self._going(workers)),
            "the workers are not started as ttp run starts them": not workers or pcontext is None,
            "no restart is left (--max-restarts)": agent._remaining_restarts <= 0,
            f"the ranks have gone on {self._most} times already, the limit (TTP_CONTINUE_MAX)": self._done
            >= self._most,
            "no process to fork from is ready": not self._host.warm.ready,
        }
        return next((reason for reason, holds in reasons.items() if holds), "")

    def start_early(self, workers: Workers) -> None:
        """Start dead workers already while the others save. The new workers wait until the others go on."""
        if not self._wanted:
            return
        dead = [rank for rank, worker in workers.items() if worker.poll() is not None]
        killed = all((workers[rank].returncode or 0) < 0 for rank in dead)  # after other exits ranks do not go on
        left = len(dead) < len(workers) or self._hosts is not None
        if not (killed and left) or self._early or self.why_not(workers):
            return
        self._meet(dead)
        for rank in dead:
            with signals_held():  # ``end`` has to know it
                self._early[rank] = self._start(rank)
        logger.info("dead ranks: %d started while the others save, in case those go on", len(dead))

    def others_go_on(self, workers: Workers) -> bool:
        """Return whether ranks of other hosts go on although all ranks of this host are dead. Waits while they save."""
        left = any(worker.poll() is None for worker in workers.values())
        return bool(self._early) and not left and self._hosts is not None and self._hosts.others_go(self._patience_s)

    def end(self, workers: Workers) -> None:
        """Stop going on, because the launcher stops all workers now."""
        if self._hosts is not None:
            self._hosts.starts_anew()
        if self._going(workers):
            self._host.stops.stop_going_on(workers, "" if self._failed else "all ranks are to be started again")
        self.drop_early()

    def drop_early(self) -> None:
        """Kill the workers that were started early: the others do not go on."""
        early, self._early, self._next = self._early, {}, None
        for handler in early.values():
            with contextlib.suppress(ProcessLookupError):
                handler.close(signal.SIGKILL)
            handler.proc.wait()

    def second_fault(self, workers: Workers) -> None:
        """Handle the failure of a worker: if the ranks were still going on, all workers are started anew."""
        self._settle(workers)
        if self._filling:
            self.fail(workers, "another rank has failed meanwhile")

    def fail(self, workers: Workers, why: str) -> None:
        """Give up going on: all workers are started anew. That does not count as another restart.

        Args:
            workers: worker processes by global rank.
            why: reason for the log.
        """
        if not self._failed and self._filling:
            self._agent._worker_group.spec.max_restarts += 1
            self._agent._remaining_restarts += 1
        logged, self._failed = bool(self._failed), self._failed or why
        if self._hosts is not None:
            self._hosts.starts_anew()
        self.drop_early()
        self._host.stops.stop_going_on(workers, "" if logged else why)

    def fill(self, workers: Workers) -> None:
        """Start the dead workers alone, because the survivors go on."""
        self._settle(workers)
        began_s = time.monotonic()
        dead = [rank for rank, worker in workers.items() if worker.poll() is not None]
        reason = self.why_not(workers) if dead else self._failed
        if reason:
            self.fail(workers, reason)
            return
        self._filling = True
        try:
            self._fill(workers, dead)
        except SignalException:  # from an operator; torch's agent obeys it
            raise
        except Exception as problem:
            logger.warning("workers cannot be started alone", exc_info=True)
            self.fail(workers, repr(problem))
            return
        finally:  # torch numbers the launch max_restarts - remaining_restarts
            self._agent._remaining_restarts -= bool(dead)
            self._agent._worker_group.spec.max_restarts += not dead
        self._next = None
        self._done += 1
        took_ms = (time.monotonic() - began_s) * 1e3
        if dead:
            logger.warning(
                "the surviving ranks go on in their processes; the dead ranks were replaced in %.0f ms",
                took_ms,
            )
        else:
            logger.warning(
                "all ranks of this host go on in their processes: others have died, or `ttp save` requested it"
            )

    def _meet(self, ranks: list[int]) -> NextLaunch:
        """Announce the next launch: a new store where its ranks meet, and which ranks are started for it."""
        group: Any = self._agent._worker_group
        address = str(group.master_addr) if self._is_first else "127.0.0.1"
        self._store = serve_store(address)
        launch = group.spec.max_restarts - self._agent._remaining_restarts + 1
        kept = target(str(group.master_addr), int(group.master_port))
        self._next = NextLaunch(launch, tuple(ranks), address, self._store.port, released=False, kept=kept)
        self._host.again.announce(self._next)
        return self._next

    @property
    def _is_first(self) -> bool:
        """True if the ranks of all hosts meet at this one."""
        return self._hosts is None or self._agent._worker_group.group_rank == 0

    def _agree(self, workers: Workers, following: NextLaunch) -> NextLaunch:
        """Agree with the other hosts on where the ranks meet."""
        if self._hosts is None:
            return following
        until = min([*self._marked(workers).values(), time.monotonic() + self._within_s])
        alive = [worker for worker in workers.values() if worker.poll() is None]

        def why_not() -> str:
            failed = any(worker.poll() is not None for worker in alive)
            late = time.monotonic() > until
            return "another rank has failed meanwhile" if failed else "the first node did not answer" if late else ""

        self._hosts.goes((following.address, following.port) if self._is_first else None)
        address, port = self._hosts.place(why_not)
        return replace(following, address=address, port=port)

    def _fill(self, workers: Workers, ranks: list[int]) -> None:
        agent = self._agent
        following = replace(self._next or self._meet(ranks), seats=tuple(ranks))
        self._launch = following.launch
        self._host.again.announce(following)  # before the ranks start: each of them looks for its seat there
        for worker in agent._worker_group.workers:
            if worker.global_rank in ranks:
                with signals_held():  # torch ends all workers after a signal, if it knows them
                    handler = self._early.pop(worker.global_rank, None) or self._start(worker.global_rank)
                    pcontext = cast("Any", agent._pcontext)
                    pcontext.subprocess_handlers[worker.local_rank] = handler
                    pcontext._running_local_ranks.add(worker.local_rank)  # torch took out a worker that exited with 0
                    worker.id = handler.proc.pid
                self._host.again.mark(handler.proc.pid, time.monotonic() + self._within_s, following.launch)
        self._host.watch(agent._workers())
        following = self._agree(workers, following)
        self._host.again.announce(replace(following, released=True))  # only now: all ranks are marked and watched

    def _start(self, rank: int) -> Any:
        pcontext, following = cast("Any", self._agent._pcontext), self._next
        (local_rank,) = (w.local_rank for w in self._agent._worker_group.workers if w.global_rank == rank)
        assert following is not None
        pcontext.envs[local_rank] = {**pcontext.envs[local_rank], **following.as_environment()}
        with forking(self._host.warm, (pcontext.stdouts[local_rank], pcontext.stderrs[local_rank])):
            args, env = pcontext.args[local_rank], pcontext.envs[local_rank]
            numa = getattr(pcontext, "_numa_options", None)  # torch 2.7 has none
            handler = start_worker(pcontext.entrypoint, args, env, local_rank, numa)
        if not isinstance(handler.proc, ForkedWorker):
            handler.proc.kill()
            raise RuntimeError("the process to fork from was lost; `ttp status` says why restarts are cold")
        return handler

    def _marked(self, workers: Workers) -> dict[int, float]:
        """Return pid -> deadline of workers released to go on that have begun no update yet; some may be dead."""
        return self._of(workers, self._host.again.marks())

    def _going(self, workers: Workers) -> dict[int, float]:
        """Return pid -> deadline of workers that still have to begin an update in the launch that is being filled."""
        return self._of(workers, self._host.again.marks(self._launch)) if self._filling else {}

    @staticmethod
    def _of(workers: Workers, marks: Mapping[int, float]) -> dict[int, float]:
        pids = {worker.pid for worker in workers.values()}
        return {pid: until for pid, until in marks.items() if pid in pids}
