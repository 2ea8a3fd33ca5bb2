"""Saves, renames and loads checkpoints of ``ReplicatedOptimizer``, with the function names of ``mindio_ttp``. ::

    <save>/iter_0000012/mp_rank_00/shard_0_of_2.pt     weights in fp32, moments and hyperparameters of a shard
                                   shard_0_of_2.json   size and digest of the shard, written when it is durable
                                   common.pt           random streams, scheduler, loss scale, untrained tensors
    <save>/latest_checkpointed_iteration.txt           as Megatron writes it

Every rank that the controller chose writes its own shard, on a thread of the processor and without a collective call,
because the training threads may hang in one. Names ending in ``_tmp`` are drafts. A draft is renamed when the shards of
all places in the model (tensor and pipeline parallel ranks) are durable. Loading verifies digests, never unpickles
objects, and walks back to the newest checkpoint that every rank finds whole. Shards are merged by tensor name, so a job
with another number of data-parallel ranks can load them.

``common.pt`` has the random streams of the rank that wrote it: Megatron gives all data-parallel ranks the same streams.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

from ttp import session
from ttp.adapters.megatron.optimizers import unchained
from ttp.adapters.megatron.rank_state import samples_after, set_streams
from ttp.adapters.megatron.replicated_loading import put_back, put_fixed
from ttp.adapters.megatron.replicated_optimizer import ReplicatedOptimizer
from ttp.adapters.torch.sharding.exchange import gather_bytes
from ttp.errors import GARBLED, CheckpointError, ConfigError, ToldAs, UsageError
from ttp.store.digest import digest_file
from ttp.store.durable import make_directory, sync_directory, write_durably
from ttp.store.writable import absolute

log = logging.getLogger("ttp.adapters.megatron")

DRAFT = "_tmp"
LATEST = "latest_checkpointed_iteration.txt"
COMMON = "common"
REPLACED = ".replaced."
_ITERATION = re.compile(r"iter_(\d{7,})(?:\.replaced\.\d+)?")
_SHARD = re.compile(r"shard_(\d+)_of_(\d+)")


class SaveHandler:
    """Writes a rank's shard: the class of ``ttp_save_checkpoint``, a handler for ``ttp_register_save_ckpt_handler``."""

    def __init__(self) -> None:
        self._noted: tuple[int, int] | None = None
        self._increment = 0

    def note_args(self, args: Any) -> None:
        """Note the scheduler's count of steps after a finished iteration; for ``args`` see ``__call__``.

        From two calls follows by how much one iteration steps the scheduler.
        """
        iteration, _, _, scheduler = args
        if scheduler is None:
            return
        if self._noted is not None and iteration == self._noted[0] + 1:
            self._increment = scheduler.num_steps - self._noted[1]
        self._noted = int(iteration), int(scheduler.num_steps)

    def __call__(self, save_rank: int, rank_list: Sequence[int], args: Any, *, step: int | None = None) -> int:
        """Write this rank's shard of the checkpoint, durably, under a temporary name.

        Args:
            save_rank: this rank. Ignored: the optimizer knows which shard this rank holds.
            rank_list: all ranks that save, in the order of the shards. Ignored.
            args: ``(iteration, model, optimizer, opt_param_scheduler)``, as given to ``ttp_set_ckpt_args``.
            step: finished updates of the state to be saved; None: as many as the optimizer has counted.

        Returns:
            0, which means success to ``mindio_ttp``.

        Raises:
            OSError: the storage failed.
            UsageError: the optimizer is not a ``ReplicatedOptimizer``, or its count of updates is not ``step``.
        """
        _, model, optimizer, scheduler = args
        own = replicated(optimizer)
        step = own.current_step if step is None else step
        if step != own.current_step:
            raise UsageError(
                f"the optimizer has made {own.current_step} updates, but the state after {step} is to be saved: call "
                "increase_step() once after each update"
            )
        place = _place(_iteration_dir(save_directory(), step, draft=True))
        make_directory(place)
        for path in place.glob("shard_*"):
            if not path.stem.endswith(f"_of_{own.placement.shards}"):
                path.unlink(missing_ok=True)  # left by an earlier attempt, in a job with another number of shards
        for path in place.glob(f".shard_{own.shard}_of_*"):
            path.unlink(missing_ok=True)  # left by a rank that died while it wrote this shard
        if own.shard == 0:
            _write(place / f"{COMMON}.pt", self._common(step, model, own, scheduler))
        _write(place / f"shard_{own.shard}_of_{own.placement.shards}.pt", _shard_state(step, own))
        sync_directory(place)
        return 0

    def _common(self, step: int, model: Any, own: ReplicatedOptimizer, scheduler: Any) -> dict[str, Any]:
        scaler = own.grad_scaler.state_dict() if own.grad_scaler else None
        state = {"step": step, "streams": own.streams, "scaler": scaler, "fixed": dict(_fixed(model, own.trained))}
        return state | {"scheduler": None if scheduler is None else self._scheduler(step, scheduler)}

    def _scheduler(self, step: int, scheduler: Any) -> dict[str, Any]:
        """Return the scheduler's state for ``step``: if the save came before the scheduler's step, count that step."""
        state = dict(scheduler.state_dict())
        if self._noted is not None and step == self._noted[0] + 1 and scheduler.num_steps == self._noted[1]:
            if not self._increment:
                log.warning("the scheduler's increment is not known yet: the saved scheduler is one step behind")
            state["num_steps"] += self._increment
        return state


