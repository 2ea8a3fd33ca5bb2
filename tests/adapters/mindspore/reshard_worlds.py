"""Cuts whole tensors with plain numpy, as MindSpore's documents say, into the files of any number of ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np

from ttp.mindspore_files.reshard import Resharded, Wish, reshard

STRATEGIES = Path(__file__).parent / "data" / "strategies"
"""Written by MindSpore 2.10 itself for 784x64, 64x64, 64x16 matrices and their moments."""

Array = Any
TensorMap = Sequence["int | list[int]"]


@dataclass(frozen=True)
class Cut:
    """The layout of one tensor, in the terms of a strategy file."""

    devices: tuple[int, ...]
    tensor_map: TensorMap
    opt_size: int = 0
    opt_step: int = 0

    def piece(self, full: Array, rank: int) -> Array:
        """Return what ``rank`` holds, by splitting axis after axis."""
        at = self._coordinates(rank)
        for axis, cuts in enumerate(self.tensor_map):
            for device in cuts if isinstance(cuts, list) else [cuts]:
                if device >= 0:
                    full = np.split(full, self.devices[-1 - device], axis)[at[-1 - device]]
        if self.opt_size > 1:
            alike = [r for r in range(int(np.prod(self.devices))) if self._slice(r) == self._slice(rank)]
            full = np.split(full, self.opt_size, 0)[alike.index(rank) % self.opt_size]
        return np.ascontiguousarray(full) if full.shape else full

    def _coordinates(self, rank: int) -> list[int]:
        return [int(index) for index in np.unravel_index(rank, self.devices)]

    def _slice(self, rank: int) -> list[int]:
        at = self._coordinates(rank)
        flat = itertools.chain.from_iterable(m if isinstance(m, list) else [m] for m in self.tensor_map)
        return [at[-1 - device] for device in flat if device >= 0]


Cuts = Mapping[str, Cut]
Tensors = Mapping[str, Array]


def real_cuts(devices: tuple[int, ...], *, opt: bool = False) -> dict[str, Cut]:
    """Return the layouts of the real strategy files: columns, rows, not cut."""
    split = {"opt_size": 2, "opt_step": 4} if opt else {}
    lone = {"opt_size": 2, "opt_step": 1} if opt else {}
    made = {"l1.w": Cut(devices, [-1, 0], **split), "l2.w": Cut(devices, [0, -1], **split)}
    made["l3.w"] = Cut(devices, [-1, -1], **lone)
    return {**made, **{f"moments.{name}": cut for name, cut in made.items()}}


def real_tensors() -> dict[str, Array]:
    random = np.random.default_rng(7)
    shapes = {"l1.w": (784, 64), "l2.w": (64, 64), "l3.w": (64, 16)}
    made = {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    return {**made, **{f"moments.{name}": random.normal(size=full.shape) for name, full in made.items()}}


def pieces(tensors: Tensors, cuts: Cuts, rank: int) -> dict[str, Array]:
    """Return what a rank of a stage holds. Tensors without a layout are held whole."""
    return {name: cuts[name].piece(full, rank) if name in cuts else full for name, full in tensors.items()}


def save(directory: Path, tensors: Tensors, cuts: Cuts, ranks: Iterable[int], step: int = 12, first: int = 0) -> Path:
    """Write files of ``ranks`` as stock MindSpore does, with what training adds; ``first``: the stage's first rank."""
    for rank in ranks:
        listed = [{"name": n, "data": ms.Tensor(value)} for n, value in pieces(tensors, cuts, rank - first).items()]
        listed.append({"name": "global_step", "data": ms.Tensor(np.array([step], np.int32))})
        listed.append({"name": "learning_rate", "data": ms.Tensor(np.float32(0.25))})
        folder = directory / f"rank_{rank}"
        folder.mkdir(parents=True, exist_ok=True)
        more = {"epoch_num": 3, "step_num": step, "cur_rank": rank, "loss_scale": 8.0, "note": "as it was"}
        ms.save_checkpoint(listed, str(folder / f"net-3_{step}.ckpt"), integrated_save=False, append_dict=more)
    return directory


def write_strategy(path: Path, cuts: Cuts, stage: int = 0) -> Path:
    """Write a strategy file as MindSpore does."""
    from mindspore.train import node_strategy_pb2

    document = node_strategy_pb2.ParallelStrategyMap(current_stage=2)
    node = document.parallel_strategy_item.add(node_name=f"node_{stage}")
    node.parallel_strategys.stage = stage
    for name, cut in cuts.items():
        layouts = document.parallel_layout_item.add(param_name=name).parallel_layouts
        layouts.dev_matrix.add().dim.extend(cut.devices)
        nested = any(isinstance(axis, list) for axis in cut.tensor_map)
        if nested:
            for axis in cut.tensor_map:
                layouts.tensor_map.add().dim.extend(axis if isinstance(axis, list) else [axis])
        else:
            layouts.tensor_map.add().dim.extend(cut.tensor_map)
        layouts.param_split_shape.add()
        layouts.indices_offset.add()
        layouts.field, layouts.opt_weight_shard_step, layouts.opt_weight_shard_size = 0, cut.opt_step, cut.opt_size
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(document.SerializeToString())
    return path


def load(directory: Path, rank: int) -> dict[str, Any]:
    """Read a rank's file with stock MindSpore, including its CRC."""
    (file,) = (directory / f"rank_{rank}").glob("*.ckpt")
    loaded = ms.load_checkpoint(str(file), crc_check=True)
    return {name: value if isinstance(value, str) else value.asnumpy() for name, value in loaded.items()}


def assert_same(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    for name, value in expected.items():
        assert found[name].dtype == value.dtype and found[name].shape == value.shape, name
        assert found[name].tobytes() == value.tobytes(), name


def assert_cut(directory: Path, tensors: Tensors, cuts: Cuts | None, ranks: Iterable[int], first: int = 0) -> None:
    """Check every element of every rank against plain slicing; None: not cut."""
    for rank in ranks:
        kept = tensors if cuts is None else {name: tensors[name] for name in tensors if name in cuts}
        assert_same(load(directory, rank), pieces(kept, cuts or {}, rank - first))


def quiet(_what: str, _total: int | None) -> Callable[[int], None]:
    return lambda _count: None


TENSORS = real_tensors()
S8, S8O, S4 = real_cuts((2, 4)), real_cuts((2, 4), opt=True), real_cuts((4,))
PP = [{name: cut for name, cut in S4.items() if ("l3" in name) == last} for last in (False, True)]


def run(source: Path, target: Path, src: Path | None, dst: Path | None, **more: Any) -> Resharded:
    return reshard(Wish(source, target, src, dst, **more), quiet)
