"""The state of ttp in one training process: its settings, its adapter and its processor."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ttp.config import Config, RankEnv
from ttp.core.layout import Layout, Version
from ttp.core.messages import FaultKind, GoodbyeReason
from ttp.core.restore_messages import Candidate
from ttp.errors import EXIT_BAD_CONFIG, ConfigError, UsageError
from ttp.launch.leases import Leases
from ttp.launch.log_format import configure_logging
from ttp.launch.run_dir import allow_journal
from ttp.processor import continuing
from ttp.processor.faults import describe, errors_of, is_collective_error
from ttp.processor.last_words import log_error, write_error_file
from ttp.processor.liveness.signals import Preemption
from ttp.processor.source import StateSource

if TYPE_CHECKING:
    from ttp.processor.processor import Processor

log = logging.getLogger("ttp")

trained: set[Path | None] = set()
"""The directories of the trainings of this process that have ended."""

_TWICE = "wrap_optimizer() was called twice: give one list, or decorate each phase of a training"
BEGAN_UNIX_S = time.time()
"""When this process imported ttp."""
BEGAN_IN = ""
"""The working directory at that time; empty: it had been removed."""
with contextlib.suppress(OSError):
    BEGAN_IN = str(Path.cwd())

TELL_S = 60.0
"""Seconds after which a rank says that it waits for the ranks whose ``train()`` has not returned."""
_WAITS = (
    "train() has returned here after %d updates, and waits until it has on every rank. A rank that still trains, and "
    "needs this one for it, hangs until its process group gives up: `ttp status` shows what the others do"
)


class Adapter(Protocol):
    """Connects the objects of one framework to ttp. ``CONTRIBUTING.md`` says how to write an adapter."""

    @property
    def source(self) -> StateSource:
        """The source from which the processor saves."""

    def refused(self, problem: ConfigError | UsageError, world_size: int) -> None:
        """Tell the other ranks, which may wait for this one in ``layout``, why this rank cannot be registered."""

    def layout(self, world_size: int) -> Layout:
        """Return the replica groups. Called on every rank, so ranks may communicate here."""

    def attach(self, processor: Processor) -> None:
        """Report updates to ``processor`` from now on. Called when this rank has joined the job."""

    def agree_without_controller(self, found: tuple[Candidate, ...], skipped: tuple[str, ...]) -> Candidate | str:
        """Return the newest checkpoint that all ranks found, agreed on by collectives, or a text why there is none."""

    def load(self, checkpoint: Path, rank: int, world_size: int, *, protected: bool) -> Version:
        """Load a verified checkpoint into the registered objects of this rank, and return its version.

        Raises:
            CheckpointError: it belongs to another model. Nothing has been changed then.
        """

    def step_done(self) -> None:
        """See ``ttp.step_done``."""


class Session:
    """The state of ttp in this process. There is one per process, made by the first call that needs it.

    Args:
        config: settings of the job.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.adapter: Adapter | None = None
        self.save_dir: Path | None = None
        self.processor: Processor | None = None
        self.in_train = self._reported = False
        self.wrap_again: Callable[[], object] | None = None  # registers the same objects once more
        self._pauses: list[list[str]] = []
        self._pauses_lock = threading.Lock()
        self.preemption = Preemption(log.info)  # installed when this rank joins
        self._trained_in: Path | None = None
        configure_logging(config)

    @property
    def enabled(self) -> bool:
        """True if the environment switches ttp on."""
        return self.config.port is not None

    @property
    def version(self) -> int:
        """Number of finished updates; 0 if this process has not joined a job."""
        return 0 if self.processor is None else self.processor.gate.version

    # ----------------------------------------------------------------------------------------------------------- begin

    def renew(self) -> None:
        """Let a program without ttp train one thing after another, decorated or not, as the environment says each time.

        Raises:
            UsageError: ttp is switched on, and something is registered already.
            ConfigError: the environment is wrong.
        """
        if self.enabled:
            if self.adapter is not None:
                raise UsageError(_TWICE)
            return
        if self.adapter is not None:
            log.warning("%s. ttp is off, so the program goes on, and restore() serves the last call", _TWICE)
            self.adapter = None
        if not self.in_train:
            self.config = Config.from_env()

    def register(self, adapter: Adapter, save_dir: Path, layout: Layout | None, *, buddy: bool = False) -> None:
        """Register an adapter, after ``renew``, and join the job if ttp is switched on.

        Raises:
            ConfigError: the environment does not describe a rank, or does not fit ``layout``.
            RefusedError: the controller does not accept this rank.
        """
        if self.enabled:
            self._join(adapter, save_dir, layout, buddy)
        self.adapter, self.save_dir = adapter, save_dir

    def join(self) -> None:
        """Join the job with the adapter that was registered before ttp was switched on. Raises as ``register``."""
        assert self.adapter is not None and self.save_dir is not None and self.processor is None
        self._join(self.adapter, self.save_dir, None, False)

    def _join(self, adapter: Adapter, save_dir: Path, layout: Layout | None, buddy: bool) -> None:
        env = RankEnv.from_env()
        found = adapter.layout(env.world_size)  # ranks may have to communicate for it: before the first one joins
        adapter.attach(self.start_processor(env, layout or found, adapter.source, save_dir, buddy=buddy))

    def start_processor(
        self,
        env: RankEnv,
        layout: Layout,
        source: StateSource,
        save_dir: Path,
        prepare: Callable[[Processor], None] | None = None,
        *,
        buddy: bool = False,
    ) -> Processor:
        """Join the job as ``env.rank``. ``prepare`` gets the processor before the controller can reach it.

        Raises:
            ConfigError: the job has several hosts and no token; or the run directory belongs to another user.
        """
        from ttp.launch.admission import admitted, spans_hosts
        from ttp.processor.processor import Processor

        self.config, address = admitted(self.config, env.master_addr, several=spans_hosts(os.environ, env.world_size))
        env = dataclasses.replace(env, master_addr=address)
        allow_journal(self.config.resolved_run_dir(), save_dir, self.fallback_dir)
        survivor = continuing.able(source, in_train=self.in_train)
        processor = Processor(self.config, env, layout, source, str(save_dir), buddy=buddy, survivor=survivor)
        if prepare is not None:
            prepare(processor)
        processor.start()
        with self._pauses_lock:
            self.processor = processor
            if self._pauses:  # entered before this rank had joined
                self._show_pause()
        self.preemption = Preemption(processor.report_preemption, processor.wait_let_go)
        self.preemption.install()
        atexit.register(self._at_exit, os.getpid())
        return processor

    # ---------------------------------------------------------------------------------------------------------- pauses

    @contextlib.contextmanager
    def paused(self, activity: str) -> Iterator[None]:
        """See ``ttp.paused``."""
        mine = [activity]  # a list, so that pauses of the same name are different objects
        with self._pauses_lock:
            self._pauses.append(mine)
            self._show_pause()
        try:
            yield
        finally:
            with self._pauses_lock:
                self._pauses = [pause for pause in self._pauses if pause is not mine]
                self._show_pause()

    def _show_pause(self) -> None:
        if self.processor is not None:
            self.processor.activity = self._pauses[-1][0] if self._pauses else ""
            self.processor.say()

    # ------------------------------------------------------------------------------------------------------------ end

    def returned(self) -> None:
        """Leave the job after ``train()`` has returned."""
        self._trained_in = self.processor.run_dir if self.processor is not None else None
        waits = threading.Timer(TELL_S, log.info, (_WAITS, self.version))
        waits.daemon = True
        with contextlib.suppress(RuntimeError):  # no thread can be started
            waits.start()
        try:
            self._leave(GoodbyeReason.DONE)
        finally:
            waits.cancel()

    def left(self, problem: BaseException | None = None) -> None:
        """Leave the job because ``train()`` was left on purpose; ``problem``: a ``KeyboardInterrupt`` if by Ctrl-C."""
        self._leave(GoodbyeReason.INTERRUPTED if isinstance(problem, KeyboardInterrupt) else GoodbyeReason.LEFT)

    def raised(self, problem: BaseException) -> None:
        """Report an exception of ``train()`` and wait for the release. Returns only if no controller can be reached."""
        if self.processor is None:
            return
        self._go_on(problem)
        self.preemption.alone = True  # a scheduler signals the ranks, and so does their launcher
        if not self._reported:
            self.report(problem)
        self._go_on(problem)
        log.error("no controller has ordered a save after this error: it is raised as it would be without ttp")
        self.processor.close()
        self.wrap_again = None
        self.end_launch()

    def report(self, problem: BaseException) -> None:
        """Report that this rank cannot train on, and wait. Returns if it is to go on, or if no controller answers."""
        assert self.processor is not None
        self._reported = True
        wrong = isinstance(problem, (ConfigError, UsageError))  # a restart would not help
        kind = FaultKind.COLLECTIVE if is_collective_error(problem) and not wrong else FaultKind.EXCEPTION
        if isinstance(problem, (KeyboardInterrupt, SystemExit)) and self.preemption.came():
            kind = FaultKind.PREEMPTED  # the program's handler of SIGTERM
        detail = log_error(self.processor.env.rank, problem)
        write_error_file(problem)
        text = f"{self.processor.name} raised {' after '.join(map(describe, errors_of(problem)))}"
        self.processor.report(kind, text, detail[-8000:], then=EXIT_BAD_CONFIG if wrong else None)
        self.processor.wait_released()

    def _go_on(self, problem: BaseException | None) -> None:
        """If this rank was released to go on in its process, end this launch and raise ``TrainAgain``."""
        survivor, processor = continuing.current(), self.processor
        if survivor is None or not survivor.releasing or processor is None:
            return
        adapter, self.wrap_again = self.adapter, None
        self.end_launch()
        survivor.out(problem, processor, adapter)

    def end_launch(self) -> None:
        """Detach this process from the current launch, so that it can become a rank of the next one."""
        self.preemption.uninstall()
        atexit.unregister(self._at_exit)  # it would keep this session, and the objects that it refers to, alive
        self.adapter, self.processor, self._reported, self.preemption = None, None, False, Preemption(log.info)

    def _leave(self, reason: GoodbyeReason) -> None:
        self.preemption.uninstall()
        if self.processor is not None:
            self.processor.leave(reason)
            if reason is GoodbyeReason.DONE:
                self._go_on(None)
            self.processor = self.adapter = self.wrap_again = None  # the exit handler keeps this
            self.preemption = Preemption(log.info)

    def _at_exit(self, pid: int) -> None:
        """Say goodbye, or report the exception that ends the program, for one that does not decorate ``train()``.

        After ``train()`` has returned, tell the launcher instead: a crash from here on is a library that is torn down.
        """
        problem = getattr(sys, "last_value", SystemExit() if (told := self.preemption.came()) else None)
        if os.getpid() != pid or (isinstance(problem, KeyboardInterrupt) and not told):
            return
        with contextlib.suppress(Exception):
            if self.processor is not None and self.in_train:
                self.preemption.program_ends()
                self.processor.wait_released()
            elif self.processor is not None:
                self.raised(problem) if problem is not None else self._leave(GoodbyeReason.LEFT)
            elif problem is None and self._trained_in is not None:
                Leases(self._trained_in).end(pid)

    # --------------------------------------------------------------------------------------------------------- restore

    def restore(self) -> int:
        """See ``ttp.restore``."""
        from ttp.restoring import Restoring

        if self.adapter is None or self.save_dir is None:
            raise UsageError("restore() needs to know what to restore into: call wrap_optimizer() first")
        given = self.adapter, self.save_dir, self.fallback_dir, self.processor
        return int(Restoring(*given, first=not trained).restore())

    @property
    def fallback_dir(self) -> Path | None:
        """The directory of checkpoints that is used when ``save_dir`` fails; None: there is none."""
        return Path(self.config.fallback_dir) if self.config.fallback_dir else None


_session: Session | None = None


def current() -> Session:
    """Return the session of this process; the first call makes it.

    Raises:
        ConfigError: the environment is wrong.
    """
    global _session
    if _session is None:
        _session = Session(Config.from_env())
    return _session


def begin(config: Config) -> Session:
    """Return a session with these settings: the current one, or a new one if the current one has joined a job."""
    global _session
    if _session is None or _session.processor is not None:
        _session = Session(config)
    _session.config = config
    return _session


def reset() -> None:
    """Forget the session; the next ``train()`` of this process begins anew."""
    global _session
    _session = None


def _forget_rank() -> None:
    """Forget the processor in a forked child, which is not the rank: it must not report, and nobody would answer it."""
    if _session is not None and _session.processor is not None:
        _session.processor = None
        getattr(_session.adapter, "forget", lambda: None)()  # its hooks write to memory that is shared with the rank


os.register_at_fork(after_in_child=_forget_rank)
