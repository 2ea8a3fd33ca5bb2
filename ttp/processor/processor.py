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
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from ttp._version import __version__
from ttp.config import Config, RankEnv
from ttp.core import messages as m
from ttp.core import processor_machine as pm
from ttp.core import rounds_messages as rm
from ttp.core.layout import Layout, Rank, Version
from ttp.core.stripes import WHOLE
from ttp.errors import EXIT_NOT_SAVED, ConfigError, RefusedError, RestoreError, TtpError
from ttp.launch.controller_process import ensure_controller, is_local
from ttp.launch.leases import Leases
from ttp.launch.standby import own_address, reachable, start_standby
from ttp.processor import stacks
from ttp.processor.copy_wire import Receiver
from ttp.processor.copying import Copying
from ttp.processor.gate import Gate, GateState
from ttp.processor.lane import Lane
from ttp.processor.mirror import KeptPages, PageMirror
from ttp.processor.neighbours import Neighbours
from ttp.processor.page_dir import PageDirectory
from ttp.processor.sentinel import Sentinel
from ttp.processor.source import Cancelled, StateSource
from ttp.processor.stream import Stream
from ttp.store.mounts import Mounts
from ttp.wire import tls
from ttp.wire.channel import target

T = TypeVar("T")

log = logging.getLogger("ttp.processor")

JOIN_PATIENCE_S = 60.0
"""How long ``start`` waits for the controller before it lets the training begin unprotected."""


DEVICE_PATIENCE_S = 5.0
"""How long queued kernels may take after the gate is closed. Behind a collective that hangs they never run."""

EXIT_S = 10.0
"""How long a last word may take."""

STACK_S = 3.0
"""How long a process that hangs may take to say where its threads are."""

MIRROR_BACKLOG = 16
"""Reports on their way; with more of them pages wait, and only the newest are sent."""
MIRROR_POLL_S = 0.01

KEEP_S = 1.0
"""How long a save waits for pages of other hosts that are just being put into memory."""

COMES_S = 1.0
"""How long a training thread that waits for its peers before the gate may take to come to it once it is closed."""

LOOK_S = 0.2
"""A rank whose state takes longer to look at acknowledges a freeze first."""


Seen = tuple[tuple[m.ShardDigest, ...], tuple[str, ...]]
"""Digests of the shards, and tensors with NaN or Inf."""
NOTHING_SEEN: Seen = ((), ())


@dataclass(frozen=True, slots=True)
class _Look:
    """What was seen of the state, and during which closure of the gate."""

    closure: int
    quiet: pm.Quiet


