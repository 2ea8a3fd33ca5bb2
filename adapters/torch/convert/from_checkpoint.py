"""Reads a checkpoint of any layout as whole tensors, one at a time, for a conversion."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from ttp.adapters.torch.convert.contents import LazyTensor, WholeState
from ttp.adapters.torch.restoring.reader import by_path, read_value, read_whole
from ttp.adapters.torch.saving.flatten_state import StateValue
from ttp.adapters.torch.saving.job_state import JOB_KIND, JobState, read_job_state
from ttp.adapters.torch.saving.metadata import fitting
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
    if manifest.framework != FRAMEWORK:
        raise CheckpointError(
            f"{path} was written by the {manifest.framework} adapter: `ttp convert` reads checkpoints of torch and "
            f"Megatron jobs only. Use a converter of {manifest.framework}"
        )
    items = items_of(manifest.pieces)
    if not any(item.path[0] == "model" and item.is_tensor for item in items):
        raise CheckpointError(f"{path} holds no weights under the name `model`, so there is nothing to convert")
    fitting(items)  # called for its check
    job = read_job_state(path, manifest.pieces) if any(p.kind == JOB_KIND for p in manifest.pieces) else None
    kind = next((item for item in items if item.path == ("ttp", "optimizer")), None)
    found = [_leaf(path, chunks) for chunks in by_path(items) if chunks[0].path[0] in ("model", "extra", "optim")]
    return WholeState(
        source=path.name,
        version=manifest.version,
        leaves=with_groups(found),
        optimizer=str(read_value(path, kind)) if kind is not None else "",
        job=None if job is None else _scalars(job),
        notes=_notes(manifest, job),
    )


def _leaf(path: Path, chunks: Sequence[IndexEntry]) -> StateValue:
    first = chunks[0]
    if not first.is_tensor:
        return StateValue(first.path, first.int_keys, read_value(path, first))
    places = tuple(sorted((chunk.file, chunk.offset, chunk.offsets) for chunk in chunks))
    identity = (places, first.shape)
    entry = LazyTensor(first.torch_dtype, first.shape, identity, lambda: cast("Tensor", read_whole(path, chunks)))
    return StateValue(first.path, first.int_keys, entry)


def _scalars(job: JobState) -> dict[str, object]:
    left_out = ("version", "ddp_buckets", *(() if job.several is not None else ("several",)))
    return {field.name: getattr(job, field.name) for field in fields(job) if field.name not in left_out}


def _notes(manifest: Manifest, job: JobState | None) -> tuple[str, ...]:
    notes = [f"{key} was left out when the checkpoint was made" for key in left_out_of(manifest.pieces)]
    if job is not None and any(schedule.pending for schedule in job.schedules):
        notes.append("scheduler.step() had not been called after the last update: call it once after loading")
    return tuple(notes)


# ------------------------------------------------------------------------------------------------- param groups by name
#
# Jobs with several pipeline stages write the settings of each parameter instead of param groups.


_GROUPS = ("optim", "param_groups")


def with_groups(leaves: Sequence[StateValue]) -> tuple[StateValue, ...]:
    """Return the values with a list of param groups, also if they have the settings of each parameter by its name.

    The job's own groups are not known then: parameters with equal settings are put into one group, in the order of the
    model.
    """
    settings: dict[str, list[StateValue]] = {}
    for leaf in leaves:
        if leaf.path[:2] == _GROUPS and len(leaf.path) > 2 and isinstance(leaf.path[2], str):
            settings.setdefault(leaf.path[2], []).append(leaf)
    if not settings:
        return tuple(leaves)
    found = [leaf for leaf in leaves if leaf.path[:2] != _GROUPS]
    groups: list[tuple[list[Any], list[str]]] = []
    for name in dict.fromkeys(str(leaf.path[1]) for leaf in leaves if leaf.path[0] == "model"):
        own = [(leaf.path[3:], _comparable(leaf.value)) for leaf in settings.get(name, ())]
        members = next((members for known, members in groups if known == own), None)
        if members is not None:
            members.append(name)
        elif own:
            groups.append((own, [name]))
    for number, (_, members) in enumerate(groups):
        head = (*_GROUPS, number)
        found += [StateValue((*head, *leaf.path[3:]), leaf.int_keys, leaf.value) for leaf in settings[members[0]]]
        found.append(StateValue((*head, "params"), (), members))
    return tuple(found)


def _comparable(value: Any) -> Any:
    return value.identity if isinstance(value, LazyTensor) else value
