"""Megatron's legacy layout out of a checkpoint of ttp: one pair of files per place in the model.

    load_dir/latest_checkpointed_iteration.txt
    load_dir/iter_0000012/mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt     weights, optimizer, schedule, args, streams
    load_dir/iter_0000012/mp_rank_TT[_PPP][_EEE]/distrib_optim.pt       flat fp32 copies and moments

Each of them holds what a whole data parallel group has. No rank has that, so it is not what a rescue writes; it is put
together here, by one process, from the boxes and the outlines in the checkpoint. Neither Megatron nor a device is
needed. The second file is there for the distributed optimizer only.
"""

from __future__ import annotations

import os
import shutil
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from ttp.adapters.megatron.mapped import Mapped
from ttp.adapters.megatron.rank_layout import FlatBuffer, LocalOptimizer, Place, RankLayout, dtype_of
from ttp.adapters.megatron.rank_state import STREAMS
from ttp.adapters.megatron.source import STATE_PREFIX
from ttp.adapters.megatron.stock import JOB_KEY
from ttp.adapters.megatron.stored import Stored
from ttp.adapters.torch.convert.contents import digest_of
from ttp.adapters.torch.local_state.capture import read_local_state
from ttp.adapters.torch.local_state.rng import streams_of
from ttp.errors import CheckpointError
from ttp.store.digest import HashingFile, Progress
from ttp.store.durable import make_directory, sync_directory, write_durably
from ttp.store.encoding import decode

MODEL_FILE, OPTIMIZER_FILE, TRACKER = "model_optim_rng.pt", "distrib_optim.pt", "latest_checkpointed_iteration.txt"
MOMENTS = ("exp_avg", "exp_avg_sq")
_MAIN_KEYS = ("param", "fp32_param")


@dataclass(frozen=True, slots=True)
class Legacy:
    """What was written.

    Args:
        path: the directory ``iter_0000012``.
        tensors: how many are in all files.
        size: bytes of all files.
        notes: what is not as it was, in words.
    """

    path: Path
    tensors: int
    size: int
    notes: tuple[str, ...]


def write_legacy(checkpoint: Path, load_dir: Path, *, progress: Progress = lambda _count: None) -> Legacy:
    """Write the legacy layout of ``checkpoint`` into ``load_dir``, durably, and make it the one that Megatron loads.

    It appears whole or not at all; one of the same iteration is replaced. What was written is read back and compared.
    The number is that of the version: finished updates.

    Args:
        checkpoint: of a Megatron job; its digests have been verified.
        load_dir: for Megatron's ``--load``.
        progress: called with the number of bytes newly written.

    Raises:
        CheckpointError: it is no such checkpoint, Megatron has no such form for it, or the disk refused.
    """
    stored = Stored(checkpoint)
    places = _places(stored)
    target = load_dir / legacy_name(stored.manifest.version)
    draft = load_dir / f".{target.name}.{os.getpid()}.new"
    notes: dict[str, None] = {}
    tensors = 0
    try:
        make_directory(draft)
        for outlines in places.values():
            tensors += _write_place(stored, outlines[0], draft, progress, notes)
        size = sum(file.stat().st_size for file in draft.rglob("*.pt"))
        _publish(draft, target)
        write_durably(load_dir / TRACKER, str(stored.manifest.version).encode())
    except OSError as problem:
        raise CheckpointError(f"{target} cannot be written: {problem}") from problem
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return Legacy(target, tensors, size, tuple(notes))


def legacy_name(version: int) -> str:
    """Of the directory below Megatron's ``--load``."""
    return f"iter_{version:07d}"


def _publish(draft: Path, target: Path) -> None:
    """Take the name; what had it, a directory or a link, is gone afterwards."""
    old = target.with_name(f"{draft.name}.old")
    with suppress(FileNotFoundError):
        target.rename(old)
    draft.rename(target)
    sync_directory(target.parent)
    if old.is_symlink():
        old.unlink()
    else:
        shutil.rmtree(old, ignore_errors=True)


def _places(stored: Stored) -> dict[Place, list[RankLayout]]:
    """The outlines of every place, or the reason why there is no legacy layout."""
    found = stored.outlines()
    problem = next((o.problem for outlines in found.values() for o in outlines if o.problem), "")
    if problem:
        raise CheckpointError(f"{stored.path} has no legacy layout: {problem}. --ckpt-format torch_dist reads it")
    missing = [place.directory for place in next(iter(found)).all() if place not in found]
    if missing:
        raise CheckpointError(f"{stored.path} does not say what the ranks of {', '.join(missing[:5])} had")
    return found


