"""Torch's elastic agent, extended to wait for workers that save.

``TtpAgent`` stops workers as ``LocalElasticAgent`` does, but later, and only if ranks have armed themselves (see
``ttp.launch.hold``). All additions of ttp fail open: an error in them is logged, and torch goes on as it would have
without ttp.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from collections.abc import Callable
from subprocess import Popen
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException

from ttp.errors import EXIT_TRAINED
from ttp.launch.deaths import ORDERLY_EXITS
from ttp.launch.held_signals import obey
from ttp.launch.host import Host
from ttp.launch.moved_ranks import MovedRanks, job_address, may_move
from ttp.launch.preparation import EXIT_FAILED, verdict
from ttp.launch.rendezvous import give_fresh_stores, keep_own_time, told_if_late
from ttp.launch.seats import Seats
from ttp.launch.shared_token import SharedToken
from ttp.launch.stand_by import Rescheduling, StandBy, is_dynamic, pass_barrier
from ttp.launch.torch_compat import forgive_replies, name_methods_quickly
from ttp.launch.warm.torch_workers import forking
from ttp.launch.worker_stops import GRACE_S, Workers

logger = logging.getLogger("ttp.launch")

IMPORTS_KEY = "ttp/imports"
"""Key in the store of a launch; its value is the list of modules that the ranks have imported."""
JOINS = "its launcher starts all ranks again, because a host wants to join the job"
OF_WORKERS = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": os.getenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")}
"""Variables that torch's agent gives to all workers alike."""


