"""What ttp does in the launcher of one host: relay, controller, death reports, waiting for saves. Imports no torch."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ttp.config import Config
from ttp.errors import EXIT_BAD_CONFIG, EXIT_NOT_SAVED, EXIT_SAVED, EXIT_TRAINED, ConfigError, TtpError
from ttp.launch.again import Again
from ttp.launch.controller_keeper import ControllerKeeper
from ttp.launch.dead_pages import DeadPages
from ttp.launch.early_failures import STARTS_S, EarlyFailures
from ttp.launch.fault_report import FaultReporter
from ttp.launch.job_verdict import ask_verdict, say_start, settled_code
from ttp.launch.leases import Leases
from ttp.launch.other_jobs import is_of_another_job
from ttp.launch.presence import ask, is_local
from ttp.launch.relay_file import wanted
from ttp.launch.ring import ask_everybody, forget_ring, job_is_busy, places, read_ring, reigning, rescue_goes_on
from ttp.launch.run_dir import forget_launcher, note_launcher
from ttp.launch.sentinel_watch import SentinelWatch
from ttp.launch.shadow import Shadows
from ttp.launch.token_file import forget_token, write_token
from ttp.launch.warm.starter import WarmStarter
from ttp.launch.worker_stops import LOOK_S, Workers, WorkerStops
from ttp.launch.worker_watch import WorkerWatch, killed_together
from ttp.polling import poll
from ttp.processor.liveness.sentinel_reader import REASON
from ttp.wire.address import target

if TYPE_CHECKING:
    from ttp.launch.relay import RelayServer

logger = logging.getLogger("ttp.launch")

_WAITED_FOR = (
    "rank %s ended with exit code 0 before it had joined the job, which had trained before this restart. The others "
    "may be waiting for it until the time-out of their process group, minutes later: if so, end the job, and let every "
    "rank of a restart come as far as ttp.restore()"
)

_STARTS_LONG = (
    "no rank of this host has joined the job in the %.0f s since the start: they still load, or wait for ranks of "
    "another host. If that is lost, end the job on all hosts with SIGTERM and start it again; what was saved stays"
)

ALL_AT_ONCE = (
    "if memory runs out in %s, the kernel kills everything there (memory.oom.group), launcher and ranks, as if this "
    "host were lost: ranks of other hosts save, none here. Kubelets with singleProcessOOMKill leave the others alive"
)

SAY_WHY_S = 1.0
"""Seconds that a controller may take to hear why workers are stopped."""
OTHERS_S = 10.0
"""Seconds for which the first node keeps the controller so that launchers of other hosts can ask it for the verdict."""


class Host:
    """Reports deaths and pages of the dead; on the first node, keeps the controller. Workers end through ``stops``.

    Args:
        config: settings; ``config.port`` is set.
        run_dir: prepared by ``prepare_run_dir``.
    """

    def __init__(self, config: Config, run_dir: Path) -> None:
        self.config = config
        self._run_dir = run_dir
        self.leases = Leases(run_dir)
        self._keeper = ControllerKeeper(config, run_dir)
        self._keeps = self._several = False
        self._sentinels = SentinelWatch(run_dir)
        self._watch = WorkerWatch(self._sentinels.shows_death)
        self._reporter: FaultReporter | None = None
        self._address = ""
        self._relay: RelayServer | None = None
        self._early = EarlyFailures()
        self.warm = WarmStarter(config, run_dir)
        self.again = Again(run_dir)
        self.shadows = Shadows(run_dir)
        self.stops = WorkerStops(self.leases, self.again, self._watch, config.rescue_patience_s)
        self.seat: Callable[[], str] = lambda: ""
        """Returns whether a dead worker can be started alone; see ``ttp.core.controller.continuing``. Thread safe."""
        self.saved_before = False
        """Whether the launch before was saved, and no rank of this host has joined the job since."""
        self.leases.sweep()
        note_launcher(run_dir)
        if group := killed_together():
            logger.info(ALL_AT_ONCE, group)
        self._too_early = is_of_another_job(run_dir, config.token, config.port or 0)
        if not self._too_early:
            forget_ring(run_dir)

    def use(self, config: Config) -> None:
        """Use the settings that the launchers have agreed on. Writes the token file for commands on this host.

        Raises:
            ConfigError: the token cannot be written.
        """
        if config.token and config.token != self.config.token:
            write_token(self._run_dir, config.token)
        self.config = config
        self._keeper.use(config)

    def forget_token(self) -> None:
        """Remove the token file: the job is over, and the token was made for it alone."""
        forget_token(self._run_dir, self.config.token)

    def before_workers(self, address: str, first_node: bool, world_size: int = 0, here: int = 0) -> None:
        """Start the relay and, on the first node, the controller. Call it before each start of workers.

        A host that is the first node no more ends its controller.

        Args:
            address: the job's MASTER_ADDR.
            first_node: this host runs the controller.
            world_size: number of ranks of the job; 0: not known.
            here: number of ranks of this host; 0: not known.

        Raises:
            ConfigError: at the first start, if this is the first node and no controller can serve. Later this is only
                logged: training without protection is better than none.
        """
        self.leases.sweep()
        self.again.clear()
        self._early.begins(time.monotonic())
        self._several = world_size > here
        first_start, self._address = not self._address, address
        self._keep_relay(world_size, here)
        try:
            if first_node:
                self._keeper.start(address)
                self._keeps = True
            elif self._keeps and not is_local(address):  # another launcher of this machine would share the controller
                self._keeper.stop()  # the new first node has one; this one would keep the ports of job and metrics
                self._keeper, self._keeps = ControllerKeeper(self.config, self._run_dir), False
            if self._too_early:  # the other job has ended meanwhile: no controller could be started before
                self._too_early = False
                forget_ring(self._run_dir)
                note_launcher(self._run_dir)  # that of the other job has removed its own
                if self.config.token:
                    write_token(self._run_dir, self.config.token)
        except ConfigError as problem:
            if first_start:
                raise
            logger.error("the job restarts without a controller: a failure would lose steps. %s", problem)
        if not first_start:
            say_start(self._places(), self.config.token, self._name)

    def _keep_relay(self, world_size: int, here: int) -> None:
        """Start the relay of this host if one is wanted. If that fails, ranks connect by themselves."""
        if self._relay is not None or not wanted(self.config, world_size, here):
            return
        from ttp.launch.relay import RelayServer

        try:
            self._relay = RelayServer(self.config, self._run_dir)
        except (OSError, RuntimeError, ValueError, TtpError) as problem:
            logger.warning(
                "cannot start a relay on this host, its ranks connect to the controller directly: %s", problem
            )

    def watch(self, workers: Workers) -> None:
        """Report deaths of these workers from now on."""
        pids = {rank: worker.pid for rank, worker in workers.items()}
        pages, token = DeadPages(self._run_dir, pids), self.config.token
        if self._reporter is None or not self._reporter.goes_on(self._home, token, pages.after):
            if self._reporter is not None:
                self._reporter.close()
            self._reporter = FaultReporter(self._places, self._home, token, pages.after, self.seat)
        self._watch.watch(workers, self._reporter)
        self._sentinels.watch(pids, self._on_death)

    def say_why(self, ranks: Collection[int], why: str) -> None:
        """Tell the controller why these ranks are about to be stopped; it would only learn that SIGTERM was sent."""
        from ttp.wire.v1 import controller_pb2 as wire

        told = wire.ReportFaultRequest(ranks=list(ranks), reason=why, kind=wire.FAULT_KIND_PREEMPTED)
        token, ends = self.config.token, time.monotonic() + SAY_WHY_S
        asked = ask_everybody(
            self._places(), lambda host, port: ask(host, port, token, "ReportFault", told, SAY_WHY_S), lambda: ends
        )
        any(answer.accused for _, answer in asked)  # until one that leads has heard it

    def wait_for_a_death(self, timeout_s: float) -> None:
        """Return at once when a worker ends, else after ``timeout_s`` seconds."""
        self._watch.died.wait(timeout_s)
        self._watch.died.clear()

    def forms(self) -> bool:
        """Return whether the ranks of this host are still starting, so that the loss of another host ends no rank."""
        return self._early.forms(time.monotonic(), self.leases.used())

    def look(self, workers: Workers) -> None:
        """Keep the files of the job. Give workers that crashed after their program, in a library, the exit code 0.

        Tell once in a launch that its ranks may be waiting for those of another host, or for some that have left.
        """
        self.leases.keep()
        self.saved_before = self.saved_before and not self.leases.used()
        ended = [str(rank) for rank, worker in workers.items() if worker.poll() == EXIT_TRAINED]
        left = 0 < len(ended) < len(workers) and not self.leases.used()
        if self._early.keeps_waiting(time.monotonic(), left):
            logger.warning(_WAITED_FOR, ", ".join(ended))
        if self._several and self._early.is_late(time.monotonic()) and self.forms():
            logger.info(_STARTS_LONG, STARTS_S)
        for rank, worker in workers.items():
            if (code := worker.poll() or 0) < 0 and self.leases.has_ended(worker.pid):
                text = "rank %d had trained to its end when signal %d killed it: that counts as trained"
                logger.warning(text, rank, -code)
                worker.returncode = EXIT_TRAINED

    def restart_helps(self, codes: Mapping[int, int], left: int) -> bool:
        """Return whether to start the ranks again. It does not help a wrong program, or a job that makes no progress.

        Args:
            codes: exit codes of the ranks of this host that have ended, by rank.
            left: number of restarts left. If none, only launches without progress are told and counted.
        """
        wrong = [rank for rank, code in codes.items() if code == EXIT_BAD_CONFIG]
        if wrong and left:
            text = "rank %d exited with %d and its message says what to change: the job is not restarted"
            logger.error(text, wrong[0], EXIT_BAD_CONFIG)
        if wrong or self._starts_in_vain(codes.values()):
            return False
        self.saved_before = EXIT_SAVED in codes.values()  # ``is_drained`` hears what became of the whole job
        answer = self._verdict() if left and EXIT_NOT_SAVED in codes.values() else None
        if answer is None or not answer.final:
            return True
        logger.error("the job is not started again: %s", answer.text)
        return False

    def _starts_in_vain(self, codes: Collection[int]) -> bool:
        """Return whether a launch that has failed is the last of several in a row in which not all ranks had joined."""
        found = reigning(self._places(), self.config.token) if self._address else None
        self._early.failed(time.monotonic(), None if found is None else found[1], codes)
        if self._early.enough:
            logger.error(
                "the job is not started again: no progress: launch %d in a row has failed before all ranks had joined "
                "the job; starting again does not help until the cause is removed, which the output of the ranks names",
                self._early.in_a_row,
            )
        return self._early.enough

    def is_drained(self, *, or_another: bool = False) -> bool:
        """Return whether an operator has drained this host, so that its launcher has to start no ranks again.

        Args:
            or_another: whether another drained host counts, too, because no host can take its place.
        """
        answer = self._verdict()
        drained = () if answer is None else answer.drained
        if answer is not None and answer.HasField("code"):
            self.saved_before = answer.code == EXIT_SAVED
        if self._name in drained:
            logger.warning("this host is drained: it leaves the job")
        elif drained and or_another:
            logger.warning("a host is drained, and none can take its place: the job is not started again here")
        return bool(drained) if or_another else self._name in drained

    def is_moved(self) -> bool:
        """Return whether this host was drained before the job was over, so that its ranks are on another host."""
        answer = self._verdict()
        over = answer is not None and answer.HasField("code") and answer.code == EXIT_TRAINED
        return answer is not None and self._name in answer.drained and not over

    def _verdict(self) -> Any:
        """Return the job's verdict, as ``ask_verdict`` does; None also before this host has started ranks."""
        return ask_verdict(self._places(), self.config.token, "", EXIT_TRAINED) if self._address else None

    def close(self, several_nodes: bool, code: int) -> int:
        """End what was started for the job. With several nodes the controller is kept until no launcher needs it.

        Args:
            several_nodes: the job has several hosts.
            code: exit code by the ranks of this host.

        Returns:
            The exit code of the whole job, after a rescue, if a controller answers within ``ASK_S``, else ``code``. It
            is 70 instead of 75 if a checkpoint in memory could not be copied to the storage, and if it started in vain.
        """
        if self._early.enough and code not in (EXIT_TRAINED, EXIT_BAD_CONFIG):
            code = EXIT_NOT_SAVED
        try:  # a signal may come meanwhile, and the controller must not stay
            self.warm.close()
            self._watch.close()
            self._sentinels.close()
            if self._reporter is not None:
                self._reporter.close()
            patience_s = self.config.rescue_patience_s
            if several_nodes and self._address:  # all ranks of this node may have died while others save
                goes_on = job_is_busy if self._keeps else rescue_goes_on
                poll(lambda: not goes_on(self._places(), self.config.token), patience_s, LOOK_S * 10)
            code = self._ask_verdict(several_nodes, code)
            durable = self.shadows.wait(patience_s)
            saved = code == EXIT_SAVED or (self.saved_before and code not in (EXIT_TRAINED, EXIT_BAD_CONFIG))
            return EXIT_NOT_SAVED if saved and not durable else code
        finally:
            forget_launcher(self._run_dir)
            self._keeper.stop()
            if self._relay is not None:
                self._relay.close()
            self.leases.sweep()

    def _ask_verdict(self, several_nodes: bool, code: int) -> int:
        """Return the job's exit code. The first node waits until the other launchers have asked for theirs."""
        if not self._address:
            return code
        deadline_s = time.monotonic() + OTHERS_S
        answer = last = ask_verdict(self._places(), self.config.token, self._name, code)
        while self._keeps and several_nodes and answer is not None and answer.hosts and time.monotonic() < deadline_s:
            time.sleep(LOOK_S * 10)
            answer = ask_verdict(self._places(), self.config.token, self._name, code)
            last = last if answer is None else answer
        return settled_code(code, last, read_ring(self._run_dir))

    @property
    def _name(self) -> str:
        return self.config.host or socket.gethostname()

    def _on_death(self, rank: int, pid: int) -> None:
        """Report a death at once, before the kernel has freed the memory. ``WorkerWatch`` reports later how it died."""
        if self._reporter is not None and not self._watch.expects(pid):
            self._reporter.exited(rank, pid, REASON)

    @property
    def _home(self) -> str:
        assert self.config.port is not None
        return target(self._address, self.config.port)

    def _places(self) -> tuple[str, ...]:
        """Return the places (``host:port``) where the job's controller may be now."""
        return places(self._run_dir, self._home)
