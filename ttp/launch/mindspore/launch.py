"""Runs a MindSpore job from its first start to its exit code."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType

from ttp.compat.mindio.placing import ours_counts
from ttp.config import Config
from ttp.errors import EXIT_TRAINED, ConfigError
from ttp.launch.admission import admitted
from ttp.launch.held_signals import obey, signals_held
from ttp.launch.host import Host
from ttp.launch.mindspore.environment import patience
from ttp.launch.mindspore.flags import LOOK_S, Job, parse, waiting_s, with_names
from ttp.launch.mindspore.processes import Processes
from ttp.launch.ports import hold_port
from ttp.launch.preparation import EXIT_FAILED, Launch, verdict
from ttp.launch.presence import port_owner
from ttp.launch.worker_stops import GRACE_S
from ttp.polling import poll
from ttp.store.plain_file import read_plain
from ttp.wire.address import resolve

logger = logging.getLogger("ttp.launch")

SCHEDULER_GRACE_S = 20.0
"""Seconds for the scheduler to leave by itself after the last worker."""

RESTART_PATIENCE_S = 30.0
"""Seconds that a restart waits for the port of the scheduler, and for the name service."""

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Interrupted(BaseException):
    """The launcher got a signal. Raised by the signal handler, at any point."""

    def __init__(self, how: signal.Signals) -> None:
        super().__init__(how.name)
        self.sigval = how


@contextlib.contextmanager
def _interrupting() -> Iterator[None]:
    """Raise ``Interrupted`` for signals while the block runs. ``nohup`` keeps its effect: SIGHUP stays ignored."""
    ignored = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else set()
    before = {how: signal.signal(how, _interrupt) for how in SIGNALS if how not in ignored}
    try:
        yield
    finally:
        for how, handler in before.items():
            signal.signal(how, handler)


def _interrupt(number: int, _: FrameType | None) -> None:
    raise Interrupted(signal.Signals(number))


class MindSporeLaunch(Launch):
    """A MindSpore job on this host. Other hosts are told nothing: the scheduler, where they meet, passes no message on.

    Args:
        argv: command line, with ``--mindspore``.

    Raises:
        ConfigError: the command line contradicts itself.
        SystemExit: argparse printed its help, or an error.
    """

    def __init__(self, argv: list[str]) -> None:
        self._argv, self._job = argv, parse(argv)
        super().__init__(self._job, several_nodes=self._job.several_nodes)

    def run(self, config: Config) -> int:
        """Launch the job, again after failures while restarts are left, and return the exit code."""
        config, _ = admitted(config, self._job.master_addr, several=self.several_nodes)
        host = Host(config, config.resolved_run_dir())
        codes = [EXIT_FAILED]
        renamed = (self.mindio or config.mindio) and ours_counts(config.mindio)
        job = replace(self._job, command=with_names(self._job.command)) if renamed else self._job
        starts = _Starts(job, self._argv, config, host)
        with _interrupting():
            try:
                codes[0] = starts.run()
            except Interrupted as signalled:
                logger.warning("the job was ended by %s", signalled.sigval.name)
                codes[0] = verdict(starts.codes.values())
            finally:
                with contextlib.suppress(Interrupted):  # while it waits for other hosts
                    _fail_open(lambda: codes.append(host.close(self.several_nodes, codes[0])))
        return codes[-1]


class _Starts:
    """The starts of a job, one after the other."""

    def __init__(self, job: Job, argv: list[str], config: Config, host: Host) -> None:
        self._job, self._argv, self._host = job, argv, host
        self._log_dir = job.log_dir or config.resolved_run_dir()
        self._run_id = os.environ.get("TORCHELASTIC_RUN_ID") or _run_id(job)
        self._environ = dict(os.environ)
        added, warnings = patience(os.environ, config.rescue_patience_s, job.local_size)
        self._environ |= added
        for warning in warnings:
            logger.warning("%s", warning)
        self.codes: dict[int, int] = {}

    def run(self) -> int:
        for launch in range(self._job.max_restarts + 1):
            before = self.codes
            try:
                if self._start(launch):
                    return EXIT_TRAINED
            except ConfigError as problem:
                if not launch:
                    raise
                logger.error("the job is not started again here: %s", problem)
                return verdict(before.values())  # of the launch that has ended, which may have saved the job
            left = self._job.max_restarts - launch
            if not self._host.restart_helps(self.codes, left):
                break
            if left and self._host.is_drained(or_another=not self._job.rank_table):  # a new table may have new hosts
                break
            if left and not self._laid_out_again():
                break
            if left:
                logger.warning("the job is started again (%d more)", left)
        return verdict(self.codes.values())

    def _laid_out_again(self) -> bool:
        """Read the rank table again: it may have other hosts and devices. Returns False if the job cannot follow it."""
        if not self._job.rank_table:
            return True
        try:
            job = parse(self._argv, os.environ, self._job.table_version if _new_table(self._job.restart_type) else -1)
        except ConfigError as problem:
            logger.error("the job is not started again here: %s", problem)
            return False
        if (job.world_size, job.node_rank) != (self._job.world_size, self._job.node_rank):
            was = f"{self._job.world_size} ranks and this host as number {self._job.node_rank}"
            now = f"{job.world_size} and {job.node_rank}"
            logger.error("the job is not started again here: the rank table had %s, and now has %s", was, now)
            return False
        self._job = replace(job, command=self._job.command)
        return True

    def _start(self, launch: int) -> bool:
        """Start the job once and wait for its end. Returns whether all workers of this host trained to the end."""
        patience_s = RESTART_PATIENCE_S if launch else 0.0
        named_s = patience_s
        if self._job.several_nodes:  # a pod's name comes with it
            named_s = max(patience_s, waiting_s(self._job.topology_s))
        with self._port(patience_s) as port:
            return self._start_at((_number_of(self._job.master_addr, named_s), port), launch)

    def _start_at(self, address: tuple[str, int], launch: int) -> bool:
        job = self._job
        self._host.before_workers(
            job.master_addr, first_node=job.node_rank == 0, world_size=job.world_size, here=job.local_size
        )
        processes = Processes(job, self._environ, self._log_dir, self._host.warm)
        try:
            with signals_held():
                processes.start(address, self._run_id, launch)
            _fail_open(lambda: self._host.watch(processes.workers))
            trained = self._wait(processes)
            if trained:
                processes.stop_scheduler(SCHEDULER_GRACE_S)
            else:
                _fail_open(lambda: self._host.stops.hold(processes.workers))
            return trained
        except Interrupted:  # SIGTERM in any case: at SIGINT a handler of MindSpore's ends workers at once
            obey(lambda: _fail_open(lambda: self._stop(processes)), Interrupted)
            raise
        finally:
            with signals_held():  # a repeated signal must leave no worker behind, nor lose the exit codes
                _fail_open(lambda: self._host.stops.expect(processes.workers))
                processes.stop()
                self.codes = self._codes_of(processes)

    def _wait(self, processes: Processes) -> bool:
        """Wait until all workers have ended well (True), or one has not, or none can go on (False)."""
        while True:
            codes = self._codes_of(processes)
            bad = {rank: code for rank, code in codes.items() if code != EXIT_TRAINED}
            _fail_open(self._host.warm.hurry if bad else self._host.warm.look)
            if bad or len(codes) == len(processes.workers):
                return not bad
            lost = processes.scheduler is not None and processes.scheduler.poll() not in (None, 0)
            if lost and not codes:  # once a worker has trained to the end, the scheduler is about to leave anyway
                return self._lost_scheduler(processes)
            time.sleep(self._job.look_s)

    def _codes_of(self, processes: Processes) -> dict[int, int]:
        """Return exit codes of the workers; 0 for a crash in MindSpore's threads after the program had ended."""
        _fail_open(lambda: self._host.look(processes.workers))
        return processes.codes()

    def _lost_scheduler(self, processes: Processes) -> bool:
        """Let the workers save after the scheduler was lost, as MindSpore ends them seconds later. Returns False."""
        assert processes.scheduler is not None
        logger.error(
            "the scheduler ended with %s, and MindSpore's workers cannot go on without one\n%s",
            processes.scheduler.returncode,
            processes.scheduler_tail(),
        )
        _fail_open(lambda: self._stop(processes))
        return False

    def _stop(self, processes: Processes) -> None:
        self._host.stops.stop(processes.workers, signal.SIGTERM, GRACE_S)

    @contextlib.contextmanager
    def _port(self, patience_s: float) -> Iterator[int]:
        """Yield the scheduler's port. A free one is held until the start is over, so that no other program gets it.

        Waits up to ``patience_s`` seconds for a given port that is still in use by the remains of the last start.

        Raises:
            ConfigError: another program has the port.
        """
        if self._job.master_port is None:
            with hold_port() as holding:
                yield int(holding.getsockname()[1])
            return
        port = self._job.master_port
        if self._job.node_rank == 0 and not poll(lambda: _can_listen(port), patience_s, LOOK_S):
            owner = port_owner(port) or "a process that cannot be seen"
            raise ConfigError(f"port {port} is in use ({owner}): choose another --master-port, on all hosts")
        yield port


