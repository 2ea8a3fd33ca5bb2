"""Reads a checkpoint of any layout as whole tensors, one at a time, for a conversion."""

from __future__ import annotations

from collections.abc import Collection, Container, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import StorageMeta

from ttp.adapters.torch.convert.contents import LazyTensor, StateValue, WholeState
from ttp.adapters.torch.restoring.reader import copy_overlaps, read_value
from ttp.adapters.torch.saving.checkpoint import Chunk
from ttp.adapters.torch.saving.job_state import JOB_KIND, JobState, read_job_state
from ttp.adapters.torch.saving.metadata import build_metadata
from ttp.adapters.torch.saving.piece_index import IndexEntry, items_of, left_out_of
from ttp.errors import CheckpointError
from ttp.store.manifest import Manifest

FRAMEWORK, MEGATRON = "torch", "megatron"


def read_checkpoint(path: Path) -> WholeState:
    """Read the checkpoint at ``path``, whose digests have been verified. Its tensors are read later, one at a time.

    Raises:
        CheckpointError: it is not of a torch or Megatron job, has no weights, or its shards do not fit together.
    """
    manifest = Manifest.load(path)
    if manifest.framework == MEGATRON:
        from ttp.adapters.megatron.contents import read_megatron

        return read_megatron(path)
    items = _torch_items(path, manifest)
    build_metadata(items, StorageMeta())  # checks that chunks cover every tensor exactly once
    job = read_job_state(path, manifest.pieces) if any(p.kind == JOB_KIND for p in manifest.pieces) else None
    kind = next((item for item in items if item.path == ("ttp", "optimizer")), None)
    found = tuple(_leaf(path, chunks) for chunks in _by_path(items))
    return WholeState(
        source=path.name,
        version=manifest.version,
        leaves=nested_optimizer(found),
        optimizer=str(read_value(path, kind)) if kind is not None else "",
        job=None if job is None else _scalars(job),
        notes=_notes(manifest, job),
    )


def _torch_items(path: Path, manifest: Manifest) -> list[IndexEntry]:
    if manifest.framework != FRAMEWORK:
        raise CheckpointError(
            f"{path} was written by the {manifest.framework} adapter: `ttp convert` reads checkpoints of torch and "
            f"Megatron jobs only. Use a converter of {manifest.framework}"
        )
    items = items_of(manifest.pieces)
    if not any(item.path[0] == "model" and item.is_tensor for item in items):
        raise CheckpointError(f"{path} holds no weights under the name `model`, so there is nothing to convert")
    return items


def _by_path(items: Sequence[IndexEntry]) -> list[list[IndexEntry]]:
    """Return the distinct chunks of each value. The values are in the order of the checkpoint."""
    found: dict[tuple[str | int, ...], dict[object, IndexEntry]] = {}
    for item in items:  # replicas may have written a chunk twice: keep the first, as stock torch does
        found.setdefault(item.path, {}).setdefault((item.offsets, item.sizes), item)
    return [list(chunks.values()) for chunks in found.values()]


def _leaf(path: Path, chunks: Sequence[IndexEntry]) -> StateValue:
    first = chunks[0]
    if not first.is_tensor:
        return StateValue(first.path, first.int_keys, read_value(path, first))
    places = tuple(sorted((chunk.file, chunk.offset, chunk.offsets) for chunk in chunks))
    entry = LazyTensor(first.torch_dtype, first.shape, (places, first.shape), lambda: _assemble(path, chunks))
    return StateValue(first.path, first.int_keys, entry)


def _assemble(path: Path, chunks: Sequence[IndexEntry]) -> Tensor:
    first = chunks[0]
    if len(chunks) == 1 and first.sizes == first.shape:
        return cast("Tensor", read_value(path, first))
    full = torch.empty(first.shape, dtype=first.torch_dtype)
    for chunk in chunks:
        copy_overlaps(path, chunk, [Chunk(full, first.shape, (0,) * full.dim())])
    return full


