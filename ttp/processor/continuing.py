"""Lets a rank go on in its process after another one has died, and lets a new process take the dead rank's seat.

The checkpoint exists before any of this begins (``ttp.core.controller.continuing`` decides). A rank that is released to
go on leaves the job, and joins it again as a rank of the next launch, in these stages::

    released      processor's thread: mark the process for the launcher, break collectives, halt the gate
    out           training thread: an error of a collective, or ``Halted``, leaves train() and reaches the decorator
    told          the launcher has said where the ranks meet, and fills the seats of the dead
    regrouped     the process groups are replaced, and train() is called again: it restores what was just committed
    update        the first update begins: remove the mark

Until the last stage a clock runs (``TTP_CONTINUE_S``). A rank that does not get there in time leaves with 75, and the
launcher starts all ranks anew, as it would without all this. So does a rank that meets any other error: ranks go on
only after a death.
"""

from __future__ import annotations

import contextlib
import enum
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
from ttp.core.layout import Version
from ttp.core.rank import staying
from ttp.errors import EXIT_SAVED, ConfigError
from ttp.launch.again import Again, NextLaunch
from ttp.processor.exiting import end_process
from ttp.processor.faults import describe, is_collective_error, is_out_of_device_memory
from ttp.processor.gate.gate import Halted
from ttp.processor.kept_state import KeptState
from ttp.processor.liveness import asleep
from ttp.processor.resume_clock import ResumeClock
from ttp.processor.source import StateSource

if TYPE_CHECKING:
    from ttp.adapters.torch.regroup import Groups
    from ttp.processor.processor import Processor

log = logging.getLogger("ttp")

LOOK_S, RETRY_S = 0.002, 0.5
_NO_LAUNCHER = (
    "no launcher that starts dead ranks alone has started it: use ttp run --continuity keep, or torchrun with ttp, for "
    "every host; a shell script that it starts has to `exec` the program"
)
_OUTSIDE = "wrap_optimizer() was called outside of train(), the function with @ttp_to_persist"
_NEVER_RUN = "its state is on a CUDA device, where this never ran with NCCL: TTP_KEEP_CUDA=1 allows it for tests only"


class _Agreed(enum.Enum):
    """What the ranks of the next launch have agreed on when they met."""

    NOTHING = "nothing"  # they have not met
    LEAVE = "leave"  # all leave their loops, and enter train() again
    STAY = "stay"  # all stay in their loops; the newcomers join them in wrap_optimizer()


class TrainAgain(BaseException):
    """Tells the decorator to call ``train()`` again. Only the decorator may catch this exception."""


