"""Detects ways of updating weights that ttp cannot protect, and raises ``UsageError`` before they write anything."""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ttp.adapters.torch.local_state.extra_state import by_name
from ttp.adapters.torch.loop.hook import Hook
from ttp.adapters.torch.loop.unwrap_optimizer import held_by
from ttp.adapters.torch.sharding.names import parameters_of
from ttp.core.layout import Version
from ttp.errors import ConfigError, UsageError
from ttp.processor.faults import is_collective_error

_log = logging.getLogger("ttp.adapters.torch")

graph_task: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", lambda: -1)
"""Returns the number of the backward pass that runs on this thread; -1 if none runs, or if torch cannot tell."""

_cuda: Any = torch.cuda
_backends: Any = torch.backends
_CUDA_BUILT = bool(_backends.cuda.is_built())

_WAY_OUT = (
    "weights would change while other ranks still wait for gradients, so at no moment of a step could the state be "
    "saved. Call optimizer.step() after backward(), for all parameters at once"
)


def capturing() -> bool:
    """Return whether work that this thread queues is recorded in a CUDA graph instead of being run."""
    return _CUDA_BUILT and bool(_cuda.is_initialized() and _cuda.is_current_stream_capturing())


def refuse_capture() -> None:
    """Refuse an update that is being captured in a CUDA graph: ttp would not notice the updates of its replays.

    Raises:
        UsageError: a graph is being captured.
    """
    if capturing():
        raise UsageError(
            "optimizer.step() is being captured in a CUDA graph: ttp would not notice the updates that its replays "
            "make. Capture the forward and the backward pass only (torch.cuda.make_graphed_callables, or a graph that "
            "ends with backward()), and call optimizer.step() outside of the graph"
        )


def pass_on_failure(problem: BaseException, closure: object) -> None:
    """Raise an error again that is on its way out while ``optimizer.step()`` is called, if a collective has failed.

    A loop that steps in a ``finally`` block, or at the end of a context manager, does so even when its peers are gone.
    It would update with a gradient that was not reduced, and that update would count as the newest version. A closure
    makes a new gradient.
    """
    if closure is None and is_collective_error(problem):
        raise problem


def refuse_lazy(model: nn.Module) -> None:
    """Refuse a model with lazy layers that have no weights yet.

    Raises:
        ConfigError: there is such a layer.
    """
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if nn.parameter.is_lazy(tensor):
            raise ConfigError(
                f"{name} has no shape yet, because its layer is a lazy one: call the model once with a batch, then "
                "make the optimizer, then call wrap_optimizer()"
            )


def tell_not_restored(save_dir: Path, newest: Version) -> None:
    """Log that ``ttp.restore()`` was not called, if there is a checkpoint (``newest`` is its version, else 0)."""
    if newest:
        _log.error(
            "%s holds a checkpoint of step %d, and this program counts its steps from 0, because it has not called "
            "ttp.restore(): what it saves counts as older than that checkpoint. Call ttp.restore() after "
            "wrap_optimizer(), and begin the loop with what it returns. To start from scratch, give another save_dir",
            save_dir,
            newest,
        )


def outside_megatron(model: nn.Module, *, layout_given: bool) -> nn.Module:
    """Return the model that a plain optimizer trains: Megatron's DistributedDataParallel is left out.

    That class has an attribute ``buffers`` in the place of torch's method.

    Args:
        model: the model of a torch optimizer.
        layout_given: whether the program gives the replica groups.

    Raises:
        ConfigError: Megatron shards the model. The names of the parameters do not tell that, as those of DTensors do.
    """
    state = _megatrons_groups()
    if state is None:
        return model
    kinds = ("tensor", "pipeline", "expert")
    sizes = [getattr(state, f"get_{kind}_model_parallel_world_size")() for kind in kinds]
    theirs = any(type(module).__module__.startswith("megatron.") for module in model.modules())
    if theirs and max(sizes) > 1 and not layout_given:
        raise ConfigError(
            f"Megatron shards this model (tensor, pipeline and expert parallel sizes {sizes}), and with a plain "
            "optimizer ttp cannot tell which ranks hold equal parts: make the optimizer with "
            "megatron.core.optimizer.get_megatron_optimizer(), or give layout= (docs/layouts.md)"
        )
    outside: Any = model
    inside: nn.Module = model if callable(model.buffers) else outside.module
    return inside