def _scalars(job: JobState) -> dict[str, object]:
    kept: dict[str, object] = {
        "scheduler": job.scheduler,
        "scaler": job.scaler,
        "scheduler_pending": job.scheduler_pending,
        "scaler_pending": job.scaler_pending,
        "scaler_skipped": job.scaler_skipped,
        "extra": job.extra,
    }
    return kept if job.several is None else kept | {"several": job.several}


def _notes(manifest: Manifest, job: JobState | None) -> tuple[str, ...]:
    notes = [f"{key} was left out when the checkpoint was made" for key in left_out_of(manifest.pieces)]
    if job is not None and any(schedule.pending for schedule in job.schedules):
        notes.append("scheduler.step() had not been called after the last update: call it once after loading")
    return tuple(notes)


# -------------------------------------------------------------------------------------------- flattened optimizer state
#
# Conversion of optimizer state from torch's flattened form, which jobs with several pipeline stages write, to the
# nested form.


_STATE, _GROUPS = "state.", "param_groups."


def nested_optimizer(leaves: Sequence[StateValue]) -> tuple[StateValue, ...]:
    """Return the values with those below ``optim`` in nested form. Values in nested form are returned unchanged.

    Flattened names are ``optim.state.<parameter>.<key>`` and ``optim.param_groups.<parameter>.<setting>``. The job's
    own groups are not known: parameters with equal settings are put into one group, in the order of the model.

    Raises:
        CheckpointError: a flattened name contains the name of no parameter.
    """
    flat, rest = [leaf for leaf in leaves if _is_flat(leaf)], [leaf for leaf in leaves if not _is_flat(leaf)]
    if not flat:
        return tuple(leaves)
    parameters = {str(leaf.path[1]): None for leaf in rest if leaf.path[0] == "model" and len(leaf.path) > 1}
    state = [_state_leaf(leaf, parameters) for leaf in flat if str(leaf.path[1]).startswith(_STATE)]
    return (*rest, *state, *_groups(flat, parameters))


def _is_flat(leaf: StateValue) -> bool:
    return leaf.path[0] == "optim" and len(leaf.path) > 1 and str(leaf.path[1]).startswith((_STATE, _GROUPS))


def _split(leaf: StateValue, head: str, parameters: Container[str]) -> tuple[str, str]:
    """Split a flattened name into the names of the parameter and of its key. Both may contain dots."""
    owner, dot, key = str(leaf.path[1]).removeprefix(head).rpartition(".")
    while dot and owner not in parameters:
        owner, dot, before = owner.rpartition(".")
        key = f"{before}.{key}"
    if not dot:
        raise CheckpointError(f"{leaf.key} belongs to no parameter of the model")
    return owner, key


def _state_leaf(leaf: StateValue, parameters: Container[str]) -> StateValue:
    owner, key = _split(leaf, _STATE, parameters)
    shift = 2  # ("optim", "state.a.b") has become ("optim", "state", "a", "b")
    int_keys = tuple(position + shift if position > 1 else position for position in leaf.int_keys)
    return StateValue(("optim", "state", owner, key, *leaf.path[2:]), int_keys, leaf.value)


def _groups(flat: Sequence[StateValue], parameters: Collection[str]) -> list[StateValue]:
    settings: dict[str, dict[str, Any]] = {}
    for leaf in flat:
        if str(leaf.path[1]).startswith(_GROUPS):
            owner, key = _split(leaf, _GROUPS, parameters)
            settings.setdefault(owner, {})[key] = leaf.value
    groups: list[tuple[dict[str, Any], list[str]]] = []
    for name in [name for name in parameters if name in settings]:
        members = next((members for known, members in groups if known == settings[name]), None)
        if members is None:
            groups.append((settings[name], [name]))
        else:
            members.append(name)
    found: list[StateValue] = []
    for number, (known, members) in enumerate(groups):
        values = {key: value for key, value in known.items() if key != "params"} | {"params": members}
        found += [StateValue(("optim", "param_groups", number, key), (), value) for key, value in values.items()]
    return found
