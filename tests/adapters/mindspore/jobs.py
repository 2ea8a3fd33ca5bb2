"""Makes directories with a checkpoint for each rank, as ``ModelCheckpoint`` does; MindSpore writes the files."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

Groups = Sequence[Sequence[int]]
S8_GROUPS = ((0, 4), (1, 5), (2, 6), (3, 7))


def rank_name(rank: int) -> str:
    """Return a name as in the sample of the documents, where the folder tells the rank."""
    return "checkpoint-2_1875.ckpt"


def make_job(
    root: Path, groups: Groups, name: Callable[[int], str] = rank_name, *, step: int = 1875, crc: bool = True
) -> Path:
    """Make a folder ``rank_N`` for each rank of ``groups``. Ranks of one group hold the same state."""
    import mindspore as ms

    for place, group in enumerate(groups):
        data = [
            {"name": "l1.w", "data": ms.Tensor(np.full((8, 4), place, np.float32))},
            {"name": "l3.w", "data": ms.Tensor(np.arange(8, dtype=np.float32))},
        ]
        first: Path | None = None
        for rank in group:
            path = root / f"rank_{rank}" / name(rank)
            path.parent.mkdir(parents=True, exist_ok=True)
            if first is None:
                numbers = {"epoch_num": 2, "step_num": step}
                ms.save_checkpoint(data, str(path), integrated_save=False, append_dict=numbers, crc_check=crc)
                path.chmod(0o600)
                first = path
            else:
                shutil.copy(first, path)
    return root


def flip(path: Path, at: int = -40) -> None:
    """Flip a bit in the last tensor, or in what follows it."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def group_of(path: Path) -> float:
    """Return the group whose weights a file holds, as MindSpore loads it."""
    import mindspore as ms

    return float(ms.load_checkpoint(str(path), crc_check=True)["l1.w"].asnumpy()[0, 0])
