"""Files of the real ``save_checkpoint`` are read as ``load_checkpoint`` reads them; damaged ones are refused."""

from __future__ import annotations

import random
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from ttp.errors import CheckpointError
from ttp.mindspore_files.ckpt_reader import CkptContents, index, read_contents
from ttp.mindspore_files.file_messages import BYTES, DIMS_MAX, varint

pytestmark = pytest.mark.xdist_group("mindspore-files")

ARRAYS: dict[str, Any] = {
    "weight": np.arange(12, dtype=np.float32).reshape(3, 4),
    "half": np.ones((2, 2), np.float16),
    "flag": np.array([True, False]),
    "empty.name.with.dots": np.arange(5, dtype=np.int64),
    "scalar": np.float32(2.5),
    "one": np.array([7], np.int32),
}


def save(path: Path, *, crc: bool, arrays: dict[str, Any] = ARRAYS, **append: Any) -> Path:
    import mindspore as ms

    data = [{"name": name, "data": ms.Tensor(array)} for name, array in arrays.items()]
    ms.save_checkpoint(data, str(path), integrated_save=False, append_dict=append or None, crc_check=crc)
    return path


@pytest.mark.parametrize("crc", [False, True])
def test_what_mindspore_saves_is_read(crc: bool, tmp_path: Path) -> None:
    import mindspore as ms

    path = save(tmp_path / "a.ckpt", crc=crc, epoch_num=2, step_num=9, lr=0.5, note="words")
    found = read_contents(path)
    assert found.counters == {"epoch_num": 2, "step_num": 9}
    loaded = ms.load_checkpoint(str(path))
    assert set(found.entries) == set(loaded)
    for name, value in loaded.items():
        if isinstance(value, str):
            continue
        array = value.asnumpy()
        assert found.entries[name].shape == array.shape
        assert found.entries[name].digest == xxhash.xxh3_128(array.tobytes()).hexdigest()


def test_a_tensor_in_many_parts_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mindspore.train import serialization

    big = np.arange(4096, dtype=np.float32).reshape(64, 64)
    whole = save(tmp_path / "a.ckpt", crc=True, arrays={"w": big})
    monkeypatch.setattr(serialization, "SLICE_SIZE", 1)  # KiB
    cut = save(tmp_path / "b.ckpt", crc=True, arrays={"w": big})
    assert cut.stat().st_size > whole.stat().st_size
    assert read_contents(cut).entries == read_contents(whole).entries


def test_a_flipped_bit_is_found_with_a_crc(tmp_path: Path) -> None:
    data = save(tmp_path / "a.ckpt", crc=True).read_bytes()
    path = tmp_path / "b.ckpt"
    for bit in range(0, 8 * (len(data) - 17), 13):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        with pytest.raises(CheckpointError, match=str(path)):
            read_contents(path)


def test_a_cut_is_found(tmp_path: Path) -> None:
    """Without a CRC a file that ends between two tensors looks whole; replicas show it, see test_recover."""
    for crc in (True, False):
        data = save(tmp_path / f"{crc}.ckpt", crc=crc).read_bytes()
        path = tmp_path / "cut.ckpt"
        whole = 0
        for size in range(0, len(data), 3):
            path.write_bytes(data[:size])
            try:
                whole += len(read_contents(path).entries) < len(ARRAYS)
            except CheckpointError:
                continue
        assert whole <= len(ARRAYS)


def test_thousands_of_damaged_files_are_read_or_refused(tmp_path: Path) -> None:
    data = save(tmp_path / "a.ckpt", crc=False, epoch_num=1).read_bytes()
    path = tmp_path / "b.ckpt"
    draw = random.Random(7)
    refused = 0
    for _ in range(1200):
        broken = bytearray(data)
        for _ in range(draw.randint(1, 3)):
            at = draw.randrange(len(broken))
            broken[at : at + draw.randrange(4)] = draw.choice([b"", b"\xff", b"\x80\x80", draw.randbytes(4)])
        path.write_bytes(broken)
        try:
            assert isinstance(read_contents(path), CkptContents)
        except CheckpointError:
            refused += 1
    assert refused > 300


@pytest.mark.parametrize("data", [b"", b"\x0a", b"PK\x03\x04", b"\x80" * 40, b"crc_num" + bytes(10)])
def test_what_is_no_checkpoint(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="is damaged"):
        read_contents(path)


def test_a_shape_with_more_dimensions_than_a_tensor_can_have(tmp_path: Path) -> None:
    """The product of thousands of large extents takes minutes."""
    path = tmp_path / "x.ckpt"
    for count, fits in ((DIMS_MAX, True), (DIMS_MAX + 1, False)):
        head = field(1, bytes([1] * count)) + field(2, b"Float32")
        path.write_bytes(field(1, field(1, b"w") + field(2, head + field(3, bytes(4)))))
        for read in (read_contents, index):
            with nullcontext() if fits else pytest.raises(CheckpointError, match="w has the shape"):
                read(path)


def field(number: int, content: bytes) -> bytes:
    return varint(number << 3 | BYTES) + varint(len(content)) + content


def test_what_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="No such file"):
        read_contents(tmp_path / "no.ckpt")
    with pytest.raises(CheckpointError, match="Is a directory"):
        read_contents(tmp_path)