def _write_place(stored: Stored, outline: RankLayout, draft: Path, progress: Progress, notes: dict[str, None]) -> int:
    directory = draft / outline.place.directory
    make_directory(directory)
    tensors = 0
    files: dict[str, Callable[[Mapped], Any]] = {MODEL_FILE: lambda into: _model_file(stored, outline, into, notes)}
    if any(optimizer.buffers for optimizer in outline.optimizers):
        files[OPTIMIZER_FILE] = lambda into: _optimizer_file(stored, outline, into)
    for name, make in files.items():
        with Mapped(directory) as memory:
            state = make(memory)
            with HashingFile(directory / name, progress) as file:
                torch.save(state, cast("Any", file))
                file.sync_and_close()
            _read_back(directory / name, state)
            tensors += memory.count
    sync_directory(directory)
    return tensors


# -------------------------------------------------------------------------------------------------- model_optim_rng.pt


def _model_file(stored: Stored, outline: RankLayout, into: Mapped, notes: dict[str, None]) -> dict[str, Any]:
    """As Megatron-LM's ``generate_state_dict`` makes it for ``--ckpt-format torch``."""
    job, progress = stored.job, stored.progress
    counters = dict(progress.get("counters", {}))
    if not progress:
        notes["the counters of samples and the loss scale were lost with the ranks that had them"] = None
    state: dict[str, Any] = {"checkpoint_version": 3.0, "iteration": counters.get("iteration", job.version)}
    if outline.args is not None:
        state["args"] = Namespace(**(dict(outline.args) | counters))
    for number, chunk in enumerate(outline.chunks):
        state["model" if len(outline.chunks) == 1 else f"model{number}"] = _chunk(stored, outline, chunk, into)
    saved, scalers = stored.optimizers, iter(progress.get("scalers", ()))
    optimizers = [
        _optimizer(stored, outline, each, of, next(scalers, {}) if each.scaled else None, into)
        for each, of in zip(outline.optimizers, saved, strict=True)
    ]
    state["optimizer"] = optimizers[0] if len(optimizers) == 1 else optimizers
    if job.scheduler is not None:
        due = job.extra[JOB_KEY]["increment"] if job.scheduler_pending else 0
        state["opt_param_scheduler"] = job.scheduler | {"num_steps": job.scheduler["num_steps"] + due}
    streams = [found for rank in outline.streams if (found := _streams(stored, rank)) is not None]
    if len(streams) == len(outline.streams):
        state["rng_state"] = streams
    else:
        notes["the random streams of some ranks were lost with them: give Megatron --no-load-rng"] = None
    return state


def _chunk(stored: Stored, outline: RankLayout, chunk: Mapping[str, int | str | None], into: Mapped) -> dict[str, Any]:
    found: dict[str, Any] = {}
    wanted = []
    for name, what in chunk.items():
        if isinstance(what, int):
            local = outline.tensors[what]
            found[name] = into.tensor(local.shape, dtype_of(local.dtype))
            wanted.append((found[name], local.tiles, ""))
        else:
            found[name] = stored.value(stored.items[what][0]) if what is not None and stored.has(what) else None
    stored.read(wanted)
    return found


def _optimizer(
    stored: Stored,
    outline: RankLayout,
    optimizer: LocalOptimizer,
    saved: Mapping[str, Any],
    scaler: Mapping[str, Any] | None,
    into: Mapped,
) -> dict[str, Any]:
    """The state dict of one optimizer; each of Megatron's kinds has a form of its own."""
    groups, step = [dict(group) for group in saved["groups"]], saved["step"]
    state: dict[str, Any]
    if optimizer.main_key == "param":
        for group in groups:
            group.update({} if step is None else {"step": step})
        state = {"optimizer": {"param_groups": groups}}
    else:
        plain = _plain_optimizer(stored, outline, optimizer, groups, step, into)
        state = {"optimizer": plain} if optimizer.main_key else plain
    if scaler is not None:
        state["grad_scaler"] = {k: torch.tensor([v]) if k == "scale" else v for k, v in scaler.items()}
    if optimizer.main_key == "fp32_param":
        state["fp32_from_fp16_params"] = [
            _read_all(stored, outline, numbers, "fp32_param", into) for numbers in optimizer.halves
        ]
    return state


def _plain_optimizer(
    stored: Stored,
    outline: RankLayout,
    optimizer: LocalOptimizer,
    groups: list[dict[str, Any]],
    step: Any,
    into: Mapped,
) -> dict[str, Any]:
    """As ``torch.optim.Optimizer.state_dict()`` has it: parameters are numbered through the groups."""
    numbers = [number for group in optimizer.groups for number in group]
    begin = 0
    for group, members in zip(groups, optimizer.groups, strict=True):
        group["params"] = list(range(begin, begin := begin + len(members)))
    state: dict[int, dict[str, Any]] = {}
    moments = {name: _read_all(stored, outline, numbers, name, into) for name in MOMENTS}
    for place in range(len(numbers)):
        state[place] = {name: tensors[place] for name, tensors in moments.items()}
        if step is not None:
            state[place]["step"] = torch.tensor(step, dtype=torch.float32)
    return {"state": state, "param_groups": groups}


