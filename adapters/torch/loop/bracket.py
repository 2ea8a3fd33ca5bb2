"""The bracket around an update: reports its beginning and its end, and captures the rank-local state for it."""

from __future__ import annotations

import enum
import logging
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch.optim import Optimizer

from ttp.adapters.torch.device.accelerator import Fence
from ttp.adapters.torch.loop.closures import (
    NOT_EVALUATED,
    WHOLE_STEP,
    Closure,
    closure_of,
    evaluates_first,
    with_closure,
)
from ttp.adapters.torch.loop.communication import warn_of_unheard
from ttp.adapters.torch.loop.misuse import graph_task, pass_on_failure, refuse_capture, refuse_in_step
from ttp.adapters.torch.loop.no_sync import NoSync
from ttp.adapters.torch.loop.post_step_state import PostStepState
from ttp.adapters.torch.loop.stepping import Stepping, changes_nothing, creates_state
from ttp.adapters.torch.loop.turns import Turns
from ttp.adapters.torch.loop.untouched import Untouched
from ttp.errors import UsageError
from ttp.processor.source import UpdateReporter

log = logging.getLogger("ttp.adapters.torch")

EVALUATING = "a forward pass without gradients"
"""The reported activity of a rank from such a forward pass until the next point of a training step."""

_STEP_LEFT = (
    "optimizer.step() was left by an exception that the program has caught, in the update after version %d. The "
    "weights may contain a part of that update, so this rank cannot be saved until it has made another whole step. If "
    "other ranks did not raise the same exception, their weights differ from those of this rank from now on; replicas "
    "are compared when a checkpoint is made"
)

HAD_AN_ERROR = "ttp had an error while it followed an update; training goes on"

_VERSIONS_LOOKED_AT = 5
"""Number of first versions in which optimizers are watched for communication in their steps."""


class Stage(enum.Enum):
    """How far the update to the next version has come."""

    NONE = "no update has begun"
    OPEN = "it has begun and not ended, and an optimizer may be writing"
    BETWEEN = "training is between steps of the open update, or in a closure that a step evaluates"
    LEFT = "an exception has left it half made, and the next step makes it again"
    ABANDONED = "an exception has left it half made, and a new gradient has come since: the next step makes another one"


NONE, OPEN, BETWEEN, LEFT, ABANDONED = Stage  # looking them up in the class takes longer


class Capture(Protocol):
    """The methods of ``LocalCapture`` that the hooks use."""

    def capture(self, version: int, final: bool, alone: bool = False) -> None:
        """Capture the rank-local state of this moment for ``version``; never raises.

        ``alone``: only torch's own code has run on this thread since ``look_again``.
        """

    def look_again(self, version: int) -> None:
        """Capture, just before the update, what has changed since the last capture for ``version``; never raises."""


def _nothing(*_: object) -> None:
    """Do nothing."""


class Calls(NamedTuple):
    """Functions that a ``Bracket`` calls around an update, all of them on the training thread.

    Args:
        before_gate: called when the gradient is reduced, before the gate; may block, and may raise like any collective.
        before_update: called after the gate, with the number of finished updates, and whether the state is that of this
            version: after a half-made update it is of none. May not raise.
        before_turn: called after the gate, before a step in or after which training may stop with the version
            unfinished. Takes the number of finished updates, the number of the optimizer, and whether training may
            stop inside of that step. Returns whether training can go back to the last version. May not raise.
        after_update: called after each update, before it is reported as finished; may not block.
        after_end: called after the update was reported as finished, before ``step()`` returns; may block, and may
            raise ``UsageError``.
        before_forward: called at the beginning of each forward pass in training; may neither block nor raise.
        before_backward: called at the beginning of each backward pass; may neither block nor raise.
        evaluating: called at the beginning of each forward pass without gradients; may neither block nor raise.
    """

    before_gate: Callable[[], None] = _nothing
    before_update: Callable[[int, bool], None] = _nothing
    before_turn: Callable[[int, int, bool], bool] = lambda *_: False  # there are no copies to go back to
    after_update: Callable[[], None] = _nothing
    after_end: Callable[[], None] = _nothing
    before_forward: Callable[[], None] = _nothing
    before_backward: Callable[[], None] = _nothing
    evaluating: Callable[[], None] = _nothing