class Continuing:
    """Lets this process go on after another rank has died. There is one object per process.

    Args:
        config: the job's settings.
        groups: the process groups; None: this is no torch program.
        next_launch: the launch in which this process takes the seat of a dead rank; None: it takes none.
    """

    def __init__(self, config: Config, groups: Groups | None, next_launch: NextLaunch | None) -> None:
        self._files = Again(config.resolved_run_dir())
        self.clock = ResumeClock(self._files, config.continue_s, self.leave)
        """Runs until the first update begins after this process was released."""
        self._patience_s = config.rescue_patience_s + config.continue_s
        self._groups, self._next, self._launcher = groups, next_launch, 0  # the launcher's pid
        self._agreed = _Agreed.NOTHING  # for the launch ``_next``
        self._newcomer = next_launch is not None  # its first wrap_optimizer() has not begun
        self._on_cuda = config.keep_cuda
        self._refused = self._incident = ""
        self._thread: tuple[int, int] | None = None  # both idents of the thread that calls train()
        self._broken = threading.Event()  # set when connections have been broken
        self._switch = threading.Lock()
        self._old: weakref.ref[Any] | None = None
        self.state = KeptState()
        self.releasing = False
        """True from the release of this process until its training thread has left train() or stays in its loop."""

    # ------------------------------------------------------------------------------------------------ training thread

    def enter(self) -> None:
        """Give this process the process groups of its launch. Call it before train()."""
        try:
            self._enter()
        except Exception as problem:
            if self._next is not None or self.clock.runs:
                self.leave(f"this rank could not go on: {problem!r}")
            self._refused = f"the process groups of this rank are not known: {problem!r}"

    def _enter(self) -> None:
        groups, is_first = self._groups, self._thread is None
        self._thread = threading.get_ident(), threading.get_native_id()
        if groups is None:
            return
        if is_first:
            from ttp.adapters.torch.regroup import self_test

            groups.enter()
            self._refused = self_test()
        else:
            groups.listen()
        if self._next is None:
            return
        if self._agreed is _Agreed.NOTHING:
            word = staying.leave("")
            if not self.clock.runs:  # this rank takes a seat; it may have been started while the others save
                self._next, word = self._await(self._next.launch), staying.SEAT
                self.clock.start(self._next.launch)
            self._meet(self._next, word)
        if self._agreed is _Agreed.LEAVE:
            self._renew("out of train()")

    def _meet(self, meeting: NextLaunch, word: str) -> str | None:
        """Meet all ranks, and return why loops are left; None: all stay in theirs (see ``ttp.core.rank.staying``)."""
        assert self._groups is not None
        why = staying.why_left(self._groups.meet(meeting.address, meeting.port, self.clock.within_s, word))
        self._agreed = _Agreed.STAY if why is None else _Agreed.LEAVE
        return why

    def _renew(self, where: str, *, all_of_them: bool = False) -> None:
        assert self._groups is not None and self._next is not None
        at_s = self.clock.elapsed_s()
        self._groups.renew(self._next.launch, all_of_them=all_of_them)
        self._next, self._agreed = None, _Agreed.NOTHING
        done_s = self.clock.elapsed_s()
        log.info("%s after %.3f s, the process groups are exchanged after %.3f s", where, at_s, done_s)

    def wraps(self) -> None:
        """Note that ``wrap_optimizer()`` begins, from which on a newcomer runs in step with the other ranks."""
        self._newcomer = False
        if self._agreed is _Agreed.STAY:
            try:
                self._renew("its optimizer is wrapped", all_of_them=True)
            except Exception as problem:
                self.leave(f"this rank could not go on: {problem!r}")
        if self._groups is not None:
            self._groups.wrapped()

    def why_no_loop(self) -> str:
        """Note that the loop begins. Return why a newcomer could not join ranks that stay in their loops; or empty."""
        return "" if self._groups is None else self._groups.in_loop()

    def stays(self, version: Version, why_not: str, processor: Processor, adapter: Any) -> bool:
        """Return whether all ranks stay in their loops, as they decide together.

        If they do, this process has left the old launch, and its process groups are replaced.

        Args:
            version: the last update that this rank has finished; it was stopped in the next one.
            why_not: why it cannot do that next update again; empty: it can.
            processor: of the old launch.
            adapter: of the old launch.
        """
        try:
            why_not = why_not or ("its state is on a device" if processor.source.on_device else "")
            following = self._next = self._await(RankEnv.from_env().launch + 1)
            left = self._meet(following, staying.leave(why_not) if why_not else staying.stay(version))
            if left is not None:
                log.info("its loop is left: %s", left)
                return False
            self._end(processor, adapter)
            self.releasing = False
            self._renew("in its loop", all_of_them=True)
        except Exception as problem:
            self.leave(f"this rank could not go on: {problem!r}")
        return True

    def why_not(self, source: StateSource) -> str:
        """Return why this process cannot go on after a failure of another; empty: it can."""
        if self._groups is None:
            return "torch was imported after @ttp_to_persist was applied"
        if source.on_device and not self._on_cuda:
            return _NEVER_RUN
        self._launcher = os.getppid()
        if not self._files.is_served_by(self._launcher):
            return _NO_LAUNCHER
        return self._refused or self._groups.why_not()

    def why_no_longer(self) -> str:
        """Return why this process, which was able to go on, no longer is; or empty. Reads no file, which may hang."""
        return "" if os.getppid() == self._launcher else "its launcher has ended"

    def refuse(self, why: str) -> None:
        """Note why this process cannot go on after a failure. Call it in train(), before the job is joined."""
        self._refused = self._refused or why

    def out(self, problem: BaseException | None, processor: Processor, adapter: Any) -> NoReturn:
        """End what belongs to the old launch, after the training thread has left train(), and raise ``TrainAgain``.

        Args:
            problem: what train() has raised. The process ends if this does not look like another rank's death.
            processor: of the old launch.
            adapter: of the old launch. Nothing should refer to it any more when the next one is made.

        Raises:
            TrainAgain: always, unless the process ends.
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
        """End what belongs to the old launch, and keep the state."""
        self._broken.wait()  # on the processor's thread; the clock runs
        source: Any = processor.source
        if source.on_device and (reason := source.why_not_at_rest(self.clock.within_s / 2)):
            self.leave(reason)
        self.state.keep(adapter, self._incident)
        if (detach := getattr(adapter, "detach", None)) is not None:
            detach()
        processor.close()
        if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
            with contextlib.suppress(OSError):
                Path(path).unlink()

    def await_launcher(self) -> None:
        """Wait for the launcher, and become a rank of the launch that it names.

        Call it when nothing refers to the old launch any more.
        """
        if self._old is not None and self._old() is not None:
            gc.collect()
        if self.releasing and self._next is None:  # else it was announced while this rank was in its loop
            self._next = self._await(RankEnv.from_env().launch + 1)
        self.releasing = False

    def _await(self, launch: int) -> NextLaunch:
        """Wait until the launcher says where the ranks of ``launch`` meet, and become one of them.

        The launcher kills processes that it does not want in that launch.
        """
        while (following := self._files.next()) is None or following.launch != launch or not following.released:
            if self.clock.elapsed_s() > self._patience_s:
                self.leave("the launcher has not announced the next launch")
            if not self._files.is_served_by(os.getppid()):
                self.leave("its launcher has ended")
            time.sleep(LOOK_S)
        os.environ.update(following.as_environment())
        return following

    # ---------------------------------------------------------------------------------------------------- any thread

    def released(self, processor: Processor, incident: str) -> None:
        """Release this rank to go on: a thread that waits in a collective gets an error.

        Args:
            processor: of this launch, whose gate is closed.
            incident: the incident that has ended.
        """
        self._broken.clear()
        with self._switch:
            self.releasing = True  # before the clock runs: a collective may fail meanwhile, see ``watched``
            self.clock.start(RankEnv.from_env().launch + 1)
            self._incident = incident
        processor.gate.halt()
        self._let_go(processor.source)
        self._broken.set()
        assert self._thread is not None
        asleep.watch(self._thread, lambda: self.releasing, lambda: self.leave("a broken collective does not return"))

    def _let_go(self, source: Any) -> None:
        groups, reason = self._groups, ""
        if groups is None:
            return
        try:
            reason = source.why_not_abort(self.clock.within_s / 2) if groups.aborts else ""
            if not reason:
                groups.let_go()
        except Exception as problem:
            reason = describe(problem)
        if reason:
            self.leave(f"the connections of this rank cannot be broken: {reason}")

    def update_begins(self) -> None:
        """Stop the clock, if it runs, because an update begins for which every rank has its gradient."""
        if self.clock.runs:
            with self._switch:
                if not self.releasing:
                    self.clock.stop()

    def leave(self, why: str) -> NoReturn:
        """End the process with exit code 75. The job is saved, and the launcher starts all ranks anew."""
        end_process(EXIT_SAVED, f"{why}; the job is saved, and all ranks are restarted", None, lambda: None)
        raise AssertionError("unreachable")

    def tries_again(self, problem: BaseException) -> bool:
        """Wait and return True if train() is to be called again, because the dead rank's device is not free yet."""
        fresh = self._newcomer and self._groups is not None and self._groups.untouched()
        if not (fresh and self._on_cuda and is_out_of_device_memory(problem)):
            return False
        log.warning("the dead rank's device is not free yet, so train() is called again: %s", describe(problem))
        traceback.clear_frames(problem.__traceback__)
        time.sleep(RETRY_S)
        return True