ttp_save_checkpoint = SaveHandler()


def rename_save_result(args: Any, *, step: int | None = None) -> int:
    """Rename the draft that all savers have written to the final name of the checkpoint.

    Args:
        args: the arguments of ``ttp_set_ckpt_args``, or the iteration.
        step: finished updates of the state; None: taken from ``args``.

    Returns:
        0 on success; 1 if the draft is not whole or the storage failed (the log says why).
    """
    root = save_directory()
    if step is None:
        step = args if isinstance(args, int) else replicated(args[2]).current_step
    draft, final = _iteration_dir(root, step, draft=True), _iteration_dir(root, step)
    try:
        if draft.exists() or not final.exists():  # else renamed by an earlier call
            _check_whole(draft, _model_places(), quick=True)
            _set_aside(final)
            draft.rename(final)
            sync_directory(root)
        write_durably(root / LATEST, str(step).encode())
    except (OSError, CheckpointError) as problem:
        log.error("the draft of step %s cannot be renamed to its final name: %s", step, problem)
        return 1
    return 0


def _set_aside(older: Path) -> None:
    """Rename an older checkpoint of the same step: a restarted job that loses a rank at once saves that step again.

    A crash before the next rename leaves it under this name, from which ``_checkpoint`` then loads it.
    """
    if older.exists():
        older.rename(older.with_name(f"{older.name}{REPLACED}{len(_replaced(older)) + 1}"))


def _replaced(final: Path) -> list[Path]:
    """Return the replaced checkpoints of a step, the oldest first."""
    others = (final.with_name(f"{final.name}{REPLACED}{number}") for number in itertools.count(1))
    return list(itertools.takewhile(Path.exists, others))


def _checkpoint(root: Path, step: int) -> Path:
    """Return the checkpoint of a step: the last replaced one if a crash has cut its replacement off."""
    final = _iteration_dir(root, step)
    replaced = _replaced(final)
    return final if final.exists() or not replaced else replaced[-1]


