"""``ttp.wrap_optimizer`` for an ``nn.Optimizer``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mindspore import nn

from ttp import api, session
from ttp.adapters.mindspore.adapter import MindSporeAdapter
from ttp.adapters.mindspore.wrapper import OptTTPWrapper
from ttp.core.layout import Layout
from ttp.errors import UsageError
from ttp.processor.uncaught import tell_launcher_of_mistakes


def wrap(
    optimizer: Any,
    model: Any,
    save_dir: str | Path,
    layout: Layout | None,
    undo: str | None,
    buddy: bool,
    others: Mapping[str, Any],
) -> OptTTPWrapper:
    """Wrap the optimizer. If ``model`` is given, also register the training. See ``ttp.wrap_optimizer``.

    Args:
        optimizer: the optimizer.
        model: the network (a Cell), or None.
        save_dir: directory of checkpoints.
        layout: the layout that the user gives, or None.
        undo: see ``ttp.wrap_optimizer``.
        buddy: must be False; MindSpore jobs keep no second copies on other hosts.
        others: further arguments of ``ttp.wrap_optimizer``, by name; each must be None.

    Raises:
        UsageError: an argument has no meaning for MindSpore.
        ConfigError: the job cannot be protected.
    """
    tell_launcher_of_mistakes()
    given = [name for name, value in others.items() if value is not None] + ["buddy"] * buddy
    if given:
        raise UsageError(
            f"wrap_optimizer({', '.join(given)}=) is not for MindSpore: ttp saves the parameters of model= and of the "
            "optimizer, with its schedules. Leave the argument out, and give as model= a Cell that also has what the "
            "loop keeps elsewhere, such as the parameters of a DynamicLossScaler"
        )
    if model is not None and not isinstance(model, nn.Cell):
        raise UsageError(
            f"model= is a {type(model).__qualname__}: give the network (a Cell); a mindspore.Model is protected by the "
            "callbacks TFTRegister and TrainFaultTolerance"
        )
    if isinstance(optimizer, (list, tuple)) or (model is not None and session.current().adapter is not None):
        raise UsageError(
            "wrap_optimizer() takes one MindSpore optimizer, once: wrap the optimizer that steps last in an iteration, "
            "give a Cell as model= that has all networks and the other optimizers, and call ttp.step_done() at the end "
            "of each iteration"
        )
    wrapped = OptTTPWrapper(optimizer, undo)
    if model is not None:
        replicas = None if layout is None else list(layout.groups.values())
        api.register(MindSporeAdapter(model, wrapped, replicas=replicas), save_dir)
    return wrapped
