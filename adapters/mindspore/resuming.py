"""``restore``: loads the newest whole checkpoint into a ``mindspore.Model`` and its dataset."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ttp import session
from ttp.adapters.mindspore.constraints import SLICING, parallel_mode
from ttp.adapters.mindspore.joining import join, optimizer_of
from ttp.adapters.mindspore.layouts import RankGroups
from ttp.adapters.mindspore.local_state import Position
from ttp.errors import ConfigError
from ttp.processor.uncaught import tell_launcher_of_mistakes

log = logging.getLogger("ttp.adapters.mindspore")


@dataclass(frozen=True, slots=True)
class Resumed:
    """The point at which training continues.

    Args:
        version: finished updates, as ``global_step`` counts them; 0: no checkpoint was found.
        step: finished steps, counted from the beginning of the first epoch.
        initial_epoch: the value for the argument ``initial_epoch`` of ``Model.train``.
    """

    version: int
    step: int
    initial_epoch: int


def restore(
    model: Any,
    dataset: Any = None,
    ckpt_save_path: str | Path = "./ttp_checkpoints/",
    *,
    replicas: RankGroups | None = None,
    strategy: str | Path | None = None,
    ckpt_load_fn: Callable[[], Any] | None = None,
) -> Resumed:
    """Load the newest whole checkpoint into ``model.train_network``, and set ``dataset`` to its position.

    Weights, moments, ``global_step``, loss scale and this rank's random streams are restored, bit for bit. All ranks
    agree on one checkpoint. Checkpoints that are not whole are skipped and named in the log; their files stay. Call it
    after ``Model(...)`` and before ``Model.train(epochs, dataset, initial_epoch=...)``::

        resumed = restore(model, dataset, "./ttp_checkpoints/")
        model.train(5, dataset, callbacks=[tft_cb], initial_epoch=resumed.initial_epoch)

    Args:
        model: a ``mindspore.Model`` with a wrapped optimizer.
        dataset: the dataset for ``Model.train``, with the same pipeline and seed as before. In semi-automatic and
            automatic parallelism a network that is not compiled yet is compiled with it, by
            ``model.infer_train_layout``.
        ckpt_save_path: the same as for ``TFTRegister``. ``TTP_SAVE_DIR`` overrides it.
        replicas: see ``TFTRegister``.
        strategy: see ``TFTRegister``.
        ckpt_load_fn: a function that loads the state instead of ttp; see ``TrainFaultTolerance``.

    Returns:
        The point at which training continues; all numbers are 0 if there is no checkpoint.

    Raises:
        CheckpointError: the checkpoint belongs to another network, or to another number of slices.
        RestoreError: the ranks do not see one common checkpoint.
        UsageError: there is no optimizer, or it is not wrapped.
        ConfigError: the job cannot be protected; the message says what to change.
    """
    tell_launcher_of_mistakes()
    compiled = _compiled(model, dataset)
    adapter = join(
        model.train_network,
        optimizer_of(model._optimizer, model._network),
        ckpt_save_path,
        replicas=replicas,
        strategy=strategy,
        compiled=compiled,
    )
    version = session.current().restore() if ckpt_load_fn is None else int(adapter.loaded_by(ckpt_load_fn))
    if not version:
        return Resumed(0, 0, 0)
    size = dataset.get_dataset_size() if dataset is not None else 0
    position = _here(adapter.position, size)
    adapter.position = position
    if dataset is None:
        size = position.batch_num
        return Resumed(version, position.step, position.step // size if size else max(0, position.epoch - 1))
    dataset.set_init_step(position.step)
    return Resumed(version, position.step, position.step // size)


def _compiled(model: Any, dataset: Any) -> Mapping[str, Any] | None:
    """Return the network's ``parameter_layout_dict``, after compiling the network if needed; None: nothing is cut.

    Before its compilation a network holds whole parameters instead of slices.

    Raises:
        ConfigError: the network is not compiled, and cannot be compiled here.
    """
    if parallel_mode() not in SLICING:
        return None
    known: Mapping[str, Any] | None = getattr(model.train_network, "parameter_layout_dict", None)
    if known:
        return known
    todo = (
        f"parallel_mode is {parallel_mode()}: restore() loads slices, and only a compiled network has slices. Call "
        "model.infer_train_layout(dataset), or model.build(dataset), with the arguments of Model.train before restore()"
    )
    if dataset is None:
        raise ConfigError(f"{todo}; or give restore() the dataset")
    try:
        found: Mapping[str, Any] = model.infer_train_layout(dataset)
    except (RuntimeError, ValueError, TypeError) as problem:
        raise ConfigError(f"{todo}. restore() tried to compile it, and MindSpore failed: {problem}") from problem
    return found


def _here(saved: Position, size: int) -> Position:
    """Return ``saved`` converted to epochs of ``size`` batches; the number depends on ranks and batch size."""
    if size in (0, saved.batch_num) or not saved.batch_num:
        return saved
    whole_epochs, rest = divmod(saved.step, saved.batch_num)
    step = whole_epochs * size + rest * size // saved.batch_num
    log.warning(
        "an epoch had %d steps and has %d now: training continues with step %d, at about the same place in the data",
        saved.batch_num, size, step + 1,
    )  # fmt: skip
    return Position(saved.epoch, step, size)