_continuing: Continuing | None = None


def prepare() -> None:
    """Make this process able to go on, if the job's settings want it. Never raises.

    Call it where train() is decorated, before process groups are made.
    """
    global _continuing
    if _continuing is not None or os.environ.get("TTP_CONTINUITY") != KEEP or not os.environ.get("TTP_PORT"):
        return
    try:
        config, env = Config.from_env(), RankEnv.from_env()
    except ConfigError:
        return  # reported when the job is joined
    following = Again(config.resolved_run_dir()).next()
    seat = following is not None and following.launch == env.launch and env.rank in following.seats
    try:
        groups = _groups(seat=seat, with_nccl=config.keep_cuda)
        _continuing = Continuing(config, groups, following if seat else None)
    except Exception as problem:
        log.warning("this process will not go on after a failure of another: %r", problem)


def current() -> Continuing | None:
    """Return the ``Continuing`` of this process; None: survivors do not go on."""
    return _continuing


def able(source: StateSource, *, in_train: bool = True) -> Continuing | None:
    """Return the ``Continuing`` of this process; None: it cannot go on after another rank died, and the log says why.

    Nothing is logged if the job's settings do not let survivors go on. ``in_train``: train() has called wrap_optimizer.
    """
    if os.environ.get("TTP_CONTINUITY") != KEEP or (_continuing is None and in_train):
        return None
    reason = _OUTSIDE if source.framework == "torch" else "only torch programs can go on so far"
    try:
        if source.framework == "torch" and in_train and _continuing is not None:
            reason = _continuing.why_not(source)
    except Exception as problem:  # private parts of torch may have changed
        reason = repr(problem)
    if reason:
        log.warning("this process will not go on after a failure of another: %s", reason)
    return None if reason else _continuing


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """Wrap a call of train(): a rank that goes on and meets an error before its first update leaves with 75.

    This holds for every error, which a fresh process may not meet, but not for a forked child: that is not the rank.
    """
    survivor, pid = _continuing, os.getpid()
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException as problem:
        left = os.getpid() != pid or (isinstance(problem, SystemExit) and problem.code in (None, 0))
        if survivor is not None and survivor.clock.runs and not (survivor.releasing or left):
            if survivor.tries_again(problem):
                raise TrainAgain from None
            log.error("train() was called again, and raised", exc_info=True)
            survivor.leave(f"train() was called again, and raised {describe(problem)}")
        raise
    if survivor is not None and survivor.clock.runs and not survivor.releasing and os.getpid() == pid:
        if not survivor.state.way:
            survivor.leave("train() was called again, and has ended without restoring anything")
        survivor.update_begins()  # no update was left to make


def _groups(*, seat: bool, with_nccl: bool) -> Groups | None:
    if "torch" not in sys.modules:
        return None
    from ttp.adapters.torch.regroup import Groups

    return Groups(seat=seat, with_nccl=with_nccl)
