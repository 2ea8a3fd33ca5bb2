"""Registers hooks on optimizers, parameters and the model, through which ttp follows the training loop.

What ttp does at each point of the step from version n to n + 1::

    forward        notes that the post-step of the last update (scheduler, scaler) is over
    backward       provisional capture for n + 1, before this rank's last gradient can leave it; not under no_sync
    step, before   capture of changes since then; a barrier if the layout needs one; the gate; a copy of n with undo
    step, after    final capture of n + 1; the version is finished

The provisional capture is needed because a rank may die after it has sent its gradients and before it has made the
update: its peers will reach n + 1, so the rank-local state of the dead rank must exist for n + 1.

A hook on one parameter is enough to notice a backward pass in time. DistributedDataParallel reduces a bucket when its
own hooks have seen every parameter of the bucket; a parameter's post-accumulate hook runs before them; and n + 1 needs
every bucket. Where parameters may stay unused, and outside of DistributedDataParallel, all parameters get the hook
(0.3 us each). FSDP calls the hooks of its parameters after it has reduced their gradients: there, hooks on the outputs
of the outermost FSDP module notice the backward pass.

Each of these points raises the mark of the running step by one. All ranks run the same program, so they pass the same
points in the same order, however often gradients are accumulated: the rank with the lower mark is behind. A forward
pass without gradients is an evaluation, which some ranks may skip: it does not raise the mark, but is reported as the
rank's activity.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ttp.adapters.torch.device.accelerator import Fence
from ttp.adapters.torch.loop.bracket import ABANDONED, EVALUATING, HAD_AN_ERROR, LEFT, Bracket, Calls, Capture
from ttp.adapters.torch.loop.forward_hooks import ForwardHooks
from ttp.adapters.torch.loop.hook import Hook
from ttp.adapters.torch.loop.misuse import Strangers, capturing, graph_task, refuse_in_backward
from ttp.adapters.torch.loop.no_sync import NoSync
from ttp.adapters.torch.loop.post_step_state import PostStepState
from ttp.adapters.torch.loop.turns import Turns
from ttp.adapters.torch.loop.untouched import Untouched
from ttp.adapters.torch.sharding.data_parallel import ddps_of
from ttp.adapters.torch.sharding.ddp_buckets import Ddp, reduced_by
from ttp.processor.source import UpdateReporter

__all__ = ["EVALUATING", "Attachment", "Calls", "gathering", "gradient_triggers"]

_is_compiling, _learns = torch.compiler.is_compiling, torch.is_grad_enabled


class Attachment(Bracket):
    """Hooks that report every update of some optimizers, and capture the state that belongs to it. Call it to end that.

    Args:
        optimizers: the optimizers that make one version together. A wrapper is given as a list of itself and the
            optimizers inside of it; of their nested steps only the outermost counts.
        model: the outermost module that the loop calls.
        reporter: gets a call for each update; its ``begin_update`` waits while the job is frozen.
        capture: captures the rank-local state.
        post_step: follows scheduler and scaler.
        fence: marks finished updates on the device.
        version: returns the number of finished updates, as the gate counts them.
        turns: decides which steps make one version; None: each optimizer steps once, in the order given, with no
            backward pass in between.
        untouched: detects a loop that changes weights outside of any step; None: no such check.
        ddps: the DistributedDataParallel modules that reduce the gradients of ``model``; None: find them.
        forwards: registers hooks on the modules that the loop calls; None: on ``model`` and ``ddps``.
        calls: further functions to call around an update; None: none.

    Raises:
        UsageError: parameters are updated in the backward pass.
    """

    __slots__ = (
        "_backward_begins", "_entered", "_forwards", "_handles", "_outside", "_remove", "_strangers", "_task",
        "_triggers")  # fmt: skip

    def __init__(
        self,
        optimizers: Sequence[Sequence[Optimizer]],
        model: nn.Module,
        reporter: UpdateReporter,
        capture: Capture,
        *,
        post_step: PostStepState,
        fence: Fence,
        version: Callable[[], int],
        turns: Turns | None = None,
        untouched: Untouched | None = None,
        ddps: Sequence[Ddp] | None = None,
        forwards: ForwardHooks | None = None,
        calls: Calls | None = None,
    ) -> None:
        refuse_in_backward(model)
        turns = turns or Turns([type(each[0]).__name__ for each in optimizers], chained=True)
        ddps = ddps_of(model) if ddps is None else ddps
        no_sync = NoSync(model, ddps)
        super().__init__(
            optimizers, reporter, capture, turns, untouched, post_step, fence, version, calls or Calls(), no_sync
        )
        self._handles: list[Any] = []
        self._backward_begins = Hook(self._backward_enters, traced=False)  # it may be part of a compiled backward pass
        self._task = -1
        every = [each for several in optimizers for each in several]
        self._strangers = Strangers(every, model, self._updating)
        for optimizer in every:
            self._handles.append(optimizer.register_step_pre_hook(Hook(self._before_step, traced=False)))
            self._handles.append(optimizer.register_step_post_hook(Hook(self._after_step, traced=False)))
        self._triggers: dict[int, weakref.ref[Tensor]] = {}  # the hooked parameters by identity
        self.hook_gradients(model, ddps)
        for module in gathering(model):
            self._handles.append(module.register_forward_hook(Hook(self._on_output)))
        self._entered = -1  # number of versions that had ended when the loop last called the model
        self._outside = -1  # the mark since the hook of a wrapper, until the hook of the module inside of it
        self._forwards = forwards or ForwardHooks(model, ddps)
        self._remove = self._forwards.register(self._on_forward, outside=self._on_wrapper)

    def __call__(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._remove()
        self._strangers.remove()

    def hook_gradients(self, model: nn.Module, ddps: Sequence[Ddp]) -> None:
        """Hook the gradients of a model, and those of parameters that have taken the place of others since.

        Args:
            model: the outermost module that the loop calls.
            ddps: the DistributedDataParallel modules that reduce its gradients now.
        """
        for parameter in gradient_triggers(model, ddps):
            if (known := self._triggers.get(id(parameter))) is not None and known() is parameter:
                continue
            self._triggers[id(parameter)] = weakref.ref(parameter)  # it may be replaced, and its memory given back
            register: Any = parameter.register_post_accumulate_grad_hook
            trained = parameter.requires_grad
            parameter.requires_grad_(True)  # else torch registers no hook; the program may train it later
            self._handles.append(register(Hook(self._on_gradient)))
            parameter.requires_grad_(trained)

    # -------------------------------------------------------------------------------------------------------- hooks
    #
    # Each of these runs in every step, mostly after its code and objects have left the CPU's caches. So the path that
    # a plain loop takes has as little code and as few objects as possible.

    def _on_forward(self, module: nn.Module, _args: Any) -> None:
        if _is_compiling():
            return  # if traced, the numbers below would become guards, and the model would be recompiled in each step
        if self._stepping.depth:
            self._look_for_exception()
        learning = _learns()
        if learning and self._mark == self._outside:
            self._outside = -1  # the hook of the wrapper has done everything else
            self._pass()
            return
        if learning:
            self._handled = id(sys.exc_info()[1])
            if not self._forwards.outside:
                self._entered = self._ended
            self._pass()
            if self._untouched is not None and not (self._stepping.depth and self._opened):
                self._untouched.forward()
            if module.training:
                self._calls.before_forward()
        else:
            if not self._reporter.activity:
                self._reporter.activity, self._evaluating = EVALUATING, True
            if not capturing():
                self._calls.evaluating()
        try:
            self._post_step.forward_entered(module.training and learning)
        except Exception:
            self._say_once(HAD_AN_ERROR, exc_info=True)

    def _on_wrapper(self, module: nn.Module, args: Any) -> None:
        if not _is_compiling():
            self._entered, self._outside = self._ended, -1
            self._on_forward(module, args)
            if _learns():
                self._outside = self._mark

    def _on_output(self, _module: nn.Module, _args: Any, output: Any) -> None:
        """Hook the output tensors: a backward pass reaches them before gradients inside of the module are reduced."""
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
        if capturing():  # hooks run once now, and not in the replays of the graph: the capture only notes that
            self._capture.capture(self._next_version(), False)
            return
        if self._stepping.depth:
            self._look_for_exception()
        if self._stage is LEFT:
            self._stage = ABANDONED
        self._heard = True
        if self._entered != self._ended:
            self._look_for_wrappers()
        self._calls.before_backward()
        self._pass()
        if not self._turns.simple:
            self._turns.backward()
        if self._untouched is not None and not (self._stepping.depth and self._opened):
            self._untouched.backward()
        if not self._no_sync.withholds():
            self._capture.capture(self._next_version(), False)

    def _look_for_wrappers(self) -> None:
        try:
            self._forwards.look_again()
        except Exception:  # of a module that another thread is making
            self._say_once(HAD_AN_ERROR, exc_info=True)


# ------------------------------------------------------------------------------------------------------------- triggers
#
# The objects to hook: parameters or FSDP modules whose hooks notice a backward pass before its gradients are reduced.


def gradient_triggers(model: nn.Module, ddps: Sequence[Ddp]) -> list[Tensor]:
    """Return parameters whose gradient hooks notice every backward pass before its reduction can be complete.

    For each DistributedDataParallel that uses all its parameters in every pass this is the first parameter only: its
    gradient is ready last, so the capture includes what the backward pass changes (random streams, where activations
    are recomputed). Of the rest of the model all parameters are returned, also those that are frozen now, except those
    of ``gathering`` modules.
    """
    chosen: list[Tensor] = []
    covered = {id(parameter) for module in gathering(model) for parameter in module.parameters()}
    for ddp in ddps:
        if ddp.find_unused_parameters or ddp.static_graph:
            continue
        reduced = [parameter for parameter in reduced_by(ddp) if parameter.requires_grad]
        fresh = [parameter for parameter in reduced if id(parameter) not in covered]
        chosen += fresh[:1]
        covered.update(map(id, reduced))
    others = [p for p in model.parameters() if id(p) not in covered and p.is_leaf]
    return chosen + [p for p in others if p.requires_grad or _may_be_trained(p)]


def _may_be_trained(frozen: Tensor) -> bool:
    """Return whether a frozen parameter can be trained later."""
    plain = type(frozen) is nn.Parameter and not frozen.is_inference()
    return plain and (frozen.is_floating_point() or frozen.is_complex())


def gathering(model: nn.Module) -> list[nn.Module]:
    """Return the outermost FSDP modules in ``model``.

    Hooks of their parameters run after the gradients have been reduced, so hooks on their outputs are used instead.
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
