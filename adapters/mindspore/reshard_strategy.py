"""Parallel strategies as MindSpore saves them: one file, one file per pipeline stage, or merged; protobuf or JSON."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ttp.adapters.mindspore.reshard_layout import Layout, Shape, problems, readable
from ttp.errors import ConfigError, UsageError
from ttp.store.plain_file import read_plain

_SIZE_MAX = 1 << 30
_MERGED = re.compile(r"(\d{1,6})-(.+)", re.DOTALL)
"""How ``merge_pipeline_strategys`` writes the stage into a parameter's name."""


@dataclass(frozen=True, slots=True)
class Strategy:
    """How every parameter is cut, in each stage of the pipeline.

    Args:
        origin: the file or directory, for messages.
        stages: for each stage its parameters.
        shapes: shapes of whole tensors, where the file tells them (JSON does).
    """

    origin: str
    stages: tuple[Mapping[str, Layout], ...]
    shapes: Mapping[str, Shape] = field(default_factory=dict)

    @property
    def devices(self) -> int:
        """Ranks of each stage."""
        return next(layout.device_count for stage in self.stages for layout in stage.values())

    @property
    def world_size(self) -> int:
        """Ranks of all stages."""
        return self.devices * len(self.stages)

    @property
    def names(self) -> set[str]:
        """All parameters."""
        return {name for stage in self.stages for name in stage}

    def layout(self, name: str) -> Layout:
        """How ``name`` is cut in the first stage that has it."""
        return next(stage[name] for stage in self.stages if name in stage)


def read_strategy(path: Path) -> Strategy:
    """Read a strategy file, or a directory that holds one per stage of a pipeline.

    Raises:
        UsageError: it is none, lacks a stage, contradicts itself, or uses what cannot be resharded.
    """
    files = _files(path)
    stages: dict[int, dict[str, Layout]] = {}
    shapes: dict[str, Shape] = {}
    for file in files:
        for number, layouts, told in _read_file(file):
            if stages.setdefault(number, layouts) != layouts:
                raise UsageError(f"{path}: two files describe stage {number} of the pipeline, and differently")
            shapes.update(told)
    numbers = sorted(stages)
    if numbers != list(range(len(numbers))):
        raise UsageError(
            f"{path} describes only {_stages_text(numbers)} of a pipeline: give the directory with the strategy files "
            "of all stages"
        )
    strategy = Strategy(str(path), tuple(stages[number] for number in numbers), shapes)
    _check(strategy)
    return strategy


def write_for_mindspore(path: Path, strategy: Strategy, names: Iterable[str]) -> None:
    """Write the part of a strategy that is about ``names``, in the form of ``merge_pipeline_strategys``."""
    pb2 = _pb2()
    document = pb2.ParallelStrategyMap(current_stage=1)
    wanted = set(names)
    for number, stage in enumerate(strategy.stages):
        for name, layout in stage.items():
            if name not in wanted:
                continue
            item = document.parallel_layout_item.add()
            item.param_name = name if len(strategy.stages) == 1 else f"{number}-{name}"
            cut = item.parallel_layouts
            cut.dev_matrix.add().dim.extend(layout.devices)
            if any(len(axis) > 1 for axis in layout.axes):
                for axis in layout.axes:
                    cut.tensor_map.add().dim.extend(axis or (-1,))
            else:
                cut.tensor_map.add().dim.extend(axis[0] if axis else -1 for axis in layout.axes)
            cut.param_split_shape.add()
            cut.indices_offset.add()
            cut.field = 0
            cut.opt_weight_shard_step, cut.opt_weight_shard_size = layout.opt_step, layout.opt_size
    path.write_bytes(document.SerializeToString())


def _files(path: Path) -> list[Path]:
    if not path.exists():
        raise UsageError(f"{path} does not exist: give a strategy file, or the directory of a pipeline's")
    if not path.is_dir():
        return [path]
    files = sorted(file for file in path.iterdir() if file.suffix in (".ckpt", ".json", ".pb") and file.is_file())
    if not files:
        raise UsageError(f"{path} holds no strategy file (.ckpt, .pb or .json)")
    return files


_Stage = tuple[int, dict[str, Layout], dict[str, Shape]]