def with_megatrons_streams(extra_state: Any) -> Any:
    """Return the ``extra_state`` of a plain optimizer, in a Megatron job with the random streams of its tracker.

    Megatron's layers draw their dropout from these streams, also if a plain optimizer trains them.
    """
    if _megatrons_groups() is None:
        return extra_state
    from ttp.adapters.megatron.rank_state import STREAMS, TrackedStreams

    return {STREAMS: TrackedStreams(), **by_name(extra_state)}


def _megatrons_groups() -> Any:
    """Return the module with Megatron's process groups; None: this is no Megatron job."""
    state: Any = sys.modules.get("megatron.core.parallel_state")
    return state if state is not None and state.model_parallel_is_initialized() else None


def refuse_in_backward(model: nn.Module) -> None:
    """Refuse, at the start, a model whose optimizers step in the backward pass.

    Raises:
        UsageError: a parameter has such an optimizer.
    """
    for name, parameter in model.named_parameters():
        if getattr(parameter, "_in_backward_optimizers", None):
            raise UsageError(
                f"the optimizer of {name} steps in the backward pass (_apply_optimizer_in_backward): {_WAY_OUT}"
            )


def refuse_in_step(optimizer: Optimizer) -> NoReturn:
    """Refuse a ``step()`` that begins while a backward pass runs on this thread.

    Raises:
        UsageError: always.
    """
    raise UsageError(f"{type(optimizer).__name__}.step() was called by a hook in the backward pass: {_WAY_OUT}")


class Strangers:
    """Detects steps of unregistered optimizers that have parameters of the registered model.

    Args:
        optimizers: the registered optimizers.
        model: the registered model.
        updating: returns whether an update is running: a step of another optimizer inside of it is part of it.
    """

    def __init__(self, optimizers: Sequence[Optimizer], model: nn.Module, updating: Callable[[], bool]) -> None:
        self._optimizers, self._model, self._updating = tuple(optimizers), model, updating
        self._looked_at: weakref.WeakSet[Optimizer] = weakref.WeakSet(optimizers)
        me = weakref.ref(self)  # the hook is global in the process, and may not keep this job's objects alive
        registered = frozenset(map(id, optimizers))  # ids stay valid: the optimizers live as long as this hook

        def before(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
            if id(optimizer) in registered:
                return
            strangers = me()
            if strangers is not None and optimizer not in strangers._looked_at:
                strangers._look_at(optimizer)

        self._handle = register_optimizer_step_pre_hook(Hook(before, traced=False))

    def remove(self) -> None:
        """Remove the hook."""
        self._handle.remove()

    def _look_at(self, optimizer: Optimizer) -> None:
        if not self._updating() and self._is_stranger(optimizer):
            if graph_task() != -1:
                refuse_in_step(optimizer)
            raise UsageError(
                f"{type(optimizer).__name__}.step() is about to change parameters of the model that wrap_optimizer() "
                "was given, but this optimizer was not given to wrap_optimizer(): its updates would belong to no "
                "version. Give wrap_optimizer() all optimizers of the model, or a model= without these parameters. If "
                "this optimizer is only tried out, do that before wrap_optimizer()"
            )
        self._looked_at.add(optimizer)

    def _is_stranger(self, optimizer: Optimizer) -> bool:
        """Return whether ``optimizer`` has parameters of the model and does not wrap a registered optimizer."""
        if any(thing is known for thing in held_by(optimizer) for known in self._optimizers):
            return False
        own = set(map(id, self._model.parameters()))
        return any(id(parameter) in own for parameter in parameters_of(optimizer))
