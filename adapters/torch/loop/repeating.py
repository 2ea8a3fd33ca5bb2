"""Restores the state from the beginning of a call of a one-update function, to repeat it; see ``ttp.one_step``.

When another rank's death breaks a call, half of a backward pass may be done. A restore brings back the state of the
version, as on every rank. This module brings back the state that belongs to no version: random streams, buffers and
``extra_state`` as they were when the call began (the loop may have drawn a batch since the last update), gradients, the
reducers of DistributedDataParallel, and the per-step records of a GradScaler.

Which gradients exist when a call begins is learned in the first ``TRIALS`` calls, so that later calls need not examine
them. See decision 55.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ttp.adapters.torch.local_state.capture import LocalCapture
from ttp.adapters.torch.local_state.extra_state import ExtraState
from ttp.adapters.torch.local_state.image import LocalState, decode
from ttp.adapters.torch.local_state.rng import RngState
from ttp.adapters.torch.loop.hooks import gathering
from ttp.adapters.torch.loop.unwrap_optimizer import is_sharded
from ttp.adapters.torch.sharding.data_parallel import ddps_of
from ttp.adapters.torch.sharding.ddp_buckets import Ddp, renew_reducer, why_not_renewed
from ttp.adapters.torch.sharding.names import parameters_of
from ttp.core.layout import Layout, Version

TRIALS = 2
"""Number of calls in which gradients are examined: the second call shows whether those of the first are kept."""


class Repeating:
    """Tracks the calls of the one-update function during one registration. For the training thread.

    Args:
        model: the model; it may be wrapped.
        optimizers: all optimizers that make an update.
        scaler: a GradScaler, or None.
        capture: captures and restores rank-local state.
        extra: the user's objects of ``extra_state``.
        layout: the replica groups.
        ddps: the DistributedDataParallel modules that reduce the gradients of the model now.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        scaler: Any,
        capture: LocalCapture,
        extra: ExtraState,
        layout: Layout,
        ddps: Sequence[Ddp] = (),
    ) -> None:
        self._model, self._optimizers, self._scaler = model, list(optimizers), scaler
        self._capture, self._extra = capture, extra
        self._ddps, self._layout = ddps, layout
        self._left_out = False  # the last call that returned has made no update
        self._image: bytes | None = None
        self._trials_left = TRIALS
        self._parameters = [*parameters_of(*self._optimizers)]
        self._gradients: list[_Gradient] = []
        self._none = True  # the first parameter had no gradient when the call began
        self._handles: list[Any] = []
        self._streams = RngState()
        self._begun = False
        self.why_not = ""
        """Why no call can be repeated; empty: no reason is known."""
        self.version = Version(0)
        """Number of finished updates when the last call began."""

    def begin(self, version: Version, why_not: Callable[[], str]) -> None:
        """Note that a call begins, and keep an image of the rank-local state. Never raises.

        Args:
            version: number of finished updates.
            why_not: returns a further reason why calls cannot be repeated, or an empty text; called in the first call
                only.
        """
        self.version = version
        if self.why_not:
            return
        try:
            if not self._begun:
                self._begun = True
                self.why_not = why_not() or self._objection()
            self._none = not self._parameters or self._parameters[0].grad is None
            self._image = self._capture.image()
            if self._trials_left:
                self._try()
        except Exception as problem:
            self.why_not = repr(problem)

    def end(self, version: Version) -> None:
        """Note that the call has returned.

        Args:
            version: number of finished updates.
        """
        made = version - self.version
        if not self.why_not and (made > 1 or (made == 0 and self._scaler is None)):
            self.why_not = f"a call of the function has made {made} updates"
        self._left_out = made == 0
        if self._handles:
            self._trials_left -= version > self.version
            self._stop_looking()

    def refusal(self) -> str:
        """Return why the last call, which was broken, cannot be repeated; empty: it can."""
        self._stop_looking()
        try:
            return self.why_not or self._refusal()
        except Exception as problem:
            return repr(problem)

    def _refusal(self) -> str:
        if self._trials_left:
            return f"the function had not been called {TRIALS} times"
        if self._left_out:  # the scaler skipped its update; a newcomer begins with the call after the last update
            return "the call before the broken one made no update, so a newcomer would be one call behind"
        if self._image is None:
            return "not all of the state of this rank is captured, or some buffers or arrays in extra_state are large"
        if self._none != (not self._gradients or self._gradients[0].kind == "none"):
            return "the function begins with gradients at some calls and without at others"
        for name in self._changed():
            if hasattr(self._extra.object(name), "__iter__"):
                return f"the function draws from {name}, which is in extra_state: its position cannot be restored"
        return ""

    def streams(self) -> bytes:
        """Return the state of the random streams at this moment."""
        return b"".join(self._streams.capture())

    def set_streams(self, data: bytes) -> None:
        """Set the random streams to a state that ``streams`` returned."""
        self._streams.restore(data)

    # ---------------------------------------------------------------------------------------------- making it again

    def reset(self) -> None:
        """Clear gradients, reducers and scaler records of the broken call. Call it before objects are registered."""
        for gradient in self._gradients:
            gradient.put_back()
        for ddp in self._ddps:
            renew_reducer(ddp)
        if self._scaler is not None:
            self._scaler._per_optimizer_states.clear()
        torch.clear_autocast_cache()

    def put_back(self, capture: LocalCapture) -> None:
        """Restore the rank-local state from the beginning of the call into its objects.

        Args:
            capture: the capture of the new registration.

        Raises:
            CheckpointError: an object does not accept its own state.
        """
        assert self._image is not None
        state, changed = decode(self._image), self._changed()
        extra = {name: data for name, data in state.extra.items() if name in changed}
        capture.restore(LocalState(state.rng, state.buffers, extra))

    def go_on_from(self, other: Repeating) -> None:
        """Take over what the last registration of the same objects has learned about gradients."""
        self._trials_left, self._gradients = other._trials_left, other._gradients

    # ------------------------------------------------------------------------------------------------------- private

    def _changed(self) -> set[str]:
        """Return the names of the objects of ``extra_state`` whose state has changed since the call began."""
        assert self._image is not None
        then = decode(self._image).extra
        return {name for name, data in then.items() if self._extra.capture(name)[0] != data}

    def _objection(self) -> str:
        """Return why calls of this model can never be repeated; empty: no reason is known."""
        if len(ddps_of(self._model, self._ddps)) > len(self._ddps):
            return "a DistributedDataParallel was made after wrap_optimizer(): a newcomer would make it alone"
        if gathering(self._model) or len(self._layout.groups) > 1 or any(map(is_sharded, self._optimizers)):
            return "only DistributedDataParallel and plain data parallelism can stay in their loops so far"
        if any(type(module).__name__ == "OptimizedModule" for module in self._model.modules()):
            return "the model is compiled"
        for ddp in self._ddps:
            if reason := why_not_renewed(ddp):
                return reason
        return ""

    def _try(self) -> None:
        """Record the gradients that exist now, and check at the step whether the optimizer uses them."""
        self._gradients = [_Gradient(parameter) for parameter in self._parameters]
        for optimizer in self._optimizers:
            register: Any = optimizer.register_step_pre_hook
            self._handles.append(register(self._before_step))

    def _before_step(self, *_: Any) -> None:
        if any(gradient.is_used() for gradient in self._gradients):
            self.why_not = self.why_not or (
                "gradients exist when the function begins, and the function does not drop them: call "
                "zero_grad(set_to_none=True) in it"
            )

    def _stop_looking(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


class _Gradient:
    """The gradient of a parameter when a call begins: none, zeros, or an old one that the call has to drop."""

    __slots__ = ("_parameter", "_seen", "kind")

    def __init__(self, parameter: Tensor) -> None:
        found = parameter.grad
        self._parameter = parameter
        self._seen = None if found is None else weakref.ref(found)
        self.kind = "none" if found is None else "old" if bool(found.count_nonzero()) else "zero"

    def is_used(self) -> bool:
        """Return whether the optimizer is about to use an old gradient that the call should have dropped."""
        found = self._parameter.grad
        return self.kind == "old" and self._seen is not None and found is not None and self._seen() is found

    def put_back(self) -> None:
        """Set the gradient to zeros if it was zero when the call began; else drop it."""
        found = self._parameter.grad
        like = self._parameter.detach() if found is None else found
        self._parameter.grad = torch.zeros_like(like) if self.kind == "zero" else None
