"""Small files and names are durable when a call returns."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from ttp.store.durable import make_directory, replace_file, sync_directory, write_durably


def test_the_bytes_are_there_and_nothing_else_is(tmp_path: Path) -> None:
    write_durably(tmp_path / "file", b"one")
    write_durably(tmp_path / "file", b"two")
    assert (tmp_path / "file").read_bytes() == b"two"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_bytes_first_then_the_name_then_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    real_replace = Path.replace

    def fsync(fd: int) -> None:
        path = Path(f"/proc/self/fd/{fd}").readlink()
        seen.append("sync names" if path.is_dir() else f"sync {os.fstat(fd).st_size} bytes")

    def replace(self: Path, target: Path) -> Path:
        seen.append("rename")
        return real_replace(self, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "replace", replace)
    write_durably(tmp_path / "file", b"12345")
    assert seen == ["sync 5 bytes", "rename", "sync names"]


def test_the_old_file_survives_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    write_durably(tmp_path / "file", b"old")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space.*/file'"):
        write_durably(tmp_path / "file", b"new")
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("file", b"old")]


def test_directories_whose_names_could_not_be_synced_are_synced_at_the_next_try(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Path] = []

    def fsync(fd: int) -> None:
        seen.append(Path(f"/proc/self/fd/{fd}").readlink())
        if len(seen) == 2:
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match="Input/output error"):
        make_directory(tmp_path / "one" / "two" / "three")
    assert not list(tmp_path.iterdir())
    seen[:] = [tmp_path] * 2
    make_directory(tmp_path / "one" / "two" / "three")
    assert set(seen[2:]) == {tmp_path, tmp_path / "one", tmp_path / "one" / "two"}


@pytest.mark.parametrize("write", [replace_file, write_durably])
def test_writers_with_one_pid_publish_whole_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Path, bytes], None]
) -> None:
    """Ranks in containers of their own share the directory, and each of them is process 1."""
    monkeypatch.setattr(os, "getpid", lambda: 1)
    real = Path.replace

    def meanwhile(self: Path, target: Path) -> Path:
        monkeypatch.setattr(Path, "replace", real)
        write(tmp_path / "file", b"another's")
        return real(self, target)

    monkeypatch.setattr(Path, "replace", meanwhile)
    write(tmp_path / "file", b"one's")
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("file", b"one's")]


def test_nothing_is_left_of_a_write_that_was_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(fd: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_durably(tmp_path / "file", b"new")
    assert not list(tmp_path.iterdir())


def test_another_name_of_the_old_bytes_keeps_them(tmp_path: Path) -> None:
    write_durably(tmp_path / "file", b"old")
    os.link(tmp_path / "file", tmp_path / "other")
    write_durably(tmp_path / "file", b"new")
    assert (tmp_path / "other").read_bytes() == b"old"


def test_only_directories_are_synced_as_directories(tmp_path: Path) -> None:
    handles = len([*Path("/proc/self/fd").iterdir()])
    sync_directory(tmp_path)
    assert len([*Path("/proc/self/fd").iterdir()]) == handles
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        sync_directory(tmp_path / "file")
