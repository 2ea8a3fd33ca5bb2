"""The files of a power-off checkpoint are those of ``mindspore.save_checkpoint``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore.train import serialization

from ttp.mindspore_files import ckpt_writer
from ttp.mindspore_files.ckpt_writer import TensorToWrite, number, write_entries
from ttp.processor.source import Cancelled
from ttp.store.piece_file import piece_file

pytestmark = pytest.mark.xdist_group("mindspore")


def never() -> bool:
    return False


def entry(name: str, array: Any, dtype: str) -> TensorToWrite:
    return TensorToWrite(name, dtype, array.shape, memoryview(array.reshape(-1).view(np.uint8)))


def write(path: Path, entries: list[TensorToWrite]) -> Path:
    with piece_file(path) as target:
        write_entries(target, entries, never)
        target.sync_and_close()
    return path


ARRAYS: dict[str, Any] = {
    "weight": np.arange(12, dtype=np.float32).reshape(3, 4),
    "half": np.ones((2, 1, 3), np.float16),
    "global_step": np.array([7], np.int32),
    "scalar": np.array(0.5, np.float32),
    "flag": np.array([True, False]),
}
TYPES = {"weight": "Float32", "half": "Float16", "global_step": "Int32", "scalar": "Float32", "flag": "Bool"}


@pytest.mark.parametrize("cut", [False, True])
def test_the_bytes_are_those_of_save_checkpoint(cut: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With their CRC. ``cut``: a large tensor is split into several values."""
    arrays, types = dict(ARRAYS), dict(TYPES)
    if cut:
        arrays["large"], types["large"] = np.random.default_rng(0).standard_normal((30, 100), np.float32), "Float32"
        monkeypatch.setattr(serialization, "SLICE_SIZE", 1)  # KiB
        monkeypatch.setattr(ckpt_writer, "CHUNK_BYTES", 1024)
    stock, numbers = tmp_path / "stock.ckpt", {"epoch_num": 3, "loss_scale": 1024.0}
    listed = [{"name": name, "data": ms.Tensor(array)} for name, array in arrays.items()]
    ms.save_checkpoint(listed, str(stock), append_dict=numbers, crc_check=True)
    entries = [entry(name, array, types[name]) for name, array in arrays.items()]
    ours = write(tmp_path / "ours.ckpt", [*entries, *(number(name, value) for name, value in numbers.items())])
    assert ours.read_bytes() == stock.read_bytes()


def test_a_cancelled_save_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(Cancelled), piece_file(tmp_path / "a.ckpt") as target:
        write_entries(target, [entry("weight", ARRAYS["weight"], "Float32")], lambda: True)
    assert list(tmp_path.iterdir()) == []