class TtpAgent(LocalElasticAgent):
    """A ``LocalElasticAgent`` that lets healthy ranks finish saving.

    Args:
        host: ttp's services for this host.
        token: the job's token, on which nodes agree once they have met.
        stand_by: True if this host waits until a host of the job is missing, and then takes its place.
        args: as ``LocalElasticAgent``.
        kwargs: as ``LocalElasticAgent``.
    """

    def __init__(self, *args: Any, host: Host, token: SharedToken, stand_by: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._fail_open(forgive_replies)
        self._fail_open(name_methods_quickly)
        self._host, self._token = host, token
        self._seats = Seats(self, host, host.config)
        self._said_in: Any = None
        self.job_code = EXIT_FAILED
        """Exit code of the whole job, valid after ``run``; that of this host's ranks if no controller answers."""
        spec: Any = self._worker_group.spec
        self._look_s, spec.monitor_interval = spec.monitor_interval, 0.0  # torch would sleep when one dies
        give_fresh_stores(spec)
        wait_s = host.config.reschedule_s
        self._moved = MovedRanks(spec, host) if stand_by and may_move() else None
        if is_dynamic(spec.rdzv_handler):
            self._fail_open(lambda: keep_own_time(spec.rdzv_handler))
        if stand_by:
            spec.rdzv_handler = StandBy(spec.rdzv_handler, wait_s, self._prepare, host.forms)
        elif is_dynamic(spec.rdzv_handler):
            spec.rdzv_handler = Rescheduling(spec.rdzv_handler, wait_s, host.forms)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the job as torch does; then end what ttp started, and set ``job_code``."""
        result = None
        try:
            result = super().run(*args, **kwargs) or RunResult(WorkerState.SUCCEEDED)  # None: it stood by to the end
            return result
        finally:
            trained = result is not None and not result.is_failed()
            self.job_code = EXIT_TRAINED if trained else verdict(self.exit_codes().values())
            self._fail_open(self._end)
            if isinstance(rendezvous := self._worker_group.spec.rdzv_handler, Rescheduling):
                self._fail_open(rendezvous.rest)
            if self._token.made_here:
                self._fail_open(self._host.forget_token)

    def _end(self) -> None:
        several_nodes = (self._worker_group.group_world_size or 1) > 1
        self.job_code = self._host.close(several_nodes, self.job_code)

    def exit_codes(self) -> dict[int, int]:
        """Return the exit codes of the workers of the last attempt by global rank; negative for a signal."""
        return {rank: code for rank, worker in self._workers().items() if (code := worker.poll()) is not None}

    @property
    def saved_before(self) -> bool:
        """Whether the launch before was saved, and no rank of this host has joined the job since."""
        return self._host.saved_before

    def _prepare(self, store: Any) -> None:
        """On a host that stands by, import ahead of need the modules that the ranks of the job have imported."""
        spec = self._worker_group.spec
        command = [str(spec.entrypoint), *(str(argument) for argument in spec.args)]
        self._fail_open(lambda: self._host.warm.prepare(command, os.environ | OF_WORKERS, _heard(store)))
        if self._moved is not None:
            self._fail_open(lambda: self._take_ranks(store))

    def _take_ranks(self, store: Any) -> None:
        """On a host that stands by, start the ranks of a drained host here, while the other hosts train on."""
        if self._moved is not None and (address := job_address(store)):
            self._moved.look(self._token.agree(store, first=False), address)

    def _rendezvous(self, worker_group: Any) -> None:
        """Meet the other hosts, and say so if that takes long."""
        tells = isinstance(worker_group.spec.rdzv_handler, Rescheduling)
        with contextlib.nullcontext() if tells else told_if_late():
            super()._rendezvous(worker_group)

    def _start_workers(self, worker_group: Any) -> Any:
        job = self._token.agree(worker_group.store, first=worker_group.group_rank == 0)
        self._host.use(job)
        os.environ["TTP_TOKEN"] = job.token  # for the workers, too
        self._host.before_workers(
            worker_group.master_addr,
            first_node=worker_group.group_rank == 0,
            world_size=_world_size(worker_group),
            here=len(worker_group.workers),
        )
        self._seats.begin()
        with forking(self._host.warm, together=True):
            ids = super()._start_workers(worker_group)
        self._fail_open(lambda: self._host.watch(self._workers()))
        return ids

    def _monitor_workers(self, worker_group: Any) -> Any:
        """Let the surviving workers save before torch stops them because a worker failed.

        This method must block while they save. If it returned HEALTHY meanwhile, torch would look for nodes that wait
        to join, and restart the workers.
        """
        self._fail_open(lambda: self._host.wait_for_a_death(self._look_s))
        workers = self._workers()
        self._fail_open(self._host.warm.look)
        self._fail_open(self._host.shadows.look)
        self._fail_open(lambda: self._seats.look(workers))
        self._fail_open(self._say_imports)
        self._fail_open(lambda: self._host.look(workers))
        if any(worker.poll() not in (None, 0) for worker in workers.values()):
            self._fail_open(self._host.warm.hurry)
            self._fail_open(lambda: self._hold(workers))
        result = super()._monitor_workers(worker_group)
        if result.is_failed():
            self._fail_open(lambda: self._forgo_restarts(worker_group))
        result.failures = _root_causes_first(result.failures)
        return result

    def _hold(self, workers: Workers) -> None:
        """Wait while the live workers save. Those that do not go on may be stopped when this returns."""
        self._seats.second_fault(workers)
        self._fail_open(lambda: self._seats.start_early(workers))
        if self._host.stops.hold(workers) or self._seats.others_go_on(workers):
            self._seats.fill(workers)
        if any(worker.poll() not in (None, 0) for worker in self._workers().values()):
            self._fail_open(lambda: self._host.stops.expect(workers))

    def _exit_barrier(self) -> None:
        """Wait for the other hosts at the end. If this host's ranks were moved to another host, do not wait."""
        rendezvous = self._worker_group.spec.rdzv_handler
        if isinstance(rendezvous, Rescheduling) and self._host.is_moved():
            logger.warning("the ranks of this host were moved to another host: this host leaves the job")
            self._fail_open(rendezvous.leave)
            self._fail_open(lambda: pass_barrier(self._store, self._worker_group.group_world_size or 1))
            return
        wait: Any = super()._exit_barrier
        within = f"the ranks of this host have ended; the wait ends after {self._exit_barrier_timeout:g} s at most"
        with told_if_late(lambda: within):
            wait()

    def _restart_workers(self, worker_group: Any) -> None:
        """Ask ranks to save if no worker has failed: torch then restarts them because a host wants to join."""
        if worker_group.state is WorkerState.HEALTHY:
            self._fail_open(lambda: self._seats.end(self._workers()))
            self._fail_open(lambda: self._host.say_why(self._workers(), JOINS))
            self._fail_open(lambda: self._host.stops.stop(self._workers(), signal.SIGTERM, GRACE_S))
        super()._restart_workers(worker_group)

    def _say_imports(self) -> None:
        """Tell hosts that stand by, once per launch, which modules the ranks have imported."""
        group: Any = self._worker_group
        if group.group_rank == 0 and (group.group_world_size or 1) > 1 and self._said_in is not group.store:
            imports = self._host.warm.imports()
            if imports:
                group.store.set(IMPORTS_KEY, imports)
                self._said_in = group.store

    def _forgo_restarts(self, worker_group: Any) -> None:
        """Set the number of restarts left to 0 if a restart cannot help.

        That is so if the program or the settings are wrong, if the job makes no progress, or if this host is drained.
        """
        if not self._host.restart_helps(self.exit_codes(), self._remaining_restarts):
            self._remaining_restarts = 0
        rendezvous = worker_group.spec.rdzv_handler
        if self._remaining_restarts and self._host.is_drained(or_another=rendezvous.get_backend() == "static"):
            self._remaining_restarts = 0
            if isinstance(rendezvous, Rescheduling):
                rendezvous.leave()

    def _shutdown(self, *args: Any, **kwargs: Any) -> None:
        """Let workers save, then stop them: after an operator's signal, a change of hosts (no signal), or an error."""
        workers = self._workers()
        self._fail_open(lambda: self._seats.end(workers))
        if args or "death_sig" in kwargs:
            how = args[0] if args else kwargs["death_sig"]
            grace_s = float(kwargs.get("timeout", GRACE_S))
            obey(lambda: self._fail_open(lambda: self._host.stops.stop(workers, how, grace_s)), SignalException)
        else:
            self._fail_open(lambda: self._host.stops.hold(workers))
        self._fail_open(lambda: self._host.stops.expect(workers))
        super()._shutdown(*args, **kwargs)

    def _workers(self) -> dict[int, Popen[Any]]:
        """Return worker processes by global rank; empty where torch runs them in another way (``--run-path``)."""
        handlers = getattr(self._pcontext, "subprocess_handlers", None) or {}
        ranks = {worker.local_rank: worker.global_rank for worker in self._worker_group.workers}
        return {ranks[local_rank]: handler.proc for local_rank, handler in handlers.items()}

    def _fail_open(self, action: Callable[[], object]) -> None:
        try:
            action()
        except SignalException:  # torch's sign that the agent got a signal
            raise
        except Exception:
            logger.exception("an error in ttp's part of the launcher: it goes on as torchrun does, without ttp's help")


def _heard(store: Any) -> bytes | None:
    """Return the modules that the ranks of this launch have imported; None: not known yet."""
    return bytes(store.get(IMPORTS_KEY)) if store.check([IMPORTS_KEY]) else None


def _world_size(worker_group: Any) -> int:
    """Return the number of ranks of the job; 0: torch does not say."""
    return int(next((worker.world_size for worker in worker_group.workers), 0) or 0)


def _root_causes_first(failures: dict[int, Any]) -> dict[int, Any]:
    """Move the failures of ranks that saved behind all others.

    torch reports the failure with the earliest time (in seconds) as the root cause, of several the first one. The time
    of a killed rank is that of its report, after the others have saved.
    """
    last = max((failure.timestamp for failure in failures.values()), default=0)
    for failure in failures.values():
        if failure.exitcode in ORDERLY_EXITS:
            failure.timestamp = last
    return dict(sorted(failures.items(), key=lambda item: (item[1].exitcode in ORDERLY_EXITS, item[0])))
