"""Hooks Megatron-LM's own training loop without touching its files."""

from __future__ import annotations

import functools
import importlib
from pathlib import Path
from typing import Any

import ttp
from ttp.adapters.megatron.protect import protect


def install(
    *,
    save_dir: str | Path | None = None,
    extra_state: Any = None,
    undo: str | None = None,
    buddy: bool = False,
    training: Any = None,
) -> None:
    """Protect what ``megatron.training.pretrain`` trains. Call it once, before ``pretrain``.

    ``setup_model_and_optimizer`` of Megatron's training module registers what it has made, and restores the newest
    checkpoint of ttp over what Megatron may have loaded: before data iterators are built from the samples consumed.
    ``train`` is run under ``ttp_to_persist``.

    Args:
        save_dir: see ``protect``; None: ``--save`` of Megatron, else ``checkpoints``.
        extra_state: see ``ttp.wrap_optimizer``.
        undo: see ``ttp.wrap_optimizer``.
        buddy: see ``protect``.
        training: the module to hook; None: ``megatron.training.training``.
    """
    module: Any = training or importlib.import_module("megatron.training.training")
    module.setup_model_and_optimizer = _restoring(module, save_dir, extra_state=extra_state, undo=undo, buddy=buddy)
    module.train = ttp.ttp_to_persist(module.train)


def _restoring(module: Any, save_dir: str | Path | None, **how: Any) -> Any:
    setup = module.setup_model_and_optimizer

    @functools.wraps(setup)
    def setup_model_and_optimizer(*positional: Any, **named: Any) -> Any:
        made = setup(*positional, **named)
        model, optimizer, scheduler = made[:3]
        args = module.get_args()
        directory = save_dir or getattr(args, "save", None) or "checkpoints"
        protect(model, optimizer, scheduler, args, save_dir=directory, **how)
        ttp.restore()  # puts the counters of ``args`` back too
        return made

    return setup_model_and_optimizer
