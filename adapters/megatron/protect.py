"""``protect``: registers the model, optimizer and scheduler of a program built on megatron-core."""

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
    """Register the model, optimizer and scheduler, and protect them when ttp is switched on (``TTP_PORT``).

    Every rank calls it once, after ``get_megatron_optimizer`` and before the first step, and then calls
    ``ttp.restore()``. Nothing of Megatron is replaced: step hooks are attached to the plain optimizers that Megatron's
    optimizers wrap.

    Args:
        model: the model that the training loop calls: one chunk, or the list of chunks of an interleaved pipeline.
        optimizer: the optimizer that ``get_megatron_optimizer`` returned for them.
        opt_param_scheduler: Megatron's ``OptimizerParamScheduler``, if any.
        args: Megatron-LM's namespace. Its counters of iterations and samples are saved and restored, and the namespace
            becomes part of the stock checkpoint. Without it the program has to save its counters itself, with
            ``extra_state``.
        save_dir: directory of checkpoints, shared by all hosts. ``TTP_SAVE_DIR`` overrides it.
        extra_state: see ``ttp.wrap_optimizer``.
        undo: see ``ttp.wrap_optimizer``.
        buddy: see ``ttp.wrap_optimizer``; for shards that only one rank holds, because the job has only one instance of
            the distributed optimizer.

    Raises:
        ConfigError: the settings, the save_dir, or the kind of optimizer cannot be used; the message says which can.
        RefusedError: the controller does not accept this rank; the message says why.
        UsageError: ``protect`` was called twice, or an extra state cannot be stored.
    """
    from ttp.adapters.megatron.adapter import MegatronAdapter

    adapter = MegatronAdapter(
        optimizer, model=model, scheduler=opt_param_scheduler, args=args, extra_state=extra_state, undo=undo
    )
    register(adapter, save_dir, buddy=buddy)
