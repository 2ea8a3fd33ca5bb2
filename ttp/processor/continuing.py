"""A rank that goes on in its process when another one has died, and one that takes the seat of the dead.

The checkpoint exists before any of this begins (``ttp.core.controller.continuing`` decides). A rank that is released to
go on says goodbye, and hello again as a rank of the next launch::

    released      processor's thread: the mark for the launcher; collectives are broken, the gate is halted
    out           training thread: an error of a collective, or ``Halted``, leaves train() and arrives at the decorator
    told          the launcher has said where ranks meet, and fills the seats of the dead
    regrouped     the groups are exchanged, and train() is called again: it restores what was just committed
    over          the first update begins: the mark goes

Until it is over a clock runs (``TTP_CONTINUE_S``): who does not get there leaves with 75, and the launcher starts all
ranks anew, as without this. So does whoever meets an error: only deaths are continued.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ttp.config import KEEP, Config, RankEnv
from ttp.core.layout import Layout, Version
from ttp.core.rank import staying
from ttp.errors import EXIT_SAVED, ConfigError
from ttp.launch.again import Again, NextLaunch
from ttp.processor.exiting import end_process
from ttp.processor.faults import describe, is_collective_error, is_out_of_device_memory
from ttp.processor.gate.gate import Halted
from ttp.processor.kept_state import KeptState
from ttp.processor.source import StateSource

if TYPE_CHECKING:
    from ttp.adapters.torch.regroup import Groups
    from ttp.processor.processor import Processor

log = logging.getLogger("ttp")

LOOK_S = 0.002


RETRY_S = 0.5
_NEVER_RUN = "its state is on a CUDA device, where this has never been run: TTP_KEEP_CUDA=1 is for its tests on GPUs"


class TrainAgain(BaseException):
    """``train()`` is to be called again. For the decorator alone."""


class Continuing:
    """One for each process.

    Args:
        config: the job's settings.
        groups: the process groups; None: this is no torch program.
    """

    def __init__(self, config: Config, groups: Groups | None, next_launch: NextLaunch | None) -> None:
        self._files, self._within_s = Again(config.resolved_run_dir()), config.continue_s
        self._patience_s = config.rescue_patience_s + config.continue_s
        self._groups, self._next = groups, next_launch
        self._pid = os.getpid()
        self._refused = self._incident = ""
        self._entered = self._registered = False
        self._on_cuda = config.keep_cuda
        self._seated = next_launch is not None  # this process takes the seat of a dead one
        self._retries = False  # train() is called once more by the same rank
        self._broken = threading.Event()  # connections have been let go
        self._met = False  # all know whether loops are left
        self._alone = False  # takes a seat while the others stay in their loops: it comes to them in wrap_optimizer()
        self._timer: threading.Timer | None = None
        self._switch = threading.Lock()
        self._since = time.monotonic()
        self._old: weakref.ref[Any] | None = None
        self.state = KeptState()
        self.runs = False
        """The clock runs: no update has begun since."""
        self.releasing = False
        """This process was released to go on, and its training thread is on its way out of train()."""

    # ------------------------------------------------------------------------------------------------ training thread

    def enter(self) -> None:
        """Call it before train(): process groups are as the launch wants them when it returns."""
        try:
            self._enter()
        except Exception as problem:
            if self._next is not None or self._timer is not None:
                self.leave(f"it could not go on: {problem!r}")
            self._refused = f"its process groups are not known: {problem!r}"

    def _enter(self) -> None:
        groups, self._registered = self._groups, False
        if groups is None:
            return
        if not self._entered:
            self._entered = True
            groups.enter()
            self._refused = _self_test()
        else:
            groups.listen()
        if self._next is not None and not self._alone:
            if self._timer is None:  # a rank that takes a seat: it may have been started while the others save
                self._next = self._await(self._next.launch)
                self._start_clock(self._next.launch)
                self._alone = self._why_left(self._next, staying.SEAT) is None
            elif not self._met:
                self._why_left(self._next, staying.leave(""))
            if not self._alone:
                self._renew("out of train()")

    def _why_left(self, told: NextLaunch, said: str) -> str | None:
        """Hear from all ranks whether they stay in their loops; see ``ttp.core.rank.staying``."""
        assert self._groups is not None
        return staying.why_left(self._groups.meet(told.address, told.port, self._within_s, said))

    def _renew(self, where: str, *, all_of_them: bool = False) -> None:
        assert self._groups is not None and self._next is not None
        at_s = time.monotonic() - self._since
        self._groups.renew(self._next.launch, all_of_them=all_of_them)
        self._next, self._met, self._alone = None, False, False
        done_s = time.monotonic() - self._since
        log.info("%s after %.3f s, the process groups are exchanged after %.3f s", where, at_s, done_s)

    def wraps(self) -> None:
        """``wrap_optimizer()`` begins: from here on all ranks do the same."""
        self._registered = True
        if self._alone:
            try:
                self._renew("its optimizer is wrapped", all_of_them=True)
            except Exception as problem:
                self.leave(f"it could not go on: {problem!r}")
        if self._groups is not None:
            self._groups.wrapped()

    def why_no_loop(self) -> str:
        """The loop begins. Why the others could not stay in theirs if this rank were a new one; empty: they could."""
        return "" if self._groups is None else self._groups.in_loop()

    def stays(self, version: Version, why_not: str, processor: Processor, adapter: Any) -> bool:
        """All ranks decide whether they leave their loops. If not the old launch is over, and groups are exchanged.

        Args:
            version: that this rank has finished; it was stopped in the update behind it.
            why_not: why it cannot make that update again; empty: it can.
            processor: of the old launch.
            adapter: likewise.
        """
        try:
            why_not = why_not or ("its state is on a device" if processor.source.on_device else "")
            told = self._next = self._await(RankEnv.from_env().launch + 1)
            left = self._why_left(told, staying.leave(why_not) if why_not else staying.stay(version))
            self._met = True
            if left is not None:
                log.info("its loop is left: %s", left)
                return False
            self._end(processor, adapter)
            self.releasing = False
            self._renew("in its loop", all_of_them=True)
        except Exception as problem:
            self.leave(f"it could not go on: {problem!r}")
        return True

    def why_not(self, layout: Layout, source: StateSource) -> str:
        """Why this process cannot go on after a failure of another; empty: it can."""
        if self._groups is None or source.framework != "torch":
            return "only torch programs can go on so far"
        if source.on_device and not self._on_cuda:
            return _NEVER_RUN
        if not self._entered:
            return "wrap_optimizer() was called outside of train()"
        return self._refused or self._groups.why_not()

    def refuse(self, why: str) -> None:
        """This process is not to go on. Call it in train(), before the job is joined."""
        self._refused = self._refused or why

    def out(self, problem: BaseException | None, processor: Processor, adapter: Any) -> NoReturn:
        """The training thread is out of train(): end what belongs to the old launch, and raise ``TrainAgain``.

        Args:
            problem: what train() has raised; only what a death looks like is continued.
            processor: of the old launch.
            adapter: likewise; it should be gone when the next one is made.
        """
        if problem is not None and not (isinstance(problem, Halted) or is_collective_error(problem)):
            self.leave(f"rank {processor.env.rank} raised {describe(problem)} while it was to go on")
        self._end(processor, adapter)
        self._old = None if adapter is None else weakref.ref(adapter)
        while problem is not None:
            traceback.clear_frames(problem.__traceback__)
            problem = problem.__context__
        raise TrainAgain

    def _end(self, processor: Processor, adapter: Any) -> None:
        """What belongs to the old launch."""
        self._broken.wait()  # on the processor's thread; the clock runs
        source: Any = processor.source
        if source.on_device and (reason := source.why_not_at_rest(self._within_s / 2)):
            self.leave(reason)
        self.state.keep(adapter, self._incident)
        if (detach := getattr(adapter, "detach", None)) is not None:
            detach()
        processor.close()
        if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
            with contextlib.suppress(OSError):
                Path(path).unlink()

    def await_launcher(self) -> None:
        """Wait for the launcher, and become a rank of the launch that it names. Call it when nothing holds the old."""
        if self._old is not None and self._old() is not None:
            gc.collect()
        if self._retries:
            self._retries = False
            return
        if self._next is None:  # else it was told so in its loop
            self._next = self._await(RankEnv.from_env().launch + 1)
        self.releasing = False

    def _await(self, launch: int) -> NextLaunch:
        """Become a rank of that launch when the launcher says where its ranks meet. It kills whom it does not want."""
        while (told := self._files.next()) is None or told.launch != launch or not told.released:
            if time.monotonic() > self._since + self._patience_s:
                self.leave("its launcher says nothing")
            time.sleep(LOOK_S)
        os.environ.update(told.as_environment())
        return told

    # ---------------------------------------------------------------------------------------------------- any thread

    def released(self, processor: Processor, incident: str) -> None:
        """This rank was released to go on: whoever waits in a collective gets an error.

        Args:
            processor: of this launch, whose gate is closed.
            incident: which has ended so.
        """
        self._broken.clear()
        with self._switch:
            self._start_clock(RankEnv.from_env().launch + 1)
            self._incident = incident
            self.releasing = True
        processor.gate.halt()
        self._let_go(processor.source)
        self._broken.set()

    def _let_go(self, source: Any) -> None:
        groups, reason = self._groups, ""
        if groups is None:
            return
        try:
            reason = source.why_not_abort(self._within_s / 2) if groups.aborts else ""
            if not reason:
                groups.let_go()
        except Exception as problem:
            reason = describe(problem)
        if reason:
            self.leave(f"its connections cannot be broken: {reason}")

    def over(self) -> None:
        """An update is about to begin, for which every rank has its gradient: now this is a launch like any other."""
        with self._switch:
            if not self.releasing:
                self._stop_clock()

    def _stop_clock(self) -> None:
        self.runs = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._files.unmark(self._pid)
            log.info("training goes on in this process, %.3f s after the checkpoint", time.monotonic() - self._since)

    def leave(self, why: str) -> NoReturn:
        """End the process with 75: the job is saved, and is started anew."""
        end_process(EXIT_SAVED, f"{why}; it is saved, and the job is started anew", None, lambda: None)
        raise AssertionError("unreachable")

    def tries_again(self, problem: BaseException) -> bool:
        """Whether ``train()`` is called once more, as the device that a dead rank had is not free again yet."""
        fresh = self._seated and not self._registered and self._groups is not None and self._groups.untouched()
        if not (fresh and self._on_cuda and is_out_of_device_memory(problem)):
            return False
        log.warning("the device of the dead rank is not free yet; train() is called again: %s", describe(problem))
        traceback.clear_frames(problem.__traceback__)
        time.sleep(RETRY_S)
        self._retries = True
        return True

    def _start_clock(self, launch: int) -> None:
        self._since = time.monotonic()
        self._files.mark(self._pid, self._since + self._within_s, launch)
        self._timer = threading.Timer(self._within_s, self.leave, (f"it did not go on within {self._within_s:g} s",))
        self._timer.daemon = True
        self._timer.start()
        self.runs = True


_continuing: Continuing | None = None


def prepare() -> None:
    """Call it where train() is decorated, before process groups are made. Never raises."""
    global _continuing
    if _continuing is not None or os.environ.get("TTP_CONTINUITY") != KEEP or not os.environ.get("TTP_PORT"):
        return
    try:
        config, env = Config.from_env(), RankEnv.from_env()
    except ConfigError:
        return  # it is said where a job is joined
    told = Again(config.resolved_run_dir()).next()
    mine = told if told is not None and told.launch == env.launch and env.rank in told.seats else None
    try:
        groups = _groups(seat=mine is not None, with_nccl=config.keep_cuda)
        _continuing = Continuing(config, groups, mine)
    except Exception as problem:
        log.warning("this process will not go on after a failure of another: %r", problem)


def current() -> Continuing | None:
    """Of this process; None: survivors are not to go on."""
    return _continuing


def able(layout: Layout, source: StateSource) -> Continuing | None:
    """How this process goes on after a failure of another; None: it does not, and why has been said."""
    if _continuing is None:
        return None
    try:
        reason = _continuing.why_not(layout, source)
    except Exception as problem:  # of torch's private parts
        reason = repr(problem)
    if reason:
        log.warning("this process will not go on after a failure of another: %s", reason)
    return None if reason else _continuing


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """Around train(): a rank that is going on, and meets an error before its first update, leaves with 75.

    Whatever the error says: it may come of what is not so in a process that has just been started.
    """
    goes_on = _continuing
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException as problem:
        left = isinstance(problem, SystemExit) and problem.code in (None, 0)
        if goes_on is not None and goes_on.runs and not (goes_on.releasing or left):
            if goes_on.tries_again(problem):
                raise TrainAgain from None
            log.error("train() was called again, and raised", exc_info=True)
            goes_on.leave(f"train() was called again, and raised {describe(problem)}")
        raise
    if goes_on is not None and goes_on.runs and not goes_on.releasing:
        if not goes_on.state.way:
            goes_on.leave("train() was called again, and has ended without restoring anything")
        goes_on.over()  # there was nothing left to do


def _groups(*, seat: bool, with_nccl: bool) -> Groups | None:
    if "torch" not in sys.modules:
        return None
    from ttp.adapters.torch.regroup import Groups

    return Groups(seat=seat, with_nccl=with_nccl)


def _self_test() -> str:
    from ttp.adapters.torch.regroup import self_test

    return self_test()
