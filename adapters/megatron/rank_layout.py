"""Describes which names the model of one rank has for the tensors of a checkpoint, and their param groups.

A ``torch_dist`` checkpoint is independent of the layout: it does not say which rank held which tensor. All layers of a
kind are one tensor in it, and so are all experts of a layer. ``ttp convert`` needs the names that the model itself
uses, so every saver puts this description of its rank into its file. It is JSON text, a few hundred bytes per tensor,
made once at start.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from ttp.adapters.megatron.geometry import Geometry, TensorView
from ttp.adapters.megatron.optimizers import Inner
from ttp.errors import GARBLED, CheckpointError, ToldAs
from ttp.store.json_text import parse_json

log = logging.getLogger("ttp.adapters.megatron")

FORMAT = 2
"""Number of the format that this module writes. Format 1 also had data for Megatron's legacy layout; ttp ignores it."""

RANK_LAYOUT_PREFIX = "ttp.outline."
"""Prefix of the entry's name in the shard file; the rest of the name is like Megatron's names of plain values."""


@dataclass(frozen=True, slots=True)
class ModelPlace:
    """The place of a rank in the model: (rank, size) for tensor, pipeline and expert parallelism."""

    tp: tuple[int, int]
    pp: tuple[int, int]
    ep: tuple[int, int]


@dataclass(frozen=True, slots=True)
class OptimizerGroups:
    """The param groups of one plain optimizer of the rank.

    Args:
        kind: ``dense`` or ``expert``.
        groups: for each param group, the numbers of its tensors that this rank updates (see ``RankLayout.tensors``).
    """

    kind: str
    groups: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class RankLayout:
    """The description of one rank.

    Args:
        place: the rank's place in the model.
        tensors: the first checkpoint view of each tensor. The index of a tensor here is its number elsewhere.
        chunks: for each model chunk, name in the chunk's ``state_dict()`` -> number of the tensor.
        optimizers: the rank's plain optimizers, in the order of their steps.
    """

    place: ModelPlace
    tensors: tuple[TensorView, ...]
    chunks: tuple[Mapping[str, int], ...]
    optimizers: tuple[OptimizerGroups, ...]

    @property
    def key(self) -> str:
        """The name of the entry in the shard file."""
        place = self.place
        return f"{RANK_LAYOUT_PREFIX}tp{place.tp[0]}-pp{place.pp[0]}-ep{place.ep[0]}/shard_0_1"

    def to_json(self) -> str:
        """Encode the description for the shard file."""
        return json.dumps({"format": FORMAT, **asdict(self)}, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> RankLayout:
        """Decode what ``to_json`` returned. Reads format 1 too.

        Raises:
            CheckpointError: the text is not a rank layout, or a newer ttp wrote it.
        """
        with ToldAs(CheckpointError, "the rank layout cannot be read", *GARBLED, reason=repr):
            data = parse_json(text)
            if data["format"] > FORMAT:
                raise CheckpointError(
                    f"the rank layout has format {data['format']}, this ttp reads up to format {FORMAT}: update ttp"
                )
            return _parsed(data)


# ------------------------------------------------------------------------------------------------------------- making


def rank_layout_text(geometry: Geometry, chunks: Sequence[nn.Module], inners: Sequence[Inner]) -> dict[str, list[str]]:
    """Return this rank's description as an entry for shard files.

    If the description cannot be made, the entry is empty and the log says why; saves do not need it.
    """
    try:
        made = describe_rank(geometry, chunks, inners)
        return {made.key: [made.to_json()]}
    except Exception as problem:
        log.warning("`ttp convert` will not be able to read the checkpoints of this job: %s", problem)
        return {}


def describe_rank(geometry: Geometry, chunks: Sequence[nn.Module], inners: Sequence[Inner]) -> RankLayout:
    """Describe this rank.

    Args:
        geometry: the description of the rank's model.
        chunks: the rank's model chunks, unwrapped.
        inners: the rank's plain optimizers.
    """
    from megatron.core import parallel_state as state

    numbers = {key: number for number, key in enumerate(geometry.tensors)}
    return RankLayout(
        place=ModelPlace(
            (state.get_tensor_model_parallel_rank(), state.get_tensor_model_parallel_world_size()),
            (state.get_pipeline_model_parallel_rank(), state.get_pipeline_model_parallel_world_size()),
            (state.get_expert_model_parallel_rank(), state.get_expert_model_parallel_world_size()),
        ),
        tensors=tuple(described.views[0] for described in geometry.tensors.values()),
        chunks=tuple(_names(chunk, numbers) for chunk in chunks),
        optimizers=tuple(_groups(inner, numbers) for inner in inners),
    )


def _names(chunk: Any, numbers: Mapping[int, int]) -> dict[str, int]:
    state = chunk.state_dict_for_save_checkpoint(keep_vars=True)
    return {name: numbers[id(value)] for name, value in state.items() if id(value) in numbers}


def _groups(inner: Inner, numbers: Mapping[int, int]) -> OptimizerGroups:
    number_of = {id(holding.main): numbers[id(holding.described.tensor)] for holding in inner.holdings}
    groups = (tuple(number_of[id(main)] for main in group["params"]) for group in inner.optimizer.param_groups)
    return OptimizerGroups(inner.kind, tuple(groups))


# ------------------------------------------------------------------------------------------------------------ reading


def _parsed(data: Mapping[str, Any]) -> RankLayout:
    place = data["place"]
    return RankLayout(
        place=ModelPlace(_pair(place["tp"]), _pair(place["pp"]), _pair(place["ep"])),
        tensors=tuple(_tensor_view(row["tiles"][0] if "tiles" in row else row) for row in data["tensors"]),
        chunks=tuple({name: what for name, what in chunk.items() if isinstance(what, int)} for chunk in data["chunks"]),
        optimizers=tuple(
            OptimizerGroups(str(row["kind"]), tuple(map(_numbers, row["groups"]))) for row in data["optimizers"]
        ),
    )


def _tensor_view(row: Mapping[str, Any]) -> TensorView:
    shape, offsets, sizes, strides = (_numbers(row[name]) for name in ("shape", "offsets", "sizes", "strides"))
    return TensorView(str(row["key"]), shape, offsets, sizes, strides, int(row["first"]), bool(row["flexible"]))


def _pair(values: Sequence[int]) -> tuple[int, int]:
    rank, size = map(int, values)
    return rank, size


def _numbers(values: Sequence[int]) -> tuple[int, ...]:
    return tuple(map(int, values))
