"""Writes the state of one rank of a Megatron job, as boxes of the tensors of a stock ``torch_dist`` checkpoint.

Weights are written from the fp32 copy that the optimizer updates, cast to the model's dtype. The parameters with which
the model computes are not read: an all-gather after the update writes them, and a fault may interrupt it. If the loop
declares the end of each version, they are complete by then, and are read: Megatron's ``clip_qk()`` changes them and
their fp32 copies one by one, after which they are no longer the copies' values in the model's dtype.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ttp.adapters.megatron.extra_states import ExtraStates
from ttp.adapters.megatron.geometry import Geometry
from ttp.adapters.megatron.optimizers import Holding, Inner, with_counts
from ttp.adapters.megatron.stock import JOB_KEY, count_entry, write_stock_files
from ttp.adapters.torch.local_state.capture import LocalCapture
from ttp.adapters.torch.local_state.extra_state import ExtraState
from ttp.adapters.torch.local_state.image import decode
from ttp.adapters.torch.loop.turns import Turns
from ttp.adapters.torch.saving.checkpoint import Chunk
from ttp.adapters.torch.saving.inspection import ComparedTensor
from ttp.adapters.torch.saving.job_state import JobState
from ttp.adapters.torch.saving.piece_index import StatePath
from ttp.adapters.torch.saving.preimage import Image
from ttp.adapters.torch.sharding.names import ModelNames
from ttp.adapters.torch.source import TorchSource
from ttp.core.layout import Layout, Rank, Shard, Version
from ttp.core.messages import Commit, Piece
from ttp.errors import CheckpointError, UsageError
from ttp.processor.local_state.local_piece import Pages

log = logging.getLogger("ttp.adapters.megatron")

STATE_PREFIX = "optimizer.state."
"""Prefix of the names of optimizer values in Megatron's checkpoints; the value's and the weight's name follow."""

COUNT = "step"
"""Name of Adam's count of updates, in the state of a parameter or in a param group."""


@dataclass(frozen=True)
class Held:
    """The tensors, optimizers and shards of one rank, found once when the training is registered.

    Args:
        geometry: the description of the rank's model.
        inners: the rank's plain optimizers, in the order of their steps.
        shards: the shard of each plain optimizer.
        layout: the replica groups of the job.
        extra_states: the extra states of the rank's modules.
        rank_layout: the description of this rank for shard files; see ``rank_layout.rank_layout_text``.
    """

    geometry: Geometry
    inners: tuple[Inner, ...]
    shards: tuple[Shard, ...]
    layout: Layout
    extra_states: ExtraStates
    rank_layout: Mapping[str, list[str]] = field(default_factory=dict)
    flat_groups = True  # ranks have other param groups, or other parameters in them

    @property
    def stepping(self) -> tuple[Optimizer, ...]:
        """The plain optimizers; an update consists of one step of each."""
        return tuple(inner.optimizer for inner in self.inners)

    def inner_of(self, shard: Shard) -> Inner | None:
        """Return the plain optimizer whose state is saved as ``shard``; None: the shard is empty."""
        return next((inner for inner, name in zip(self.inners, self.shards, strict=True) if name == shard), None)


