"""Decides which optimizer steps make one version, in a training with several optimizers.

The first version shows the order: it ends when each optimizer has stepped once. From then on a version ends with the
step of the optimizer that came last in it. A loop whose optimizers step a different number of times (five steps of a
critic for one of the generator) has no such order, and must call ``step_done()`` at the end of its iterations. The
first step that does not fit raises ``UsageError``, because versions that are counted wrongly are restored wrongly. A
loop with several steps in an iteration raises it too, if its first ``step_done()`` comes so late that several of these
steps were counted as versions.

``Turns`` also learns whether there is a backward pass between the steps of one version. If there is, a rank may die, or
wait for a dead peer, when only some of the steps are made: see ``between.py``. Decision 27 has the reasons.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from ttp.adapters.torch.loop.communication import CommunicationCheck
from ttp.adapters.torch.sharding.names import first_of
from ttp.errors import UsageError

log = logging.getLogger("ttp.adapters.torch")

_UNDECIDED_TOLD = 20
"""Number of steps without a version after which the log says so."""
_UNDECIDED_MAX = 1000
"""Number of steps after which the first version has to be over: no loop makes so many in one iteration."""

_UNDECIDED = (
    "no version is finished before %s has stepped: the %d steps so far would be lost in a failure. If they are more "
    "than one iteration (a network is trained alone at first), call ttp.step_done() at the end of each iteration"
)

_LATE = (
    "{0} steps again before step_done(), which was called for the first time only after {1} updates: each of these was "
    "counted as a version, so a restart would begin at too high a step. Call ttp.step_done() once before the loop, "
    "right after ttp.restore(), and at the end of each iteration"
)

_HIDDEN = (
    "{0} wraps another optimizer and does not call torch.optim.Optimizer.__init__(), so its step() calls no hooks: ttp "
    "cannot see what it does around the step of the inner optimizer (Lookahead writes to the weights). If it does "
    "nothing there, give ttp the inner optimizer (Lightning Fabric's is in its attribute optimizer). Otherwise call "
    "ttp.step_done() at the end of each iteration, from the first one on"
)


class Turns:
    """Follows the steps of one training loop, and decides where versions end. For the training thread.

    Args:
        names: names of the optimizers, for messages.
        skipped: returns whether the gradient scaler skipped the last step.
        scaled: whether there is a gradient scaler, which may skip steps.
        hidden: class name of a wrapper around an optimizer whose own step fires no hooks; empty: there is none.
        chained: whether the optimizers are known to step in the order given, with no backward pass in between.
    """

    def __init__(
        self,
        names: Sequence[str],
        *,
        skipped: Callable[[], bool] = lambda: False,
        scaled: bool = False,
        hidden: str = "",
        chained: bool = False,
    ) -> None:
        self._hidden = hidden
        self._names, self._skipped, self._scaled, self._chained = tuple(names), skipped, scaled, chained
        self._made: list[int] = []
        self.order: tuple[int, ...] | None = tuple(range(len(names))) if chained or len(names) == 1 else None
        """The order in which the optimizers step, by their numbers; None: not known yet."""
        self.interleaved: bool | None = False if self.order is not None else None
        """Whether backward passes come between the steps of a version; None: not known yet."""
        self.by_hand = False
        """Whether the loop declares the end of each version with ``step_done()``. Set by ``ends_by_hand``."""
        self.several = len(names) > 1
        """Whether there is more than one optimizer."""
        self.communication: CommunicationCheck | None = CommunicationCheck()
        """Checks whether the loop communicates before it calls ``step_done()``; None: training can go back then."""
        self._early = 0  # number of versions that ended before the first step_done()
        self.simple = len(names) == 1 and not hidden
        """Whether each step makes a version, so that no method of this object needs to be called."""

    def ends_by_hand(self, counted: int) -> bool:
        """Note that from now on the loop declares the end of each version. Returns whether it did so before.

        Args:
            counted: number of versions that have ended so far.
        """
        before, self.by_hand, self.simple = self.by_hand, True, False
        if not before:
            self._early = counted
        elif self.communication is not None:
            self.communication.version_ended()
        return before

    @property
    def stands_between(self) -> bool:
        """Whether training may have to stop between two steps of one version, in a backward pass there."""
        return (self.several or self.by_hand) and self.interleaved is not False

    def is_last(self, number: int) -> bool:
        """Return whether the version is known to end with the step of this optimizer."""
        if self.by_hand or self._hidden:
            return False
        if self.order is not None:
            return number == self.order[-1]
        return {*self._made, number} == set(range(len(self._names))) and len(set(self._made)) == len(self._made)

    def has_stepped(self, number: int) -> bool:
        """Return whether this optimizer has stepped in the open version."""
        return number in self._made

    def overdue(self, number: int) -> bool:
        """Return whether the version has to end before this step, because the scaler has skipped its last step."""
        return not (self.by_hand or self._hidden) and self.has_stepped(number) and self._scaled and self._skipped()

    def step_begins(self, number: int) -> None:
        """Note that an optimizer is about to step.

        Raises:
            UsageError: this step does not fit the order, so ttp cannot tell where versions end.
        """
        if self.by_hand:
            if self._early > 1 and number in self._made:
                raise UsageError(_LATE.format(self._names[number], self._early))
            return
        if self._hidden and number in self._made:
            raise UsageError(_HIDDEN.format(self._hidden))
        if not self.several or self._chained or self._hidden:
            return
        made = self._made
        if self.order is None:
            wrong = number in made and (set(made) == set(range(len(self._names))) or len(made) >= _UNDECIDED_MAX)
        elif self._scaled:
            wrong = number in made or (bool(made) and self.order.index(number) < self.order.index(made[-1]))
        else:
            wrong = number != self.order[len(made)]
        if wrong:
            raise UsageError(self._irregular(number))

    def step_ended(self, number: int) -> bool:
        """Note that an optimizer has stepped. Returns whether the version is finished."""
        finished = self.is_last(number)
        self._made.append(number)
        if self.by_hand and self.communication is not None:
            self.communication.stepped(self.stands_between)
        if len(self._made) == _UNDECIDED_TOLD and self.order is None and not self.by_hand:
            missing = [name for each, name in enumerate(self._names) if each not in self._made]
            if missing:
                log.warning(_UNDECIDED, " and ".join(missing), _UNDECIDED_TOLD)
        return finished

    def backward(self) -> None:
        """Note that a backward pass has begun."""
        if self._made and not self._chained:
            self.interleaved = True

    def version_abandoned(self) -> None:
        """Note that the open version was abandoned, and that the loop begins another one, or the same one again."""
        self._made = []

    def version_ended(self) -> None:
        """Note that the version is finished."""
        made, self._made = tuple(self._made), []
        if self.by_hand:
            self._early = 0  # an iteration has passed with one step, so the earlier versions were counted rightly
        if len(set(made)) < len(self._names):
            return  # the scaler has skipped a step, or step_done() ended the version: this one shows no order
        if self.order is None and not self.by_hand:
            self.order = made
        if self.interleaved is None:
            self.interleaved = False

    def _irregular(self, number: int) -> str:
        made = first_of([self._names[each] for each in self._made], 8)
        usual = (
            "that order is not known yet"
            if self.order is None
            else "the order was " + ", ".join(self._names[each] for each in self.order)
        )
        return (
            f"{self._names[number]} steps again or out of turn: in this iteration {made or 'none'} stepped before, and "
            f"{usual}. A version is finished when every optimizer has stepped once in the order of the first "
            "iteration. If they step a different number of times, call ttp.step_done() at the end of each iteration, "
            "from the first one on"
        )
