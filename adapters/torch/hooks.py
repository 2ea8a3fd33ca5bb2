"""Where ttp touches the training loop: hooks of optimizer, parameters and model.

::

    forward        the tail of the last update is through
    backward       provisional capture for n + 1, before this rank's last gradient can leave it
    step, before   provisional capture again; a barrier where the layout needs one; the gate; a copy of n where asked
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
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ttp.adapters.torch.device import Fence
from ttp.adapters.torch.tail import Tail
from ttp.adapters.torch.turns import Turns
from ttp.errors import UsageError
from ttp.processor.source import UpdateReporter

log = logging.getLogger("ttp.adapters.torch")

_graph_task: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", lambda: -1)
"""Number of the backward pass that runs; -1 outside of one."""

EVALUATING = "a forward pass without gradients"
"""What a rank is said to do from such a pass until the next point of a step."""


class Capture(Protocol):
    """``LocalCapture``, as hooks need it."""

    def capture(self, version: int, final: bool) -> None:
        """Take the rank-local state of this moment; never raises."""


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
        turns: whose steps make one version; None: each optimizer steps once, in the order given, without a pause.
        before_gate: called when the gradient is reduced; may block, and raise like any collective.
        before_update: called behind the gate with the number of finished updates; may not raise.
        before_turn: the same before each step of several, with the number of the optimizer too, where training may
            stand between the steps of one version.
        after_update: called on the training thread after each update; may not block.
        after_end: called when the update was reported as finished, before ``step()`` returns; may block, may not raise.

    Returns:
        Call it to detach.
    """
    each_or_several = [optimizers] if isinstance(optimizers, Optimizer) else optimizers
    many = [[each] if isinstance(each, Optimizer) else each for each in each_or_several]
    attachment = Attachment(
        reporter,
        capture,
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
    attachment.connect(many, model)
    return attachment


class Attachment:
    """The bracket around an update; see ``attach`` for its parts.

    An exception inside ``optimizer.step()`` leaves the bracket open: the copy is torn, which is the truth. ``step`` of
    a subclass that calls ``super().step()`` fires the hooks twice: only the outermost counts.
    """

    def __init__(
        self,
        reporter: UpdateReporter,
        capture: Capture,
        *,
        turns: Turns,
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
        self._depth = 0
        self._begun = False
        self._stands = False  # training may stand between the steps of the open update
        self._between = False  # it does
        self._turns = turns
        self._numbers: dict[int, int] = {}  # of the optimizers, by identity
        self._task = -1
        self._mark = 0
        self._evaluating = False
        self._complained = False
        self._handles: list[Any] = []

    def connect(self, optimizers: Sequence[Sequence[Optimizer]], model: nn.Module) -> None:
        """Register the hooks."""
        for number, optimizer in ((number, each) for number, several in enumerate(optimizers) for each in several):
            self._numbers[id(optimizer)] = number
            self._handles.append(optimizer.register_step_pre_hook(self._before_step))
            self._handles.append(optimizer.register_step_post_hook(self._after_step))
        for parameter in gradient_triggers(model):
            register: Any = parameter.register_post_accumulate_grad_hook
            self._handles.append(register(self._on_gradient))
        for module in gathering(model):
            self._handles.append(module.register_forward_hook(self._on_output))
        if self._tail.wants_forward:
            self._handles.append(model.register_forward_pre_hook(self._on_forward))

    def __call__(self) -> None:
        """Take all hooks away."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._tail.close()

    def step_done(self) -> None:
        """The user says that a step is done, tail and all; from the first call on this ends the update.

        Without an update since the last call (a skipped step) nothing happens.

        Raises:
            UsageError: called from inside ``optimizer.step()``.
        """
        if self._depth:
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
        task = _graph_task()
        if task != self._task or task == -1:
            self._task = task
            self._pass()
            self._turns.backward()
            self._capture.capture(self._version() + 1, final=False)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._depth == 0:
            self._take_turn(
                self._numbers[id(optimizer)],
                has_closure=(args[1] if len(args) > 1 else kwargs.get("closure")) is not None,
            )
        self._depth += 1

    def _take_turn(self, number: int, has_closure: bool) -> None:
        """The outermost step of an optimizer begins: it opens an update, or goes on with the one that is open."""
        if self._turns.overdue(number):
            self._end()
        self._turns.begins(number)
        if not self._begun:
            self._begin(has_closure)
        elif self._stands:
            self._pass()
            self._reporter.begin_update()
            self._between = False
        if self._stands:
            self._before_turn(self._version(), number)

    def _begin(self, has_closure: bool) -> None:
        self._pass()
        self._safely(self._tail.at_gate)
        self._capture.capture(self._version() + 1, final=False)
        self._stands = self._turns.stands_between
        self.redoable = not (has_closure or self._turns.by_hand or self._stands)
        self._before_gate()
        self._reporter.begin_update()
        self._begun = True
        self._before_update(self._version())

    def _after_step(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        self._depth -= 1
        if self._depth:
            return
        if self._turns.ended(self._numbers[id(optimizer)]):
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

    def _pass(self) -> None:
        """One more point of the step."""
        self._mark += 1
        self._reporter.mark = self._mark
        if self._evaluating:
            self._evaluating = False
            if self._reporter.activity == EVALUATING:  # else the user has said something since
                self._reporter.activity = ""

    def _safely(self, call: Callable[..., object], *args: Any, **kwargs: Any) -> None:
        try:
            call(*args, **kwargs)
        except Exception:
            if not self._complained:
                self._complained = True
                log.warning("ttp could not follow an update; training goes on", exc_info=True)


def gradient_triggers(model: nn.Module) -> list[Tensor]:
    """Parameters whose gradients tell of every backward pass before what it reduces can be complete.

    One for each DistributedDataParallel that uses all its parameters in every pass: the first, which is ready last, so
    that what a backward pass changes (recomputed activations) is in the capture. Every other parameter, but for those
    of ``gathering`` modules.
    """
    chosen: list[Tensor] = []
    covered = {id(parameter) for module in gathering(model) for parameter in module.parameters()}
    for ddp in _all_used(model):
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


def _all_used(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            ddp: Any = module
            if not ddp.find_unused_parameters and not ddp.static_graph:
                yield ddp
