"""The parallel strategy of a whole job, with all stages of its pipeline, for resharding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ttp.errors import UsageError
from ttp.mindspore_files.strategy_file import read_stages, require
from ttp.mindspore_files.tensor_layout import Shape, TensorLayout, readable


@dataclass(frozen=True, slots=True)
class Strategy:
    """The layout of each parameter in each stage of the pipeline.

    Args:
        origin: the file or directory, for messages.
        stages: for each stage, name of a parameter -> its layout.
        shapes: name -> shape of the whole tensor, if the file states it (JSON files do).
    """

    origin: str
    stages: tuple[Mapping[str, TensorLayout], ...]
    shapes: Mapping[str, Shape] = field(default_factory=dict)

    @property
    def devices(self) -> int:
        """Number of ranks of each stage."""
        return next(layout.device_count for stage in self.stages for layout in stage.values())

    @property
    def world_size(self) -> int:
        """Number of ranks of all stages together."""
        return self.devices * len(self.stages)

    @property
    def names(self) -> set[str]:
        """The names of all parameters."""
        return {name for stage in self.stages for name in stage}


def read_strategy(path: Path) -> Strategy:
    """Read a strategy file, or a directory that holds one per stage of a pipeline.

    Raises:
        UsageError: a stage is missing, or the strategy uses something that cannot be resharded.
        CheckpointError: a file cannot be read, is no strategy file, or contradicts itself.
    """
    require(path, "give a strategy file, or a directory with those of all stages")
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
            raise UsageError(f"{path}: {name} is cut into parts of different sizes, which is not supported")
        for name, shape in stage.shapes.items():
            if len(shape) != len(stage.layouts[name].axes):
                raise UsageError(f"{path}: {name} has the shape {shape} and the map {readable(stage.layouts[name])}")
        shapes.update(stage.shapes)
    return Strategy(str(path), tuple(stage.layouts for stage in stages), shapes)


def _stages_text(numbers: list[int]) -> str:
    return f"stage{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
