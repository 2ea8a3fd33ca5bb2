"""Files that compute their digest while they are written."""

from __future__ import annotations

import array
import ctypes
import errno
import io
import os
from pathlib import Path

import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ttp.store import digest, plain_file
from ttp.store.digest import HashingFile, digest_bytes, digest_file
from ttp.store.piece_file import piece_file

SIZES = st.one_of(st.integers(0, 300), st.sampled_from([65535, 65536, 65537, 1 << 20, (1 << 20) + 1, 9 << 20]))


def expected(data: bytes) -> str:
    return f"xxh3_128:{xxhash.xxh3_128_hexdigest(data)}"


@settings(max_examples=40, suppress_health_check=list(HealthCheck), deadline=None)
@given(sizes=st.lists(SIZES, max_size=6), flush_after=st.integers(0, 6))
def test_writes_of_all_sizes_arrive_in_order_and_are_digested(
    tmp_path: Path, sizes: list[int], flush_after: int
) -> None:
    parts = [bytes([index + 1]) * size for index, size in enumerate(sizes)]
    file = HashingFile(tmp_path / "piece")
    for index, part in enumerate(parts):
        assert file.tell() == sum(sizes[:index])
        assert file.write(part) == len(part)
        if index == flush_after:
            file.flush()
            assert (tmp_path / "piece").stat().st_size == file.tell()
    whole = b"".join(parts)
    assert file.digest() == expected(whole)
    assert file.sync_and_close() == (len(whole), expected(whole))
    assert (tmp_path / "piece").read_bytes() == whole
    assert digest_file(tmp_path / "piece") == (len(whole), expected(whole))


@pytest.mark.parametrize("size", [3, 100_000])
@pytest.mark.parametrize("make", [bytes, bytearray, memoryview, lambda data: array.array("B", data)])
def test_any_contiguous_buffer_is_written_by_its_bytes(tmp_path: Path, make: object, size: int) -> None:
    data = os.urandom(size)
    file = HashingFile(tmp_path / "piece")
    file.write(make(data))  # type: ignore[operator]
    assert file.sync_and_close() == (size, expected(data))


def test_wide_items_count_in_bytes(tmp_path: Path) -> None:
    file = HashingFile(tmp_path / "piece")
    assert file.write(array.array("d", [1.0, 2.0])) == 16
    assert file.sync_and_close()[0] == 16


def test_it_works_as_the_target_of_torch_save_and_of_dcp(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from torch.distributed.checkpoint import filesystem as fs
    from torch.distributed.checkpoint.metadata import MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

    tensor = torch.arange(100_000, dtype=torch.float32)
    file = HashingFile(tmp_path / "piece")
    blob = WriteItem(index=MetadataIndex("a"), type=WriteItemType.BYTE_IO)
    item = WriteItem(index=MetadataIndex("b"), type=WriteItemType.TENSOR)
    form = [fs.SerializationFormat.TORCH_SAVE] if hasattr(fs, "SerializationFormat") else []  # torch 2.7 has one form
    results = [
        fs._write_item(fs._StorageWriterTransforms(), file, data, write_item, "piece", *form)
        for data, write_item in ((io.BytesIO(b"hello"), blob), (tensor, item))
    ]
    size, found = file.sync_and_close()
    data = (tmp_path / "piece").read_bytes()
    assert (size, found) == (len(data), expected(data))
    assert [(r.storage_data.offset, r.storage_data.length) for r in results] == [(0, 5), (5, size - 5)]
    assert torch.equal(torch.load(io.BytesIO(data[5:]), weights_only=True), tensor)


def test_an_existing_file_is_replaced_and_not_written_into(tmp_path: Path) -> None:
    committed = tmp_path / "committed"
    committed.write_bytes(b"precious")
    os.link(committed, tmp_path / "piece")
    file = HashingFile(tmp_path / "piece")
    file.write(b"other")
    file.sync_and_close()
    assert committed.read_bytes() == b"precious"
    assert (tmp_path / "piece").read_bytes() == b"other"


def test_sync_and_close_waits_for_the_disk_after_all_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda fd: seen.append(os.fstat(fd).st_size))
    file = HashingFile(tmp_path / "piece")
    file.write(b"12345")
    file.sync_and_close()
    assert seen == [5]
    assert file.closed


def test_a_full_disk_is_reported_at_the_write_and_again_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, data: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    file = HashingFile(tmp_path / "piece")
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(OSError, match="No space"):
            file.write(bytes(100_000))
    with pytest.raises(OSError, match="No space"):
        file.sync_and_close()
    assert file.closed


def test_short_writes_of_the_kernel_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[:1000]))
    data = os.urandom(100_000)
    file = HashingFile(tmp_path / "piece")
    file.write(data)
    assert file.sync_and_close() == (100_000, expected(data))
    assert (tmp_path / "piece").read_bytes() == data


def test_a_disk_that_keeps_less_than_it_has_accepted_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the state is still there: a commit that finds the file too short can only give up."""
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[: len(data) // 2]) and len(data))
    with pytest.raises(OSError, match="kept 5 of the 10 bytes") as found, piece_file(tmp_path / "piece") as file:
        file.write(b"0123456789")
        file.sync_and_close()
    assert found.value.errno == errno.EIO and not list(tmp_path.iterdir())


def test_after_the_end_nothing_can_be_written(tmp_path: Path) -> None:
    with HashingFile(tmp_path / "piece") as file:
        file.write(b"1")
    file.close()
    assert (tmp_path / "piece").read_bytes() == b"1"
    for call in (lambda: file.write(b"2"), file.fileno, file.sync_and_close):
        with pytest.raises(ValueError, match="closed"):
            call()


def test_a_directory_that_is_not_there_is_an_error_at_once(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        HashingFile(tmp_path / "absent" / "piece")


def test_progress_adds_up_to_the_size(tmp_path: Path) -> None:
    (tmp_path / "piece").write_bytes(bytes((5 << 20) + 3))
    steps: list[int] = []
    size, _ = digest_file(tmp_path / "piece", steps.append)
    assert sum(steps) == size == (5 << 20) + 3
    assert len(steps) > 1


def test_a_fresh_digest_forgets_what_it_is_about_to_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr(plain_file, "FORGET", 2 << 20)
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, start, size, advice: seen.append(start))
    data = os.urandom((5 << 20) + 3)
    (tmp_path / "piece").write_bytes(data)
    assert digest_file(tmp_path / "piece", fresh=True) == (len(data), expected(data))
    assert seen == [0, 2 << 20, 4 << 20]


def test_no_kernel_help_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest, "_sync_file_range", None)
    data = bytes(20 << 20)
    file = HashingFile(tmp_path / "piece")
    file.write(data)
    assert file.sync_and_close() == (len(data), digest_bytes(data))


def test_a_call_that_is_not_there_or_forbidden_is_done_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that does not know the call refuses it for its files, a sandbox (EPERM...) for any descriptor."""
    unknown = (errno.ENOSYS, errno.EINVAL, errno.ESPIPE, errno.EOPNOTSUPP)
    forbidden = (errno.ENOSYS, errno.EPERM, errno.EACCES)
    for number, of_none in [*((code, errno.EBADF) for code in unknown), *((code, code) for code in forbidden)]:

        def refuse(fd: int, *_: int, number: int = number, of_none: int = of_none) -> int:
            ctypes.set_errno(of_none if fd < 0 else number)
            return -1

        monkeypatch.setattr(digest, "_sync_file_range", refuse)
        file = HashingFile(tmp_path / "piece")
        file.write(b"1")
        assert file.sync_and_close() == (1, digest_bytes(b"1"))
