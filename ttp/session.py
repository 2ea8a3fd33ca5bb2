"""The state of ttp in one training process: its settings, its adapter, its processor."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import logging
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ttp.config import Config, RankEnv
from ttp.core.layout import Layout, Version
from ttp.core.messages import FaultKind, GoodbyeReason
from ttp.core.restore_messages import Candidate
from ttp.errors import EXIT_BAD_CONFIG, ConfigError, RestoreError, UsageError
from ttp.launch.log_format import configure_logging
from ttp.launch.rank_names import in_torchruns_names
from ttp.launch.run_dir import allow_journal
from ttp.processor import continuing
from ttp.processor.faults import describe, is_collective_error
from ttp.processor.last_words import write_error_file
from ttp.processor.source import StateSource

if TYPE_CHECKING:
    from ttp.processor.liveness.signals import Preemption
    from ttp.processor.processor import Processor
    from ttp.store.choice import Found
    from ttp.store.share import Share

log = logging.getLogger("ttp")


class Adapter(Protocol):
    """A framework's objects, registered by ``wrap_optimizer``. See ``CONTRIBUTING.md`` for how to write one."""

    @property
    def source(self) -> StateSource:
        """What the processor saves from."""

    def refused(self, problem: ConfigError | UsageError, world_size: int) -> None:
        """This rank cannot be registered: tell the other ranks why, if they wait for it in ``layout``."""

    def layout(self, world_size: int) -> Layout:
        """The replica groups. Called on every rank, so ranks may communicate here."""

    def attach(self, processor: Processor) -> None:
        """This rank has joined the job: report updates to ``processor`` from now on."""

    def agree_without_controller(self, found: tuple[Candidate, ...], skipped: tuple[str, ...]) -> Candidate | str:
        """The newest checkpoint that all ranks found, by the framework's collectives; a text: why there is none."""

    def load(self, checkpoint: Path, rank: int, world_size: int, *, protected: bool) -> Version:
        """Load a verified checkpoint into the registered objects of this rank. Returns its version.

        Raises:
            CheckpointError: it belongs to another model. Nothing has been changed then.
        """

    def step_done(self) -> None:
        """See ``ttp.step_done``."""


