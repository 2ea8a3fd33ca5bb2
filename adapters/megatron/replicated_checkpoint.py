"""Saves, renames and loads checkpoints of ``ReplicatedOptimizer``, by functions that ``mindio_ttp`` names. ::

    <save>/iter_0000012/mp_rank_00/shard_0_of_2.pt     weights in fp32, moments and hyperparameters of a shard
                                   shard_0_of_2.json   its size and digest, written when it is durable
                                   common.pt           random streams, scheduler, loss scale, untrained tensors
    <save>/latest_checkpointed_iteration.txt           as Megatron writes it

Every chosen rank writes its own shard, on a thread of the processor and without a collective: the training threads may
hang in one. Names ending in ``_tmp`` are drafts. A draft is renamed when all shards of all places in the model are
durable. Loading verifies digests, never unpickles objects, and walks back to the newest checkpoint that every rank
finds whole; shards are merged by name, so another number of data-parallel ranks may load them.

Random streams are those of the rank that wrote ``common.pt``: Megatron gives all data-parallel ranks the same ones.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

from ttp import session
from ttp.adapters.megatron.optimizers import unchained
from ttp.adapters.megatron.rank_state import samples_after
from ttp.adapters.megatron.replicated_optimizer import ReplicatedOptimizer
from ttp.adapters.torch.sharding.exchange import gather_bytes
from ttp.errors import CheckpointError, ConfigError, UsageError
from ttp.store.digest import digest_file
from ttp.store.durable import make_directory, sync_directory, write_durably

log = logging.getLogger("ttp.adapters.megatron")

DRAFT = "_tmp"
LATEST = "latest_checkpointed_iteration.txt"
COMMON = "common"
_ITERATION = re.compile(r"iter_(\d{7,})")
_SHARD = re.compile(r"shard_(\d+)_of_(\d+)")


class SaveHandler:
    """``ttp_save_checkpoint(save_rank, rank_list, args)``, for ``ttp_register_save_ckpt_handler``."""

    def __init__(self) -> None:
        self._noted: tuple[int, int] | None = None
        self._increment = 0

    def note_args(self, args: Any) -> None:
        """Note how far the scheduler is when the program has finished an iteration; ``args``: see ``__call__``."""
        iteration, _, _, scheduler = args
        if scheduler is None:
            return
        if self._noted is not None and iteration == self._noted[0] + 1:
            self._increment = scheduler.num_steps - self._noted[1]
        self._noted = int(iteration), int(scheduler.num_steps)

    def __call__(self, save_rank: int, rank_list: Sequence[int], args: Any, *, step: int | None = None) -> int:
        """Write this rank's shard of the checkpoint, durably, under a temporary name.

        Args:
            save_rank: this rank.
            rank_list: all ranks that save, in the order of the shards.
            args: ``(iteration, model, optimizer, opt_param_scheduler)``, as given to ``ttp_set_ckpt_args``.
            step: finished updates of the state; None: the optimizer's count.

        Returns:
            0.

        Raises:
            OSError: the storage failed.
            UsageError: the optimizer is no ``ReplicatedOptimizer``, or not at ``step``.
        """
        _, model, optimizer, scheduler = args
        own = replicated(optimizer)
        step = own.current_step if step is None else step
        if step != own.current_step:
            raise UsageError(f"the optimizer has made {own.current_step} updates, and {step} are to be saved")
        place = _place(_iteration_dir(save_directory(), step, draft=True))
        make_directory(place)
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
        """Return the scheduler's state after ``step``: a save may come between the update and the scheduler's step."""
        state = dict(scheduler.state_dict())
        if self._noted is not None and step == self._noted[0] + 1 and scheduler.num_steps == self._noted[1]:
            if not self._increment:
                log.warning("the scheduler's step after the first update is not known: it is one behind when resumed")
            state["num_steps"] += self._increment
        return state


ttp_save_checkpoint = SaveHandler()


def rename_save_result(args: Any, *, step: int | None = None) -> int:
    """Rename the draft that all savers have written to the final name of the checkpoint.

    Args:
        args: the arguments of ``ttp_set_ckpt_args``, or the iteration.
        step: finished updates of the state; None: taken from ``args``.

    Returns:
        0; or 1 if the draft is not whole or the storage failed, and then the log says why.
    """
    root = save_directory()
    if step is None:
        step = args if isinstance(args, int) else replicated(args[2]).current_step
    draft, final = _iteration_dir(root, step, draft=True), _iteration_dir(root, step)
    if final.exists() and not draft.exists():
        return 0  # renamed by an earlier call
    try:
        _check_whole(draft, _model_places(), quick=True)
        draft.rename(final)
        sync_directory(root)
        write_durably(root / LATEST, str(step).encode())
    except (OSError, CheckpointError) as problem:
        log.error("the checkpoint of step %s cannot be renamed to its final name: %s", step, problem)
        return 1
    return 0


def load_checkpoint(model: Any, optimizer: Any, opt_param_scheduler: Any = None, *_: Any, **__: Any) -> int:
    """Load the newest checkpoint that all ranks find whole into model, optimizer and scheduler. A collective call.

    Returns:
        Its iteration; 0: there is none.

    Raises:
        CheckpointError: the checkpoint belongs to another model.
    """
    own = replicated(optimizer)
    root = save_directory(loading=True)
    step = _agree(root)
    if step == 0:
        return 0
    place = _place(_iteration_dir(root, step))
    shards = [_read(path) for path in sorted(place.glob("shard_*.pt"))]
    _put_back(own, shards, place)
    common = _read(place / f"{COMMON}.pt")
    _put_fixed(model, common["fixed"])
    if opt_param_scheduler is not None and common["scheduler"] is not None:
        opt_param_scheduler.load_state_dict(common["scheduler"])
    if own.grad_scaler and common["scaler"]:
        own.grad_scaler.load_state_dict(common["scaler"])
    for note in own.restore_streams(common["streams"]) if common["streams"] else ():
        log.warning("%s", note)
    own.current_step = step
    own.note_streams()
    _tell_counters(step)
    return step


def replicated(optimizer: Any) -> ReplicatedOptimizer:
    """Return the ``ReplicatedOptimizer`` in ``optimizer``.

    Raises:
        UsageError: there is none, or there are several.
    """
    found = [each for each in unchained(optimizer) if isinstance(each, ReplicatedOptimizer)]
    if len(found) != 1:
        raise UsageError(
            f"{len(found)} ReplicatedOptimizers in {type(optimizer).__name__}, and one is wanted: models with experts "
            "have an optimizer more; protect them with ttp.adapters.megatron.protect"
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
        raise ConfigError("where do checkpoints go? Give Megatron --save, or set TTP_SAVE_DIR")
    return Path(given or str(asked)).absolute()


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
    """Check that a checkpoint is whole; ``quick``: by names and sizes, without recomputing digests.

    Raises:
        CheckpointError: files are missing or damaged.
        OSError: a file cannot be read.
    """
    found = sorted(directory.glob("mp_rank_*"))
    if not found or places not in (None, len(found)):
        raise CheckpointError(f"{directory} has {len(found)} places of the model, {places or 'some'} are needed")
    for place in found:
        shards = [m for path in place.glob("shard_*.pt") if (m := _SHARD.fullmatch(path.stem))]
        count = max((int(m[2]) for m in shards), default=0)
        if not count or {int(m[1]) for m in shards} != set(range(count)) or any(int(m[2]) != count for m in shards):
            raise CheckpointError(f"{place} has {sorted(m[0] for m in shards)}: shards lack")
        for path in (*(place / f"{m[0]}.pt" for m in shards), place / f"{COMMON}.pt"):
            _check_file(path, quick)


def _check_file(path: Path, quick: bool) -> None:
    try:
        said = json.loads(path.with_suffix(".json").read_text())
        size, digest = said["size"], said["digest"]
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise CheckpointError(f"{path} was not finished: {problem}") from None
    if path.stat().st_size != size or (not quick and digest_file(path) != (size, digest)):
        raise CheckpointError(f"{path} is not as it was written: it is damaged")


def _agree(root: Path) -> int:
    """Return the newest step that every rank finds whole; 0: none. A collective call of all ranks of the job."""
    bound = sys.maxsize
    while True:
        mine = _newest_whole(root, bound)
        seen = [int(text) for text in gather_bytes(str(mine).encode())]
        lowest = min(seen)
        if lowest == max(seen):
            return lowest
        bound = lowest + 1
        log.warning("ranks do not see the same checkpoints under %s: going back to step %d or before", root, lowest)


def _newest_whole(root: Path, bound: int) -> int:
    steps = sorted((int(m[1]) for path in root.glob("iter_*") if (m := _ITERATION.fullmatch(path.name))), reverse=True)
    for step in steps:
        if step < bound:
            try:
                _check_whole(_iteration_dir(root, step))
            except (OSError, CheckpointError) as problem:
                log.warning("skipped: %s", problem)
            else:
                return step
    return 0


def _read(path: Path) -> dict[str, Any]:
    try:
        return dict(torch.load(path, map_location="cpu", weights_only=True))
    except Exception as problem:
        raise CheckpointError(f"{path} cannot be read: {problem}") from None


def _put_back(own: ReplicatedOptimizer, shards: Sequence[dict[str, Any]], place: Path) -> None:
    weights: dict[str, Tensor] = {name: value for shard in shards for name, value in shard["weights"].items()}
    here = own.trained
    if weights.keys() != here.keys() or any(weights[n].shape != p.shape for n, p in here.items()):
        odd = sorted(weights.keys() ^ here.keys()) or [n for n, p in here.items() if weights[n].shape != p.shape]
        raise CheckpointError(f"{place} is of another model: {', '.join(odd[:5])}")
    states = {name: value for shard in shards for name, value in shard["state"].items()}
    with torch.no_grad():
        for name, parameter in here.items():
            parameter.copy_(weights[name])
        for name, (_, main) in own.held.items():
            main.copy_(weights[name])
            own.optimizer.state[main] = {k: _at(v, main) for k, v in states[name].items()}
    if own.optimizer is None:
        return
    for number, group in enumerate(own.optimizer.param_groups):
        group.update(_group(number, shards))


def _at(value: Any, main: Tensor) -> Any:
    return value.to(main.device) if isinstance(value, Tensor) and value.dim() else value


def _group(number: int, shards: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return a group's hyperparameters, from the shard that has counted the most steps: empty groups do not count."""
    versions = [shard["groups"][number] for shard in shards if number < len(shard["groups"])]
    counted = [v for v in versions if "step" in v]
    merged = dict(max(counted, key=lambda v: float(v["step"])) if counted else versions[0] if versions else {})
    return {k: _at(v, v) if isinstance(v, Tensor) else v for k, v in merged.items()}


def _put_fixed(model: Any, saved: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for number, chunk in enumerate(model if isinstance(model, (list, tuple)) else [model]):
            for name, value in (*chunk.named_parameters(), *chunk.named_buffers()):
                if f"{number}.{name}" in saved:
                    value.copy_(saved[f"{number}.{name}"])
