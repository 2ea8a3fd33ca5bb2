"""What a rank's program makes of the tensors of a checkpoint: names, buffers, param groups.

A ``torch_dist`` checkpoint says nothing about who held what: that is what makes it independent of the layout. Some
readers want it all the same: Megatron's legacy layout is one file per place in the model (tensor, pipeline, expert
parallel), with the names, the flat buffers and the order of parameters of the ranks there; and whoever wants the names
of the model needs them too. So every saver puts an outline of its rank into its file: text, a few hundred bytes per
tensor, made once at start.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from ttp.adapters.megatron.geometry import Geometry, Tile
from ttp.adapters.megatron.optimizers import Inner, unchained
from ttp.errors import CheckpointError
from ttp.store.json_text import parse_json

log = logging.getLogger("ttp.adapters.megatron")

FORMAT = 1
OUTLINE_PREFIX = "ttp.outline."
"""Of the name in the shard file; what follows is named as Megatron names plain values."""

_DTYPE = "torch.dtype"


@dataclass(frozen=True, slots=True)
class Place:
    """Where in the model a rank is: rank and size of each kind of parallelism that cuts it."""

    tp: tuple[int, int]
    pp: tuple[int, int]
    ep: tuple[int, int]

    @property
    def directory(self) -> str:
        """What Megatron calls it on disk."""
        name = f"mp_rank_{self.tp[0]:02d}"
        name += f"_{self.pp[0]:03d}" if self.pp[1] > 1 else ""
        return name + (f"_{self.ep[0]:03d}" if self.ep[1] > 1 else "")

    def all(self) -> Iterator[Place]:
        """Every place of such a model."""
        for pp in range(self.pp[1]):
            for ep in range(self.ep[1]):
                for tp in range(self.tp[1]):
                    yield Place((tp, self.tp[1]), (pp, self.pp[1]), (ep, self.ep[1]))


@dataclass(frozen=True, slots=True)
class LocalTensor:
    """One tensor of the rank.

    Args:
        dtype: of the model's tensor.
        shape: the same.
        tiles: what it is made of in the checkpoint.
    """

    dtype: str
    shape: tuple[int, ...]
    tiles: tuple[Tile, ...]


@dataclass(frozen=True, slots=True)
class FlatBuffer:
    """One buffer of a distributed optimizer, without the padding between its buckets.

    Args:
        dtypes: of parameters and of gradients.
        numel: elements.
        starts: tensor number -> its first element.
    """

    dtypes: tuple[str, str]
    numel: int
    starts: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class LocalOptimizer:
    """One plain optimizer of the rank.

    Args:
        kind: ``dense`` or ``expert``.
        main_key: see ``optimizers.Inner``.
        scaled: whether there is a loss scale.
        groups: tensor numbers of each param group, as far as this rank updates them.
        halves: of these, what has an fp32 copy.
        buffers: of a distributed optimizer.
    """

    kind: str
    main_key: str
    scaled: bool
    groups: tuple[tuple[int, ...], ...]
    halves: tuple[tuple[int, ...], ...]
    buffers: tuple[FlatBuffer, ...]


@dataclass(frozen=True, slots=True)
class RankLayout:
    """Of one rank.

    Args:
        place: of the rank.
        ranks: all at this place that hold the same model, in Megatron's order; the first writes the legacy file.
        streams: ranks whose random streams are in that file.
        tensors: by number.
        chunks: for each chunk of the model, what its ``state_dict()`` has: the number of a tensor, the name of a plain
            value in the checkpoint, or None.
        optimizers: in the order of their steps.
        args: Megatron-LM's namespace, as far as it is made of plain values; None: there is none.
        problem: why there is no legacy layout of it; empty: there is.
    """

    place: Place
    ranks: tuple[int, ...]
    streams: tuple[int, ...]
    tensors: tuple[LocalTensor, ...]
    chunks: tuple[Mapping[str, int | str | None], ...]
    optimizers: tuple[LocalOptimizer, ...]
    args: Mapping[str, Any] | None
    problem: str = ""

    @property
    def key(self) -> str:
        """Of the item in the shard file."""
        place = self.place
        return f"{OUTLINE_PREFIX}tp{place.tp[0]}-pp{place.pp[0]}-ep{place.ep[0]}/shard_0_1"

    def to_json(self) -> str:
        """For the shard file."""
        return json.dumps({"format": FORMAT, **asdict(self)}, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> RankLayout:
        """Inverse of ``to_json``.

        Raises:
            CheckpointError: the text is something else, or of a newer ttp.
        """
        try:
            data = parse_json(text)
            if data["format"] > FORMAT:
                raise CheckpointError(f"an outline of format {data['format']}, this ttp reads {FORMAT}: update ttp")
            return _outline(data)
        except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as problem:
            raise CheckpointError(f"the outline of a rank cannot be read: {problem!r}") from problem


# ------------------------------------------------------------------------------------------------------------- making


def outline_text(
    geometry: Geometry, chunks: Sequence[nn.Module], optimizer: Any, inners: Sequence[Inner], args: Any
) -> dict[str, list[str]]:
    """The outline of this rank as what goes into a shard's file; empty: it cannot be made, and a save does without."""
    try:
        made = outline_of(geometry, chunks, optimizer, inners, args)
        return {made.key: [made.to_json()]}
    except Exception as problem:
        log.warning("no legacy layout can be made of the checkpoints of this job: %s", problem)
        return {}


