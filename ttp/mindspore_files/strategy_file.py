"""Read strategy files (protobuf or JSON), which say how each parameter is cut over the ranks of pipeline stages.

The format (``mindspore/train/node_strategy_pb2.py``, 2.10)::

    ParallelStrategyMap { uint32 current_stage = 1; repeated ParallelStrategyItem = 2; ParallelLayoutItem = 3; }
    ParallelStrategyItem { string node_name = 1; ParallelStrategys { uint32 stage = 1; ... } = 2; }
    ParallelLayoutItem { string param_name = 1; ParallelLayouts = 2; }
    ParallelLayouts { DevMatrix = 1; TensorMap = 2; ParamSplitShape = 3; ...; int32 field = 5;
                      opt_weight_shard_step = 6; opt_weight_shard_size = 7; }

``current_stage`` is not used (it was 2 in every file seen); the stage is that of the operators. In a file that
``merge_pipeline_strategys`` wrote, each parameter's name begins with the stage: ``1-l3.w``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ttp.core.layout import WORLD_SIZE_MAX
from ttp.errors import CheckpointError, ToldAs, UsageError, strerror_of
from ttp.mindspore_files import group_info
from ttp.mindspore_files.file_messages import DIMS_MAX, parse, text
from ttp.mindspore_files.tensor_layout import Shape, TensorLayout, problems
from ttp.store.json_text import parse_json
from ttp.store.plain_file import read_plain

SIZE_MAX = 1 << 30
SUFFIXES = (".ckpt", ".json", ".pb")

_MERGED = re.compile(r"(\d{1,6})-(.+)", re.DOTALL | re.ASCII)


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage of the pipeline and its parameters.

    Args:
        number: number of the stage, from 0.
        layouts: name of a parameter -> how it is cut.
        shapes: name -> shape of the whole tensor, if the file states it (JSON files do).
        uneven: names of parameters that are cut into parts of different sizes.
    """

    number: int
    layouts: Mapping[str, TensorLayout]
    shapes: Mapping[str, Shape] = field(default_factory=dict)
    uneven: frozenset[str] = frozenset()

    @property
    def devices(self) -> int:
        """Number of ranks of the stage."""
        return next((layout.device_count for layout in self.layouts.values()), 1)

    @property
    def first_rank(self) -> int:
        """The first rank of the stage; all stages have the same number of ranks."""
        return self.number * self.devices


def require(path: Path, hint: str) -> None:
    """Check that there is a file or a directory. The hint says what to give.

    Raises:
        UsageError: there is none, or it cannot be looked at.
    """
    try:
        path.stat()
    except OSError as problem:
        why = "does not exist" if isinstance(problem, FileNotFoundError) else f"cannot be read: {problem.strerror}"
        raise UsageError(f"{path} {why}: {hint}") from None


def read_stages(path: Path) -> list[Stage]:
    """Return, in order, the stages that a strategy file, or all strategy files of a directory, describe.

    Raises:
        CheckpointError: a file is absent, damaged or no strategy file, or two contradict each other.
    """
    path = Path(path)
    stages: dict[int, Stage] = {}
    for file in _files(path):
        for found in _read_file(file):
            if stages.setdefault(found.number, found) != found:
                raise CheckpointError(f"{file} describes stage {found.number} differently from another file of {path}")
    ordered = [stages[number] for number in sorted(stages)]
    counts = sorted({stage.devices for stage in ordered})
    if len(counts) > 1:
        raise CheckpointError(f"{path} has {counts[0]} devices in one stage, but {counts[1]} in another")
    return ordered


def parse_strategy(data: bytes) -> list[Stage]:
    """Parse one strategy file. A file that MindSpore has merged describes several stages.

    Raises:
        ValueError: the file is malformed, contradicts itself, or has no parameter.
    """
    found = _from_json(parse_json(text(data))) if data.lstrip()[:1] == b"{" else _from_protobuf(data)
    if not found.items:
        raise ValueError("it holds no layout of a parameter")
    stages = _by_stage(found)
    for stage in stages:
        checked: set[TensorLayout] = set()
        for name, layout in stage.layouts.items():
            if layout not in checked:
                _check(name, layout, stage)
                checked.add(layout)
        if stage.first_rank + stage.devices > WORLD_SIZE_MAX:
            raise ValueError(f"stage {stage.number} of {stage.devices} devices has ranks that are too large")
    return stages


def _files(path: Path) -> list[Path]:
    with ToldAs(CheckpointError, f"{path} cannot be listed", OSError, reason=strerror_of):
        if not path.is_dir():
            return [path]
        inside = [file for file in path.iterdir() if file.suffix in SUFFIXES and file.is_file()]
    files = sorted(file for file in inside if file.name != group_info.NAME)  # MindSpore may write both to one directory
    if not files:
        raise CheckpointError(f"{path} holds no strategy file ({', '.join(SUFFIXES)})")
    return files


