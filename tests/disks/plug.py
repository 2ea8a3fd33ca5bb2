"""A disk that loses its power at a chosen call, and the files that are left on it.

Data that a dead process gave to the kernel is kept. A power cut may lose more: some or all of the names whose directory
was not synced. ``PluggedDisk`` remembers which those are, so a test can look at each outcome.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import os
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TypeVar

from ttp.store.digest import digest_bytes
from ttp.store.disk import Disk

T = TypeVar("T")


class PowerCut(BaseException):
    """The machine has lost its power. It is not an ``Exception``, so that no handler catches it."""


class Moment(enum.Enum):
    """When the power is cut, relative to the chosen call."""

    BEFORE = "before"
    DURING = "during"  # half a file is written, half a tree is removed; other calls are atomic: not done
    AFTER = "after"


class Loss(enum.Enum):
    """Which unsynced names are lost."""

    NOTHING = "nothing"  # the process died, the machine did not
    ALL = "all"
    ALL_BUT_RENAMES = "all but renames"  # the disk may choose an order of its own


class PluggedDisk(Disk):
    """Counts its calls, and raises at one of them. Syncing only clears what could be lost, so it is fast.

    Args:
        cut_at: number of the call, from 0; None: never.
        moment: when exactly.
        problem: what to raise instead of ``PowerCut``; an OSError stands for a disk that refuses once and works later.
        lacks: names of methods that this file system answers with ENOSYS.
    """

    def __init__(
        self,
        cut_at: int | None = None,
        moment: Moment = Moment.BEFORE,
        problem: BaseException | None = None,
        lacks: Collection[str] = (),
    ) -> None:
        self.cut_at, self.moment, self.problem, self.lacks = cut_at, moment, problem, lacks
        self.calls: list[str] = []
        self._unsynced: list[tuple[tuple[int, int], bool, Callable[[], None]]] = []

    @property
    def losses(self) -> set[Loss]:
        """Which losses now leave different disks."""
        kinds = {is_rename for _, is_rename, _ in self._unsynced}
        return {Loss.NOTHING, *([Loss.ALL] if kinds else []), *([Loss.ALL_BUT_RENAMES] if len(kinds) == 2 else [])}

    def lose(self, loss: Loss) -> None:
        """Undo the names that were not synced, the latest first."""
        for _, is_rename, undo in reversed(self._unsynced):
            if loss is Loss.ALL or (loss is Loss.ALL_BUT_RENAMES and not is_rename):
                with contextlib.suppress(OSError):  # what it hung on is gone already
                    undo()
        self._unsynced.clear()

    def names(self, directory: Path) -> list[str]:
        return self._call("names", lambda: Disk.names(self, directory))

    def tree(self, directory: Path) -> tuple[list[Path], list[Path]]:
        return self._call("tree", lambda: Disk.tree(self, directory))

    def size(self, file: Path) -> int | None:
        return self._call("size", lambda: Disk.size(self, file))

    def make_directory(self, directory: Path) -> None:
        def make() -> None:
            if not directory.exists():
                Disk.make_directory(self, directory)
                made = _identity(directory)
                self._remember(directory.parent, False, lambda: self._unmake(directory, made))

        self._call("make_directory", make)

    def link(self, source: Path, target: Path) -> None:
        def make() -> None:
            Disk.link(self, source, target)
            self._remember_name(target)

        self._call("link", make)

    def write(self, file: Path, data: bytes) -> str:
        def make(part: bytes) -> str:
            file.unlink(missing_ok=True)
            file.write_bytes(part)
            self._remember_name(file)
            return digest_bytes(data)

        return self._call("write", lambda: make(data), lambda: make(data[: len(data) // 2]))

    def rename(self, source: Path, target: Path) -> None:
        def rename() -> None:
            Disk.rename(self, source, target)
            self._remember(target.parent, True, lambda: Disk.rename(self, target, source))

        self._call("rename", rename)

    def exchange(self, one: Path, other: Path) -> None:
        def exchange() -> None:
            Disk.exchange(self, one, other)
            self._remember(one.parent, True, lambda: Disk.exchange(self, one, other))

        self._call("exchange", exchange)

    def sync_directory(self, directory: Path) -> None:
        def sync() -> None:
            synced = _identity(directory)
            self._unsynced = [entry for entry in self._unsynced if entry[0] != synced]

        self._call("sync_directory", sync)

    def remove(self, file: Path) -> None:
        self._call("remove", lambda: Disk.remove(self, file))

    def remove_tree(self, directory: Path) -> None:
        def remove_half() -> None:
            files = Disk.tree(self, directory)[1]
            for file in files[: (len(files) + 1) // 2]:
                file.unlink()

        self._call("remove_tree", lambda: Disk.remove_tree(self, directory), remove_half)

    def _call(self, name: str, do: Callable[[], T], do_half: Callable[[], object] | None = None) -> T:
        number = len(self.calls)
        self.calls.append(name)
        if number != self.cut_at:
            return self._do(name, do)
        if self.moment is Moment.AFTER:
            with contextlib.suppress(OSError):
                self._do(name, do)
        elif self.moment is Moment.DURING and do_half is not None:
            do_half()
        raise self.problem or PowerCut(f"{self.moment.value} call {number}: {name}")

    def _do(self, name: str, do: Callable[[], T]) -> T:
        if name in self.lacks:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        return do()

    def _unmake(self, directory: Path, made: tuple[int, int]) -> None:
        if _identity(directory) == made:  # otherwise it was renamed, and that was not lost
            Disk.remove_tree(self, directory)

    def _remember(self, directory: Path, is_rename: bool, undo: Callable[[], None]) -> None:
        self._unsynced.append((_identity(directory), is_rename, undo))

    def _remember_name(self, file: Path) -> None:
        handle = _Directory(file.parent)  # by handle: the directory may have another name by then
        self._remember(file.parent, False, lambda: os.unlink(file.name, dir_fd=handle.fd))


class _Directory:
    def __init__(self, path: Path) -> None:
        self.fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)

    def __del__(self) -> None:
        os.close(self.fd)


def _identity(directory: Path) -> tuple[int, int]:
    status = directory.stat()
    return status.st_dev, status.st_ino
