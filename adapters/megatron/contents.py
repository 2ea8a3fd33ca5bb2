"""A checkpoint of a Megatron job as ``ttp convert`` reads it: one whole model, named as Megatron's own modules name it.

In the checkpoint all layers of a kind are one tensor, and so are all experts of a layer. The names that ranks have
count layers and experts from the first of their own place. Both together give the names that the model has on one rank:
the numbers in a rank's name become those at which its part lies in the checkpoint's tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import StorageMeta

from ttp.adapters.megatron.geometry import TensorView
from ttp.adapters.megatron.rank_layout import RANK_LAYOUT_PREFIX, RankLayout
from ttp.adapters.megatron.restore import Want, fill
from ttp.adapters.megatron.source import STATE_PREFIX
from ttp.adapters.megatron.stock import JOB_KEY
from ttp.adapters.torch.convert.contents import LazyTensor, StateValue, WholeState
from ttp.adapters.torch.restoring.reader import read_value
from ttp.adapters.torch.saving.job_state import JobState, read_job_state
from ttp.adapters.torch.saving.metadata import build_metadata
from ttp.adapters.torch.saving.piece_index import IndexEntry, items_of, left_out_of
from ttp.errors import CheckpointError
from ttp.store.manifest import Manifest


@dataclass(frozen=True, slots=True)
class Weight:
    """One tensor of the whole model.

    Args:
        view: where all of it is in the checkpoint.
        group: kind of the optimizer that updates it, and the number of its param group there; None: none does.
    """

    view: TensorView
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
    leaves = [StateValue(("model", name), (), _entry(stored, weight.view)) for name, weight in weights.items()]
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
                view = layout.tensors[number]
                name, index = _global_name(local, view)
                if len(index) < len(view.shape) - len(view.sizes):
                    stacked[name] = None
                group = groups.get(number) or (found[name].group if name in found else None)
                found[name] = Weight(whole_view(view.key, stored.items[view.key][0].shape, index), group)
    return dict(sorted(found.items(), key=lambda pair: _order(pair[0]))), list(stacked)


def _global_name(local: str, view: TensorView) -> tuple[str, tuple[int, ...]]:
    """The name in the whole model, and where in front of the checkpoint's tensor it lies.

    Where the numbers in the name are not those dimensions, the tensor stays as it is in the checkpoint.
    """
    front = view.offsets[: len(view.shape) - len(view.sizes)]
    steps = local.split(".")
    numbered = [place for place, step in enumerate(steps) if step.isdecimal()]
    if not front or len(numbered) != len(front):
        return view.key, ()
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


def _entry(stored: MegatronCheckpoint, view: TensorView, prefix: str = "") -> LazyTensor:
    place = (prefix, view.key, view.offsets)
    return LazyTensor(stored.dtype(prefix + view.key), view.sizes, place, lambda: stored.read(view, prefix))


def _moments(stored: MegatronCheckpoint, weights: Mapping[str, Weight]) -> Iterator[StateValue]:
    by_key: dict[str, list[str]] = {}
    for key in stored.items:
        if key.startswith(STATE_PREFIX):
            state, _, owner = key[len(STATE_PREFIX) :].partition(".")
            by_key.setdefault(owner, []).append(state)
    steps = {saved["kind"]: _count(saved) for saved in stored.optimizers}
    for name, weight in weights.items():
        for state in by_key.get(weight.view.key, ()):
            entry = _entry(stored, weight.view, f"{STATE_PREFIX}{state}.")
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


# ---------------------------------------------------------------------------------------------- what a checkpoint holds
#
# A checkpoint of a Megatron job as programs read it that are no ranks of a job: what is in it, and who held what.


FRAMEWORK = "megatron"


class MegatronCheckpoint:
    """The checkpoint at ``path``; its digests have been verified. Nothing but values of its own is loaded.

    Args:
        path: the directory.

    Raises:
        CheckpointError: it was not written by a Megatron job, or its shards do not fit together.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.manifest = path, Manifest.load(path)
        if self.manifest.framework != FRAMEWORK:
            raise CheckpointError(f"{path} was written by the {self.manifest.framework} adapter, not by a Megatron job")
        items = items_of(self.manifest.pieces)
        build_metadata(items, StorageMeta())  # that boxes cover every tensor exactly once
        self.items: dict[str, list[IndexEntry]] = {}
        for item in items:
            self.items.setdefault(item.key, []).append(item)
        self.job: JobState = read_job_state(path, self.manifest.pieces)
        if JOB_KEY not in self.job.extra:
            raise CheckpointError(f"the job state of {path} has nothing of Megatron")

    @property
    def optimizers(self) -> Sequence[Mapping[str, Any]]:
        """Param groups and counts of steps, of each optimizer."""
        return list(self.job.extra[JOB_KEY]["optimizers"])

    def rank_layouts(self) -> list[RankLayout]:
        """Of the ranks that have written.

        Raises:
            CheckpointError: there are none, or they cannot be read.
        """
        told = (item for key, items in self.items.items() if key.startswith(RANK_LAYOUT_PREFIX) for item in items)
        found = [RankLayout.from_json(str(self._value(item))) for item in told]
        if not found:
            raise CheckpointError(
                f"{self.path} does not say which names its ranks had: an older ttp wrote it, or the log of "
                "the job said why not. ttp.restore() and Megatron's torch_dist loader read it"
            )
        return found

    def _value(self, item: IndexEntry) -> Any:
        """A plain value, which Megatron puts into lists of one."""
        (found,) = read_value(self.path, item)
        return found

    def dtype(self, key: str) -> torch.dtype:
        """Of a tensor that is there."""
        return self.items[key][0].torch_dtype

    def read(self, view: TensorView, prefix: str) -> Tensor:
        """A tensor, whole.

        Args:
            view: where it is, as a tensor of its own.
            prefix: what stands before its name: nothing for a weight, else the name of the optimizer's state.

        Raises:
            CheckpointError: something is missing, or cannot be read.
        """
        target = torch.empty(view.sizes, dtype=self.dtype(prefix + view.key))
        parts = view.parts(0, target.numel()) if target.numel() else ()
        fill(self.path, [Want(prefix + view.key, part, part.view(target.view(-1), 0)) for part in parts], self.items)
        return target


def whole_view(key: str, shape: Sequence[int], index: Sequence[int]) -> TensorView:
    """Of a checkpoint's tensor that holds one of each layer or expert: that of one of them, as a tensor of its own.

    Args:
        key: of the checkpoint's tensor.
        shape: of it.
        index: which, along as many dimensions in front.
    """
    sizes = tuple(shape[len(index) :])
    strides = tuple(prod(sizes[dim + 1 :]) for dim in range(len(sizes)))
    return TensorView(key, tuple(shape), (*index, *(0,) * len(sizes)), sizes, strides, 0, flexible=False)