def _read_file(path: Path) -> list[Stage]:
    try:
        return parse_strategy(read_plain(path, SIZE_MAX))
    except OSError as problem:
        raise CheckpointError(f"{path} cannot be read: {problem.strerror or problem}") from None
    except ValueError as problem:
        raise CheckpointError(f"{path} is no strategy file of MindSpore, or damaged: {problem}") from None


# ------------------------------------------------------------------------------------- common to protobuf and JSON


@dataclass(slots=True)
class _Item:
    """One parameter as the file describes it."""

    name: str
    layout: TensorLayout
    shape: Shape | None = None
    uneven: bool = False


@dataclass(slots=True)
class _Found:
    stages: set[int] = field(default_factory=set)
    """The stages of the operators."""

    items: list[_Item] = field(default_factory=list)


def _by_stage(found: _Found) -> list[Stage]:
    merged = all(_MERGED.fullmatch(item.name) for item in found.items)
    stages: dict[int, list[_Item]] = {}
    for item in found.items:
        match = _MERGED.fullmatch(item.name) if merged else None
        if match is not None:
            item.name = match[2]
        stages.setdefault(int(match[1]) if match else _only(found.stages), []).append(item)
    return [_stage(number, stages[number]) for number in sorted(stages)]


def _stage(number: int, items: list[_Item]) -> Stage:
    layouts: dict[str, TensorLayout] = {}
    for item in items:
        if layouts.setdefault(item.name, item.layout) != item.layout:
            raise ValueError(f"{item.name:.80} is described twice")
    shapes = {item.name: item.shape for item in items if item.shape is not None}
    return Stage(number, layouts, shapes, frozenset(item.name for item in items if item.uneven))


def _only(stages: set[int]) -> int:
    if len(stages) > 1:
        raise ValueError(f"its operators are in the stages {sorted(stages)!r:.80}: give the file of one stage")
    return next(iter(stages), 0)


def _check(name: str, layout: TensorLayout, stage: Stage) -> None:
    if len(layout.devices) > DIMS_MAX or len(layout.axes) > DIMS_MAX:
        raise ValueError(f"{name:.80} has more than {DIMS_MAX} dimensions")
    if any(extent < 1 for extent in layout.devices) or layout.device_count > WORLD_SIZE_MAX:
        raise ValueError(f"{name:.80} has the device matrix {layout.devices!r:.80}")
    for problem in problems(layout):
        raise ValueError(f"{name:.80}: {problem}. The strategy contradicts itself: a conversion by it would be wrong")
    if layout.device_count != stage.devices:
        raise ValueError(
            f"it has {stage.devices} devices, but {layout.device_count} for {name:.80}: all parameters of a stage need "
            "the same number"
        )


def _layout(devices: list[int], axes: list[list[int]], opt_size: int, opt_step: int) -> TensorLayout:
    cuts = tuple(tuple(device for device in axis if device != -1) for axis in axes)
    return TensorLayout(tuple(devices), cuts, opt_size, opt_step)


def _from_protobuf(data: bytes) -> _Found:
    told = parse("StrategyMap", data)
    stages = {strategies.stage for operator in told.operators for strategies in operator.strategies}
    return _Found(stages, [_item(parameter) for parameter in told.parameters])


def _item(parameter: Any) -> _Item:
    if not parameter.param_name or not parameter.HasField("layout"):
        raise ValueError("a parameter has no name or no layout")
    told = parameter.layout
    devices = list(told.dev_matrix[0].dim) if told.dev_matrix else []
    axes = [list(axis.dim) for axis in told.tensor_map]
    if len(axes) == 1:
        axes = [[axis] for axis in axes[0]]
    layout = _layout(devices, axes, told.opt_weight_shard_size, told.opt_weight_shard_step)
    uneven = bool(told.field) or any(shape.dim for shape in told.param_split_shape)
    return _Item(parameter.param_name, layout, uneven=uneven)


def _from_json(document: Any) -> _Found:
    if not isinstance(document, dict):
        raise ValueError("its JSON is not an object")
    items = _object(document.get("parallel_layout_item"), "parallel_layout_item")
    operators = _object(document.get("parallel_strategy_item") or {}, "parallel_strategy_item")
    stages = {_whole(_object(o, name).get("stage", 0), "stage") for name, o in operators.items()}
    return _Found(stages, [_json_item(name, _object(item, name)) for name, item in items.items()])


def _json_item(name: str, item: dict[str, Any]) -> _Item:
    axes = item.get("tensor_map")
    if not isinstance(axes, list):
        raise ValueError(f"{name:.80} has no tensor_map")
    layout = _layout(
        _wholes(item.get("dev_matrix"), "dev_matrix"),
        [_wholes(axis if isinstance(axis, list) else [axis], "tensor_map") for axis in axes],
        _whole(item.get("opt_weight_shard_size", 0), "opt_weight_shard_size"),
        _whole(item.get("opt_weight_shard_step", 0), "opt_weight_shard_step"),
    )
    told = item.get("tensor_shape")
    shape = None if told is None else tuple(_wholes(told, "tensor_shape"))
    return _Item(name, layout, shape, uneven=bool(item.get("field") or item.get("param_split_shape")))


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
