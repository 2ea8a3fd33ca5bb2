"""Makes strategy files as MindSpore 2.10 writes them, with its own protobuf code, and checkpoints of such jobs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Layout:
    """The layout of one parameter: device matrix, tensor map, optimizer shards and their stride."""

    devices: Sequence[int]
    axes: Sequence[int]
    shards: int = 0
    step: int = 0


S8 = {"l1.w": Layout((2, 4), (-1, 0)), "l2.w": Layout((2, 4), (0, -1)), "l3.w": Layout((2, 4), (-1, -1))}
"""Data parallel 2 x model parallel 4: ranks 0 and 4 hold the same, and so on."""

S8_SHARDED = {
    "l1.w": Layout((2, 4), (-1, 0), 2, 4),
    "l2.w": Layout((2, 4), (0, -1), 2, 4),
    "l3.w": Layout((2, 4), (-1, -1), 2, 1),
}
"""The same with optimizer_weight_shard_size 2: nothing but l3.w has a replica."""


def write_strategy(path: Path, layouts: Mapping[str, Layout], stage: int = 0) -> Path:
    from mindspore.train.node_strategy_pb2 import ParallelStrategyMap

    document = ParallelStrategyMap(current_stage=2)
    operator = document.parallel_strategy_item.add()
    operator.node_name = "MatMul"
    operator.parallel_strategys.stage = stage
    for name, layout in layouts.items():
        for prefix in ("", "moments."):
            item = document.parallel_layout_item.add()
            item.param_name = prefix + name
            cut = item.parallel_layouts
            cut.dev_matrix.add().dim.extend(layout.devices)
            cut.tensor_map.add().dim.extend(layout.axes)
            cut.param_split_shape.add()
            cut.indices_offset.add()
            cut.field, cut.opt_weight_shard_step, cut.opt_weight_shard_size = 0, layout.step, layout.shards
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(document.SerializeToString())
    return path


def write_json(path: Path, layouts: Mapping[str, Layout]) -> Path:
    items: dict[str, Any] = {
        name: {
            "dev_matrix": list(layout.devices),
            "tensor_map": list(layout.axes),
            "opt_weight_shard_size": layout.shards,
            "opt_weight_shard_step": layout.step,
            "field": 0,
            "tensor_shape": [8, 8],
        }
        for name, layout in layouts.items()
    }
    path.write_text(
        json.dumps({"current_stage": 2, "parallel_layout_item": items, "parallel_strategy_item": {"M": {"stage": 0}}})
    )
    return path
