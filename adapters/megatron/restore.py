"""Loads a checkpoint into a live Megatron model and its optimizers, bit for bit, in any layout.

Every rank lists the boxes that it holds, and copies their elements from whichever saved boxes overlap them. With
another number of tensor or pipeline parallel ranks a rank holds other boxes of the same tensors. Nothing is
communicated or unpickled.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ttp.adapters.megatron.geometry import CheckpointBox
from ttp.adapters.megatron.optimizers import Holding, Inner
from ttp.adapters.megatron.source import STATE_PREFIX, Held, class_of
from ttp.adapters.megatron.stock import JOB_KEY, read_megatron_job
from ttp.adapters.torch.restoring.reader import load_chunks, overlap
from ttp.adapters.torch.saving.checkpoint import Chunk
from ttp.adapters.torch.saving.job_state import JobState
from ttp.adapters.torch.saving.metadata import fitting
from ttp.adapters.torch.saving.piece_index import IndexEntry, StatePath, items_of
from ttp.adapters.torch.sharding.names import first_of
from ttp.errors import CheckpointError, OtherModelError
from ttp.store.manifest import Manifest

_LISTED_MAX = 5
_GROUP_IDENTITY = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")
_MAIN_KEYS = ("param", "fp32_param")


class Wants:
    """The boxes of a checkpoint's tensors that this rank needs, and the memory into which their elements are copied."""

    def __init__(self) -> None:
        self.chunks: dict[StatePath, list[Chunk]] = {}
        """The boxes by the path of the checkpoint's tensor."""
        self.padded: set[StatePath] = set()
        """Paths of tensors that may have another shape in the checkpoint: the vocabulary is padded to some size."""

    def add(self, prefix: str, part: CheckpointBox, memory: Tensor, begin: int) -> None:
        """Add a box.

        Args:
            prefix: prefix of the tensor's name: empty for a weight.
            part: the box in the weight of the checkpoint.
            memory: a vector over the memory to fill.
            begin: position of the vector's first element in the memory of the rank's tensor, in elements.
        """
        path = (prefix + part.key,)
        self.chunks.setdefault(path, []).append(part.chunk(memory, begin))
        if part.flexible:
            self.padded.add(path)


def restore_into(path: Path, manifest: Manifest, held: Held) -> JobState:
    """Load weights, fp32 copies and moments into the live tensors.

    Args:
        path: the directory of the checkpoint, whose digests have been verified.
        manifest: its manifest.
        held: the tensors and shards of this rank.

    Returns:
        The job state, which is equal on all ranks; the caller restores scheduler and param groups from it.

    Raises:
        CheckpointError: the checkpoint belongs to another model (then nothing has been changed), or a piece cannot be
            read.
    """
    job = read_megatron_job(path, manifest.pieces)
    if job.version != manifest.version or JOB_KEY not in job.extra:
        raise CheckpointError(f"{path} was not written by a Megatron job of version {manifest.version}")
    saved, wants = items_by_key(manifest), Wants()
    _add_weights(held, wants)
    gaps = _gaps(saved)
    fresh = [_moments(inner, saved, gaps, wants) for inner in held.inners]
    _refuse_foreign(path, wants, saved, _other_optimizers(held, job))
    load_chunks(path, itertools.chain(*saved.values()), wants.chunks.items(), padded=wants.padded)
    for inner, states in zip(held.inners, fresh, strict=True):
        _install(inner, states, _saved_of(held, inner, job))
    return job


def items_by_key(manifest: Manifest) -> dict[str, list[IndexEntry]]:
    """Return the entries (saved boxes and values) of a checkpoint, by the name of the tensor.

    Raises:
        CheckpointError: see ``fitting``.
    """
    return fitting(items_of(manifest.pieces), STATE_PREFIX)


