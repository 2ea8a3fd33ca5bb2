"""Recognises backward passes that only accumulate gradients under ``no_sync``.

A provisional capture is needed before a rank's gradients can reach other ranks. Under ``no_sync`` a backward pass of
DistributedDataParallel only adds to the local gradients, so no capture is needed there.

The capture is left out only while the last backward pass before the last update was one that DistributedDataParallel
reduced. In other programs (all passes under ``no_sync``, and a reduction of their own; a forward pass outside of the
``no_sync`` of its backward pass) every backward pass gets its capture.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from ttp.adapters.torch.sharding.ddp_buckets import Ddp, reduced_by


class NoSync:
    """Tells which backward passes of ``model`` send no gradients to other ranks.

    Args:
        model: the outermost module that the loop calls.
        ddps: the DistributedDataParallel modules that reduce its gradients.
    """

    def __init__(self, model: nn.Module, ddps: Sequence[Ddp] = ()) -> None:
        self._reducing = ddps if _reduce_all(model, ddps) else ()
        self._usual = False  # the last backward pass before the last update was one that reduces
        self._reduced = False

    def withholds(self) -> bool:
        """Return whether the gradients of the backward pass that begins now stay on this rank."""
        for ddp in self._reducing:
            if ddp.require_backward_grad_sync or ddp.require_forward_param_sync:
                self._reduced = True
                return False
        self._reduced = False
        return self._usual

    def at_gate(self) -> None:
        """Note that all backward passes of the update are over."""
        self._usual = self._reduced


def _reduce_all(model: nn.Module, ddps: Sequence[Ddp]) -> bool:
    """Return whether these DistributedDataParallel modules reduce every gradient of the model."""
    theirs = {id(parameter) for ddp in ddps for parameter in reduced_by(ddp)}
    return all(id(parameter) in theirs for parameter in model.parameters() if parameter.requires_grad)
