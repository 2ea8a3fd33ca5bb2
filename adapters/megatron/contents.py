"""A checkpoint of a Megatron job as ``ttp convert`` reads it: one whole model, named as Megatron's own modules name it.

In the checkpoint all layers of a kind are one tensor, and so are all experts of a layer. The names that ranks have
count layers and experts from the first of their own place. Both together give the names that the model has on one rank:
the numbers in a rank's name become those at which its part lies in the checkpoint's tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ttp.adapters.megatron.geometry import Tile
from ttp.adapters.megatron.rank_layout import RankLayout
from ttp.adapters.megatron.source import STATE_PREFIX
from ttp.adapters.megatron.stock import JOB_KEY
from ttp.adapters.megatron.stored import MegatronCheckpoint, whole_tile
from ttp.adapters.torch.convert.contents import LazyTensor, StateValue, WholeState
from ttp.adapters.torch.saving.piece_index import left_out_of


@dataclass(frozen=True, slots=True)
class Weight:
    """One tensor of the whole model.

    Args:
        tile: where all of it is in the checkpoint.
        group: kind of the optimizer that updates it, and the number of its param group there; None: none does.
    """

    tile: Tile
    group: tuple[str, int] | None


def read_megatron(path: Path) -> WholeState:
    """What the checkpoint at ``path`` holds; its digests have been verified.

    ``optim`` has the moments and the fp32 copy (``param`` or ``fp32_param``) of each weight, and Megatron's param
    groups with the names of their parameters.

    Raises:
        CheckpointError: it does not say what its tensors are called, or cannot be read.
    """
    stored = MegatronCheckpoint(path)
    weights, stacked = _weights(stored, stored.rank_layouts())
    leaves = [StateValue(("model", name), (), _entry(stored, weight.tile)) for name, weight in weights.items()]
    leaves += _moments(stored, weights)
    leaves += _groups(stored, weights)
    return WholeState(
        source=path.name,
        version=stored.manifest.version,
        leaves=tuple(leaves),
        optimizer=str(stored.optimizers[0]["class"]),
        job=_scalars(stored),
        notes=tuple(_notes(stored, stacked)),
    )


def _weights(stored: MegatronCheckpoint, layouts: Iterable[RankLayout]) -> tuple[dict[str, Weight], list[str]]:
    """By name, sorted; and the names under which several layers or experts are one tensor."""
    found: dict[str, Weight] = {}
    stacked: dict[str, None] = {}
    for layout in sorted(layouts, key=lambda each: (each.place.pp, each.place.tp, each.place.ep)):
        groups = _groups_of(layout)
        for chunk in layout.chunks:
            for local, number in chunk.items():
                tile = layout.tensors[number]
                name, index = _global_name(local, tile)
                if len(index) < len(tile.shape) - len(tile.sizes):
                    stacked[name] = None
                group = groups.get(number) or (found[name].group if name in found else None)
                found[name] = Weight(whole_tile(tile.key, stored.items[tile.key][0].shape, index), group)
    return dict(sorted(found.items(), key=lambda pair: _order(pair[0]))), list(stacked)


def _global_name(local: str, tile: Tile) -> tuple[str, tuple[int, ...]]:
    """The name in the whole model, and where in front of the checkpoint's tensor it lies.

    Where the numbers in the name are not those dimensions, the tensor stays as it is in the checkpoint.
    """
    front = tile.offsets[: len(tile.shape) - len(tile.sizes)]
    steps = local.split(".")
    numbered = [place for place, step in enumerate(steps) if step.isdecimal()]
    if not front or len(numbered) != len(front):
        return tile.key, ()
    for place, number in zip(numbered, front, strict=True):
        steps[place] = str(number)
    return ".".join(steps), front


def _order(name: str) -> tuple[tuple[bool, int, str], ...]:
    """Layer 2 comes before layer 10."""
    return tuple((step.isdecimal(), int(step) if step.isdecimal() else 0, step) for step in name.split("."))


def _groups_of(layout: RankLayout) -> dict[int, tuple[str, int]]:
    return {
        number: (optimizer.kind, group)
        for optimizer in layout.optimizers
        for group, members in enumerate(optimizer.groups)
        for number in members
    }


def _entry(stored: MegatronCheckpoint, tile: Tile, prefix: str = "") -> LazyTensor:
    place = (prefix, tile.key, tile.offsets)
    return LazyTensor(stored.dtype(prefix + tile.key), tile.sizes, place, lambda: stored.read(tile, prefix))


def _moments(stored: MegatronCheckpoint, weights: Mapping[str, Weight]) -> Iterator[StateValue]:
    by_key: dict[str, list[str]] = {}
    for key in stored.items:
        if key.startswith(STATE_PREFIX):
            state, _, owner = key[len(STATE_PREFIX) :].partition(".")
            by_key.setdefault(owner, []).append(state)
    steps = {saved["kind"]: _count(saved) for saved in stored.optimizers}
    for name, weight in weights.items():
        for state in by_key.get(weight.tile.key, ()):
            entry = _entry(stored, weight.tile, f"{STATE_PREFIX}{state}.")
            yield StateValue(("optim", "state", name, state), (), entry)
        step = steps.get(weight.group[0]) if weight.group is not None else None
        if step is not None:
            yield StateValue(("optim", "state", name, "step"), (), LazyTensor.of(torch.tensor(float(step))))


def _count(saved: Mapping[str, Any]) -> float | None:
    """Updates that an optimizer has counted; one for all of its parameters."""
    if saved["step"] is not None:
        return float(saved["step"])
    return max((float(group["step"]) for group in saved["groups"] if "step" in group), default=None)


def _groups(stored: MegatronCheckpoint, weights: Mapping[str, Weight]) -> Iterator[StateValue]:
    number = 0
    for saved in stored.optimizers:
        for place, group in enumerate(saved["groups"]):
            members = [name for name, weight in weights.items() if weight.group == (saved["kind"], place)]
            if not members:
                continue
            for key, value in {**group, "params": members}.items():
                yield StateValue(("optim", "param_groups", number, key), (), value)
            number += 1


def _scalars(stored: MegatronCheckpoint) -> dict[str, Any]:
    job = stored.job
    extra = {key: value for key, value in job.extra.items() if key != JOB_KEY}
    return {"scheduler": job.scheduler, "scheduler_pending": job.scheduler_pending, "extra": extra}


def _notes(stored: MegatronCheckpoint, stacked: Iterable[str]) -> Iterator[str]:
    for key in left_out_of(stored.manifest.pieces):
        yield f"{key} was left out when the checkpoint was made"
    for name in stacked:
        yield f"{name} holds several layers or experts along its first dimensions, as in Megatron's checkpoint"
    if stored.job.scheduler_pending:
        yield "the step of the LR scheduler after the last update had not been made: its state is of before it"
