"""The driver of ``ProcessorMachine`` inside a rank: one thread owns the machine, edges fill its inbox.

Threads: the owner (``ttp-processor``), the stream's reader, one that looks at the state of a closed gate, one saver for
slow disk work (left behind for a fresh one if it hangs), short-lived ones for what others ask of this rank. None of
them ever takes a lock that the training thread waits for, except for the two words of the gate.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ttp.config import Config, RankEnv
from ttp.core import messages as m
from ttp.core.controller.layout_exchange import in_parts
from ttp.core.layout import Layout, Rank, Version
from ttp.core.rank import actions as act
from ttp.core.rank import events as ev
from ttp.core.rank.machine import ProcessorMachine
from ttp.core.rank.program import RankProgram
from ttp.errors import ConfigError, RefusedError, RestoreError, TtpError
from ttp.launch.leases import Leases
from ttp.launch.standby import own_address, reachable, start_standby
from ttp.mindio.protocol.rank_side import NoHandlers
from ttp.processor.copies.copier import Copying
from ttp.processor.copies.transfer import Receiver
from ttp.processor.gate.gate import Gate
from ttp.processor.link.connecting import JOIN_PATIENCE_S, ControllerLink
from ttp.processor.link.greeting import hello, timeouts
from ttp.processor.liveness import stacks
from ttp.processor.liveness.host_services import HostServices
from ttp.processor.saver import Saver
from ttp.processor.serial_worker import SerialWorker
from ttp.processor.source import StateSource
from ttp.processor.state_inspector import Snapshot, StateInspector
from ttp.wire.address import target

log = logging.getLogger("ttp.processor")

EXIT_S = 10.0
"""How long a last word may take."""

LEASE_S = 1.0
"""How long a process that leaves waits for its lease to be taken back."""

STACK_S = 3.0
"""How long a process that hangs may take to say where its threads are."""


class Processor:
    """Speaks for this rank, owns its gate, saves when told to.

    Args:
        config: the job's settings.
        env: who this rank is.
        layout: the replica groups, equal on all ranks.
        source: the adapter that can write the state.
        save_dir: where checkpoints go.
        version: finished updates at the start.
        buddy: keep second copies where a shard has only one; see ``ttp.core.replication``.
    """

    incarnation = 0
    mark = 0
    """Point of the step that the training thread has passed; see ``Heartbeat``."""
    activity = ""
    """What it does instead of training, on purpose."""
    written = 0
    """Bytes written by the saver so far; only ever compared with itself."""
    before_exit: Callable[[], None] | None = None
    """Called before the process is ended by order; on a thread of its own, for ``EXIT_S`` at most."""

    def __init__(
        self,
        config: Config,
        env: RankEnv,
        layout: Layout,
        source: StateSource,
        save_dir: str,
        version: int = 0,
        *,
        buddy: bool = False,
    ) -> None:
        if layout.world_size != env.world_size:
            raise ConfigError(f"the layout is for {layout.world_size} ranks, WORLD_SIZE is {env.world_size}")
        self.config, self.env, self.layout, self.source = config, env, layout, source
        self.save_dir = Path(save_dir)
        self.gate = Gate(lambda: self._looker.on_quiet(bool(self._machine.incident)))
        self.gate.set_version(Version(version))
        self.run_dir = config.resolved_run_dir()
        self._leases = Leases(self.run_dir)
        # the run directory may hang, and the gate has to close all the same
        self._lease_writer = SerialWorker("ttp-lease")
        self._inbox: queue.SimpleQueue[ev.Event | Snapshot] = queue.SimpleQueue()
        put = self._inbox.put
        self._receiver: Receiver | None = None
        self.copying: Copying | None = None
        at = self._keep_for_others(copies=buddy and bool(layout.unreplicated()))
        greeting = hello(config, env, layout, source, save_dir, version, *at)
        self._machine = ProcessorMachine(greeting, timeouts(config, env), time.monotonic(), in_parts(layout))
        self.speak_for(NoHandlers(), lambda action: None)
        self._line = ControllerLink(
            config, env, self.run_dir, put=put, joining=self._joining, over=self._over, fail=self._cannot_join
        )
        self.company = HostServices(config, env, self.run_dir, nonce=greeting.nonce, died=self.neighbour_died)
        if self._receiver is not None and config.mirror:
            self._receiver.keep = self.company.keep
        self._looker = StateInspector(source, self.gate, self.copying.held if self.copying is not None else tuple, put)
        self._saver = self._make_saver()
        self._joined = threading.Event()
        self._problem: TtpError | None = None
        self._started = False  # the training thread does not wait for the controller any more
        self._decision: queue.SimpleQueue[m.RestoreDecision] = queue.SimpleQueue()
        self._let_go: concurrent.futures.Future[bool] = concurrent.futures.Future()
        self._closed = False
        self._exit_code: int | None = None
        self.on_death: Callable[[], None] = lambda: None
        """Called when a neighbour has died, on any thread; must not block."""
        self._thread = threading.Thread(target=self._run, name="ttp-processor", daemon=True)

    # --------------------------------------------------------------------------------------------- for the main thread

    def start(self) -> None:
        """Join the job.

        Raises:
            ConfigError: the port belongs to something else.
            RefusedError: the controller does not accept this rank; the text says why.
        """
        self._leases.arm(os.getpid())
        self.company.show_stacks()
        self._thread.start()
        if not self._joined.wait(JOIN_PATIENCE_S):
            self._started = True
            log.error(
                "%s: training begins UNPROTECTED (restore() waits as long again, then refuses); ttp keeps trying",
                self._unjoined(),
            )
        if self._problem is not None:
            self._leases.disarm(os.getpid())
            raise self._problem
        self._started = True

    def _unjoined(self) -> str:
        return f"no controller at {self.env.master_addr}:{self.config.port} for {JOIN_PATIENCE_S:g} s"

    @property
    def page_dir(self) -> Path | None:
        """Where ranks of this host show that they live, and may share memory; None before this rank has joined."""
        return self.company.pages.path if self.company.pages is not None else None

    def begin_update(self, again: bool = False) -> None:
        """See ``UpdateReporter``."""
        if self.copying is not None:
            self.copying.hold()
        self.gate.begin_update(again)

    def leave_update(self) -> None:
        """See ``UpdateReporter``."""
        self.gate.leave_update()

    def stand_between(self) -> None:
        """See ``UpdateReporter``."""
        self.gate.stand_between()

    def end_update(self) -> None:
        """See ``UpdateReporter``."""
        self.gate.end_update()
        if self.copying is not None:
            self.copying.updated(self.gate.version)

    def end_update_at(self, version: Version) -> None:
        """Like ``end_update``, for programs that number their versions themselves."""
        self.gate.end_update(version)
        if self.copying is not None:
            self.copying.updated(version)

    def tidy_after(self, checkpoint: Path) -> None:
        """This checkpoint has been restored, after all of its digests were found right: older ones may go."""
        if self.env.rank == 0:
            self._saver.tidy(checkpoint.parent, self.config.keep, checkpoint.name, verified=True)

    def set_base_version(self, version: Version) -> None:
        """The state was restored to ``version``."""
        self.gate.set_version(version)
        self._inbox.put(ev.Based(version))

    def agree_on_restore(
        self, candidates: tuple[m.Candidate, ...], skipped: tuple[str, ...], readings: tuple[m.Reading, ...]
    ) -> m.RestoreDecision:
        """Tell the controller what this rank found, wait for what all ranks have in common.

        Raises:
            ConfigError: what the job has committed has vanished, or no controller can be reached.
            RefusedError: the controller does not accept this rank.
            RestoreError: nothing in common, or the other ranks did not ask within ``TTP_RESTORE_S``.
        """
        if not self._joined.wait(JOIN_PATIENCE_S):  # the other ranks may have one: without it nobody agrees with them
            raise ConfigError(
                f"{self._unjoined()}, twice: restore() cannot agree with the other ranks. Snapshot at MASTER_ADDR, "
                "TTP_PORT and what is between this host and that one, and at the controller's log there"
            )
        if self._problem is not None:
            raise self._problem
        self._inbox.put(ev.RestoreWanted(candidates, skipped, readings))
        try:
            decision = self._decision.get(timeout=self.config.restore_patience_s)
        except queue.Empty:
            raise RestoreError(
                f"restore() waited {self.config.restore_patience_s:g} s (TTP_RESTORE_S) for the other ranks: "
                "every rank must call ttp.restore()"
            ) from None
        if decision.error:
            raise ConfigError(decision.error) if decision.version else RestoreError(decision.error)
        return decision

    def report(self, kind: m.FaultKind, text: str, detail: str = "", then: int | None = None) -> None:
        """This rank cannot train on. May be called from any thread.

        Args:
            kind: of fault.
            text: what happened.
            detail: more of it.
            then: exit code of this process after the rescue, whatever came of it; None: as the controller says.
        """
        self._exit_code = then
        self.gate.mark_torn()
        self._inbox.put(ev.Raised(kind, text, detail))

    def speak_for(self, program: RankProgram, perform: Callable[[act.ProgramAction], None]) -> None:
        """The program saves and repairs itself. Before ``start``; ``perform`` must not block."""
        self._machine.program, self._perform_program = program, perform

    def tell(self, event: ev.ProgramEvent) -> None:
        """Something happened that the program's own recovery has to know. May be called from any thread."""
        self._inbox.put(event)

    def exit_with(self, code: int | None) -> None:
        """Exit code of this process after a release; None: as the controller says."""
        self._exit_code = code

    def wait_let_go(self, timeout_s: float) -> bool:
        """Whether nothing more comes from the controller; waits for that."""
        with contextlib.suppress(concurrent.futures.TimeoutError):
            self._let_go.result(timeout=timeout_s)
        return self._let_go.done() or self._closed

    def say(self) -> None:
        """Tell the controller now, not with the next beat, what this rank does."""
        self._inbox.put(replace(self._observed(), urgent=True))

    def neighbour_died(self, rank: int, nonce: str, text: str) -> None:
        """Another process of this host has ended. May be called from any thread."""
        self._inbox.put(ev.NeighbourDied(Rank(rank), nonce, text))
        self.on_death()

    def report_preemption(self, text: str) -> None:
        """A signal asked this process to end; unlike an exception it leaves a running update alone."""
        self._inbox.put(ev.Raised(m.FaultKind.PREEMPTED, text))

    def wait_released(self) -> None:
        """After ``report``: wait for the rescue. Returns only if nobody came; else the process exits in here."""
        _wait(self._let_go)

    def leave(self, reason: m.GoodbyeReason) -> None:
        """train() is over: wait until it is over for every rank (or nobody can tell), then close."""
        if self._problem is None and not self._closed:
            self.gate.mark_done()
            self._inbox.put(ev.Observed(self.gate.version, m.Phase.DONE))
            self._inbox.put(ev.Returned(reason))
            _wait(self._let_go)
        self.close()

    def close(self) -> None:
        """Let go of the stream, the page and the lease."""
        if self._closed:
            return
        self._closed = True
        self._lease_writer.submit(lambda: self._leases.disarm(os.getpid()))
        self._lease_writer.wait_done(LEASE_S)
        self._lease_writer.close()
        self._inbox.put(ev.Observed(self.gate.version, m.Phase.DONE))
        self._line.finish(timeout_s=1.0)
        self._saver.close()
        self._looker.close()
        self.company.stop()
        if self.copying is not None:
            self.copying.close()
        elif self._receiver is not None:
            self._receiver.close()
        self._close_source()

    # ------------------------------------------------------------------------------------------------ the owner thread

    def _run(self) -> None:
        while not (self._closed or self._machine.gone):
            try:
                event = self._next_event()
                if isinstance(event, Snapshot):
                    if event.closure != self.gate.state().closure:
                        continue  # the gate was open in between
                    event = event.quiet
                for action in self._machine.on_event(event, time.monotonic()):
                    self._try(action)
            except Exception:  # whatever happens here, training goes on
                log.exception("the processor stumbled; training is not affected")

    def _try(self, action: act.Action) -> None:
        """One that fails keeps none of those after it from being done."""
        try:
            self._perform(action)
        except Exception as problem:
            log.exception("%s could not be done; training is not affected", type(action).__name__)
            self._not_done(action, repr(problem))

    def _not_done(self, action: act.Action, text: str) -> None:
        """So that it is tried again, or somebody else does it: a thread that cannot be started does nothing."""
        match action:
            case act.Connect():
                self._inbox.put(ev.StreamDown(text))
            case act.StartSave(order):
                self._inbox.put(ev.WriteFailed(order.incident, order.generation, text))
            case act.StartCommit(order):
                self._inbox.put(ev.CommitBroken(order.incident, order.generation, text))
            case act.StartStandby():
                self._inbox.put(ev.StandbyStarted(""))
            case act.ProbeHost(order):
                self._inbox.put(ev.HostProbed(order.subject, False, text))

    def _next_event(self) -> ev.Event | Snapshot:
        deadline = self._machine.deadline()
        wait_s = None if deadline is None else max(0.0, deadline - time.monotonic())
        try:
            return self._inbox.get(timeout=wait_s)
        except queue.Empty:
            return self._observed()

    def _observed(self) -> ev.Observed:
        state = self.gate.state()
        if self._saver.busy and not self.source.counts_bytes:
            self.written += 1  # it may go on for hours, for all that is known here
        version, phase = self._looker.standing(state)
        return ev.Observed(version, phase, self.mark, self.activity, self.written)

    def _perform(self, action: act.Action) -> None:
        match action:
            case act.Connect():
                self._aside("ttp-connect", lambda: self._line.connect(action))
            case act.Send(report):
                self._line.send(report)
            case act.CloseGate(hurry):
                if self.copying is not None:
                    self.copying.freeze()
                self._looker.freeze(hurry=hurry)
            case act.OpenGate():
                if self.copying is not None:
                    self.copying.thaw()
                self._looker.thaw()
            case act.Redo(version):
                self._redo(version)
            case act.StartSave(save):
                self._saver.save(save)
            case act.CancelSave():
                self._saver.cancel()
            case act.StartCommit(commit):
                self._saver.commit(commit)
            case act.HoldLease(until):
                self._lease_writer.submit(lambda: self._leases.grant(os.getpid(), until))
            case act.DropLease():
                self._lease_writer.submit(lambda: self._leases.revoke(os.getpid()))
            case act.NoteRing():
                self._lease_writer.submit(lambda: self._line.note(action, self._machine.incarnation))
            case act.Joined(incarnation, first):
                self._on_joined(incarnation, first)
            case act.Rejected(_, text):
                self._on_rejected(text)
            case act.Decided(decision):
                self._decision.put(decision)
            case act.LetGo(rescued):
                self._set_let_go(rescued)
            case act.Exit(code, text):
                self._exit(code, text)
            case act.ProbeHost() | act.StartStandby() | act.TakeStack() | act.KeepPage():
                self._serve(action)
            case act.NameKeeper(order):
                self.company.mirror_to(order)
            case act.NameBuddy(order) if self.copying is not None:
                self.copying.named(order)
            case act.SettleCopy() if self.copying is not None:
                self.copying.settle(action)
            case act.ProgramAction():
                self._perform_program(action)

    @staticmethod
    def _aside(name: str, job: Callable[[], None]) -> None:
        threading.Thread(target=job, name=name, daemon=True).start()

    def _redo(self, version: Version) -> None:
        log.info("rank %s makes the update to version %s, whose gradient it holds", self.env.rank, version)
        queued, let_through = self.gate.version >= version, self.source.redo(version)
        if not (let_through if queued else self.gate.admit()):
            self._inbox.put(ev.NotRedone("the training thread does not stand at the gate"))

    def _on_joined(self, incarnation: int, first: bool) -> None:
        self.incarnation = incarnation
        self.company.joined(incarnation)
        if first:
            try:
                pages = self.company.begin(self.source, incarnation)
                if self.copying is not None:
                    self.copying.joined(pages, incarnation)
            except Exception:
                log.exception("no rank-local page: the RNG of this rank will not survive it")
        self._joined.set()

    def _on_rejected(self, text: str) -> None:
        where = f"{self.env.master_addr}:{self.config.port}"
        self._cannot_join(RefusedError(f"the controller at {where} refused this rank: {text}"))

    def _cannot_join(self, problem: TtpError) -> None:
        """No other attempt will mend it. A rank that trains without protection by now goes on, and waits for nobody."""
        self._problem = problem
        if self._started:
            log.error("rank %s trains UNPROTECTED, and for good: %s", self.env.rank, problem)
            self._set_let_go(False)
        self._joined.set()

    def _set_let_go(self, rescued: bool) -> None:
        if not self._let_go.done():
            self._let_go.set_result(rescued)

    def _joining(self) -> bool:
        return not self._joined.is_set()

    def _over(self) -> bool:
        return self._closed or self._machine.gone

    # ------------------------------------------------------------------------------------------------------ for others

    def _serve(self, action: act.ProbeHost | act.StartStandby | act.TakeStack | act.KeepPage) -> None:
        match action:
            case act.ProbeHost(order):
                self._aside("ttp-probe", lambda: self._probe(order))
            case act.StartStandby():
                self._aside("ttp-standby", self._start_standby)
            case act.TakeStack(wanted):
                self._aside("ttp-stack", lambda: self._take_stack(wanted))
            case act.KeepPage(keep):
                self.company.store(keep)

    def _probe(self, order: m.Probe) -> None:
        found, text = reachable(order.address, self.config.port or 0)
        self._inbox.put(ev.HostProbed(order.subject, found, text))

    def _take_stack(self, order: m.TakeStack) -> None:
        text = stacks.take(order.pid, self.run_dir, STACK_S)
        self._inbox.put(ev.StackSeen(order.incident, order.subject, text))

    def _start_standby(self) -> None:
        try:
            here = own_address(self.config, self.env.master_addr)
            address = start_standby(self.config, self.run_dir, here, str(self.save_dir))
        except Exception as problem:
            log.warning("no controller can stand by on this host: %s", problem)
            address = ""
        self._inbox.put(ev.StandbyStarted(address))

    # ---------------------------------------------------------------------------------------------------------- saving

    def _make_saver(self) -> Saver:
        return Saver(
            self.config,
            self.env,
            self.layout,
            self.source,
            self.save_dir,
            self.copying,
            version=lambda: self.gate.version,
            wait_pages=self.company.wait_stored,
            put=self._inbox.put,
            wrote=self._wrote,
            look_again=self._looker.look_again,
        )

    def _wrote(self, count: int) -> None:
        self.written += count

    def _keep_for_others(self, *, copies: bool) -> tuple[str, str]:
        """Take copies and pages of other ranks, where that is wanted. Training does not depend on it.

        Returns:
            Where copies are taken, and where pages are (host:port); empty: they are not.
        """
        config, env = self.config, self.env
        if not (copies or config.mirror):
            return "", ""
        try:
            receiver = self._receiver = Receiver(config, env.run_id)
        except Exception as problem:
            what = "buddy=True: no copies can be kept, and shards without replicas are UNPROTECTED"
            log.error("%s: %s", what if copies else "TTP_MIRROR: no pages of other hosts can be kept here", problem)
            return "", ""
        if copies:
            rank, every = Rank(env.rank), config.buddy_every
            self.copying = Copying(
                self.source, self.layout, rank, every, receiver, config.token, env.run_id, self._inbox.put
            )
        at = target(own_address(config, env.master_addr), receiver.port)
        return at if copies else "", at if config.mirror else ""

    # --------------------------------------------------------------------------------------------------------- leaving

    def _close_source(self) -> None:
        self.company.leave()
        with contextlib.suppress(Exception):
            self.source.close()
        self.company.close()

    def _exit(self, code: int, text: str) -> None:
        """End the process from this thread: the main thread may hang in a collective for half an hour."""
        code = code if self._exit_code is None else self._exit_code
        last_resort = threading.Timer(EXIT_S, os._exit, (code,))  # logs may be on the storage that hangs
        last_resort.daemon = True
        last_resort.start()
        with contextlib.suppress(OSError, ValueError):  # a driver that hangs may keep the interpreter lock
            signal.setitimer(signal.ITIMER_REAL, 2 * EXIT_S)
        log.warning("rank %s exits with %s: %s", self.env.rank, code, text)
        if self.before_exit is not None:
            last_word = threading.Thread(target=self.before_exit, name="ttp-exit", daemon=True)
            last_word.start()
            last_word.join(EXIT_S / 2)
        with contextlib.suppress(Exception):
            self._line.finish(timeout_s=0.5)
        self._close_source()
        flusher = threading.Thread(target=_flush, daemon=True)
        flusher.start()
        flusher.join(0.5)  # the main thread may hold the lock of stdout
        os._exit(code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    with contextlib.suppress(Exception):
        logging.shutdown()


def _wait(future: concurrent.futures.Future[bool]) -> bool:
    """Wait so that signals of the main thread are still handled."""
    while True:
        with contextlib.suppress(concurrent.futures.TimeoutError):
            return future.result(timeout=1.0)
