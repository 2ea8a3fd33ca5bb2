"""What an optimizer keeps on the host though its state is on a device: put back to an earlier version.

The host counts an update when it queues it; a device that hangs before it has the moments of a version before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ttp.errors import CheckpointError

OnHost = Callable[[Tensor], bool]


def counted_back(optim: Mapping[str, Any], updates: int, on_host: OnHost) -> dict[str, Any]:
    """The optimizer's state as it was ``updates`` updates ago, of what lies on the host.

    Args:
        optim: ``state`` and ``param_groups``, by names.
        updates: by how many the host is ahead.
        on_host: whether a tensor is there.

    Raises:
        CheckpointError: the host has more than counts, and nobody knows what it was.
    """
    groups = {name: group for group in optim["param_groups"] for name in group["params"]}
    products: dict[tuple[Any, ...], Tensor | None] = {}

    def before(name: str, values: Mapping[Any, Any]) -> dict[Any, Any]:
        return {key: value_before(name, key, value, values) for key, value in values.items()}

    def value_before(name: str, key: Any, value: Any, values: Mapping[Any, Any]) -> Any:
        there = type(value) in (int, float) or (isinstance(value, Tensor) and on_host(value))
        if there and key == "step":
            return value - updates
        if there and key == "mu_product":
            group = groups.get(name, {})
            place = float(value), float(values["step"]), group.get("betas"), group.get("momentum_decay")
            if place not in products:
                products[place] = _product_before(value, int(values["step"]), updates, group)
            if (product := products[place]) is not None:
                return product
        if there and isinstance(value, Tensor):
            raise CheckpointError(
                f"the host is {updates} updates ahead of its device, and optimizer.state[{name}][{key!r}] is on the "
                "host: what it was then is not known"
            )
        return value

    return {
        name: before(name, values) if isinstance(values, dict) else values for name, values in optim["state"].items()
    }


def _product_before(now: Any, step: int, updates: int, group: Mapping[str, Any]) -> Tensor | None:
    """NAdam's ``mu_product`` some updates ago: multiplied again as it was. None if that does not lead to ``now``."""
    if "betas" not in group or "momentum_decay" not in group:
        return None
    product = torch.ones((), dtype=now.dtype if isinstance(now, Tensor) else torch.float32)
    found = product.clone()
    for count in range(1, step + 1):
        product *= group["betas"][0] * (1.0 - 0.5 * 0.96 ** (float(count) * group["momentum_decay"]))
        if count == step - updates or (count < step - updates and not product):
            found = product.clone()
        if not product:
            break
    return found if product == now else None