class MegatronSource(TorchSource):
    """The state source of a Megatron training; see ``StateSource`` for the contract.

    Args:
        chunks: the model of this rank, as one module.
        names: the names of the model's tensors.
        optimizer: all plain optimizers, combined.
        capture: captures the rank-local state.
        extra: the user's objects of ``extra_state``, and Megatron's.
        devices: the devices on which the state lies; empty: it lies on the host.
        held: the tensors, optimizers and shards of this rank.
        args: Megatron-LM's namespace, for stock checkpoints; or None.
    """

    framework = "megatron"
    gaps = STATE_PREFIX  # all layers of a kind are one tensor, and some of them may be frozen
    turns: Turns | None = None
    """Tells whether the loop declares the end of each version; None: not attached."""

    def __init__(
        self,
        chunks: nn.Module,
        names: ModelNames,
        optimizer: Any,
        capture: LocalCapture,
        extra: ExtraState,
        devices: Sequence[torch.device],
        *,
        held: Held,
        args: Any,
    ) -> None:
        super().__init__(chunks, names, optimizer, capture, extra, devices)
        self.held = held
        self._args = args
        self.increment = 0
        """Increment of the scheduler's last step, in samples."""

    # ------------------------------------------------------------------------------------------------------ the shards

    def _job_state(self, version: Version) -> JobState:
        assert self.post_step is not None
        job = super()._job_state(version)
        optimizers = with_counts(
            [
                {"kind": inner.kind, "class": class_of(inner), "groups": groups, "step": self._step(inner, version)}
                for inner, groups in zip(self.held.inners, self.post_step.param_groups(version, job), strict=True)
            ]
        )
        return replace(job, extra=job.extra | {JOB_KEY: {"optimizers": optimizers, "increment": self.increment}})

    def _step(self, inner: Inner, version: Version) -> float | None:
        """Return the count of steps that torch's Adam keeps per parameter; None: the optimizer keeps no such count.

        Apex, Transformer Engine and Megatron's checkpoints keep one count per param group instead.
        """
        preimage = self._preimage_now
        image = preimage.image(version) if preimage is not None and preimage.version == version else None
        for holding in inner.holdings:
            kept = (inner.optimizer.state if image is None else image.state).get(holding.main, {})
            if kept.get("step") is not None:
                ahead = 0 if image is not None else self.processor.gate.version - version  # the device is behind
                step = self.host_values.value(kept, "step", version) if ahead and self.on_device else kept["step"]
                value = float(self._to_host(step) if isinstance(step, Tensor) else step)
                return value if self.on_device else value - ahead
        return None

    def _state(self, pages: Pages, job: JobState, image: Image | None, shards: Sequence[Shard]) -> dict[str, Any]:
        """Return the values from which ``_state_of`` makes the state of each shard."""
        if image is None and not self.on_device and self.processor.gate.version != job.version:
            raise CheckpointError(f"this rank holds version {self.processor.gate.version}, not {job.version}")
        buffers: Mapping[str, Tensor] = {}
        if pages.data:
            own = pages.data.get(Rank(self.processor.env.rank), pages.data[min(pages.data)])
            buffers = decode(own).buffers
        saved = dict(zip(self.held.shards, job.extra[JOB_KEY]["optimizers"], strict=True))
        return {"image": image, "buffers": buffers, "extra": self.held.extra_states.of(job.version), "saved": saved}

    def _state_of(self, shard: Shard, state: dict[str, Any]) -> dict[str, Any]:
        inner = self.held.inner_of(shard)
        if inner is None:
            return {}
        found: dict[str, list[Chunk]] = {}
        declared = state["image"] is None and self.turns is not None and self.turns.by_hand
        for key, chunk in _updated(inner, state["image"], live=declared):
            found.setdefault(key, []).append(chunk)
        result: dict[str, Any] = dict(self.held.rank_layout) | count_entry(shard, state["saved"][shard])
        result |= state["extra"]  # the savers of experts have those of experts
        if inner is self.held.inners[0]:
            for key, chunk in self._fixed(inner, state["buffers"]):
                found.setdefault(key, []).append(chunk)
        return result | {key: tuple(chunks) for key, chunks in found.items()}

    def _fixed(self, inner: Inner, buffers: Mapping[str, Tensor]) -> Iterator[tuple[str, Chunk]]:
        """Yield the tensors that are not trained; buffers as they were when the version was finished."""
        captured = {id(live): buffers[name] for name, live in self._model.named_buffers() if name in buffers}
        for described in inner.fixed:
            memory = captured.get(id(described.tensor), described.tensor).detach().contiguous().view(-1)
            for part in described.whole:
                yield part.key, part.chunk(memory, 0)

    def _agreed(self) -> Callable[[StatePath], bool]:
        """Return a predicate: whether all replicas hold equal values of an entry. Buffers may differ."""
        fixed = self.held.inners[0].fixed
        apart = {part.key for d in fixed if not isinstance(d.tensor, nn.Parameter) for part in d.whole}
        return lambda path: path[0] not in apart

    def _leaves(self, shards: Sequence[Shard]) -> list[list[ComparedTensor]]:
        return [list(_leaves_of(inner)) if (inner := self.held.inner_of(shard)) else [] for shard in shards]

    def finalise(self, directory: Path, order: Commit) -> list[Piece]:
        """See ``StateSource``: add ``.metadata`` and the files of Megatron's own format."""
        stock = write_stock_files(directory, order, self.held.inners, self._args)
        return [*super().finalise(directory, order), *stock]


