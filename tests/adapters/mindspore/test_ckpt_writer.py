"""The files of a power-off checkpoint are those of ``mindspore.save_checkpoint``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest

from tests.damage import flip
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


def test_mindspore_reads_them_and_checks_the_crc(tmp_path: Path) -> None:
    entries = [entry(name, array, TYPES[name]) for name, array in ARRAYS.items()]
    path = write(tmp_path / "a.ckpt", [*entries, number("epoch_num", 3), number("loss_scale", 1024.0)])
    found = ms.load_checkpoint(str(path), crc_check=True)
    assert set(found) == {*ARRAYS, "epoch_num", "loss_scale"}
    for name, array in ARRAYS.items():
        assert (found[name].asnumpy() == array).all()
        assert found[name].asnumpy().dtype == array.dtype and found[name].shape == array.shape
    assert int(found["epoch_num"].asnumpy()) == 3 and float(found["loss_scale"].asnumpy()) == 1024


def test_the_bytes_are_those_of_save_checkpoint(tmp_path: Path) -> None:
    stock = tmp_path / "stock.ckpt"
    listed = [{"name": name, "data": ms.Tensor(array)} for name, array in ARRAYS.items()]
    ms.save_checkpoint(listed, str(stock), append_dict={"epoch_num": 3}, crc_check=True)
    entries = [entry(name, array, TYPES[name]) for name, array in ARRAYS.items()]
    ours = write(tmp_path / "ours.ckpt", [*entries, number("epoch_num", 3)])
    assert ours.read_bytes() == stock.read_bytes()


def test_a_large_tensor_is_cut_and_comes_back_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ckpt_writer, "CHUNK_BYTES", 1000)
    array = np.random.default_rng(0).standard_normal((30, 100)).astype(np.float32)
    path = write(tmp_path / "a.ckpt", [entry("before", ARRAYS["weight"], "Float32"), entry("large", array, "Float32")])
    found = ms.load_checkpoint(str(path), crc_check=True)
    assert (found["large"].asnumpy() == array).all()


def test_a_flipped_bit_is_found_by_mindspore(tmp_path: Path) -> None:
    path = write(tmp_path / "a.ckpt", [entry("weight", ARRAYS["weight"], "Float32")])
    flip(path, 40)
    with pytest.raises(ValueError, match="Failed to read the checkpoint file"):
        ms.load_checkpoint(str(path), crc_check=True)


def test_a_cancelled_save_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(Cancelled), piece_file(tmp_path / "a.ckpt") as target:
        write_entries(target, [entry("weight", ARRAYS["weight"], "Float32")], lambda: True)
    assert list(tmp_path.iterdir()) == []
