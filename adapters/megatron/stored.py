"""A checkpoint of a Megatron job as programs read it that are no ranks of a job: what is in it, and who held what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import StorageMeta

from ttp.adapters.megatron.geometry import Tile
from ttp.adapters.megatron.rank_layout import RANK_LAYOUT_PREFIX, RankLayout
from ttp.adapters.megatron.restore import Want, fill
from ttp.adapters.megatron.stock import JOB_KEY
from ttp.adapters.torch.restoring.reader import read_value
from ttp.adapters.torch.saving.job_state import JobState, read_job_state
from ttp.adapters.torch.saving.metadata import build_metadata
from ttp.adapters.torch.saving.piece_index import IndexEntry, items_of
from ttp.errors import CheckpointError
from ttp.store.manifest import Manifest

FRAMEWORK = "megatron"


class MegatronCheckpoint:
    """The checkpoint at ``path``; its digests have been verified. Nothing but values of its own is loaded.

    Args:
        path: the directory.

    Raises:
        CheckpointError: it was not written by a Megatron job, or its shards do not fit together.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.manifest = path, Manifest.load(path)
        if self.manifest.framework != FRAMEWORK:
            raise CheckpointError(f"{path} was written by the {self.manifest.framework} adapter, not by a Megatron job")
        items = items_of(self.manifest.pieces)
        build_metadata(items, StorageMeta())  # that boxes cover every tensor exactly once
        self.items: dict[str, list[IndexEntry]] = {}
        for item in items:
            self.items.setdefault(item.key, []).append(item)
        self.job: JobState = read_job_state(path, self.manifest.pieces)
        if JOB_KEY not in self.job.extra:
            raise CheckpointError(f"the job state of {path} has nothing of Megatron")

    @property
    def optimizers(self) -> Sequence[Mapping[str, Any]]:
        """Param groups and counts of steps, of each optimizer."""
        return list(self.job.extra[JOB_KEY]["optimizers"])

    def rank_layouts(self) -> list[RankLayout]:
        """Of the ranks that have written.

        Raises:
            CheckpointError: there are none, or they cannot be read.
        """
        told = (item for key, items in self.items.items() if key.startswith(RANK_LAYOUT_PREFIX) for item in items)
        found = [RankLayout.from_json(str(self._value(item))) for item in told]
        if not found:
            raise CheckpointError(
                f"{self.path} does not say which names its ranks had: an older ttp wrote it, or the log of "
                "the job said why not. ttp.restore() and Megatron's torch_dist loader read it"
            )
        return found

    def _value(self, item: IndexEntry) -> Any:
        """A plain value, which Megatron puts into lists of one."""
        (found,) = read_value(self.path, item)
        return found

    def dtype(self, key: str) -> torch.dtype:
        """Of a tensor that is there."""
        return self.items[key][0].torch_dtype

    def read(self, tile: Tile, prefix: str) -> Tensor:
        """A tensor, whole.

        Args:
            tile: where it is, as a tensor of its own.
            prefix: what stands before its name: nothing for a weight, else the name of the optimizer's state.

        Raises:
            CheckpointError: something is missing, or cannot be read.
        """
        target = torch.empty(tile.sizes, dtype=self.dtype(prefix + tile.key))
        parts = tile.parts(0, target.numel()) if target.numel() else ()
        fill(self.path, [Want(prefix + tile.key, part, part.view(target.view(-1), 0)) for part in parts], self.items)
        return target


def whole_tile(key: str, shape: Sequence[int], index: Sequence[int]) -> Tile:
    """Of a checkpoint's tensor that holds one of each layer or expert: that of one of them, as a tensor of its own.

    Args:
        key: of the checkpoint's tensor.
        shape: of it.
        index: which, along as many dimensions in front.
    """
    sizes = tuple(shape[len(index) :])
    strides = tuple(prod(sizes[dim + 1 :]) for dim in range(len(sizes)))
    return Tile(key, tuple(shape), (*index, *(0,) * len(sizes)), sizes, strides, 0, flexible=False)
