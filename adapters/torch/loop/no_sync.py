"""Backward passes that give nothing away: gradient accumulation under ``no_sync``.

A provisional capture belongs before the moment at which a rank's gradients can leave it. Under ``no_sync`` a backward
pass of DistributedDataParallel only adds to the local gradients, so none is needed there.

What DistributedDataParallel says is believed only of programs that were seen to work like that: the last backward pass
before the update was one that reduces. Otherwise (all passes under ``no_sync``, and a reduction of the program's own;
a forward pass outside of the ``no_sync`` that its backward pass is in) every backward pass gets its capture.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from ttp.adapters.torch.sharding.ddp_buckets import Ddp


class NoSync:
    """Tells which backward passes of ``model`` cannot give gradients away.

    Args:
        model: the outermost module that the loop calls.
        ddps: what reduces its gradients.
    """

    def __init__(self, model: nn.Module, ddps: Sequence[Ddp] = ()) -> None:
        self._reducing = ddps if _is_all_theirs(model, ddps) else ()
        self._usual = False  # the last backward pass before the last update was one that reduces
        self._reduced = False

    def withholds(self) -> bool:
        """A backward pass begins: whether nothing of it can leave this rank."""
        for ddp in self._reducing:
            if ddp.require_backward_grad_sync or ddp.require_forward_param_sync:
                self._reduced = True
                return False
        self._reduced = False
        return self._usual

    def at_gate(self) -> None:
        """All backward passes of the update are through."""
        self._usual = self._reduced


def _is_all_theirs(model: nn.Module, ddps: Sequence[Ddp]) -> bool:
    """Whether no gradient is anybody else's to reduce."""
    theirs = {
        id(parameter)
        for ddp in ddps
        for name, parameter in ddp.module.named_parameters()
        if name not in getattr(ddp, "parameters_to_ignore", ())
    }
    return all(id(parameter) in theirs for parameter in model.parameters() if parameter.requires_grad)