class Processor:
    """Speaks for this rank, owns its gate, saves when told to.

    Args:
        config: the job's settings.
        env: who this rank is.
        layout: the replica groups, equal on all ranks.
        source: the adapter that can write the state.
        save_dir: where checkpoints go.
        version: finished updates at the start.
        buddy: keep second copies where a shard has only one; see ``ttp.core.buddies``.
    """

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
        self._mounts = Mounts(self.save_dir, *([Path(config.fallback_dir)] if config.fallback_dir else []))
        self.gate = Gate(self._on_quiet)
        self.gate.set_version(Version(version))
        self.incarnation = 0
        self.mark = 0
        """Point of the step that the training thread has passed; see ``Heartbeat``."""
        self.activity = ""
        """What it does instead of training, on purpose."""
        self.written = 0
        """Bytes written by the saver so far; only ever compared with itself."""
        self.run_dir = config.resolved_run_dir()
        self._leases = Leases(self.run_dir)
        self._inbox: queue.SimpleQueue[pm.Event | _Look] = queue.SimpleQueue()
        self._copying, copies_at = self._keep_copies() if buddy and layout.unreplicated() else (None, "")
        hello = _hello(config, env, layout, source, save_dir, version, copies_at)
        self._nonce = hello.nonce
        self._machine = pm.ProcessorMachine(hello, _manners(config, env), time.monotonic())
        self._stream: Stream | None = None
        self._pages: PageDirectory | None = None
        self._kept: KeptPages | None = None
        self._company = contextlib.ExitStack()  # what shows and watches life on this host
        self._saver = Lane("ttp-saver")
        self._looker = Lane("ttp-looker")
        self._keeper = Lane("ttp-keeper")
        self._look_s = 0.0
        self._came = threading.Event()  # to the gate, since it was closed
        self._seen: tuple[tuple[Version, m.Phase], Seen] | None = None
        self._cancel: threading.Event = threading.Event()
        self._joined = threading.Event()
        self._problem: TtpError | None = None
        self._decision: queue.SimpleQueue[m.RestoreDecision] = queue.SimpleQueue()
        self._let_go: concurrent.futures.Future[bool] = concurrent.futures.Future()
        self._closed = False
        self._exit_code: int | None = None
        self.on_act: Callable[[rm.Act], None] | None = None
        """Carries out rounds; must not block. ``acted`` says what came of it."""
        self.before_exit: Callable[[], None] | None = None
        """Called before the process is ended by order; on a thread of its own, for ``EXIT_S`` at most."""
        self._thread = threading.Thread(target=self._run, name="ttp-processor", daemon=True)

    # --------------------------------------------------------------------------------------------- for the main thread

    def start(self) -> None:
        """Join the job.

        Raises:
            ConfigError: the port belongs to something else.
            RefusedError: the controller does not accept this rank; the text says why.
        """
        self._leases.arm(os.getpid())
        if self.config.stacks and stacks.install(self.run_dir):
            self._company.callback(stacks.uninstall, self.run_dir)
        self._thread.start()
        if not self._joined.wait(JOIN_PATIENCE_S):
            log.error(
                "no controller at %s:%s for %g s: training begins UNPROTECTED, ttp keeps trying",
                self.env.master_addr,
                self.config.port,
                JOIN_PATIENCE_S,
            )
        if self._problem is not None:
            self._leases.disarm(os.getpid())
            raise self._problem

    def begin_update(self) -> None:
        """See ``UpdateReporter``."""
        if self._copying is not None:
            self._copying.hold()
        self.gate.begin_update()

    def end_update(self) -> None:
        """See ``UpdateReporter``."""
        self.gate.end_update()
        if self._copying is not None:
            self._copying.updated(self.gate.version)

    def end_update_at(self, version: Version) -> None:
        """Like ``end_update``, for programs that number their versions themselves."""
        self.gate.end_update(version)
        if self._copying is not None:
            self._copying.updated(version)

    def set_base_version(self, version: Version) -> None:
        """The state was restored to ``version``."""
        self.gate.set_version(version)
        self._inbox.put(pm.Based(version))

    def agree_on_restore(self, candidates: tuple[m.Candidate, ...], skipped: tuple[str, ...]) -> m.RestoreDecision:
        """Tell the controller what this rank found, wait for what all ranks have in common.

        Raises:
            ConfigError: what the job has committed has vanished.
            RestoreError: nothing in common, or the other ranks did not ask within ``TTP_RESTORE_S``.
        """
        self._inbox.put(pm.RestoreWanted(candidates, skipped))
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
        self._inbox.put(pm.Raised(kind, text, detail))

    def handlers_known(self, report: rm.Handlers) -> None:
        """What the program's handlers can do; said again to every controller."""
        self._inbox.put(pm.HandlersKnown(report))

    def ails(self, report: rm.Ailing) -> None:
        """The training thread has left its loop, and can go back. May be called from any thread."""
        self.gate.mark_torn()
        self._inbox.put(pm.Ailed(report))

    def acted(self, report: rm.Acted) -> None:
        """What came of an act. May be called from any thread."""
        self._inbox.put(pm.ActDone(report))

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
        self._inbox.put(pm.NeighbourDied(Rank(rank), nonce, text))

    def report_preemption(self, text: str) -> None:
        """A signal asked this process to end; unlike an exception it leaves a running update alone."""
        self._inbox.put(pm.Raised(m.FaultKind.PREEMPTED, text))

    def wait_released(self) -> None:
        """After ``report``: wait for the rescue. Returns only if nobody came; else the process exits in here."""
        _wait(self._let_go)

    def leave(self, reason: m.GoodbyeReason) -> None:
        """train() is over: wait until it is over for every rank (or nobody can tell), then close."""
        if self._problem is None and not self._closed:
            self.gate.mark_done()
            self._inbox.put(pm.Observed(self.gate.version, m.Phase.DONE))
            self._inbox.put(pm.Returned(reason))
            _wait(self._let_go)
        self.close()

    def close(self) -> None:
        """Let go of the stream, the page and the lease."""
        if self._closed:
            return
        self._closed = True
        self._leases.revoke(os.getpid())
        self._leases.disarm(os.getpid())
        self._inbox.put(pm.Observed(self.gate.version, m.Phase.DONE))
        if self._stream is not None:
            self._stream.finish(timeout_s=1.0)
        self._saver.close()
        self._looker.close()
        self._keeper.close()
        if self._copying is not None:
            self._copying.close()
        self._close_source()

    # ------------------------------------------------------------------------------------------------ the owner thread

    def _run(self) -> None:
        while not (self._closed or self._machine.gone):
            try:
                event = self._next_event()
                if isinstance(event, _Look):
                    if event.closure != self.gate.state().closure:
                        continue  # the gate was open in between
                    event = event.quiet
                for action in self._machine.on_event(event, time.monotonic()):
                    self._perform(action)
            except Exception:  # whatever happens here, training goes on
                log.exception("the processor stumbled; training is not affected")

    def _next_event(self) -> pm.Event | _Look:
        deadline = self._machine.deadline()
        wait_s = None if deadline is None else max(0.0, deadline - time.monotonic())
        try:
            return self._inbox.get(timeout=wait_s)
        except queue.Empty:
            return self._observed()

    def _observed(self) -> pm.Observed:
        state = self.gate.state()
        if self._saver.busy and not self.source.counts_bytes:
            self.written += 1  # it may go on for hours, for all that is known here
        return pm.Observed(state.version, state.phase, self.mark, self.activity, self.written)

    def _perform(self, action: pm.Action) -> None:
        match action:
            case pm.Connect():
                self._aside("ttp-connect", lambda: self._connect(action))
            case pm.Send(report):
                if self._stream is not None:
                    self._stream.send(report)
            case pm.CloseGate():
                self._answer_freeze()
            case pm.OpenGate():
                self._seen = None
                if self._copying is not None:
                    self._copying.thaw()
                self.gate.open()
                self._came.set()
            case pm.Redo(version):
                self._redo(version)
            case pm.StartSave(save):
                self._cancel = cancel = threading.Event()
                self._work(lambda: self._save(save, cancel))
            case pm.CancelSave():
                self._cancel.set()
            case pm.StartCommit(commit):
                self._work(lambda: self._commit(commit))
            case pm.HoldLease(until):
                self._leases.grant(os.getpid(), until)
            case pm.DropLease():
                self._leases.revoke(os.getpid())
            case pm.Joined(incarnation, first):
                self._on_joined(incarnation, first)
            case pm.Rejected(code, text):
                self._on_rejected(code, text)
            case pm.Decided(decision):
                self._decision.put(decision)
            case pm.LetGo(rescued):
                if not self._let_go.done():
                    self._let_go.set_result(rescued)
            case pm.Exit(code, text):
                self._exit(code, text)
            case pm.ProbeHost() | pm.StartStandby() | pm.TakeStack() | pm.KeepPage():
                self._serve(action)
            case pm.NameBuddy(order) if self._copying is not None:
                self._copying.named(order)
            case pm.SettleCopy() if self._copying is not None:
                self._copying.settle(action)
            case pm.StartAct(act):
                self._start_act(act)

    def _start_act(self, act: rm.Act) -> None:
        if self.on_act is not None:
            self.on_act(act)
            return
        state = self.gate.state()
        torn, text = state.phase is m.Phase.TORN, f"this rank has no handlers to {act.kind.value} with"
        self.acted(rm.Acted(act.rank, act.serial, False, 0, state.version, torn, text))

    def _work(self, job: Callable[[], None]) -> None:
        """On the saver; one that still hangs in what was cancelled is left behind."""
        if self._saver.busy:
            self._saver.leave_behind()
        self._saver.submit(job)

    @staticmethod
    def _aside(name: str, job: Callable[[], None]) -> None:
        threading.Thread(target=job, name=name, daemon=True).start()

    def _answer_freeze(self) -> None:
        if self._copying is not None:
            self._copying.freeze()
        self._came.clear()
        self._say_quiet(self.gate.close())

    def _on_quiet(self) -> None:
        """Called by the gate, possibly on the training thread."""
        self._came.set()
        if self._machine.incident:
            self._say_quiet(self.gate.state())

    def _say_quiet(self, state: GateState) -> None:
        updating = state.phase is m.Phase.UPDATING
        if updating or self.source.on_device or self._look_s > LOOK_S:  # the freeze is acknowledged, the answer follows
            self._inbox.put(_Look(state.closure, pm.Quiet(state.version, m.Phase.UPDATING, state.parked, False)))
        if not updating:
            self._looker.submit(lambda: self._look(state))

    def _look(self, state: GateState) -> None:
        """The host is quiet; say what there is, on the device too.

        All of it is of the moment of ``state``, or nothing is said: whoever comes to the gate with its gradient while
        somebody looks must not be taken for one that hangs elsewhere.
        """
        if state.near and not state.parked:
            self._came.wait(COMES_S)
        if self._moved_on(state):
            return
        began = time.monotonic()
        version = self._device_version(state)
        phase = m.Phase.TORN if version is None else state.phase
        digests, bad = self._inspected(version, phase)
        quiet = pm.Quiet(
            version=state.version if version is None else version,
            phase=phase,
            parked=state.parked,
            settled=self._asked(self.source.settled, False),
            has_gradient=state.parked and self._asked(self.source.gradient_ready, False),
            has_preimage=self._asked(lambda: self.source.has_preimage, False),
            digests=digests,
            bad=bad,
            kept=self._copying.held() if self._copying is not None else (),
        )
        self._look_s = time.monotonic() - began
        if not self._moved_on(state):
            self._inbox.put(_Look(state.closure, quiet))

    def _moved_on(self, state: GateState) -> bool:
        """Whether ``state`` is of the past; if so the new one is said instead, unless nobody asks any more."""
        now = self.gate.state()
        if now != state and now.closure == state.closure:
            self._say_quiet(now)
        return now != state

    def _device_version(self, state: GateState) -> Version | None:
        if not self.source.on_device or state.phase is m.Phase.TORN:
            return state.version
        return self._asked(lambda: self.source.device_version(state.version, DEVICE_PATIENCE_S), None)

    def _inspected(self, version: Version | None, phase: m.Phase) -> Seen:
        """Once for each version: under a closed gate nothing changes."""
        if version is None or phase is m.Phase.TORN:
            return NOTHING_SEEN
        if self._seen is None or self._seen[0] != (version, phase):
            self._seen = (version, phase), self._asked(lambda: self.source.inspect(version), NOTHING_SEEN)
        return self._seen[1]

    @staticmethod
    def _asked(question: Callable[[], T], otherwise: T) -> T:
        """What the adapter says; an adapter that stumbles hurts nobody."""
        try:
            return question()
        except Exception:
            log.exception("the adapter cannot tell how the state is")
            return otherwise

    def _redo(self, version: Version) -> None:
        log.info("rank %s makes the update to version %s, whose gradient it holds", self.env.rank, version)
        if not self.gate.admit():
            self._inbox.put(pm.NotRedone("the training thread does not stand at the gate"))

    def _on_joined(self, incarnation: int, first: bool) -> None:
        self.incarnation = incarnation
        if first:
            try:
                self._pages = PageDirectory(self.run_dir, self.env, self.config.port or 0, host=self.config.host)
                self.source.on_welcome(Rank(self.env.rank), incarnation, self._pages.path)
                self._keep_company(self._pages.path, incarnation)
            except Exception:
                log.exception("no rank-local page: the RNG of this rank will not survive it")
        self._joined.set()

    def _keep_company(self, page_dir: Path, incarnation: int) -> None:
        """Show neighbours that this process lives, watch one of them, and let a rank elsewhere have the page."""
        rank = self.env.rank
        sentinel = Sentinel(page_dir, rank, self._nonce, incarnation)
        neighbours = Neighbours(page_dir, rank, incarnation, self.neighbour_died)
        neighbours.start()
        self._company.callback(neighbours.close)
        self._company.callback(sentinel.close)
        if self._copying is not None:
            self._copying.joined(page_dir, incarnation)
        self._kept = KeptPages(page_dir, rank, incarnation)
        self._company.callback(self._kept.close)
        if self.config.mirror:
            mirror = PageMirror(page_dir, rank, incarnation, self._page_changed)
            self._company.callback(mirror.close)
            self.source.watch_pages(mirror.changed)

    def _keep(self, order: m.Keep) -> None:
        if self._kept is not None:
            self._kept.store(order)

    def _page_changed(self, version: int, final: bool, incarnation: int, data: bytes) -> None:
        """On the mirror's thread, which gathers changes while it waits here."""
        while self._stream is not None and self._stream.backlog > MIRROR_BACKLOG and not self._closed:
            time.sleep(MIRROR_POLL_S)
        if incarnation == self.incarnation:
            self._inbox.put(pm.PageChanged(Version(version), final, data))

    def _on_rejected(self, code: m.RefusalCode, text: str) -> None:
        problem = RefusedError(f"the controller at {self.env.master_addr}:{self.config.port} refused this rank: {text}")
        if self._joined.is_set():
            self._exit(EXIT_NOT_SAVED, str(problem))
        self._problem = problem
        self._joined.set()

    # ------------------------------------------------------------------------------------------------------ connecting

    def _connect(self, action: pm.Connect) -> None:
        try:
            if action.start_controller and self.config.port is not None and is_local(self.env.master_addr):
                ensure_controller(
                    self.env.master_addr,
                    self.config.port,
                    run_dir=self.run_dir,
                    token=self.config.token,
                    bind=self.config.bind,
                    patience_s=JOIN_PATIENCE_S,
                )
            self._open_stream(action.address, action.within_s)
        except ConfigError as problem:
            if not self._joined.is_set():
                self._problem = problem
                self._joined.set()
            log.error("%s", problem)
            self._inbox.put(pm.StreamDown(str(problem)))
        except Exception as problem:
            log.debug("cannot connect", exc_info=True)
            self._inbox.put(pm.StreamDown(repr(problem)))

    def _open_stream(self, address: str, within_s: float | None) -> None:
        """To the controller at ``address`` (host:port), or to the one of the environment."""
        assert self.config.port is not None
        host, _, port = address.rpartition(":") if address else (self.env.master_addr, "", str(self.config.port))
        previous = self._stream
        if previous is not None:
            previous.abort()
        self._stream = Stream(
            host.strip("[]"),
            int(port),
            self.config.token,
            on_up=lambda: self._inbox.put(pm.StreamUp()),
            on_order=lambda order: self._inbox.put(pm.OrderReceived(order)),
            on_down=self._on_down,
            within_s=within_s,
        )
        self._stream.start()

    def _on_down(self, reason: str) -> None:
        level = logging.WARNING if self._joined.is_set() else logging.DEBUG
        if not self._closed and not self._machine.gone:
            log.log(level, "stream to the controller ended: %s", reason)
        if reason.startswith("UNAUTHENTICATED") and not self._joined.is_set():
            self._problem = ConfigError(f"the controller at {self.env.master_addr}:{self.config.port}: {reason}")
            self._joined.set()
        self._complain_of_encryption(reason)
        self._inbox.put(pm.StreamDown(reason))

    def _complain_of_encryption(self, reason: str) -> None:
        """Before the job has formed: a side that speaks TLS and one that does not will never understand each other."""
        if self._joined.is_set() or self._closed or not reason.startswith("UNAVAILABLE"):
            return
        problem = tls.diagnose(self.env.master_addr, self.config.port or 0, reason)
        if problem is not None:
            self._problem = ConfigError(problem)
            self._joined.set()

    # ------------------------------------------------------------------------------------------------------ for others

    def _serve(self, action: pm.ProbeHost | pm.StartStandby | pm.TakeStack | pm.KeepPage) -> None:
        match action:
            case pm.ProbeHost(order):
                self._aside("ttp-probe", lambda: self._probe(order))
            case pm.StartStandby():
                self._aside("ttp-standby", self._start_standby)
            case pm.TakeStack(wanted):
                self._aside("ttp-stack", lambda: self._take_stack(wanted))
            case pm.KeepPage(keep):
                self._keeper.submit(lambda: self._keep(keep))

    def _probe(self, order: m.Probe) -> None:
        found, text = reachable(order.address, self.config.port or 0)
        self._inbox.put(pm.HostProbed(order.subject, found, text))

    def _take_stack(self, order: m.TakeStack) -> None:
        text = stacks.take(order.pid, self.run_dir, STACK_S)
        self._inbox.put(pm.StackSeen(order.incident, order.subject, text))

    def _start_standby(self) -> None:
        try:
            address = start_standby(self.config, self.run_dir, own_address(self.config, self.env.master_addr))
        except Exception as problem:
            log.warning("no controller can stand by on this host: %s", problem)
            address = ""
        self._inbox.put(pm.StandbyStarted(address))

    # ---------------------------------------------------------------------------------------------------------- saving

    def _save(self, order: m.Save, cancel: threading.Event) -> None:
        done: pm.Event
        try:
            draft = self.directory(order) / order.draft
            draft.mkdir(parents=True, exist_ok=True)
            self._keeper.wait_done(KEEP_S)  # pages of dead ranks may have come a moment ago
            pieces = self._pieces(order, draft, cancel.is_set)
            done = pm.PiecesWritten(order.incident, order.generation, tuple(pieces))
        except Cancelled:
            return
        except BaseException as problem:
            log.exception("saving version %s failed", order.version)
            done = pm.WriteFailed(order.incident, order.generation, _words(problem))
        self._inbox.put(done)

    def _pieces(self, order: m.Save, draft: Path, cancelled: Callable[[], bool]) -> list[m.Piece]:
        """From the state that is alive, and from copies that were kept."""
        copying, live, brought = self._copying, order.order, None
        if copying is not None:
            copying.quiesce()
            live, brought = copying.split(order, self.gate.version)
        pieces: list[m.Piece] = []
        if live.shards or live.pages or live.job_state or brought is None:
            pieces += self.source.write_pieces(
                order=live, version=order.version, draft=draft, generation=order.generation, cancelled=cancelled
            )
        if copying is not None and brought is not None and (brought.kept or brought.pages):
            pieces += copying.bring(brought, order, draft, cancelled, self._wrote)
        return pieces

    def _wrote(self, count: int) -> None:
        self.written += count

    def _keep_copies(self) -> tuple[Copying | None, str]:
        """What keeps copies, and where it takes those of others (host:port). Training does not depend on it."""
        config, env = self.config, self.env
        try:
            receiver = Receiver(config.bind, config.token, env.run_id)
        except Exception as problem:
            log.error("buddy=True: no copies can be kept, and shards without replicas are UNPROTECTED: %s", problem)
            return None, ""
        rank, every = Rank(env.rank), config.buddy_every
        copying = Copying(self.source, self.layout, rank, every, receiver, config.token, env.run_id, self._inbox.put)
        return copying, target(own_address(config, env.master_addr), receiver.port)

    def directory(self, order: m.Save | m.Commit) -> Path:
        """Where the checkpoint of this order goes.

        Raises:
            OSError: that place is not mounted any more.
        """
        directory = Path(order.directory) if order.directory else self.save_dir
        self._mounts.check(directory)
        return directory

    def _commit(self, order: m.Commit) -> None:
        done: pm.Event
        try:
            path, size = self.source.commit(order)
            done = pm.CommitDone(order.incident, order.generation, path, size)
        except BaseException as problem:
            log.exception("committing version %s failed", order.version)
            done = pm.CommitBroken(order.incident, order.generation, _words(problem))
        self._inbox.put(done)

    # --------------------------------------------------------------------------------------------------------- leaving

    def _close_source(self) -> None:
        with contextlib.suppress(Exception):
            self._company.close()
        with contextlib.suppress(Exception):
            self.source.close()
        if self._pages is not None:
            self._pages.close()

    def _exit(self, code: int, text: str) -> None:
        """End the process from this thread: the main thread may hang in a collective for half an hour."""
        code = code if self._exit_code is None else self._exit_code
        last_resort = threading.Timer(EXIT_S, os._exit, (code,))  # logs may be on the storage that hangs
        last_resort.daemon = True
        last_resort.start()
        log.warning("rank %s exits with %s: %s", self.env.rank, code, text)
        if self.before_exit is not None:
            last_word = threading.Thread(target=self.before_exit, name="ttp-exit", daemon=True)
            last_word.start()
            last_word.join(EXIT_S / 2)
        with contextlib.suppress(Exception):
            if self._stream is not None:
                self._stream.finish(timeout_s=0.5)
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