def outline_of(
    geometry: Geometry, chunks: Sequence[nn.Module], optimizer: Any, inners: Sequence[Inner], args: Any
) -> RankLayout:
    """Describe this rank.

    Args:
        geometry: of its model.
        chunks: of the model, unwrapped.
        optimizer: what ``get_megatron_optimizer`` gave.
        inners: the plain ones below it.
        args: Megatron-LM's namespace, or None.
    """
    from megatron.core import parallel_state as state

    numbers = {key: number for number, key in enumerate(geometry.tensors)}
    named, lost = _chunks(geometry, chunks, numbers)
    ranks = _ranks_of(state.get_expert_data_parallel_group())
    everyone = getattr(args, "data_parallel_random_init", False)
    return RankLayout(
        place=Place(
            (state.get_tensor_model_parallel_rank(), state.get_tensor_model_parallel_world_size()),
            (state.get_pipeline_model_parallel_rank(), state.get_pipeline_model_parallel_world_size()),
            (state.get_expert_model_parallel_rank(), state.get_expert_model_parallel_world_size()),
        ),
        ranks=ranks,
        streams=_ranks_of(state.get_data_parallel_group()) if everyone else ranks[:1],
        tensors=tuple(
            LocalTensor(_name_of(d.tensor.dtype), tuple(d.tensor.shape), d.tiles) for d in geometry.tensors.values()
        ),
        chunks=named,
        optimizers=tuple(_optimizer(inner, numbers) for inner in inners),
        args=None if args is None else _plain_args(args),
        problem=_problem(optimizer, lost),
    )


def _problem(optimizer: Any, lost: Sequence[str]) -> str:
    from megatron.core import parallel_state as state

    if lost:
        return f"the model's sharded_state_dict() leaves out {', '.join(lost[:5])}"
    if any(each.optimizer is None for each in unchained(optimizer)):
        return (
            "on some rank one of the optimizers has nothing to update, for which Megatron's legacy layout has no form"
        )
    if state.get_expert_tensor_parallel_world_size() != state.get_tensor_model_parallel_world_size():
        return "experts are cut over another number of tensor parallel ranks than the rest"
    return ""


def _chunks(
    geometry: Geometry, chunks: Sequence[nn.Module], numbers: Mapping[int, int]
) -> tuple[tuple[dict[str, int | str | None], ...], list[str]]:
    """What the state dict of each chunk is made of, and the names of what the checkpoint does not have."""
    found: list[dict[str, int | str | None]] = []
    lost: list[str] = []
    for chunk, objects in zip(chunks, geometry.object_names, strict=True):
        module: Any = chunk
        named: dict[str, int | str | None] = {}
        for name, value in module.state_dict_for_save_checkpoint(keep_vars=True).items():
            if isinstance(value, torch.Tensor) and id(value) in numbers:
                named[name] = numbers[id(value)]
            elif name in objects or value is None:
                named[name] = None if value is None else objects[name]
            else:
                lost.append(name)
        found.append(named)
    return tuple(found), lost