def load_checkpoint(model: Any, optimizer: Any, opt_param_scheduler: Any = None, *_: Any, **__: Any) -> int:
    """Load the newest checkpoint that all ranks find whole into model, optimizer and scheduler. A collective call.

    Further arguments of Megatron's ``load_checkpoint`` are accepted and ignored.

    Returns:
        The iteration (finished updates) of the checkpoint; 0: there is no checkpoint.

    Raises:
        CheckpointError: the checkpoint belongs to another model, or a file cannot be loaded.
    """
    own = replicated(optimizer)
    root = save_directory(loading=True)
    step = _agree(root)
    if step == 0:
        return 0
    place = _place(_checkpoint(root, step))
    shards = [_read(path) for path in sorted(place.glob("shard_*.pt"))]
    put_back(own, shards, place)
    common = _read(place / f"{COMMON}.pt")
    put_fixed(model, common["fixed"])
    if opt_param_scheduler is not None and common["scheduler"] is not None:
        opt_param_scheduler.num_steps = 0  # load_state_dict() adds the saved steps to num_steps
        opt_param_scheduler.load_state_dict(common["scheduler"])
    if own.grad_scaler and common["scaler"]:
        own.grad_scaler.load_state_dict(common["scaler"])
    for note in set_streams(common["streams"]) if common["streams"] else ():
        log.warning("%s", note)
    own.current_step = step
    own.note_streams()
    _tell_counters(step)
    return step


def replicated(optimizer: Any) -> ReplicatedOptimizer:
    """Return the ``ReplicatedOptimizer`` in ``optimizer``, which may be a chain of optimizers.

    Raises:
        UsageError: ``optimizer`` contains none, or several.
    """
    found = [each for each in unchained(optimizer) if isinstance(each, ReplicatedOptimizer)]
    if len(found) != 1:
        raise UsageError(
            f"{len(found)} ReplicatedOptimizers in {type(optimizer).__name__}, and there must be 1: a model with "
            "experts has several optimizers; protect it with ttp.adapters.megatron.protect instead"
        )
    return found[0]


# --------------------------------------------------------------------------------------------------------------- paths


def save_directory(*, loading: bool = False) -> Path:
    """Return the directory of checkpoints: ``TTP_SAVE_DIR``, or else Megatron's ``--save`` (``--load`` when loading).

    Raises:
        ConfigError: none of them is set.
    """
    given = session.current().config.save_dir
    args = _megatron_args()
    asked = (getattr(args, "load", None) if loading else None) or getattr(args, "save", None)
    if not (given or asked):
        raise ConfigError("no directory for checkpoints is set: give Megatron --save, or set TTP_SAVE_DIR")
    return absolute(given or str(asked))


def _megatron_args() -> Any:
    for name in ("megatron.training.global_vars", "megatron.global_vars"):
        module = sys.modules.get(name)
        if module is not None and getattr(module, "_GLOBAL_ARGS", None) is not None:
            return module._GLOBAL_ARGS
    return None


def _tell_counters(step: int) -> None:
    args = _megatron_args()
    if args is not None and getattr(args, "global_batch_size", None):
        args.consumed_train_samples = samples_after(step, args.global_batch_size)


def _iteration_dir(root: Path, step: int, *, draft: bool = False) -> Path:
    return root / f"iter_{step:07d}{DRAFT if draft else ''}"


def _place(directory: Path) -> Path:
    """Return this rank's subdirectory, with Megatron's name for its place in the model."""
    tensor, pipeline = parallel_state.get_tensor_model_parallel_rank(), ""
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        pipeline = f"_{parallel_state.get_pipeline_model_parallel_rank():03d}"
    return directory / f"mp_rank_{tensor:02d}{pipeline}"


def _model_places() -> int:
    sizes = parallel_state.get_tensor_model_parallel_world_size, parallel_state.get_pipeline_model_parallel_world_size
    return int(sizes[0]() * sizes[1]())


# ------------------------------------------------------------------------------------------------------------- writing


def _shard_state(step: int, own: ReplicatedOptimizer) -> dict[str, Any]:
    inner, held = own.optimizer, own.held
    groups = [{k: v for k, v in g.items() if k != "params" and _plain(v)} for g in inner.param_groups] if inner else []
    state = {name: dict(inner.state.get(main, {})) for name, (_, main) in held.items()}
    weights = {name: main.detach() for name, (_, main) in held.items()}
    return {"step": step, "weights": weights, "state": state, "groups": groups}


