"""Strategy files: how each parameter is cut over the ranks of a stage, as protobuf or JSON.

Format (``mindspore/train/node_strategy_pb2.py``, 2.10)::

    ParallelStrategyMap { uint32 current_stage = 1; repeated ParallelStrategyItem = 2; ParallelLayoutItem = 3; }
    ParallelStrategyItem { string node_name = 1; ParallelStrategys { uint32 stage = 1; ... } = 2; }
    ParallelLayoutItem { string param_name = 1; ParallelLayouts = 2; }
    ParallelLayouts { DevMatrix = 1; TensorMap = 2; ...; opt_weight_shard_step = 6; opt_weight_shard_size = 7; }

``current_stage`` says nothing (it is 2 in every file seen); the stage is that of the operators.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ttp.adapters.mindspore.wire_format import fields, message, number, numbers, signed, text
from ttp.core.layout import WORLD_SIZE_MAX
from ttp.errors import CheckpointError
from ttp.store.json_text import parse_json
from ttp.store.plain_file import read_plain

SIZE_MAX = 1 << 30
DIMS_MAX = 64


@dataclass(frozen=True, slots=True)
class Cut:
    """How one parameter is cut.

    Args:
        devices: the ranks of the stage as a matrix, row by row.
        axes: for each dimension of the tensor the dimensions of ``devices``, counted from the right, that cut it; -1:
            none.
        shards: parts into which the optimizer cuts a slice among the ranks that hold it; 0: does not; -1: as many as
            ``step`` leaves.
        step: rank stride between these parts.
    """

    devices: tuple[int, ...]
    axes: tuple[tuple[int, ...], ...]
    shards: int = 0
    step: int = 0


@dataclass(frozen=True, slots=True)
class Strategy:
    """One file: a stage of the pipeline and its parameters."""

    stage: int
    cuts: Mapping[str, Cut]

    @property
    def devices(self) -> int:
        """Ranks of the stage."""
        return next((math.prod(cut.devices) for cut in self.cuts.values()), 1)

    @property
    def first_rank(self) -> int:
        """Rank of the first device: all stages have as many."""
        return self.stage * self.devices


def read_strategies(path: Path) -> list[Strategy]:
    """The stages described by a file, or by all strategy files of a directory, in order.

    Raises:
        CheckpointError: nothing can be read, or two files contradict each other.
    """
    path = Path(path)
    files = sorted(f for f in path.iterdir() if f.suffix in (".ckpt", ".json", ".pb")) if path.is_dir() else [path]
    if not files:
        raise CheckpointError(f"{path} holds no strategy file (.ckpt or .json)")
    stages: dict[int, Strategy] = {}
    for file in files:
        found = read_strategy(file)
        if stages.setdefault(found.stage, found) != found:
            raise CheckpointError(f"{file} describes stage {found.stage} otherwise than another file of {path}")
    strategies = [stages[stage] for stage in sorted(stages)]
    if len({strategy.devices for strategy in strategies}) > 1:
        raise CheckpointError(f"the stages in {path} have different numbers of devices")
    return strategies


def read_strategy(path: Path) -> Strategy:
    """Read one strategy file.

    Raises:
        CheckpointError: it is absent, damaged, or something else.
    """
    try:
        return parse_strategy(read_plain(Path(path), SIZE_MAX))
    except OSError as problem:
        raise CheckpointError(f"{path} cannot be read: {problem.strerror or problem}") from None
    except ValueError as problem:
        raise CheckpointError(f"{path} is no strategy file, or damaged: {problem}") from None


def parse_strategy(data: bytes) -> Strategy:
    """As ``read_strategy``.

    Raises:
        ValueError: malformed, contradictory, or without a parameter.
    """
    view = memoryview(data)
    strategy = _from_json(parse_json(text(view))) if data.lstrip()[:1] == b"{" else _from_protobuf(view)
    if not strategy.cuts:
        raise ValueError("it names no parameter")
    for name, cut in strategy.cuts.items():
        _check(name, cut)
    if len({math.prod(cut.devices) for cut in strategy.cuts.values()}) > 1:
        raise ValueError("its parameters live on different numbers of devices")
    if strategy.first_rank + strategy.devices > WORLD_SIZE_MAX:
        raise ValueError(f"stage {strategy.stage} of {strategy.devices} devices cannot be")
    return strategy


def _check(name: str, cut: Cut) -> None:
    if len(cut.devices) > DIMS_MAX or len(cut.axes) > DIMS_MAX:
        raise ValueError(f"{name:.80} has more than {DIMS_MAX} dimensions")
    if any(extent < 1 for extent in cut.devices) or math.prod(cut.devices) > WORLD_SIZE_MAX:
        raise ValueError(f"{name:.80} has the device matrix {cut.devices!r:.80}")
    used = [axis for together in cut.axes for axis in together if axis != -1]
    if any(not 0 <= axis < len(cut.devices) for axis in used) or len(set(used)) < len(used):
        raise ValueError(f"{name:.80} is cut along {cut.axes!r:.80}, its device matrix is {cut.devices!r:.80}")
    if cut.shards < -1 or cut.step < -1 or (cut.shards == -1 and cut.step < 1):
        raise ValueError(f"{name:.80} has {cut.shards} optimizer shards in steps of {cut.step}")


def _from_protobuf(data: memoryview) -> Strategy:
    stages: set[int] = set()
    cuts: dict[str, Cut] = {}
    for field in fields(data):
        if field[0] == 2:
            stages |= _stage_of(message(field))
        elif field[0] == 3:
            name, cut = _layout(message(field))
            if cuts.setdefault(name, cut) != cut:
                raise ValueError(f"{name:.80} is described twice")
    return Strategy(_only(stages), cuts)


def _only(stages: set[int]) -> int:
    if len(stages) > 1:
        raise ValueError(f"its operators are in the stages {sorted(stages)!r:.80}: give the file of one stage")
    return next(iter(stages), 0)


def _stage_of(data: memoryview) -> set[int]:
    inner = [message(field) for field in fields(data) if field[0] == 2]
    return {number(field) for part in inner for field in fields(part) if field[0] == 1}


def _layout(data: memoryview) -> tuple[str, Cut]:
    name, layouts = "", None
    for field in fields(data):
        if field[0] == 1:
            name = text(message(field))
        elif field[0] == 2:
            layouts = message(field)
    if not name or layouts is None:
        raise ValueError("a parameter has no name or no layout")
    parts: dict[int, list[memoryview]] = {1: [], 2: []}
    plain = {6: 0, 7: 0}
    for field in fields(layouts):
        if field[0] in parts:
            parts[field[0]].append(message(field))
        elif field[0] in plain:
            plain[field[0]] = signed(number(field), 32)
    devices = tuple(numbers(fields(parts[1][0]), 1)) if parts[1] else ()
    maps = [tuple(signed(value, 32) for value in numbers(fields(part), 1)) for part in parts[2]]
    axes = tuple((axis,) for axis in maps[0]) if len(maps) == 1 else tuple(maps)
    return name, Cut(devices, axes, plain[7], plain[6])


def _from_json(document: Any) -> Strategy:
    if not isinstance(document, dict):
        raise ValueError("an object is wanted")
    items = _object(document.get("parallel_layout_item"), "parallel_layout_item")
    operators = _object(document.get("parallel_strategy_item", {}), "parallel_strategy_item")
    stages = {_whole(_object(o, name).get("stage", 0), "stage") for name, o in operators.items()}
    cuts = {}
    for name, item in items.items():
        layout = _object(item, name)
        axes = layout.get("tensor_map")
        if not isinstance(axes, list):
            raise ValueError(f"{name:.80} has no tensor_map")
        cuts[name] = Cut(
            tuple(_wholes(layout.get("dev_matrix"), "dev_matrix")),
            tuple(tuple(_wholes(axis if isinstance(axis, list) else [axis], "tensor_map")) for axis in axes),
            _whole(layout.get("opt_weight_shard_size", 0), "opt_weight_shard_size"),
            _whole(layout.get("opt_weight_shard_step", 0), "opt_weight_shard_step"),
        )
    return Strategy(_only(stages), cuts)


def _object(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{name:.80} is no object")
    return value


def _wholes(value: Any, name: str) -> list[int]:
    if not isinstance(value, list):
        raise ValueError(f"{name} is no list")
    return [_whole(item, name) for item in value]


def _whole(value: Any, name: str) -> int:
    if type(value) is not int or abs(value) > 1 << 31:
        raise ValueError(f"{name} is {value!r:.40}, no whole number")
    return value
