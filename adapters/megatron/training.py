"""``protect`` registers a training on megatron-core; ``install`` hooks Megatron-LM's own loop, and leaves its files."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ttp
from ttp.adapters.megatron.rank_state import set_streams, streams_now
from ttp.api import register
from ttp.errors import ConfigError
from ttp.processor.uncaught import tell_launcher_of_mistakes


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


def install(
    *,
    save_dir: str | Path | None = None,
    extra_state: Any = None,
    undo: str | None = None,
    buddy: bool = False,
    training: Any = None,
) -> None:
    """Protect the training of ``megatron.training.pretrain``. Call it once, before ``pretrain``.

    ``setup_model_and_optimizer`` of Megatron's training module is wrapped: when it returns, the wrapper registers the
    model, optimizer and scheduler, and restores the newest checkpoint of ttp over what Megatron may have loaded. This
    happens before Megatron builds data iterators from the count of consumed samples. ``train`` is wrapped by
    ``ttp_to_persist``. When it begins, the restored random streams are set a second time: building a data iterator
    draws from them, and an unbroken training would not have drawn at that version.

    Args:
        save_dir: see ``protect``; None: ``--save`` of Megatron, else ``checkpoints``.
        extra_state: see ``ttp.wrap_optimizer``.
        undo: see ``ttp.wrap_optimizer``.
        buddy: see ``protect``.
        training: the module to hook; None: ``megatron.training.training``.

    ``setup_model_and_optimizer`` then raises what ``protect`` raises, and ``ConfigError`` if Megatron has loaded a
    later iteration than ttp. These errors end the process with 64 instead of 1: a restart would not help.
    """
    tell_launcher_of_mistakes()
    module: Any = training or importlib.import_module("megatron.training.training")
    streams: dict[str, Any] = {}  # as the restore has left them, until the training begins
    how = {"extra_state": extra_state, "undo": undo, "buddy": buddy}
    module.setup_model_and_optimizer = _restoring(module, save_dir, streams, **how)
    module.train = ttp.ttp_to_persist(_beginning_with(module.train, streams))


def _restoring(module: Any, save_dir: str | Path | None, streams: dict[str, Any], **how: Any) -> Any:
    setup = module.setup_model_and_optimizer

    @functools.wraps(setup)
    def setup_model_and_optimizer(*positional: Any, **named: Any) -> Any:
        made = setup(*positional, **named)
        model, optimizer, scheduler = made[:3]
        if optimizer is None:  # --skip-train: an evaluation only
            return made
        args = module.get_args()
        directory = save_dir or getattr(args, "save", None) or "checkpoints"
        protect(model, optimizer, scheduler, args, save_dir=directory, **how)
        loaded = getattr(args, "iteration", 0)
        if ttp.restore():  # restores the counters in ``args`` too
            _refuse_older(loaded, args.iteration, directory)
            streams.update(streams_now())
        if getattr(args, "qk_clip", False):  # train_step() clips weights after the update
            ttp.step_done()
            module.train_step = _declaring_its_end(module.train_step)
        return made

    return setup_model_and_optimizer


def _declaring_its_end(step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(step)
    def train_step(*positional: Any, **named: Any) -> Any:
        made = step(*positional, **named)
        ttp.step_done()
        return made

    return train_step


def _refuse_older(loaded: int, restored: int, directory: str | Path) -> None:
    if loaded > restored:
        raise ConfigError(
            f"Megatron has loaded iteration {loaded} (--load), but the newest checkpoint of ttp, in {directory}, is of "
            f"iteration {restored}. To go on from {loaded}, move ttp's directories tft_saved_checkpoints-step_* "
            f"elsewhere; to go on from {restored}, start without --load"
        )


def _beginning_with(train: Callable[..., Any], streams: dict[str, Any]) -> Callable[..., Any]:
    @functools.wraps(train)
    def training(*positional: Any, **named: Any) -> Any:
        if streams:
            set_streams(streams)
            streams.clear()
        return train(*positional, **named)

    return training
