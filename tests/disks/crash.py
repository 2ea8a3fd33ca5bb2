"""Works out what a disk may hold after a power cut, from the journal of a ``BadDisk``.

The journal lists the requests of the kernel in order. A power cut may come between any two lines. Data that was not
synced then may be lost or not: bytes of a file without an ``fsync`` after them, names without a sync of their
directory. POSIX promises no more, and file systems differ in what they keep.
"""

from __future__ import annotations

import enum
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Union

Line = Sequence[Any]
Tree = dict[str, Union[bytes, "Tree"]]
"""Names in a directory: bytes of a file, or another directory."""

_ROOT = 1
_RENAMES = ("rename", "exchange")


class Loss(enum.Enum):
    """Which unsynced bytes and names are lost."""

    NOTHING = "nothing"  # the process died, the machine did not
    ALL = "all"
    EMPTY = "data, files are empty"
    SHORT = "data, files are short"
    GARBAGE = "data, files have their size and other bytes"
    RENAMES = "renames only"
    ALL_BUT_RENAMES = "all but renames"
    SOME = "some, drawn by lot"


@dataclass(slots=True)
class _File:
    data: bytearray = field(default_factory=bytearray)
    durable: bytes = b""


@dataclass(slots=True)
class _Change:
    """One change of names.

    Args:
        what: first word of the journal's line.
        entries: what the names mean afterwards: directory, name, inode; None: nothing.
        unsynced: directories that were not synced since.
    """

    what: str
    entries: tuple[tuple[int, str, int | None], ...]
    unsynced: set[int] = field(default_factory=set)


class Disk:
    """A disk that was empty at first, with everything that was done to it.

    Args:
        journal: of a ``BadDisk``, up to the power cut.
    """

    def __init__(self, journal: Sequence[Line]) -> None:
        self._files: dict[int, _File] = {}
        self._directories: dict[int, dict[str, int]] = {_ROOT: {}}
        self._changes: list[_Change] = []
        self.take(journal)

    def take(self, journal: Sequence[Line]) -> None:
        """Do what the next lines of the journal say."""
        for line in journal:
            self._take(*line)

    def after(self, loss: Loss, seed: int = 0) -> Tree:
        """Return what the disk holds when the machine starts again. ``seed`` draws the losses of ``Loss.SOME``."""
        lot = random.Random(seed)
        directories: dict[int, dict[str, int]] = {inode: {} for inode in self._directories}
        for change in self._changes:
            if not change.unsynced or _stays(change, loss, lot):
                for directory, name, inode in change.entries:
                    directories[directory].pop(name, None)
                    if inode is not None:
                        directories[directory][name] = inode
        contents = {inode: _content(file, loss, lot) for inode, file in self._files.items()}
        return _tree(_ROOT, directories, contents)

    # --------------------------------------------------------------------------------------------------- the journal

    def _take(self, what: str, *facts: Any) -> None:
        actions: dict[str, Callable[..., None]] = {
            "write": self._write,
            "truncate": self._truncate,
            "fsync": self._fsync,
            "fsyncdir": self._fsyncdir,
            "mark": lambda _: None,
        }
        if what in actions:
            actions[what](*facts)
            return
        entries = tuple(self._entries(what, *facts))
        change = _Change(what, entries, {directory for directory, _, _ in entries})
        self._changes.append(change)
        for directory, name, inode in change.entries:
            self._directories[directory].pop(name, None)
            if inode is not None:
                self._directories[directory][name] = inode

    def _entries(self, what: str, directory: int, name: str, *rest: Any) -> Iterator[tuple[int, str, int | None]]:
        match what, rest:
            case "create", (inode,):
                self._files[inode] = _File()
                yield directory, name, inode
            case "mkdir", (inode,):
                self._directories[inode] = {}
                yield directory, name, inode
            case "link", (inode,):
                yield directory, name, inode
            case "unlink", ():
                yield directory, name, None
            case "rename", (target, new):
                yield target, new, self._directories[directory][name]
                yield directory, name, None
            case "exchange", (target, new):
                yield target, new, self._directories[directory][name]
                yield directory, name, self._directories[target][new]
            case _:
                raise AssertionError((what, rest))

    def _write(self, inode: int, offset: int, data: bytes) -> None:
        file = self._files[inode].data
        file.extend(b"\0" * (offset - len(file)))
        file[offset : offset + len(data)] = data

    def _truncate(self, inode: int, size: int) -> None:
        file = self._files[inode].data
        del file[size:]
        file.extend(b"\0" * (size - len(file)))

    def _fsync(self, inode: int) -> None:
        if inode in self._files:
            self._files[inode].durable = bytes(self._files[inode].data)

    def _fsyncdir(self, inode: int) -> None:
        for change in self._changes:
            change.unsynced.discard(inode)


def _stays(change: _Change, loss: Loss, lot: random.Random) -> bool:
    is_rename = change.what in _RENAMES
    if loss is Loss.SOME:
        return lot.random() < 0.5
    return not (
        loss is Loss.ALL or (loss is Loss.RENAMES and is_rename) or (loss is Loss.ALL_BUT_RENAMES and not is_rename)
    )


def _content(file: _File, loss: Loss, lot: random.Random) -> bytes:
    data, durable = bytes(file.data), file.durable
    if data == durable:
        return data
    half = len(durable) + max(0, len(data) - len(durable)) // 2
    found = {
        Loss.NOTHING: data,
        Loss.RENAMES: data,
        Loss.SHORT: data[:half],
        Loss.GARBAGE: durable + b"\xa5" * max(0, len(data) - len(durable)),
    }
    if loss is Loss.SOME:
        return lot.choice([data, durable, found[Loss.SHORT], found[Loss.GARBAGE]])
    return found.get(loss, durable)


def _tree(inode: int, directories: dict[int, dict[str, int]], contents: dict[int, bytes]) -> Tree:
    return {
        name: _tree(child, directories, contents) if child in directories else contents[child]
        for name, child in directories[inode].items()
    }


def fingerprint(tree: Tree) -> int:
    """Return a hash of a tree, equal for equal trees within this process."""
    return hash(tuple(sorted((n, hash(c) if isinstance(c, bytes) else fingerprint(c)) for n, c in tree.items())))


def outcomes(
    recorded: Sequence[Line], cuts: Iterable[int], succeeded: Callable[[int], bool], seeds: int
) -> Iterator[tuple[Tree, int, bool]]:
    """Yield each different disk that a power cut may leave, the line before it, and whether success was declared.

    Args:
        recorded: all lines.
        cuts: numbers of the lines that a cut may follow.
        succeeded: whether success was declared before such a cut.
        seeds: number of ways to lose some of the writes.
    """
    losses = [(loss, 0) for loss in Loss if loss is not Loss.SOME] + [(Loss.SOME, seed) for seed in range(seeds)]
    known: set[tuple[bool, int]] = set()
    disk, taken = Disk(()), 0
    for cut in sorted(cuts):
        disk.take(recorded[taken:cut])
        taken, success = cut, succeeded(cut)
        for loss, seed in losses:
            tree = disk.after(loss, seed)
            if (key := (success, fingerprint(tree))) not in known:
                known.add(key)
                yield tree, cut, success


def build(tree: Tree, target: Path) -> None:
    """Make ``target`` a new directory that holds ``tree``."""
    target.mkdir()
    for name, content in tree.items():
        if isinstance(content, bytes):
            (target / name).write_bytes(content)
        else:
            build(content, target / name)
