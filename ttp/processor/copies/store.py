"""Keeps copies of shards in the memory of a host, as finished pieces: one directory for each rank and version.

``<page_dir>/copies/<incarnation>/<rank>-<version>/`` holds the files that a save would have written, and an index that
describes them. The directory is made under another name and renamed when it is whole. So any rank of this host can use
a directory with the final name, whether the rank that made it lives or not. Copies of ranks of other hosts lie next to
those of this host; their ranks differ. All copies are removed with the page directory (``local_state.page_dir``),
however the job ends.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Collection
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from ttp.core.layout import Rank, Version
from ttp.core.messages import KeptCopy, Piece
from ttp.errors import GARBLED, CheckpointError, ToldAs
from ttp.store.encoding import EncodingError, decode, encode
from ttp.store.plain_file import read_plain

INDEX = "index"
RESERVE = 0.1
"""Share of the shared memory that stays free: other programs need it too, and get a SIGBUS when it is full."""

_NAME = re.compile(r"(\d+)-(\d+)")
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")


class NoRoomError(Exception):
    """The shared memory of this host cannot hold a copy; the text says what to change."""


@dataclass(frozen=True, slots=True)
class Copy:
    """A whole copy of the shards of one rank.

    Args:
        path: its directory.
        pieces: its pieces; the index is not listed.
    """

    path: Path
    pieces: tuple[Piece, ...]

    @property
    def size(self) -> int:
        """Bytes of all pieces."""
        return sum(piece.size for piece in self.pieces)


class CopyStore:
    """The copies of one incarnation on this host.

    Args:
        page_dir: the host's page directory.
        incarnation: launch of the job; copies of an older one are removed.
        anew: no rank of this launch has made an update yet, so all copies with its number are of an earlier start of
            the job, whose controller counted alike; they are removed too.
    """

    def __init__(self, page_dir: Path, incarnation: int, *, anew: bool = False) -> None:
        self.incarnation = incarnation
        home = page_dir / "copies"
        self._root = home / str(incarnation)
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        for old in home.iterdir():
            if old.name.isdecimal() and int(old.name) < incarnation:
                shutil.rmtree(old, ignore_errors=True)
        for copy in self.held() if anew else ():
            self.drop(copy.of, copy.version)

    def begin(self, rank: Rank, version: Version) -> Path:
        """Make an empty directory for a new copy.

        Raises:
            OSError: it cannot be made.
        """
        draft = self._root / f".{rank}-{version}.{os.getpid()}"
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(mode=0o700)
        return draft

    def finish(self, draft: Path, rank: Rank, version: Version, pieces: Collection[Piece]) -> Copy:
        """Make the contents of ``draft`` the copy of this rank and version.

        Raises:
            OSError: the index cannot be written.
        """
        rows = [asdict(piece) for piece in pieces]
        (draft / INDEX).write_bytes(encode({"rank": int(rank), "version": int(version), "pieces": rows}))
        return self.publish(draft, rank, version)

    def publish(self, draft: Path, rank: Rank, version: Version) -> Copy:
        """Like ``finish``, for a draft that has its index already.

        Raises:
            CheckpointError: the index does not describe what is there.
        """
        copy = Copy(draft, pieces_of(draft, rank, version))
        wrong = [piece.file for piece in copy.pieces if _size(draft / piece.file) != piece.size]
        if wrong:
            raise CheckpointError(
                f"the copy of rank {rank} is incomplete: {wrong[0]} does not have the size in its index"
            )
        self.drop(rank, version)
        final = self._root / f"{rank}-{version}"
        draft.rename(final)
        return replace(copy, path=final)

    def held(self) -> tuple[KeptCopy, ...]:
        """Return every copy that can be used, in ascending order."""
        with contextlib.suppress(OSError):
            names = (_NAME.fullmatch(entry.name) for entry in os.scandir(self._root))
            found = [(int(name[1]), int(name[2])) for name in names if name]
            return tuple(KeptCopy(Rank(rank), Version(version)) for rank, version in sorted(found))
        return ()

    def read(self, rank: Rank, version: Version) -> Copy:
        """Find a copy and read its description.

        Raises:
            CheckpointError: there is none, or its index cannot be read.
        """
        path = self._root / f"{rank}-{version}"
        return Copy(path, pieces_of(path, rank, version))

    def drop(self, rank: Rank, version: Version) -> None:
        """Remove a copy. Readers see all of it or nothing."""
        gone = self._root / f".gone-{rank}-{version}.{os.getpid()}"
        with contextlib.suppress(OSError):
            (self._root / f"{rank}-{version}").rename(gone)
        shutil.rmtree(gone, ignore_errors=True)

    def drop_others(self, rank: Rank, keep: Collection[int]) -> None:
        """Remove all copies of this rank except those of the versions in ``keep``."""
        for copy in self.held():
            if copy.of == rank and copy.version not in keep:
                self.drop(rank, copy.version)

    def check_room(self, size: int = 0) -> None:
        """Check that ``size`` more bytes leave enough memory for other programs.

        Raises:
            NoRoomError: they do not.
        """
        stat = os.statvfs(self._root)
        free, total = stat.f_bavail * stat.f_frsize, stat.f_blocks * stat.f_frsize
        if free - size < RESERVE * total:
            raise NoRoomError(
                f"{_mib(free)} of the {_mib(total)} at {self._root.parents[1]} are free, and a tenth has to stay free "
                "for other programs. Make it larger (mount -o remount,size=..., docker --shm-size, an emptyDir of "
                "medium Memory): a host needs four times the state of its ranks. Or do without buddy=True"
            )


def plain_name(name: str) -> bool:
    """Return whether a name is a plain file name, which cannot lead out of its directory."""
    return _FILE.fullmatch(name) is not None


def pieces_of(path: Path, rank: Rank, version: Version) -> tuple[Piece, ...]:
    """Read the index of a copy, or of a draft of one.

    Raises:
        CheckpointError: it cannot be read, or describes something else.
    """
    names = {field.name for field in fields(Piece)}
    with ToldAs(CheckpointError, f"the copy {path} cannot be read", *GARBLED, OSError, EncodingError, reason=repr):
        found = decode(read_plain(path / INDEX))
        pieces = tuple(Piece(**{k: v for k, v in row.items() if k in names}) for row in found["pieces"])
        fits = (found["rank"], found["version"]) == (rank, version) and all(plain_name(p.file) for p in pieces)
    if not fits:
        raise CheckpointError(f"the index of {path} is not of rank {rank}, version {version}, or has wrong names")
    return pieces


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:
        return -1


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"
