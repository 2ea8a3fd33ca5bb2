"""The part of ttp inside a rank: drives ``ProcessorMachine`` on one thread, and carries out its actions.

Threads: the owner of the machine (``ttp-processor``), the stream's reader, one that inspects the state behind a closed
gate, one saver for slow disk work (replaced by a new one if it hangs), short-lived ones for requests to this rank. None
of them ever takes a lock that the training thread waits for, except the lock of the gate.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ttp.config import Config, RankEnv
from ttp.core import messages as m
from ttp.core.copy_messages import CopyTo, Keep, MirrorTo
from ttp.core.layout import Layout, Rank, Version
from ttp.core.layout_messages import in_parts
from ttp.core.rank import actions as act
from ttp.core.rank import events as ev
from ttp.core.rank.machine import ProcessorMachine
from ttp.core.rank.program import RankProgram
from ttp.core.restore_messages import Candidate, Reading, RestoreDecision
from ttp.errors import EXIT_BAD_CONFIG, ConfigError
from ttp.inbox import Inbox
from ttp.launch.standby import own_address
from ttp.mindio.protocol.rank_side import NoHandlers
from ttp.processor.continuing import Continuing
from ttp.processor.copies.copier import Copying
from ttp.processor.copies.transfer import open_receiver
from ttp.processor.errands import Errands
from ttp.processor.exiting import end_process
from ttp.processor.gate.gate import Gate
from ttp.processor.holding import Holding
from ttp.processor.import_list import ImportList
from ttp.processor.joining import Joining
from ttp.processor.link.connecting import ControllerLink
from ttp.processor.link.greeting import hello, timeouts
from ttp.processor.liveness.host_services import HostServices
from ttp.processor.own_lease import OwnLease
from ttp.processor.rank_job import RankJob
from ttp.processor.saver import Saver
from ttp.processor.source import StateSource
from ttp.processor.state_inspector import Inspection, StateInspector
from ttp.wire.address import target

log = logging.getLogger("ttp.processor")


class Processor:
    """Connects this rank to the controller, owns its gate, and saves when the controller orders it.

    Args:
        config: the job's settings.
        env: identity of this rank.
        layout: the replica groups, equal on all ranks.
        source: the adapter that can write the state.
        save_dir: directory of checkpoints.
        buddy: keep second copies where a shard has only one; see ``ttp.core.replication``.
        survivor: lets this process go on after the death of another rank; None: it ends then.
    """

    incarnation = 0
    joins = was_guest = False  # this process takes a seat in a running job; the rank before it still lived
    mark = 0
    """Number of points of the step that the training thread has passed; see ``Heartbeat``."""
    activity = ""
    """What the rank does instead of training, on purpose; empty: it trains."""
    written = 0
    """Bytes written by the saver so far; only ever compared with itself."""
    before_exit: Callable[[], None] | None = None
    """Called before this process exits on the controller's order; see ``ttp.processor.exiting.end_process``."""

    def __init__(
        self,
        config: Config,
        env: RankEnv,
        layout: Layout,
        source: StateSource,
        save_dir: str,
        *,
        buddy: bool = False,
        survivor: Continuing | None = None,
    ) -> None:
        if layout.world_size != env.world_size:
            raise ConfigError(f"the layout is for {layout.world_size} ranks, WORLD_SIZE is {env.world_size}")
        self.config, self.env, self.layout, self.source, self.survivor = config, env, layout, source, survivor
        self.save_dir, self.run_dir = Path(save_dir), config.resolved_run_dir()
        job = RankJob(config, env, layout, source, self.save_dir)
        self.gate = Gate(lambda: self._inspector.on_quiet(bool(self._machine.incident)), self._gate_was_left)
        self._lease = OwnLease(self.run_dir)
        self._imports = ImportList(self.run_dir, wanted=config.continuity != "off" and env.local_rank == 0)
        self._inbox: Inbox[ev.Event | Inspection] = Inbox()
        put = self._inbox.put
        copies = buddy and bool(layout.unreplicated())
        receiver = self._receiver = open_receiver(config, env.run_id, copies=copies)
        self.copying = Copying(job, receiver, put) if copies and receiver is not None else None
        at = "" if receiver is None else target(own_address(config, env.master_addr), receiver.port)
        copies_at, pages_at = at if copies else "", at if config.mirror else ""
        greeting = hello(job, copies_at=copies_at, pages_at=pages_at, can_continue=survivor is not None)
        self._machine = ProcessorMachine(greeting, timeouts(config, env), time.monotonic(), in_parts(layout))
        self.speak_for(NoHandlers(), lambda action: None)
        self._let_go = threading.Event()  # set when train() may return
        self._joining = Joining(config, env, alone=self._let_go.set)
        self._link = ControllerLink(config, env, put, self._joining, over=lambda: self._closed or self._machine.gone)
        self.host = HostServices(config, env, nonce=greeting.nonce, died=self.neighbour_died)
        if receiver is not None and config.mirror:
            receiver.keep = self.host.keep
        holding = Holding(job, may=survivor is not None and not source.on_device)
        held = tuple if self.copying is None else self.copying.held
        self._inspector = StateInspector(source, self.gate, held, holding.look, put, survivor)
        self._saver = Saver(
            job, self.copying, holding, version=lambda: self.gate.version, wait_pages=self.host.wait_stored, put=put,
            wrote=self._wrote, look_again=self._inspector.look_again,
        )  # fmt: skip
        self._errands = Errands(job, put)
        self.name, self._closed = f"rank {env.rank} on {greeting.host}", False
        self._exit_code: int | None = None
        self.broken = False
        """Whether ``report`` has said that this rank cannot train on."""
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
        self._lease.arm()
        self.host.show_stacks()
        self._thread.start()
        try:
            self._joining.wait()
        except BaseException:
            self.close()
            raise

    @property
    def page_dir(self) -> Path | None:
        """Directory with the pages and sentinels of this host's ranks; None before this rank has joined."""
        return self.host.pages.path if self.host.pages is not None else None

    def begin_update(self, again: bool = False) -> None:
        """See ``UpdateReporter.begin_update``."""
        if self.copying is not None:
            self.copying.hold()
        self.gate.begin_update(again)
        if self.survivor is not None:
            self.survivor.update_begins()  # behind the gate, which is halted for a rank that goes on

    def leave_update(self) -> None:
        """See ``UpdateReporter.leave_update``."""
        self.gate.leave_update()

    def stand_between(self) -> None:
        """See ``UpdateReporter.stand_between``."""
        self.gate.stand_between()

    def end_update(self, version: Version | None = None) -> None:
        """See ``UpdateReporter.end_update``. ``version``: for programs that number their versions themselves."""
        self.gate.end_update(version)
        if self.copying is not None:
            self.copying.updated(self.gate.version)

    def tidy_after(self, checkpoint: Path) -> None:
        """Remove older checkpoints, after this one was restored and all of its digests were verified."""
        if self.env.rank == 0:
            self._saver.tidy(checkpoint.parent, self.config.keep, checkpoint.name, verified=True)

    def set_base_version(self, version: Version, size: int = 0) -> None:
        """Note that the state was restored to ``version``, from a checkpoint of ``size`` bytes (0: not known)."""
        self.gate.set_version(version)
        self._inbox.put(ev.Based(version, size))

    def agree_on_restore(
        self, candidates: tuple[Candidate, ...], skipped: tuple[str, ...], readings: tuple[Reading, ...]
    ) -> RestoreDecision:
        """Tell the controller what this rank found, and wait for what all ranks have in common.

        Raises:
            ConfigError: a checkpoint that the job has committed has vanished.
            RefusedError: the controller does not accept this rank.
            RestoreError: nothing in common, the other ranks did not ask within ``TTP_RESTORE_S``, or there is no
                controller.
        """
        self._joining.wait_to_agree()
        self._inbox.put(ev.RestoreWanted(candidates, skipped, readings))
        return self._joining.decided(self.config.restore_patience_s)

    def report(self, kind: m.FaultKind, text: str, detail: str = "", then: int | None = None) -> None:
        """Report that this rank cannot train on. May be called from any thread.

        Args:
            kind: kind of fault.
            text: what happened.
            detail: more about it, such as a traceback.
            then: exit code of this process, whatever the rescue's outcome; None: the controller's. 64: of all ranks.
        """
        self._exit_code, self.broken = then, True
        self._inspector.left = True
        self.gate.mark_torn()
        self._inbox.put(ev.Raised(kind, text, detail, wrong=then == EXIT_BAD_CONFIG))

    def speak_for(self, program: RankProgram, perform: Callable[[act.ProgramAction], None]) -> None:
        """Set the machine of a program that saves and repairs itself. Before ``start``; ``perform`` must not block."""
        self._machine.state.program, self._perform_program = program, perform

    def tell(self, event: ev.ProgramEvent) -> None:
        """Pass an event to the program's own recovery. May be called from any thread."""
        self._inbox.put(event)

    def wait_let_go(self, timeout_s: float) -> bool:
        """Wait up to ``timeout_s`` seconds until train() may return. Returns False if the time is over."""
        return self._let_go.wait(timeout_s) or self._closed

    def say(self) -> None:
        """Send a heartbeat now, so that the controller learns at once what this rank does."""
        self._inbox.put(replace(self._observed(), urgent=True))

    def neighbour_died(self, rank: int, nonce: str, text: str) -> None:
        """Report that another process of this host has ended. May be called from any thread."""
        fault = m.Fault(Rank(self.env.rank), Rank(rank), m.FaultKind.EXITED, text, nonce=nonce)
        self._inbox.put(ev.Tell(fault))
        self.on_death()

    def report_preemption(self, text: str) -> None:
        """Report what ends this rank (``was asked to``...); unlike an exception it leaves a running update alone."""
        self._inbox.put(ev.Raised(m.FaultKind.PREEMPTED, f"{self.name} {text}"))

    def wait_released(self) -> None:
        """Wait for the rescue after ``report``. The process exits in this call, unless no controller can be reached."""
        while not self._let_go.wait(1.0):
            pass  # signals of the main thread are handled in between

    def leave(self, reason: m.GoodbyeReason) -> None:
        """End training: wait until every rank has ended training, or no controller can be reached; then close."""
        if self._joining.problem is None and not self._closed:
            self.gate.mark_done()
            self._inbox.put(ev.Observed(self.gate.version, m.Phase.DONE))
            self._inbox.put(ev.Returned(reason))
            self.wait_released()
        self.close()

    def close(self) -> None:
        """Close the stream, the page and the lease."""
        if self._closed:
            return
        self._closed = True
        self._lease.close()
        self._inbox.put(ev.Observed(self.gate.version, m.Phase.DONE))
        self._link.finish(timeout_s=1.0)
        self._saver.close()
        self._inspector.close()
        if (copies := self.copying or self._receiver) is not None:
            copies.close()
        self.host.leave()
        try:
            self.source.close()
        except Exception:
            log.exception("the adapter could not close what it had opened for this rank")
        self.host.close()

    # ------------------------------------------------------------------------------------------------ the owner thread

    def _run(self) -> None:
        failed = 0
        while not (self._closed or self._machine.gone):
            try:
                event = self._next_event()
                if isinstance(event, Inspection):
                    if event.closure != self.gate.state().closure:
                        continue  # the gate was open in between
                    event = event.quiet
                for action in self._machine.on_event(event, time.monotonic()):
                    self._try(action)
            except Exception:  # whatever happens here, training goes on
                log.exception("an error in the processor of this rank; training is not affected")
                failed = min(failed + 1, 7)
                time.sleep(0.01 * 2**failed)  # 20 ms to 1.28 s: the error may come at every turn, which takes no time
            else:
                failed = 0
        self._errands.end()

    def _try(self, action: act.Action) -> None:
        """Carry out an action. If it fails, the actions after it are still carried out."""
        try:
            self._perform(action)
        except Exception as problem:
            log.exception("the processor could not carry out %s; training is not affected", act.name_of(action))
            if (failed := act.not_done(action, repr(problem))) is not None:
                self._inbox.put(failed)

    def _next_event(self) -> ev.Event | Inspection:
        deadline = self._machine.deadline()
        try:
            return self._inbox.get(timeout=None if deadline is None else deadline - time.monotonic())
        except queue.Empty:
            if self._imports.due(self.gate.version):
                self._lease.writer.submit(self._imports.write)
            self.host.look_after(self.source)
            self._joining.finished(self.gate.version, lambda: self.source.promise(self.layout, self.save_dir))
            return self._observed()

    def _observed(self) -> ev.Observed:
        state = self.gate.state()
        if self._saver.busy and not self.source.counts_bytes:
            self.written += 1  # this source counts no bytes, so a running write always counts as progress
        return ev.Observed(*self._inspector.reported(state), self.mark, self.activity, self.written)

    def _perform(self, action: act.Action) -> None:
        match action:
            case act.LinkAction():
                self._link.perform(action)
            case act.CloseGate(until, hurry):
                self._lease.hold(until)
                if self.copying is not None:
                    self.copying.freeze()
                self._inspector.freeze(hurry=hurry)
            case act.OpenGate():
                if self.copying is not None:
                    self.copying.thaw()
                self._inspector.thaw()
                self._lease.drop()
            case act.Redo(version):
                self._inspector.redo(version)
            case act.StartSave(save):
                self._saver.save(save)
            case act.CancelSave():
                self._saver.cancel()
            case act.StartCommit(commit):
                self._saver.commit(commit)
            case act.NoteRing():
                self._lease.writer.submit(lambda: self._link.note(action, self._machine.incarnation))
            case act.Joined(incarnation, first, controller, joins, guest):
                self.joins, self.was_guest = self.joins or joins, self.was_guest or guest
                self._on_joined(incarnation, first, controller, replaces=joins or guest)
            case act.Rejected(code, text):
                self._joining.refused(code, text)
            case act.Decided(decision):
                self._joining.decide(decision)
            case act.LetGo():
                self._let_go.set()
            case act.Exit() | act.GoOn():
                self._exit(action)
            case act.Serve(m.Probe() | m.StandBy() | m.TakeStack() as order):
                self._errands.run(order)
            case act.Serve(Keep() as keep):
                self.host.store(keep)
            case act.Serve(MirrorTo() as keeper):
                self.host.mirror_to(keeper)
            case act.Serve(CopyTo() as buddy) if self.copying is not None:
                self.copying.named(buddy)
            case act.SettleCopy() if self.copying is not None:
                self.copying.settle(action)
            case act.ProgramAction():
                self._perform_program(action)

    def _on_joined(self, incarnation: int, first: bool, controller: str, *, replaces: bool) -> None:
        self.incarnation = incarnation
        if first:
            try:
                pages = self.host.begin(self.source, incarnation)
                if self.copying is not None:
                    self.copying.joined(pages, incarnation, anew=self._joining.holds_training and not replaces)
            except Exception:
                log.exception("this rank has no rank-local page: if it dies, its random streams are lost")
        self._joining.joined(controller)

    def _gate_was_left(self) -> None:
        self._inbox.put(ev.NotRedone("the training thread has left the gate"))

    def _wrote(self, count: int) -> None:
        self.written += count

    def _exit(self, order: act.Exit | act.GoOn) -> None:
        """End the process, with the program's own exit code if it has set one; for ``GoOn`` release it to go on."""
        if isinstance(order, act.Exit):
            code = order.code if self._exit_code is None else self._exit_code
            end_process(code, f"rank {self.env.rank} exits with {code}: {order.text}", self.before_exit, self._hang_up)
        elif self.survivor is not None:
            self.survivor.released(self, self._machine.incident)
            self._let_go.set()

    def _hang_up(self) -> None:
        """Close what other processes wait for. The source stays: its hooks hold the training thread at the gate."""
        with contextlib.suppress(Exception):
            self._link.finish(timeout_s=0.5)
        self.host.leave()
        self.host.close()