class Session:
    """One per process; made by the first call that needs it.

    Args:
        config: settings of the job.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.adapter: Adapter | None = None
        self.save_dir: Path | None = None
        self.processor: Processor | None = None
        self.in_train = False
        self.wrap_again: Callable[[], object] | None = None  # registers the same objects once more
        self._reported = False
        self._pauses: list[list[str]] = []
        self._pauses_lock = threading.Lock()
        self._preemption: Preemption | None = None
        self._trained_in: Path | None = None
        configure_logging(config)

    @property
    def enabled(self) -> bool:
        """Whether the environment switches ttp on."""
        return self.config.port is not None

    # ----------------------------------------------------------------------------------------------------------- begin

    def register(self, adapter: Adapter, save_dir: Path, layout: Layout | None, *, buddy: bool = False) -> None:
        """Take an adapter; when switched on, join the job.

        Raises:
            UsageError: something is registered already.
            ConfigError: the environment does not describe a rank, or does not fit ``layout``.
            RefusedError: the controller does not accept this rank.
        """
        if self.adapter is not None:
            raise UsageError("wrap_optimizer() was called twice in this process: wrap one optimizer per process")
        if self.enabled:
            self._join(adapter, save_dir, layout, buddy)
        self.adapter, self.save_dir = adapter, save_dir

    def join(self) -> None:
        """Join the job with what was registered before ttp was switched on. Errors as of ``register``."""
        assert self.adapter is not None and self.save_dir is not None and self.processor is None
        self._join(self.adapter, self.save_dir, None, False)

    def _join(self, adapter: Adapter, save_dir: Path, layout: Layout | None, buddy: bool) -> None:
        env = RankEnv.from_env()
        found = adapter.layout(env.world_size)  # the ranks may have to ask each other: before the first one joins
        processor = self.start_processor(env, layout or found, adapter.source, save_dir, buddy=buddy)
        adapter.attach(processor)

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
            ConfigError: the job has several hosts and no token; or the run directory is not this user's.
        """
        from ttp.launch.admission import admitted, spans_hosts
        from ttp.processor.liveness.signals import Preemption
        from ttp.processor.processor import Processor

        self.config, address = admitted(self.config, env.master_addr, several=spans_hosts(os.environ, env.world_size))
        env = dataclasses.replace(env, master_addr=address)
        allow_journal(self.config.resolved_run_dir(), save_dir, self.fallback_dir)
        goes_on = continuing.able(layout, source) if self.in_train else None
        processor = Processor(self.config, env, layout, source, str(save_dir), buddy=buddy, goes_on=goes_on)
        if prepare is not None:
            prepare(processor)
        processor.start()
        self.processor = processor
        self._preemption = Preemption(processor.report_preemption)
        self._preemption.install()
        atexit.register(self._at_exit, os.getpid())
        return processor

    # ---------------------------------------------------------------------------------------------------------- pauses

    @contextlib.contextmanager
    def paused(self, activity: str) -> Iterator[None]:
        """See ``ttp.paused``."""
        mine = [activity]  # a list, to be told from another pause of the same name
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
        """``train()`` has returned."""
        self._trained_in = self.processor.run_dir if self.processor is not None else None
        self._leave(GoodbyeReason.DONE)

    def left(self) -> None:
        """The user has left ``train()`` on purpose."""
        self._leave(GoodbyeReason.LEFT)

    def raised(self, problem: BaseException) -> None:
        """``train()`` has raised: report it, wait for the release. Returns only when no controller can be reached."""
        if self.processor is None:
            return
        self._go_on(problem)
        if not self._reported:
            self.report(problem)
        self._go_on(problem)
        log.error("no controller came to the rescue; the error is raised as it would be without ttp")
        self.processor.close()
        self.processor = None

    def report(self, problem: BaseException) -> None:
        """This rank cannot train on: wait for what comes of it. Returns when it is to go on, or if nobody came."""
        assert self.processor is not None
        self._reported = True
        kind = FaultKind.COLLECTIVE if is_collective_error(problem) else FaultKind.EXCEPTION
        detail = "".join(traceback.format_exception(problem))
        log.error("rank %s: %s\n%s", self.processor.env.rank, describe(problem), detail)
        write_error_file(problem)
        text = f"rank {self.processor.env.rank} raised {describe(problem)}"
        wrong = isinstance(problem, (ConfigError, UsageError))  # a restart would not help
        self.processor.report(kind, text, detail[-8000:], then=EXIT_BAD_CONFIG if wrong else None)
        self.processor.wait_released()

    def _go_on(self, problem: BaseException | None) -> None:
        """If this rank was released to go on in its process: end this session, and have train() called again."""
        goes_on, processor = continuing.current(), self.processor
        if goes_on is None or not goes_on.releasing or processor is None:
            return
        adapter, self.wrap_again = self.adapter, None
        self.end_launch()
        goes_on.out(problem, processor, adapter)

    def end_launch(self) -> None:
        """This rank is none of this launch any more; it becomes one of the next."""
        if self._preemption is not None:
            self._preemption.uninstall()
        atexit.unregister(self._at_exit)  # which would hold this session, and so what it has held
        self.adapter = self.processor = self._preemption = None
        self._reported = False

    def _leave(self, reason: GoodbyeReason) -> None:
        if self._preemption is not None:
            self._preemption.uninstall()
            self._preemption = None
        if self.processor is not None:
            self.processor.leave(reason)
            if reason is GoodbyeReason.DONE:
                self._go_on(None)
            self.processor = None

    def _at_exit(self, pid: int) -> None:
        """A program that does not decorate train() says goodbye here; one that died of an exception does not.

        One that trained to its end tells the launcher: what crashes now is a library that is taken down.
        """
        if os.getpid() != pid or getattr(sys, "last_value", None) is not None:
            return
        with contextlib.suppress(Exception):
            if self.processor is not None:
                self._leave(GoodbyeReason.LEFT)
            elif self._trained_in is not None:
                from ttp.launch.leases import Leases

                Leases(self._trained_in).end(pid)

    def restore(self) -> int:
        """See ``ttp.restore``."""
        from ttp.processor.holding import held_by
        from ttp.store.choice import checkpoint_bytes

        if self.adapter is None or self.save_dir is None:
            raise UsageError("restore() needs to know what to restore into: call wrap_optimizer() first")
        with held_by(self.save_dir, None if self.processor is None else self.processor.run_dir):
            found, chosen = self._find()
            self._say_what_is_lost(found.candidates, chosen)
            checkpoint = found.where.get(chosen, self.save_dir / chosen.name)
            version = self._load(checkpoint, chosen, verified=chosen in found.verified) if chosen.name else Version(0)
        if chosen.name:
            log.info("restored %s: training goes on with step %s", checkpoint, version + 1)
        if (processor := self.processor) is not None:
            processor.set_base_version(version, 0 if processor.env.rank else checkpoint_bytes(checkpoint))
        return int(version)

    def _load(self, checkpoint: Path, chosen: Candidate, *, verified: bool) -> Version:
        """Where survivors go on in their processes the ranks meet, and verify it together then."""
        from ttp.store.choice import check_chosen

        adapter: Any = self.adapter
        at, goes_on = (checkpoint, *self._place()), self._goes_on()
        check_chosen(checkpoint, chosen, already_verified=verified or goes_on is not None)
        if goes_on is not None:
            share = self._share(checkpoint.parent)
            verify = functools.partial(check_chosen, checkpoint, chosen, already_verified=False, share=share)
            return Version(adapter.load_going_on(*at, goes_on.state, verify))
        version = Version(adapter.load(*at, protected=self.processor is not None))
        if self.processor is not None:
            self.processor.tidy_after(checkpoint)
        return version

    def _goes_on(self) -> continuing.Continuing | None:
        """Where survivors go on in their processes; then all ranks of the launch know it."""
        found = continuing.current() if hasattr(self.adapter, "load_going_on") else None
        return found if found is not None and found.runs and self.processor is not None else None

    def _share(self, directory: Path) -> Share:
        """This rank's share of the pieces to read. Without a controller all: nobody compares what was read."""
        from ttp.store.share import WHOLE, share_of

        if self.processor is None:
            return WHOLE
        return share_of(directory, *self._place(), os.environ)

    @property
    def fallback_dir(self) -> Path | None:
        """Where checkpoints go when ``save_dir`` refuses."""
        return Path(self.config.fallback_dir) if self.config.fallback_dir else None

    @staticmethod
    def _say_what_is_lost(found: tuple[Candidate, ...], chosen: Candidate) -> None:
        """Warn that other ranks lack the newest checkpoint that this rank found, so the job goes back further."""
        if found and found[0].version > chosen.version:
            log.warning(
                "this rank found nothing wrong with step %s, but not every rank did, and their logs say why: the job "
                "goes back to step %s. Steps between them are trained again; if that is too much, stop now and mend "
                "that checkpoint, or make it visible to all hosts",
                found[0].version,
                chosen.version,
            )

    def _place(self) -> tuple[int, int]:
        """Rank and world size, as the launcher says them."""
        if self.processor is not None:
            return self.processor.env.rank, self.processor.env.world_size
        told = in_torchruns_names(os.environ)
        return int(told.get("RANK", "0")), int(told.get("WORLD_SIZE", "1"))

    def _find(self) -> tuple[Found, Candidate]:
        """What this rank finds, and what all ranks restore.

        Most of the time shares of the newest checkpoint are enough. Where one of them is damaged the ranks go back to
        an older one, of which their shares are read then. Where the parts are not all of it, each rank reads it all.
        """
        from ttp.store.share import everything

        found = self._look_back(self._share)
        chosen, unread = self._agree(found)
        for share, older, why in (
            (self._share, True, "shares of older checkpoints are read too"),
            (everything, False, "LOCAL_RANK or LOCAL_WORLD_SIZE is wrong, or ranks see different copies: all is read"),
        ):
            if not unread:
                break
            log.warning("the ranks have not read all of %s: %s", chosen.name, why)
            if any(reading.count != 1 for reading in found.readings):
                found = self._look_back(share, older=older, told=found)
            chosen, unread = self._agree(found)
        while unread:  # others may not have heard yet that they are to
            chosen, unread = self._agree(found)
        return found, chosen

    def _look_back(self, share: Callable[[Path], Share], *, older: bool = False, told: Found | None = None) -> Found:
        from ttp.core.restore_choice import is_fallback_note
        from ttp.store.choice import look_back

        assert self.save_dir is not None
        later = self._goes_on() is not None
        found = look_back(self.save_dir, self.fallback_dir, share, older=older, later=later)
        for reason in found.skipped:
            if told is None or reason not in told.skipped:
                log.warning("restore %s %s", "found" if is_fallback_note(reason) else "skipped", reason)
        return found

    def _agree(self, found: Found) -> tuple[Candidate, bool]:
        """The checkpoint that all ranks restore, and whether part of it was read by no rank."""
        assert self.adapter is not None
        if self.processor is not None:
            decision = self.processor.agree_on_restore(found.candidates, found.skipped, found.readings)
            return Candidate(decision.version, decision.manifest_digest, decision.name), decision.unread
        verdict = self.adapter.agree_without_controller(found.candidates, found.skipped)
        if isinstance(verdict, str):
            raise RestoreError(verdict)
        return verdict, False


_session: Session | None = None


def current() -> Session:
    """The session of this process, made on first use.

    Raises:
        ConfigError: the environment is wrong.
    """
    global _session
    if _session is None:
        _session = Session(Config.from_env())
    return _session


def begin(config: Config) -> Session:
    """The session, with settings that the program has chosen itself; a new one if it has joined a job already."""
    global _session
    if _session is None or _session.processor is not None:
        _session = Session(config)
    _session.config = config
    return _session


def reset() -> None:
    """Forget the session; the next ``train()`` of this process begins anew."""
    global _session
    _session = None