def _plain(value: Any) -> bool:
    return isinstance(value, (int, float, str, bool, tuple, list, type(None), Tensor))


def _fixed(model: Any, trained: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield frozen parameters and buffers, by name."""
    for number, chunk in enumerate(model if isinstance(model, (list, tuple)) else [model]):
        for name, value in (*chunk.named_parameters(), *chunk.named_buffers()):
            if f"{number}.{name}" not in trained and value is not None:
                yield f"{number}.{name}", value.detach()


def _write(path: Path, state: dict[str, Any]) -> None:
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    torch.save(state, draft)
    with draft.open("rb") as file:
        os.fsync(file.fileno())
    size, digest = digest_file(draft)
    draft.replace(path)
    write_durably(path.with_suffix(".json"), json.dumps({"size": size, "digest": digest}).encode())


# ------------------------------------------------------------------------------------------------------------- reading


def _check_whole(directory: Path, places: int | None = None, *, quick: bool = False) -> None:
    """Check that a checkpoint is whole.

    Args:
        directory: the checkpoint, or its draft.
        places: number of places in the model (tensor times pipeline parallel size) that must be there; None: any.
        quick: compare names and sizes only, without recomputing digests.

    Raises:
        CheckpointError: files are missing or damaged.
        OSError: a file cannot be read.
    """
    found = sorted(directory.glob("mp_rank_*"))
    if not found or places not in (None, len(found)):
        raise CheckpointError(
            f"{directory} has {len(found)} directories mp_rank_*, and {places or 'at least 1'} must be there"
        )
    for place in found:
        shards = [m for path in place.glob("shard_*.pt") if (m := _SHARD.fullmatch(path.stem))]
        count = max((int(m[2]) for m in shards), default=0)
        if not count or {int(m[1]) for m in shards} != set(range(count)) or any(int(m[2]) != count for m in shards):
            raise CheckpointError(f"{place} is not complete: it has only the shards {sorted(m[0] for m in shards)}")
        for path in (*(place / f"{m[0]}.pt" for m in shards), place / f"{COMMON}.pt"):
            _check_file(path, quick)


def _check_file(path: Path, quick: bool) -> None:
    with ToldAs(CheckpointError, f"{path} was not finished: its .json file cannot be read", *GARBLED, OSError):
        record = json.loads(path.with_suffix(".json").read_text())
        size, digest = record["size"], record["digest"]
    if path.stat().st_size != size or (not quick and digest_file(path) != (size, digest)):
        raise CheckpointError(f"{path} is damaged: its size or digest is not the one in its .json file")


def _agree(root: Path) -> int:
    """Return the newest step whose checkpoint every rank finds whole; 0: none. A collective call of all ranks."""
    bound = sys.maxsize
    while True:
        mine = _newest_whole(root, bound)
        seen = [int(text) for text in gather_bytes(str(mine).encode())]
        lowest = min(seen)
        if lowest == max(seen):
            return lowest
        bound = lowest + 1
        log.warning("ranks do not find the same checkpoints under %s: all go back to step %d or before", root, lowest)


def _newest_whole(root: Path, bound: int) -> int:
    steps = {int(m[1]) for path in root.glob("iter_*") if (m := _ITERATION.fullmatch(path.name))}
    for step in sorted(steps, reverse=True):
        if step < bound:
            try:
                _check_whole(_checkpoint(root, step))
            except (OSError, CheckpointError) as problem:
                log.warning("a checkpoint is skipped: %s", problem)
            else:
                return step
    return 0


def _read(path: Path) -> dict[str, Any]:
    with ToldAs(CheckpointError, f"{path} cannot be read", Exception):
        return dict(torch.load(path, map_location="cpu", weights_only=True))
