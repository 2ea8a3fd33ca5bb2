"""The strategy of a whole job, for resharding: all stages of its pipeline; and how MindSpore is told of it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ttp.errors import ConfigError, UsageError
from ttp.mindspore_files.strategy_file import read_stages
from ttp.mindspore_files.tensor_layout import Shape, TensorLayout, readable


@dataclass(frozen=True, slots=True)
class Strategy:
    """How every parameter is cut, in each stage of the pipeline.

    Args:
        origin: the file or directory, for messages.
        stages: for each stage its parameters.
        shapes: shapes of whole tensors, where the file tells them (JSON does).
    """

    origin: str
    stages: tuple[Mapping[str, TensorLayout], ...]
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

    def layout(self, name: str) -> TensorLayout:
        """How ``name`` is cut in the first stage that has it."""
        return next(stage[name] for stage in self.stages if name in stage)


def read_strategy(path: Path) -> Strategy:
    """Read a strategy file, or a directory that holds one per stage of a pipeline.

    Raises:
        UsageError: it lacks a stage, or uses what cannot be resharded.
        CheckpointError: it cannot be read, is no strategy file, or contradicts itself.
    """
    if not path.exists():
        raise UsageError(f"{path} does not exist: give a strategy file, or the directory of a pipeline's")
    stages = read_stages(path)
    numbers = [stage.number for stage in stages]
    if numbers != list(range(len(numbers))):
        raise UsageError(
            f"{path} describes only {_stages_text(numbers)} of a pipeline: give the directory with the strategy files "
            "of all stages"
        )
    shapes: dict[str, Shape] = {}
    for stage in stages:
        for name in sorted(stage.uneven):
            raise UsageError(f"{path}: {name} is cut into parts of unequal size, which cannot be resharded")
        for name, shape in stage.shapes.items():
            if len(shape) != len(stage.layouts[name].axes):
                raise UsageError(f"{path}: {name} has the shape {shape} and the map {readable(stage.layouts[name])}")
        shapes.update(stage.shapes)
    return Strategy(str(path), tuple(stage.layouts for stage in stages), shapes)


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