def restore_groups(held: Held, job: JobState) -> None:
    """Restore the hyperparameters in the param groups, among them Adam's count of steps if it is kept there.

    Call it after the scheduler was loaded: loading the scheduler sets learning rates that may differ from the saved.
    """
    for inner in held.inners:
        groups = [group for each in _saved_of(held, inner, job) for group in each["groups"]]
        _install_groups(inner.optimizer.param_groups, groups)


# --------------------------------------------------------------------------------------------------------- wanted boxes


def _add_weights(held: Held, wants: Wants) -> None:
    """Add the boxes of all tensors of this rank's model, including copies that other ranks wrote."""
    for described in held.geometry.tensors.values():
        for part in described.whole:
            wants.add("", part, described.tensor.detach().view(-1), 0)


def _moments(
    inner: Inner, saved: Mapping[str, Sequence[IndexEntry]], gaps: Gaps, wants: Wants
) -> dict[Tensor, dict[str, Tensor]]:
    """Return newly allocated optimizer state for each parameter, and add the boxes to load into it to ``wants``."""
    fresh: dict[Tensor, dict[str, Tensor]] = {}
    for holding in inner.holdings:
        main_key = _main_key(holding, saved, gaps)
        states = {
            name: torch.zeros_like(holding.main.detach(), dtype=_dtype(saved, name, holding))
            for name in _state_names(holding, saved, gaps)
        }
        targets = {main_key: holding.main.detach()} | {f"{STATE_PREFIX}{name}.": each for name, each in states.items()}
        for prefix, target in targets.items():
            for part in holding.parts:
                wants.add(prefix, part, target.view(-1), holding.begin)
        fresh[holding.main] = states
    return fresh


def _main_key(holding: Holding, saved: Mapping[str, Sequence[IndexEntry]], gaps: Gaps) -> str:
    """Return the prefix of the name of a parameter's fp32 copy; empty: only the weight was saved."""
    names = (f"{STATE_PREFIX}{key}." for key in _MAIN_KEYS)
    found = (name for name in names if name + holding.described.views[0].key in saved)
    return next((name for name in found if _is_saved(holding, name, gaps)), "")


def _state_names(holding: Holding, saved: Mapping[str, Sequence[IndexEntry]], gaps: Gaps) -> list[str]:
    """Return the names of the optimizer values that the checkpoint has for a parameter, such as ``exp_avg``."""
    end = "." + holding.described.views[0].key
    found = [key[len(STATE_PREFIX) : -len(end)] for key in saved if key.startswith(STATE_PREFIX) and key.endswith(end)]
    found = [name for name in found if "." not in name and name not in _MAIN_KEYS]
    return [name for name in found if _is_saved(holding, f"{STATE_PREFIX}{name}.", gaps)]


Gaps = Mapping[str, Sequence[IndexEntry]]
"""The entries of optimizer values that only some layers have, because others were frozen, by the name of the tensor."""


def _gaps(saved: Mapping[str, Sequence[IndexEntry]]) -> Gaps:
    return {
        key: entries
        for key, entries in saved.items()
        if key.startswith(STATE_PREFIX) and sum(prod(e.sizes) for e in entries) < prod(entries[0].shape)
    }


def _is_saved(holding: Holding, prefix: str, gaps: Gaps) -> bool:
    """Return whether the checkpoint has these values of all elements of a parameter."""
    for part in holding.parts:
        entries = gaps.get(prefix + part.key, ())
        if not entries or entries[0].shape != part.shape:
            continue
        shared = filter(None, (overlap(e.offsets, e.sizes, part.offsets, part.sizes) for e in entries))
        if sum(prod(one.stop - one.start for one in there) for there, _ in shared) < prod(part.sizes):
            return False
    return True


def _dtype(saved: Mapping[str, Sequence[IndexEntry]], name: str, holding: Holding) -> torch.dtype:
    return saved[f"{STATE_PREFIX}{name}.{holding.described.views[0].key}"][0].torch_dtype