def _updated(inner: Inner, image: Image | None, *, live: bool = False) -> Iterator[tuple[str, Chunk]]:
    """Yield, for the ranges that this rank updates, the weights, their fp32 copies and the optimizer's tensors.

    Args:
        inner: the plain optimizer.
        image: the state to write instead of the present one; None: the present one.
        live: read the weights from the model's parameters instead of the fp32 copies.
    """
    for holding in inner.holdings:
        if not holding.described.first:
            continue
        dtype = holding.described.tensor.dtype
        main = holding.main if image is None else image.of(holding.main)
        memory = main.detach().view(-1)
        kept = inner.optimizer.state if image is None else image.state
        states = {k: v for k, v in kept.get(holding.main, {}).items() if _is_elementwise(holding, k, v)}
        weights = holding.described.tensor.detach().view(-1)[holding.begin : holding.end] if live else memory
        for part in holding.parts:
            yield part.key, replace(part.chunk(weights, holding.begin), dtype=dtype)
            if inner.main_key and (inner.main_key == "param" or main.dtype != dtype):
                yield f"{STATE_PREFIX}{inner.main_key}.{part.key}", part.chunk(memory, holding.begin)
            for name, value in states.items():
                yield f"{STATE_PREFIX}{name}.{part.key}", part.chunk(value.view(-1), holding.begin)


def _is_elementwise(holding: Holding, name: str, value: Any) -> bool:
    """Return whether the optimizer's ``value`` has one element per element of the range (a moment, not a count)."""
    if not isinstance(value, Tensor) or name == COUNT:
        return False
    return value.numel() == holding.end - holding.begin and (value.dim() > 0 or holding.main.dim() == 0)


def refuse_unsaved(inners: Iterable[Inner]) -> None:
    """Check, after an update, that checkpoints have all state that plain optimizers keep for their parameters.

    Raises:
        UsageError: an optimizer keeps a value that is neither Adam's count of steps nor has one element for each
            element of the parameter.
    """
    for inner in inners:
        for holding in inner.holdings:
            kept = inner.optimizer.state.get(holding.main, {}).items()
            lost = sorted(k for k, v in kept if v is not None and k != COUNT and not _is_elementwise(holding, k, v))
            if lost:
                raise UsageError(
                    f"the {type(inner.optimizer).__qualname__} keeps {', '.join(lost)} of {holding.described.name}, "
                    "whose shape is not that of the parameter: ttp cannot save this with Megatron. Use an optimizer "
                    "that keeps one number for each element of a parameter, such as Adam, SGD or Muon"
                )


def _leaves_of(inner: Inner) -> Iterator[ComparedTensor]:
    for number, holding in enumerate(inner.holdings):
        name = f"{number}.{holding.described.name}"
        yield ComparedTensor(name, holding.main.detach(), True)
        for key, value in inner.optimizer.state.get(holding.main, {}).items():
            if _is_elementwise(holding, key, value):
                yield ComparedTensor(f"{name}.{key}", value, True)


def class_of(inner: Inner) -> str:
    """Return module and name of the optimizer's class."""
    return f"{type(inner.optimizer).__module__}.{type(inner.optimizer).__qualname__}"