def _words(problem: BaseException) -> str:
    if isinstance(problem, OSError) and problem.errno is not None:
        return f"{type(problem).__name__}: [errno {problem.errno}] {problem.strerror}: {problem.filename or ''}".rstrip(
            ": "
        )
    return f"{type(problem).__name__}: {problem}"


def _hello(
    config: Config, env: RankEnv, layout: Layout, source: StateSource, save_dir: str, version: int, copies_at: str
) -> m.Hello:
    return m.Hello(
        rank=Rank(env.rank),
        protocol_major=m.PROTOCOL_MAJOR,
        protocol_minor=m.PROTOCOL_MINOR,
        ttp_version=__version__,
        run_id=env.run_id,
        launch=env.launch,
        incarnation=0,
        nonce=uuid.uuid4().hex,
        world_size=env.world_size,
        layout_digest=layout.digest,
        groups=tuple(m.ShardGroup(shard, ranks) for shard, ranks in layout.groups.items()),
        host=config.host or socket.gethostname(),
        pid=os.getpid(),
        local_rank=env.local_rank,
        save_dir=str(save_dir),
        framework=source.framework,
        version=Version(version),
        phase=m.Phase.IDLE,
        base_version=Version(version),
        term_seen=0,
        incident="",
        released=False,
        resume=False,
        keep=config.keep,
        address=own_address(config, env.master_addr),
        fallback_dir=config.fallback_dir or "",
        stripes=config.stripes if source.writes_parts else WHOLE,
        copies_at=copies_at,
    )


def _manners(config: Config, env: RankEnv) -> pm.Manners:
    # The first rank of a host looks for a controller at once; the others take turns, and hardly ever have to.
    return pm.Manners(
        heartbeat_s=config.heartbeat_s,
        rescue_s=config.rescue_patience_s,
        start_controller_after=3 * env.local_rank,
    )
