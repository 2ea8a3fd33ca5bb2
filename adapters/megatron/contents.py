"""Reads a checkpoint of a Megatron job for ``ttp convert``, as one whole model with the names of Megatron's modules.

In the checkpoint all layers of a kind are one tensor, and so are all experts of a layer. The names that a rank uses
number layers and experts from that rank's first one. This module makes the names that the whole model would have on a
single rank: it replaces the numbers in a rank's name by the offsets of the rank's box in the checkpoint's tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ttp.adapters.megatron.geometry import TensorView
from ttp.adapters.megatron.rank_layout import RANK_LAYOUT_PREFIX, RankLayout
from ttp.adapters.megatron.source import STATE_PREFIX
from ttp.adapters.megatron.stock import JOB_KEY, read_megatron_job
from ttp.adapters.torch.convert.contents import LazyTensor, WholeState
from ttp.adapters.torch.restoring.reader import load_chunks, read_value
from ttp.adapters.torch.saving.flatten_state import StateValue
from ttp.adapters.torch.saving.job_state import JobState
from ttp.adapters.torch.saving.metadata import fitting
from ttp.adapters.torch.saving.piece_index import IndexEntry, items_of, left_out_of
from ttp.errors import CheckpointError
from ttp.store.manifest import Manifest


@dataclass(frozen=True, slots=True)
class Weight:
    """One tensor of the whole model.

    Args:
        view: where the whole tensor is in the checkpoint.
        group: kind of the optimizer that updates it, and number of its param group there; None: it is not trained.
    """

    view: TensorView
    group: tuple[str, int] | None


def read_megatron(path: Path) -> WholeState:
    """Read the checkpoint at ``path``, whose digests have been verified.

    Returns:
        The whole state; its tensors are read later, one at a time. ``optim`` has the moments and the fp32 copy
        (``param`` or ``fp32_param``) of each weight, and Megatron's param groups with the names of their parameters.

    Raises:
        CheckpointError: the checkpoint does not say how its tensors are named in the model, or cannot be read; or it is
            of a job with two optimizers for one kind of parameters.
    """
    stored = MegatronCheckpoint(path)
    kinds = [saved["kind"] for saved in stored.optimizers]
    if len(set(kinds)) < len(kinds):
        classes = ", ".join(saved["class"] for saved in stored.optimizers)
        raise CheckpointError(
            f"{path} was made with several optimizers for one kind of parameters ({classes}), and does not say which "
            "of them updates which parameter: it cannot be converted. ttp.restore() can read it"
        )
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
    """Return the weights, sorted by name, and the names of weights that hold several layers or experts."""
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
    """Return the name in the whole model, and the index along the leading dimensions of the checkpoint's tensor.

    If the numbers in the name do not match those dimensions, the weight is the whole tensor of the checkpoint.
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
    """Return a sort key that puts layer 2 before layer 10."""
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
        if weight.group is None:  # it was frozen, but other layers of its kind may have state
            continue
        for state in by_key.get(weight.view.key, ()):
            entry = _entry(stored, weight.view, f"{STATE_PREFIX}{state}.")
            yield StateValue(("optim", "state", name, state), (), entry)
        step = steps.get(weight.group[0])
        if step is not None:
            count = torch.tensor(float(step), device="cpu")
            yield StateValue(("optim", "state", name, "step"), (), LazyTensor.of(count))


def _count(saved: Mapping[str, Any]) -> float | None:
    """Return an optimizer's count of updates, one number for all of its parameters; None: it counts none."""
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
        yield "the LR scheduler had not made its step after the last update: its state is that from before this step"


# ------------------------------------------------------------------------------------- the contents of a checkpoint
#
# Access to a checkpoint of a Megatron job, for programs outside the job: its contents, and the rank layouts.


FRAMEWORK = "megatron"


class MegatronCheckpoint:
    """Reads a checkpoint of a Megatron job, whose digests have been verified. Nothing is unpickled.

    Args:
        path: the directory of the checkpoint.

    Raises:
        CheckpointError: the checkpoint was not written by a Megatron job, or its shards do not fit together.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.manifest = path, Manifest.load(path)
        if self.manifest.framework != FRAMEWORK:
            raise CheckpointError(f"{path} was written by the {self.manifest.framework} adapter, not by a Megatron job")
        self.items = fitting(items_of(self.manifest.pieces), STATE_PREFIX)
        self.job: JobState = read_megatron_job(path, self.manifest.pieces)
        if JOB_KEY not in self.job.extra:
            raise CheckpointError(f"{path} is damaged: its job state lacks the part that Megatron jobs write")

    @property
    def optimizers(self) -> Sequence[Mapping[str, Any]]:
        """The saved param groups and step counts of each optimizer."""
        return list(self.job.extra[JOB_KEY]["optimizers"])

    def rank_layouts(self) -> list[RankLayout]:
        """Return the layouts of the ranks that have written shards.

        Raises:
            CheckpointError: the checkpoint has no rank layouts, or they cannot be read.
        """
        # From all pieces: data-parallel ranks that update different tensors have one key for different layouts.
        described = (item for item in items_of(self.manifest.pieces) if item.key.startswith(RANK_LAYOUT_PREFIX))
        found = [RankLayout.from_json(str(self._value(item))) for item in described]
        if not found:
            raise CheckpointError(
                f"{self.path} does not say which names its ranks had for the tensors: an older ttp wrote it, or the "
                "names could not be described (the job's log says why). ttp.restore() and Megatron's torch_dist loader "
                "can still read it"
            )
        return found

    def _value(self, item: IndexEntry) -> Any:
        """Read a plain value. Megatron stores it as a list with one element."""
        (found,) = read_value(self.path, item)
        return found

    def dtype(self, key: str) -> torch.dtype:
        """Return the element type of the tensor ``key``."""
        return self.items[key][0].torch_dtype

    def read(self, view: TensorView, prefix: str) -> Tensor:
        """Read one tensor, whole.

        Args:
            view: where the tensor lies in the checkpoint; see ``whole_view``.
            prefix: prefix of the tensor's name: empty for a weight, or ``optimizer.state.`` and the value's name for a
                value of the optimizer's state.

        Raises:
            CheckpointError: elements are missing, or a file cannot be read.
        """
        key = prefix + view.key
        target = torch.empty(view.sizes, dtype=self.dtype(key), device="cpu")
        parts = view.parts(0, target.numel()) if target.numel() else ()
        load_chunks(self.path, self.items[key], [((key,), [part.chunk(target.view(-1), 0) for part in parts])])
        return target


def whole_view(key: str, shape: Sequence[int], index: Sequence[int]) -> TensorView:
    """Return a view of one layer or expert in a checkpoint's tensor, as a contiguous tensor of its own.

    Args:
        key: name of the checkpoint's tensor.
        shape: shape of the checkpoint's tensor.
        index: index of the layer or expert along the leading dimensions; empty: the view is the whole tensor.
    """
    sizes = tuple(shape[len(index) :])
    strides = tuple(prod(sizes[dim + 1 :]) for dim in range(len(sizes)))
    return TensorView(key, tuple(shape), (*index, *(0,) * len(sizes)), sizes, strides, 0, flexible=False)
