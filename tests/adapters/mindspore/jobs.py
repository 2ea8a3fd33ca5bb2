"""Makes directories with a checkpoint for each rank, as ``ModelCheckpoint`` does; MindSpore writes the files."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from ttp.core.layout import Rank, Shard, Version
from ttp.core.messages import Piece
from ttp.store.digest import digest_file
from ttp.store.manifest import MANIFEST, Manifest

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


def add_manifest(step: Path, groups: Mapping[str, Sequence[int]], version: int = 12) -> Path:
    """Add the manifest of a power-off checkpoint: a file belongs to the shard that the rank of its folder holds."""
    shards = {rank: shard for shard, ranks in groups.items() for rank in ranks}
    pieces = []
    for file in sorted(step.rglob("*.ckpt")):
        rank, name = int(file.parent.name.removeprefix("rank_")), file.relative_to(step).as_posix()
        pieces.append(Piece(name, *digest_file(file), "shard", shards.get(rank, min(groups)), Rank(rank)))
    held = {Shard(shard): tuple(map(Rank, ranks)) for shard, ranks in groups.items()}
    world_size = max(shards) + 1
    manifest = Manifest(Version(version), "r", 0, "i", "c", "w", world_size, held, "mindspore", 0.0, tuple(pieces))
    (step / MANIFEST).write_text(manifest.to_json())
    return step


def saved_by_ttp(save_dir: Path, version: int) -> Path:
    """Return a checkpoint of two groups of two ranks, which ranks 0 and 3 have written."""
    step = save_dir / f"tft_saved_checkpoints-step_{version}"
    make_job(step, [(0,), (3,)], lambda rank: f"ttp_rank_{rank}-1_{version}.ckpt", step=version)
    return add_manifest(step, {"even": (0, 2), "odd": (1, 3)}, version)


def group_of(path: Path) -> float:
    """Return the group whose weights a file holds, as MindSpore loads it."""
    import mindspore as ms

    return float(ms.load_checkpoint(str(path), crc_check=True)["l1.w"].asnumpy()[0, 0])