class Bracket:
    """Reports the beginning and the end of each update to the processor; see ``hooks.Attachment`` for the arguments.

    When ``step`` of a subclass calls ``super().step()``, the hooks fire twice: only the outermost call counts. If
    ``step()`` raises, the update stays unfinished, so the copy counts as torn, which it is. If the program catches the
    exception and goes on, an error is logged; decision 28 says what becomes of the version.
    """

    __slots__ = (
        "_calls", "_capture", "_closures", "_ended", "_evaluating", "_fence", "_handled", "_heard", "_mark", "_no_sync",
        "_number", "_numbers", "_opened", "_post_step", "_reporter", "_said", "_stage", "_stands", "_stepping",
        "_turns", "_untouched", "_version", "redoable")  # fmt: skip

    def __init__(
        self,
        optimizers: Sequence[Sequence[Optimizer]],
        reporter: UpdateReporter,
        capture: Capture,
        turns: Turns,
        untouched: Untouched | None,
        post_step: PostStepState,
        fence: Fence,
        version: Callable[[], int],
        calls: Calls,
        no_sync: NoSync,
    ) -> None:
        self._reporter, self._capture = reporter, capture
        self._post_step = post_step
        self._fence = fence
        self._version = version
        self._calls = calls
        self.redoable = False
        """Whether the update at the gate needs only its gradient, and neither a closure nor ``step_done()``."""
        self._stepping = Stepping([each for several in optimizers for each in several])
        self._no_sync = no_sync
        self._stage = NONE
        self._stands = False  # training may have to stop between the steps of the open update
        self._turns, self._untouched = turns, untouched
        self._numbers = {id(each): number for number, several in enumerate(optimizers) for each in several}
        self._number = 0  # number of the optimizer that steps now, or stepped last
        self._opened = False  # that optimizer may write
        self._handled = 0  # identity of the exception that the loop handled already when the forward pass began
        self._heard = False  # a backward pass was seen, or its absence was reported
        self._closures = 0  # number of closures that are running
        self._ended = 0  # number of versions that this process has finished
        self._mark = 0
        self._evaluating = False  # this object has reported an evaluation as the activity
        self._said: set[str] = set()

    def step_done(self) -> None:
        """End the version, because the user's loop declares its step done. From now on only this call ends versions.

        If there was no update since the last call (a skipped step), nothing happens.

        Raises:
            UsageError: called from inside ``optimizer.step()``.
        """
        self._look_for_exception()
        if self._stepping.depth:
            raise UsageError("step_done() was called inside optimizer.step(): call it at the end of the iteration")
        declared = self._turns.ends_by_hand(self._ended)
        if self._updating():
            self._end()
        elif not declared:  # at the first call the hooks have ended this version already, too early
            self._post_step_over(self._post_step.step_done)

    def settled(self) -> None:
        """Note that scheduler, scaler and averages have followed the last update; for frameworks that tell when."""
        self._post_step_over(self._post_step.at_gate)

    def _post_step_over(self, note: Callable[[], None]) -> None:
        try:
            note()
        except Exception:
            self._say_once(HAD_AN_ERROR, exc_info=True)
        self._capture.capture(self._version(), True)

    # --------------------------------------------------------------------------------------------------- the update

    def _before_step(
        self, optimizer: Optimizer, args: Any, kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if graph_task() != -1:
            refuse_in_step(optimizer)
        refuse_capture()
        if (problem := sys.exc_info()[1]) is not None and id(problem) != self._handled:
            pass_on_failure(problem, closure_of(args, kwargs))
        if self._stepping.depth:
            self._look_for_exception(entering=True)
            if self._stepping.depth:  # this call runs inside another step
                self._stepping.entered()
                return None
        closure = closure_of(args, kwargs) if (given := bool(kwargs) or len(args) > 1) else None
        first = not (self._heard or self._mark)
        if closure is None and ((given and creates_state()) or (first and changes_nothing(optimizer))):
            self._stepping.entered(aside=True)
            return None
        if self._turns.simple:
            self._opened = False
        else:
            self._take_turn(self._numbers[id(optimizer)])
        if closure is None:
            if not self._heard:
                self._heard = True
                warn_of_unheard(optimizer, (*args[1:], *kwargs.values()))
            self._open()
            self._stepping.entered(optimizer)
            if self._ended < _VERSIONS_LOOKED_AT and (check := self._turns.communication) is not None:
                check.step_begins(type(optimizer).__name__)
            return None
        return self._begin_with_closure(type(optimizer), closure, args, kwargs)

    def _begin_with_closure(
        self, kind: Any, closure: Closure, args: Any, kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Begin a step that evaluates a closure; returns its arguments, with a closure that opens the update."""
        if self._stage is LEFT:
            self._stage = ABANDONED  # the closure makes a new gradient
        evaluate = self._evaluate
        if not evaluates_first(kind):
            self._say_once(WHOLE_STEP.format(kind.__name__))
            if self._open(redoable=False, within=True):
                evaluate = self._evaluate_between
        self._stepping.entered()
        return with_closure(partial(evaluate, closure), args, kwargs)

    def _take_turn(self, number: int) -> None:
        """Note that the optimizer with this number is about to step; end the version first if that is overdue."""
        if self._stage is ABANDONED or (self._stage is LEFT and self._turns.has_stepped(number)):
            self._turns.version_abandoned()  # a half-made version begins anew
        if self._turns.overdue(number):
            self._end()
        self._turns.step_begins(number)
        self._number, self._opened = number, False

    def _evaluate(self, closure: Closure, *args: Any, **kwargs: Any) -> Any:
        """Evaluate a closure, then open the update: now the gradient is final, and the step has not written yet."""
        self._closures += 1
        try:
            result = closure(*args, **kwargs)
        finally:
            self._closures -= 1
        if not self._opened:
            with torch.no_grad():
                self._open()
        return result

    def _evaluate_between(self, closure: Closure, *args: Any, **kwargs: Any) -> Any:
        """Evaluate a closure in a step that may write weights before and after it, and that training can go back from.

        While the closure runs the state does not change but belongs to no version, and the rank may wait in a
        collective for a dead peer. So the rank can be frozen here, and is saved as it was before the step.
        """
        self._stand_between()
        result = self._evaluate(closure, *args, **kwargs)
        with torch.no_grad():
            self._go_on()
        return result

    def _open(self, *, redoable: bool = True, within: bool = False) -> bool:
        """Begin an update, or continue the open one: the optimizer whose turn it is will write next.

        Args:
            redoable: see the attribute of that name.
            within: whether training may have to stop inside of this step.

        Returns:
            Whether training can stop inside of this step, because it can go back to the last version from there.
        """
        if self._untouched is not None:
            self._untouched.before_step()
        before, self._opened = self._stage, True
        if before is BETWEEN:
            self._go_on()
        elif before is not OPEN:
            self._begin(redoable)
        if not (self._stands or within):
            return False
        # There is no version to go back to after a half-made update, or if earlier steps of this one were not copied.
        known = before is NONE or (self._stands and before in (OPEN, BETWEEN))
        return known and self._calls.before_turn(self._version(), self._number, within)

    def _go_on(self) -> None:
        """Continue an update after a stop between its steps; waits while the job is frozen, as before any update."""
        self._pass()
        self._capture.look_again(self._next_version())
        self._reporter.begin_update()
        self._stage = OPEN

    def _stand_between(self) -> None:
        """Let the rank be frozen at this point inside of the open update."""
        self._stage = BETWEEN
        self._reporter.stand_between()

    def _begin(self, redoable: bool) -> None:
        before, turns = self._stage, self._turns
        self._pass()
        self._no_sync.at_gate()
        try:
            self._post_step.at_gate()
        except Exception:
            self._say_once(HAD_AN_ERROR, exc_info=True)
        self._capture.look_again(self._next_version())
        self._stands = stands = not turns.simple and turns.stands_between
        self.redoable = redoable and not (turns.by_hand or stands)
        if before is not LEFT:
            self._calls.before_gate()
        self._reporter.begin_update(before is LEFT)
        self._stage = OPEN
        self._calls.before_update(self._version(), before is NONE)

    def _after_step(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        depth = self._stepping.returned()
        if self._stepping.aside:
            return
        if not self._opened:
            self._untouched = None  # the step has written already, which is no change by the loop
            self._say_once(NOT_EVALUATED.format(type(optimizer).__name__))
            self._open(redoable=False)
        if depth:
            return
        if self._ended < _VERSIONS_LOOKED_AT and (check := self._turns.communication) is not None:
            check.step_ended(type(optimizer).__name__)
        if self._untouched is not None and not self._untouched.stepped():
            self._untouched = None
        if self._turns.simple or self._turns.step_ended(self._number):
            self._end()
        elif self._stands:
            self._stand_between()

    def _end(self) -> None:
        if self._stage is BETWEEN:
            self._reporter.begin_update()  # waits while the job is frozen, as between two steps
        turns, version = self._turns, self._version() + 1
        if not turns.simple:
            turns.version_ended()
        self._capture.capture(version, True, turns.simple and self._stepping.alone)
        try:
            self._post_step.update_finished(version, turns.by_hand)
        except Exception:
            self._say_once(HAD_AN_ERROR, exc_info=True)
        try:
            self._calls.after_update()
        except Exception:
            self._say_once(HAD_AN_ERROR, exc_info=True)
        try:
            self._fence.record(version)  # behind what is noted of the weights, which a save compares with them
        except Exception:
            self._say_once(HAD_AN_ERROR, exc_info=True)
        self._stage = NONE
        self._ended += 1
        self._mark = self._reporter.mark = 0
        self._reporter.end_update()
        self._calls.after_end()

    def _next_version(self) -> int:
        """Return the version that the next update makes. A half-made update uses up a number unless it is repeated."""
        return self._version() + (2 if self._stage is ABANDONED else 1)

    def _updating(self) -> bool:
        """Return whether an update has begun and not ended."""
        return self._stage in (OPEN, BETWEEN)

    def _look_for_exception(self, *, entering: bool = False) -> None:
        """Give up the open update if an exception has left its ``step()`` and the program has caught the exception."""
        if self._closures or not self._stepping.was_left(entering=entering):
            return
        if self._updating():
            self._stage = LEFT
            if self._untouched is not None and not self._untouched.stepped():
                self._untouched = None
            self._reporter.leave_update()
            log.error(_STEP_LEFT, self._version())

    def _pass(self) -> None:
        """Raise the mark of the step by one."""
        self._mark += 1
        self._reporter.mark = self._mark
        if self._evaluating:
            self._evaluating = False
            if self._reporter.activity == EVALUATING:  # else the program has set another activity since
                self._reporter.activity = ""

    def _say_once(self, text: str, *, exc_info: bool = False) -> None:
        """Log a warning, with the error that is being handled if ``exc_info``; the same text only once."""
        if text not in self._said:
            self._said.add(text)
            log.warning("%s", text, exc_info=exc_info)