def _read_file(path: Path) -> list[_Stage]:
    """Stages, their parameters, and the shapes of whole tensors if they are told."""
    try:
        data = read_plain(path, _SIZE_MAX)
    except OSError as problem:
        raise UsageError(f"{path} cannot be read: {problem.strerror or problem}") from problem
    try:
        stage, items = _from_json(data) if path.suffix == ".json" else _from_protobuf(data)
    except (AttributeError, KeyError, TypeError, ValueError, IndexError) as problem:
        raise UsageError(f"{path} is no strategy file of MindSpore: {problem}") from None
    if not items:
        raise UsageError(f"{path} holds no layout of a parameter: it is no strategy file of MindSpore")
    made: dict[int, _Stage] = {}
    merged = all(_MERGED.fullmatch(name) for name, _, _ in items)
    for name, layout, shape in items:
        match = _MERGED.fullmatch(name) if merged else None
        number, plain = (int(match[1]), match[2]) if match else (stage, name)
        _, layouts, shapes = made.setdefault(number, (number, {}, {}))
        layouts[plain] = layout
        if shape is not None:
            shapes[plain] = shape
    return list(made.values())


_Items = list[tuple[str, Layout, "Shape | None"]]


def _from_protobuf(data: bytes) -> tuple[int, _Items]:
    document = _pb2().ParallelStrategyMap()
    try:
        document.ParseFromString(data)
    except Exception as problem:  # protobuf's own class; its import path differs between versions
        raise ValueError(f"{type(problem).__name__} while its protobuf was read") from None
    items: _Items = []
    for item in document.parallel_layout_item:
        cut = item.parallel_layouts
        if cut.field or any(split.dim for split in cut.param_split_shape):
            raise ValueError(f"{item.param_name} is cut into parts of unequal size, which cannot be resharded")
        maps = [list(one.dim) for one in cut.tensor_map]
        tensor_map: list[Any] = maps if len(maps) > 1 else maps[0] if maps else []
        devices = list(cut.dev_matrix[0].dim)
        layout = _layout(devices, tensor_map, cut.opt_weight_shard_size, cut.opt_weight_shard_step)
        items.append((item.param_name, layout, None))
    named = document.parallel_strategy_item
    return (named[0].parallel_strategys.stage if named else 0), items


def _from_json(data: bytes) -> tuple[int, _Items]:
    document = json.loads(data)
    items: _Items = []
    for name, cut in document["parallel_layout_item"].items():
        if cut.get("field") or cut.get("param_split_shape"):
            raise ValueError(f"{name} is cut into parts of unequal size, which cannot be resharded")
        layout = _layout(
            cut["dev_matrix"], cut["tensor_map"], cut["opt_weight_shard_size"], cut["opt_weight_shard_step"]
        )
        shape = cut.get("tensor_shape")
        items.append((name, layout, None if shape is None else tuple(int(size) for size in shape)))
    named = document.get("parallel_strategy_item") or {}
    return int(next((item["stage"] for item in named.values()), 0)), items


def _layout(devices: list[int], tensor_map: list[Any], opt_size: int, opt_step: int) -> Layout:
    axes = (axis if isinstance(axis, list) else [axis] for axis in tensor_map)
    cuts = tuple(tuple(int(device) for device in axis if device != -1) for axis in axes)
    return Layout(tuple(int(size) for size in devices), cuts, int(opt_size), int(opt_step))


def _check(strategy: Strategy) -> None:
    for stage in strategy.stages:
        for name, layout in stage.items():
            for problem in problems(layout):
                raise UsageError(
                    f"{strategy.origin}: {name}: {problem}. MindSpore would convert it without a word, wrongly"
                )
            if layout.device_count != strategy.devices:
                raise UsageError(
                    f"{strategy.origin} counts {strategy.devices} devices, but {layout.device_count} for {name}: "
                    "all parameters of all stages must be laid out over as many"
                )
            told = strategy.shapes.get(name)
            if told is not None and len(told) != len(layout.axes):
                raise UsageError(f"{strategy.origin}: {name} has the shape {told} and the map {readable(layout)}")


def _stages_text(numbers: list[int]) -> str:
    return f"stage{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def mindspore() -> Any:
    """MindSpore itself, told to be quiet unless the user wants to hear it: what it cannot convert we do.

    Raises:
        ConfigError: it is not installed, or cannot be imported here.
    """
    os.environ.setdefault("GLOG_v", "4")
    try:
        import mindspore as found
    except ModuleNotFoundError as problem:
        if problem.name != "mindspore":
            raise
        raise ConfigError("mindspore is not installed: pip install 'ttp-ft[mindspore]'") from None
    except ImportError as problem:  # such as a protobuf that is too old for it
        raise ConfigError(f"mindspore cannot be imported: {problem}") from problem
    return found


def _pb2() -> Any:
    mindspore()
    from mindspore.train import node_strategy_pb2

    return node_strategy_pb2
