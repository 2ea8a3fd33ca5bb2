"""What tells of a backward pass in time: parameters whose gradients come last, and modules that gather theirs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from ttp.adapters.torch.sharding.ddp_buckets import Ddp


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