def _optimizer(inner: Inner, numbers: Mapping[int, int]) -> LocalOptimizer:
    by_main = {id(holding.main): holding for holding in inner.holdings}
    groups, halves = [], []
    for group in inner.optimizer.param_groups:
        held = [by_main[id(main)] for main in group["params"]]
        groups.append(tuple(numbers[id(holding.described.tensor)] for holding in held))
        halved = (holding for holding in held if holding.main.dtype != holding.described.tensor.dtype)
        halves.append(tuple(numbers[id(holding.described.tensor)] for holding in halved))
    buffers: tuple[FlatBuffer, ...] = ()
    if inner.main_key == "param":
        megatron = inner.megatron
        pairs = zip(megatron.buffers, megatron.gbuf_ranges, strict=True)
        buffers = tuple(_buffer(buffer, ranges, numbers) for buffer, ranges in pairs)
    scaled = getattr(inner.megatron, "grad_scaler", None) is not None
    return LocalOptimizer(inner.kind, inner.main_key, scaled, tuple(groups), tuple(halves), buffers)


def _buffer(buffer: Any, ranges: Mapping[Any, Any], numbers: Mapping[int, int]) -> FlatBuffer:
    (dtypes,) = ranges
    begins, count = [], 0
    for bucket in buffer.buckets:
        begins.append(count - bucket.offset)
        count += bucket.numel_unpadded
    starts = {
        numbers[id(parameter)]: begins[bucket] + start
        for parameter, (start, _, bucket) in buffer.param_index_map.items()
    }
    return FlatBuffer((_name_of(dtypes[0]), _name_of(dtypes[1])), int(buffer.numel_unpadded), starts)


def _ranks_of(group: Any) -> tuple[int, ...]:
    return tuple(torch.distributed.get_process_group_ranks(group))


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _plain_args(args: Any) -> dict[str, Any]:
    """What Megatron's loading looks at are numbers, texts and dtypes; everything else is left out."""
    return {name: kept for name, value in vars(args).items() for kept in _plain(value)}


def _plain(value: Any) -> list[Any]:
    """In a list: the value as JSON has it; an empty one: it has none."""
    if isinstance(value, torch.dtype):
        return [{_DTYPE: _name_of(value)}]
    if type(value) in (bool, int, str, type(None)) or (type(value) is float and math.isfinite(value)):
        return [value]
    if type(value) in (list, tuple):
        inner = [_plain(each) for each in value]
        return [[each for kept in inner for each in kept]] if all(inner) else []
    return []


# ------------------------------------------------------------------------------------------------------------ reading


def _outline(data: Mapping[str, Any]) -> RankLayout:
    place = data["place"]
    return RankLayout(
        place=Place(_pair(place["tp"]), _pair(place["pp"]), _pair(place["ep"])),
        ranks=_numbers(data["ranks"]),
        streams=_numbers(data["streams"]),
        tensors=tuple(
            LocalTensor(str(row["dtype"]), _numbers(row["shape"]), tuple(map(_tile, row["tiles"])))
            for row in data["tensors"]
        ),
        chunks=tuple(dict(chunk) for chunk in data["chunks"]),
        optimizers=tuple(map(_read_optimizer, data["optimizers"])),
        args=None if data["args"] is None else {name: _revived(value) for name, value in data["args"].items()},
        problem=str(data["problem"]),
    )


def _read_optimizer(row: Mapping[str, Any]) -> LocalOptimizer:
    buffers = tuple(
        FlatBuffer(
            (str(one["dtypes"][0]), str(one["dtypes"][1])),
            int(one["numel"]),
            {int(number): int(start) for number, start in one["starts"].items()},
        )
        for one in row["buffers"]
    )
    groups, halves = (tuple(map(_numbers, row[name])) for name in ("groups", "halves"))
    return LocalOptimizer(str(row["kind"]), str(row["main_key"]), bool(row["scaled"]), groups, halves, buffers)


def _tile(row: Mapping[str, Any]) -> Tile:
    shape, offsets, sizes, strides = (_numbers(row[name]) for name in ("shape", "offsets", "sizes", "strides"))
    return Tile(str(row["key"]), shape, offsets, sizes, strides, int(row["first"]), bool(row["flexible"]))


def _pair(values: Sequence[int]) -> tuple[int, int]:
    rank, size = map(int, values)
    return rank, size


def _numbers(values: Sequence[int]) -> tuple[int, ...]:
    return tuple(map(int, values))


def _revived(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dtype_of(value[_DTYPE])
    return [_revived(each) for each in value] if isinstance(value, list) else value


def dtype_of(name: str) -> torch.dtype:
    """Raises: CheckpointError: this torch does not know it."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise CheckpointError(f"torch {torch.__version__} has no dtype {name!r}")
    return found