def _other_optimizers(held: Held, job: JobState) -> Iterable[str]:
    """Yield what differs if an optimizer is not Adam, of whatever library, and the saved one is, or the other way."""
    for inner in held.inners:
        adam = any("betas" in group for group in inner.optimizer.param_groups)
        saved = _saved_of(held, inner, job)
        others = [each for each in saved if adam != any("betas" in group for group in each["groups"])]
        if others and len(others) == len(saved):
            yield f"the {inner.kind} optimizer is {class_of(inner)} here and {others[0].get('class')} in the checkpoint"


def _refuse_foreign(path: Path, wants: Wants, saved: Mapping[str, Sequence[IndexEntry]], others: Iterable[str]) -> None:
    problems: dict[str, None] = dict.fromkeys(others)
    for (key,), chunks in wants.chunks.items():
        items, shape = saved.get(str(key)), chunks[0].shape
        if not items:
            problems[f"it lacks {key}"] = None
        elif items[0].shape != shape and (key,) not in wants.padded:
            problems[f"{key} has shape {list(items[0].shape)} there and {list(shape)} here"] = None
    if problems:
        raise OtherModelError(
            f"{path} belongs to another model: {first_of(problems, _LISTED_MAX, '; ')}. Nothing was loaded. Use "
            "the code that wrote it, or another save_dir to start at step 0"
        )


# ----------------------------------------------------------------------------------------------------------- optimizers


def _saved_of(held: Held, inner: Inner, job: JobState) -> Sequence[Mapping[str, Any]]:
    """Return the saved optimizers of the kind and class of ``inner``; else those of that kind, else all saved ones.

    If there are as many of that kind and class as here, they match in their order.
    """
    saved: Sequence[Mapping[str, Any]] = job.extra[JOB_KEY]["optimizers"]
    kind = [each for each in saved if each["kind"] == inner.kind] or saved
    alike = [each for each in kind if each.get("class") == class_of(inner)]
    here = [each for each in held.inners if (each.kind, class_of(each)) == (inner.kind, class_of(inner))]
    if len(alike) == len(here):
        return [each for each, one in zip(alike, here, strict=True) if one is inner]
    return alike or kind


def _install(inner: Inner, states: dict[Tensor, dict[str, Tensor]], saved: Sequence[Mapping[str, Any]]) -> None:
    """Give the live optimizer its loaded moments, and the count of steps that torch's Adam keeps per parameter."""
    step = next((each["step"] for each in saved if each["step"] is not None), None)
    for main, values in states.items():
        inner.optimizer.state[main] = dict(values)
        if step is not None and values:
            inner.optimizer.state[main]["step"] = _step_tensor(step, main, inner.optimizer.param_groups[0])


def _install_groups(live: Sequence[dict[str, Any]], groups: Sequence[Mapping[str, Any]]) -> None:
    """Give each live param group the saved hyperparameters of its match, or of the saved group at its position.

    Several groups may have one identity, with other rates (``--decoupled-lr``): they match in their order.
    """
    counted = max((group["step"] for group in groups if "step" in group), default=None)
    seen: Counter[tuple[Any, ...]] = Counter()
    for number, group in enumerate(live):
        identity = _identity(group)
        match = [other for other in groups if _identity(other) == identity]
        chosen = match[min(seen[identity], len(match) - 1)] if match else groups[number] if number < len(groups) else {}
        seen[identity] += 1
        group.update({key: value for key, value in chosen.items() if key != "params"})
        if counted is not None:  # a fused optimizer does not count steps in groups that are empty on a rank
            group["step"] = counted


def _step_tensor(step: float, main: Tensor, group: Mapping[str, Any]) -> Tensor:
    """Make a tensor of the count of steps. Each parameter needs its own: the optimizer increments it in place."""
    device = main.device if group.get("capturable") or group.get("fused") else "cpu"
    return torch.tensor(step, dtype=torch.float32, device=device)


def _identity(group: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(group.get(key, group.get(f"pre_{key}")) for key in _GROUP_IDENTITY)
