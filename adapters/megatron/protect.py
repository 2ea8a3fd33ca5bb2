"""Registers a training built on megatron-core."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ttp.api import register


def protect(
    model: Any,
    optimizer: Any,
    opt_param_scheduler: Any = None,
    args: Any = None,
    *,
    save_dir: str | Path = "checkpoints",
    extra_state: Any = None,
    undo: str | None = None,
    buddy: bool = False,
) -> None:
    """Register what Megatron trains, and protect it when ttp is switched on (``TTP_PORT``).

    Every rank calls it once, after ``get_megatron_optimizer`` and before the first step; then ``ttp.restore()``.
    Nothing of Megatron is replaced: step hooks are attached to the plain optimizers below Megatron's.

    Args:
        model: the model that the training loop calls: one chunk, or the list of chunks of an interleaved pipeline.
        optimizer: the optimizer that ``get_megatron_optimizer`` returned for them.
        opt_param_scheduler: Megatron's ``OptimizerParamScheduler``, if any.
        args: Megatron-LM's namespace. Its counters of iterations and samples are saved and restored, and it becomes
            part of the stock checkpoint. Without it the program has to keep its counters itself: see ``extra_state``.
        save_dir: directory of checkpoints, shared by all hosts. ``TTP_SAVE_DIR`` overrides it.
        extra_state: see ``ttp.wrap_optimizer``.
        undo: see ``ttp.wrap_optimizer``.
        buddy: see ``ttp.wrap_optimizer``; for shards that one rank holds alone, because there is one instance only.

    Raises:
        ConfigError: the settings, the save_dir, or the kind of optimizer cannot be used; the text says what can.
        RefusedError: the controller does not accept this rank; the text says why.
        UsageError: called twice, or an extra state cannot be stored.
    """
    from ttp.adapters.megatron.adapter import MegatronAdapter

    adapter = MegatronAdapter(
        optimizer, model=model, scheduler=opt_param_scheduler, args=args, extra_state=extra_state, undo=undo
    )
    register(adapter, save_dir, buddy=buddy)