def _read_all(stored: Stored, outline: RankLayout, numbers: Sequence[int], name: str, into: Mapped) -> list[Tensor]:
    """One of the optimizer's tensors for each of these."""
    found = [into.tensor(outline.tensors[number].shape, torch.float32) for number in numbers]
    pairs = zip(found, numbers, strict=True)
    stored.read((target, *_source(stored, outline, number, name)) for target, number in pairs)
    return found


def _source(stored: Stored, outline: RankLayout, number: int, name: str) -> tuple[Sequence[Any], str]:
    """Where the elements of an optimizer's tensor are; of a weight that has no fp32 copy, the weight itself."""
    tiles = outline.tensors[number].tiles
    names = _MAIN_KEYS if name in _MAIN_KEYS else (name,)
    prefixes = [f"{STATE_PREFIX}{each}." for each in names]
    prefix = next((prefix for prefix in prefixes if stored.has(prefix + tiles[0].key)), None)
    if prefix is None and name not in _MAIN_KEYS:
        raise CheckpointError(f"{stored.path} has no {name} of {tiles[0].key}: Megatron's legacy layout is Adam's")
    return tiles, prefix or ""


def _streams(stored: Stored, rank: int) -> dict[str, Any] | None:
    """The random streams of one rank, as Megatron-LM's ``get_rng_state`` has them; None: they are lost."""
    local = read_local_state(stored.path, stored.manifest.pieces, rank)
    if local is None or not local.rng or STREAMS not in local.extra:
        return None
    streams = streams_of(local.rng)
    device = streams["torch"] if streams["device"] is None else streams["device"]
    return {
        "random_rng_state": streams["python"],
        "np_rng_state": streams["numpy"],
        "torch_rng_state": streams["torch"],
        "cuda_rng_state": device,
        "rng_tracker_states": dict(decode(local.extra[STREAMS])["streams"]),
    }


# ---------------------------------------------------------------------------------------------------- distrib_optim.pt


def _optimizer_file(stored: Stored, outline: RankLayout, into: Mapped) -> Any:
    """As ``DistributedOptimizer.get_parameter_state_dp_zero`` makes it; of a chain a list of these."""
    states = [
        {"buckets_coalesced": True}
        | {number: _buffer(stored, outline, buffer, into) for number, buffer in enumerate(optimizer.buffers)}
        for optimizer in outline.optimizers
    ]
    return states[0] if len(states) == 1 else states


def _buffer(stored: Stored, outline: RankLayout, buffer: FlatBuffer, into: Mapped) -> dict[Any, Any]:
    found: dict[str, Any] = {}
    for name in ("param", *MOMENTS):
        found[name] = flat = into.tensor((buffer.numel,), torch.float32)
        stored.read(_stretches(stored, outline, buffer, name, flat))
    param, grad = map(dtype_of, buffer.dtypes)
    return {(param, grad): found | {"numel_unpadded": buffer.numel}}


def _stretches(
    stored: Stored, outline: RankLayout, buffer: FlatBuffer, name: str, flat: Tensor
) -> Iterator[tuple[Tensor, Sequence[Any], str]]:
    for number, start in buffer.starts.items():
        target = flat[start : start + _numel(outline, number)]
        yield (target, *_source(stored, outline, number, name))


def _numel(outline: RankLayout, number: int) -> int:
    return int(torch.Size(outline.tensors[number].shape).numel())


# ------------------------------------------------------------------------------------------------------------ checking


def _read_back(path: Path, state: Any) -> None:
    """Load the file, mapped, and compare every tensor.

    Raises:
        CheckpointError: it is not what was written.
    """
    try:
        with torch.serialization.safe_globals([Namespace, *_numpy_globals()]):
            found = torch.load(path, weights_only=True, map_location="cpu", mmap=True)
    except Exception as problem:
        raise CheckpointError(f"{path} cannot be read back: {problem}") from problem
    for name, one, other in _pairs("", state, found):
        if not isinstance(other, Tensor) or digest_of(one) != digest_of(other):
            raise CheckpointError(f"{name} in {path} is not what was written: look at this disk")


def _pairs(name: str, one: Any, other: Any) -> Iterator[tuple[str, Tensor, Any]]:
    if isinstance(one, Tensor):
        yield name, one, other
    elif isinstance(one, dict):
        for key, value in one.items():
            yield from _pairs(f"{name}.{key}", value, other.get(key) if isinstance(other, dict) else None)
    elif isinstance(one, list):
        for number, value in enumerate(one):
            there = isinstance(other, list) and number < len(other)
            yield from _pairs(f"{name}.{number}", value, other[number] if there else None)


def _numpy_globals() -> list[Any]:
    """What the state of numpy's generator is made of."""
    import numpy

    array = numpy.zeros(1, dtype=numpy.uint32)
    reconstruct: Any = array.__reduce__()[0]
    return [numpy.ndarray, numpy.dtype, type(array.dtype), reconstruct]
