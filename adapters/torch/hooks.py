"""Where ttp touches the training loop: hooks of optimizer, parameters and model.

::

    forward        the tail of the last update is through
    backward       provisional capture for n + 1, before this rank's last gradient can leave it; not under no_sync
    step, before   what has changed since then; a barrier where the layout needs one; the gate; a copy of n where asked
    step, after    final capture of n + 1; the version is finished

The provisional capture exists because a rank may die after it has given its gradients and before it has made the
update: its peers will reach n + 1, so what only it had must be there for n + 1.

One parameter is enough to notice a backward pass in time. DistributedDataParallel reduces a bucket when its own hooks
have seen every parameter of it; a parameter's post-accumulate hook runs before them; and n + 1 needs every bucket.
Where parameters may stay unused, and outside of DistributedDataParallel, all of them get the hook (0.3 us each). FSDP
calls the hooks of its parameters behind the reduction of their gradients: there the outputs of the outermost module
tell of the backward pass.

Each of these points raises the mark of the step by one. Ranks run the same program, so they pass the same points in the
same order, however often gradients are accumulated: the one with the lower mark is behind. A forward pass without
gradients is an evaluation, which not every rank may make: it raises no mark, it is said to be one.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ttp.adapters.torch.closures import Closure, closure_of, evaluates_first, with_closure
from ttp.adapters.torch.data_parallel import ddps_of
from ttp.adapters.torch.ddp import Ddp
from ttp.adapters.torch.device import Fence
from ttp.adapters.torch.hook import Hook
from ttp.adapters.torch.misuse import (
    Strangers,
    capturing,
    graph_task,
    in_backward,
    refuse_capture,
    refuse_in_backward,
)
from ttp.adapters.torch.no_sync import NoSync
from ttp.adapters.torch.stepping import Stepping
from ttp.adapters.torch.tail import Tail
from ttp.adapters.torch.turns import Turns
from ttp.adapters.torch.untouched import Untouched
from ttp.errors import UsageError
from ttp.processor.source import UpdateReporter

log = logging.getLogger("ttp.adapters.torch")

EVALUATING = "a forward pass without gradients"
"""What a rank is said to do from such a pass until the next point of a step."""

_WHOLE_STEP = (
    "{0}.step(closure) may write before its closure has run, or runs it more than once, as far as its code shows: the "
    "whole step counts as the update, forward and backward passes included. If a rank is lost in it, this step cannot "
    'be saved before it ends; with undo="preimage" ranks that get an exception from the loss can go back. To have the '
    "update begin later, call the closure yourself: loss = closure(); optimizer.step()"
)

_LEFT = (
    "step() was left by an exception that the program has caught, in the update after version %d. Parts of that update "
    "may be in the weights: nothing can be saved from this rank until its next whole step. If other ranks did not "
    "raise alike, their weights differ from those of this one from now on; that is compared when a checkpoint is made"
)

_NOT_EVALUATED = "{0}.step(closure) has not called its closure: ttp was told of this update when it was over"


class Capture(Protocol):
    """``LocalCapture``, as hooks need it."""

    def capture(self, version: int, final: bool) -> None:
        """Take the rank-local state of this moment; never raises."""

    def look_again(self, version: int) -> None:
        """Just before the update: take what has changed since the last capture for ``version``; never raises."""


def attach(
    optimizers: Optimizer | Sequence[Optimizer | Sequence[Optimizer]],
    model: nn.Module,
    reporter: UpdateReporter,
    capture: Capture,
    *,
    tail: Tail,
    fence: Fence,
    version: Callable[[], int],
    turns: Turns | None = None,
    untouched: Untouched | None = None,
    ddps: Sequence[Ddp] | None = None,
    before_gate: Callable[[], None] = lambda: None,
    before_update: Callable[[int], None] = lambda _version: None,
    before_turn: Callable[[int, int], None] = lambda _version, _number: None,
    after_update: Callable[[], None] = lambda: None,
    after_end: Callable[[], None] = lambda: None,
) -> Attachment:
    """Report every update of ``optimizers``, and capture what belongs to it.

    Args:
        optimizers: one, or several that make one version together; of wrappers those inside too, as a list, of which
            the outermost step counts.
        model: the outermost module that the loop calls.
        reporter: begin waits while the world is frozen.
        capture: of rank-local state.
        tail: of scheduler and scaler.
        fence: of the device.
        version: finished updates, as the gate counts them.
        untouched: looks whether the loop changes weights by itself.
        turns: whose steps make one version; None: each optimizer steps once, in the order given, without a pause.
        ddps: what reduces the gradients of ``model``; None: to be found.
        before_gate: called when the gradient is reduced; may block, and raise like any collective.
        before_update: called behind the gate with the number of finished updates; may not raise.
        before_turn: the same before each step of several, with the number of the optimizer too, where training may
            stand between the steps of one version.
        after_update: called on the training thread after each update; may not block.
        after_end: called when the update was reported as finished, before ``step()`` returns; may block, and raise
            ``UsageError``.

    Returns:
        Call it to detach.
    """
    each_or_several = [optimizers] if isinstance(optimizers, Optimizer) else optimizers
    many = [[each] if isinstance(each, Optimizer) else each for each in each_or_several]
    attachment = Attachment(
        reporter,
        capture,
        untouched=untouched,
        turns=turns or Turns([type(each[0]).__name__ for each in many], chained=True),
        tail=tail,
        fence=fence,
        version=version,
        before_gate=before_gate,
        before_update=before_update,
        before_turn=before_turn,
        after_update=after_update,
        after_end=after_end,
    )
    attachment.connect(many, model, ddps_of(model) if ddps is None else ddps)
    return attachment


class Attachment:
    """The bracket around an update; see ``attach`` for its parts.

    ``step`` of a subclass that calls ``super().step()`` fires the hooks twice: only the outermost counts. An exception
    of ``step()`` leaves the bracket open: the copy is torn, which is the truth. A program that catches it and goes on
    is told so; see docs/decisions/0028-the-bracket.md for what becomes of the version.
    """

    def __init__(
        self,
        reporter: UpdateReporter,
        capture: Capture,
        *,
        turns: Turns,
        untouched: Untouched | None,
        tail: Tail,
        fence: Fence,
        version: Callable[[], int],
        before_gate: Callable[[], None],
        before_update: Callable[[int], None],
        before_turn: Callable[[int, int], None],
        after_update: Callable[[], None],
        after_end: Callable[[], None],
    ) -> None:
        self._reporter = reporter
        self._capture = capture
        self._tail = tail
        self._fence = fence
        self._version = version
        self._before_gate, self._before_update, self._after_update = before_gate, before_update, after_update
        self._before_turn, self._after_end = before_turn, after_end
        self.redoable = False
        """Whether the update at the gate needs nothing but the gradient: neither a closure nor ``step_done()``."""
        self._stepping = Stepping(())
        self._strangers: Strangers | None = None
        self._begun = False
        self._stands = False  # training may stand between the steps of the open update
        self._between = False  # it does
        self._turns, self._untouched = turns, untouched
        self._numbers: dict[int, int] = {}  # of the optimizers, by identity
        self._number = 0  # whose turn it is
        self._opened = False  # nothing keeps it from writing any more
        self._left = False  # the last update, half made; until the next one begins
        self._again = False  # no gradient has come since
        self._closures = 0  # that run
        self._backward_begins = Hook(self._backward_enters, traced=False)  # it may be part of a compiled backward pass
        self._task = -1
        self._mark = 0
        self._evaluating = False
        self._complained = False
        self._said: set[str] = set()
        self._handles: list[Any] = []
        self._no_sync = NoSync(nn.Module())

    def connect(self, optimizers: Sequence[Sequence[Optimizer]], model: nn.Module, ddps: Sequence[Ddp]) -> None:
        """Register the hooks.

        Raises:
            UsageError: parameters are updated in the backward pass.
        """
        refuse_in_backward(model)
        self._numbers = {id(each): number for number, several in enumerate(optimizers) for each in several}
        every = [each for several in optimizers for each in several]
        self._stepping = Stepping(every)
        self._strangers = Strangers(every, model, lambda: self._begun)
        self._no_sync = NoSync(model, ddps)
        for optimizer in every:
            self._handles.append(optimizer.register_step_pre_hook(Hook(self._before_step, traced=False)))
            self._handles.append(optimizer.register_step_post_hook(Hook(self._after_step, traced=False)))
        for parameter in gradient_triggers(model, ddps):
            register: Any = parameter.register_post_accumulate_grad_hook
            self._handles.append(register(Hook(self._on_gradient)))
        for module in gathering(model):
            self._handles.append(module.register_forward_hook(Hook(self._on_output)))
        if self._tail.wants_forward:
            self._handles.append(model.register_forward_pre_hook(Hook(self._on_forward)))

    def __call__(self) -> None:
        """Take all hooks away."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._strangers is not None:
            self._strangers.remove()

    def step_done(self) -> None:
        """The user says that a step is done, tail and all; from the first call on this ends the update.

        Without an update since the last call (a skipped step) nothing happens.

        Raises:
            UsageError: called from inside ``optimizer.step()``.
        """
        self._look_for_exception()
        if self._stepping.depth:
            raise UsageError("step_done() was called inside optimizer.step(): call it at the end of the iteration")
        hand, self._turns.by_hand = self._turns.by_hand, True
        if self._begun:
            self._end()
        elif not hand:  # the hooks have ended this update already, too early
            self._safely(self._tail.step_done)
            self._capture.capture(self._version(), final=True)

    # -------------------------------------------------------------------------------------------------------- hooks

    def _on_forward(self, module: nn.Module, _args: Any) -> None:
        if torch.compiler.is_compiling():
            return  # traced, it would bring its changing numbers as guards, and the model would be compiled each step
        self._look_for_exception()
        learning = torch.is_grad_enabled()
        if learning:
            self._pass()
        elif not self._reporter.activity:
            self._reporter.activity, self._evaluating = EVALUATING, True
        self._safely(self._tail.forward_entered, module.training and learning)

    def _on_output(self, _module: nn.Module, _args: Any, output: Any) -> None:
        """A backward pass will come through here before anything inside of the module is reduced."""
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            for tensor in torch.utils._pytree.tree_leaves(output):
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    hook: Any = tensor.register_hook
                    hook(self._on_gradient)

    def _on_gradient(self, _tensor: Tensor) -> None:
        task = graph_task()
        if task != self._task or task == -1:
            self._task = task
            self._backward_begins()

    def _backward_enters(self) -> None:
        if capturing():
            return  # of a CUDA graph: this happens once, not in each of its replays
        self._look_for_exception()
        self._again = False
        self._pass()
        self._turns.backward()
        if self._untouched is not None and not self._stepping.depth:
            self._untouched.backward()
        if not self._no_sync.withholds():
            self._capture.capture(self._next_version(), final=False)

    def _before_step(
        self, optimizer: Optimizer, args: Any, kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        in_backward(optimizer)
        refuse_capture()
        self._look_for_exception(entering=True)
        if self._stepping.depth:  # in another step
            self._stepping.entered()
            return None
        self._take_turn(self._numbers[id(optimizer)])
        kind: Any = type(optimizer)
        closure = closure_of(args, kwargs)
        self._again = self._again and closure is None  # a closure makes a gradient of its own
        if closure is None:
            self._open(redoable=True)
        elif not evaluates_first(kind):
            self._say_once(_WHOLE_STEP.format(kind.__name__))
            self._open(redoable=False)
        self._stepping.entered()
        return None if closure is None else with_closure(partial(self._evaluate, closure), args, kwargs)

    def _take_turn(self, number: int) -> None:
        """It is the turn of this optimizer; nothing of its step is done yet."""
        if self._left and not self._again:
            self._turns.forget()
        if self._turns.overdue(number):
            self._end()
        self._turns.begins(number)
        self._number, self._opened = number, False

    def _evaluate(self, closure: Closure, *args: Any, **kwargs: Any) -> Any:
        """What the optimizer calls in place of ``closure``: behind it the gradient is there, and nothing is written."""
        self._closures += 1
        try:
            result = closure(*args, **kwargs)
        finally:
            self._closures -= 1
        if not self._opened:
            with torch.no_grad():
                self._open(redoable=True)
        return result

    def _open(self, redoable: bool) -> None:
        """The optimizer whose turn it is is about to write: it begins an update, or goes on with one."""
        fresh, self._opened = not self._left, True  # what was left half made is nothing to go back to
        if not self._begun:
            self._begin(redoable)
        elif self._between:
            self._pass()
            self._capture.look_again(self._next_version())
            self._reporter.begin_update()
            self._between = False
        if self._stands and fresh:
            self._before_turn(self._version(), self._number)

    def _begin(self, redoable: bool) -> None:
        again = self._again
        self._pass()
        self._no_sync.at_gate()
        self._safely(self._tail.at_gate)
        self._capture.look_again(self._next_version())
        self._stands = self._turns.stands_between
        self.redoable = redoable and not (self._turns.by_hand or self._stands)
        if not again:
            self._before_gate()
        self._reporter.begin_update(again)
        self._begun = True
        if not self._left:  # what was left half made is nothing to go back to
            self._before_update(self._version())
        self._left = self._again = False

    def _after_step(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        self._stepping.returned()
        if not self._opened:
            self._say_once(_NOT_EVALUATED.format(type(optimizer).__name__))
            self._open(redoable=False)
        if self._stepping.depth:
            return
        if self._untouched is not None:
            self._untouched.stepped()
        if self._turns.ended(self._number):
            self._end()
        elif self._stands:
            self._between = True
            self._reporter.stand_between()

    def _end(self) -> None:
        if self._between:
            self._reporter.begin_update()  # who stands between is frozen like anybody before the gate
        version = self._version() + 1
        self._turns.over()
        self._capture.capture(version, final=True)
        self._safely(self._tail.update_finished, version, whole=self._turns.by_hand)
        self._safely(self._fence.record, version)
        self._safely(self._after_update)
        self._begun = self._between = False
        self._mark = self._reporter.mark = 0
        self._reporter.end_update()
        self._after_end()

    def _next_version(self) -> int:
        """Of the update that comes. One that was left half made has used up its number, unless it is made again."""
        return self._version() + (2 if self._left and not self._again else 1)

    def _look_for_exception(self, *, entering: bool = False) -> None:
        """Whether the program has caught an exception of ``step()`` and goes on."""
        if self._stepping.depth and not self._closures and self._stepping.was_left(entering=entering) and self._begun:
            self._begun = self._between = False
            self._left = self._again = True
            if self._untouched is not None:
                self._untouched.stepped()
            self._reporter.leave_update()
            log.error(_LEFT, self._version())

    def _pass(self) -> None:
        """One more point of the step."""
        self._mark += 1
        self._reporter.mark = self._mark
        if self._evaluating:
            self._evaluating = False
            if self._reporter.activity == EVALUATING:  # else the user has said something since
                self._reporter.activity = ""

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            log.warning("%s", text)

    def _safely(self, call: Callable[..., object], *args: Any, **kwargs: Any) -> None:
        try:
            call(*args, **kwargs)
        except Exception:
            if not self._complained:
                self._complained = True
                log.warning("ttp could not follow an update; training goes on", exc_info=True)


def gradient_triggers(model: nn.Module, ddps: Sequence[Ddp]) -> list[Tensor]:
    """Parameters whose gradients tell of every backward pass before what it reduces can be complete.

    One for each DistributedDataParallel that uses all its parameters in every pass: the first, which is ready last, so
    that what a backward pass changes (recomputed activations) is in the capture. Every other parameter, but for those
    of ``gathering`` modules.
    """
    chosen: list[Tensor] = []
    covered = {id(parameter) for module in gathering(model) for parameter in module.parameters()}
    for ddp in ddps:
        if ddp.find_unused_parameters or ddp.static_graph:
            continue
        ignored = set(getattr(ddp, "parameters_to_ignore", ()))
        reduced = [p for name, p in ddp.module.named_parameters() if p.requires_grad and name not in ignored]
        fresh = [parameter for parameter in reduced if id(parameter) not in covered]
        chosen += fresh[:1]
        covered.update(map(id, reduced))
    return chosen + [p for p in model.parameters() if p.requires_grad and id(p) not in covered and p.is_leaf]


def gathering(model: nn.Module) -> list[nn.Module]:
    """The outermost modules of FSDP in ``model``: hooks of their parameters run when the gradient is reduced already.

    Their outputs tell of a backward pass before.
    """
    library: Any = sys.modules.get("torch.distributed.fsdp")
    kinds = (library.FSDPModule, library.FullyShardedDataParallel) if hasattr(library, "FSDPModule") else ()
    found: list[nn.Module] = []
    inside: set[int] = set()
    for module in model.modules():
        if isinstance(module, kinds) and id(module) not in inside:
            found.append(module)
            inside.update(map(id, module.modules()))
    return found