def _new_table(restart_type: Path) -> bool:
    """Return whether MindCluster says that pods were replaced, and with them the rank table."""
    try:
        return read_plain(restart_type, 64).strip() == b"podReschedule"
    except OSError:
        return False


def _run_id(job: Job) -> str:
    """Return the run id: equal on all hosts of a job; on one host a new one for each job."""
    return f"msrun-{job.master_addr}-{job.master_port}" if job.several_nodes else f"msrun-{secrets.token_hex(6)}"


def _number_of(address: str, patience_s: float) -> str:
    """Return the numeric address of a host: MindSpore takes no names.

    Raises:
        ConfigError: the name service gives none within ``patience_s`` seconds.
    """
    deadline_s = time.monotonic() + patience_s
    while True:
        try:
            return str(resolve(address, None)[0][4][0])
        except OSError as problem:
            if time.monotonic() >= deadline_s:
                raise ConfigError(f"--master-addr {address!r:.100} cannot be resolved: {problem}") from None
        time.sleep(LOOK_S)


def _can_listen(port: int) -> bool:
    try:
        socket.create_server(("", port)).close()
    except OSError:
        return False
    return True


def _fail_open(action: Callable[[], object]) -> None:
    try:
        action()
    except Exception:
        logger.exception("ttp cannot protect this job on this host; the job runs without ttp")
