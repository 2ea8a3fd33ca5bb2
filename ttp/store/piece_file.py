"""Writes the files of a draft: a file becomes a ``Piece`` once it is durable, and is removed if writing it fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ttp.core.layout import Rank
from ttp.core.messages import Piece
from ttp.errors import CheckpointError
from ttp.store.digest import HashingFile, Progress, digest_bytes
from ttp.store.durable import write_durably
from ttp.store.plain_file import chunks


@contextmanager
def piece_file(path: Path, progress: Progress | None = None) -> Iterator[HashingFile]:
    """Open a new file for one large piece. The block must call ``sync_and_close``; on an exception the file is removed.

    Args:
        path: path of the file; its directory exists.
        progress: see ``HashingFile``.

    Raises:
        OSError: the file cannot be made.
    """
    target = HashingFile(path, progress)
    try:
        yield target
    except BaseException:
        with suppress(OSError):
            target.close()
        with suppress(OSError):  # the first error says more
            path.unlink(missing_ok=True)
        raise


def copy_piece(
    piece: Piece, source: Path, target: Path, progress: Progress, check: Callable[[], None] = lambda: None
) -> None:
    """Copy a piece from memory to the storage, durably, and compare its digest with the recorded one.

    Args:
        piece: size and digest of the piece.
        source: the file in memory.
        target: the new file; its directory exists.
        progress: see ``HashingFile``.
        check: called between the chunks; raises to give up.

    Raises:
        CheckpointError: the bytes are not those that were recorded.
        OSError: the disk refused.
    """
    with piece_file(target, progress) as out:
        for chunk in chunks(source):
            check()
            out.write(chunk)
        if (found := out.sync_and_close()) != (piece.size, piece.digest):
            raise CheckpointError(f"{source} is damaged in memory: {found}")


@contextmanager
def all_or_nothing(draft: Path) -> Iterator[list[Piece]]:
    """Collect the pieces of one order, and remove them all if the block raises.

    A failed order is repeated with other file names, so on a full disk the left-overs of each try would add up.

    Args:
        draft: the directory that the pieces are in.

    Yields:
        A list, to which the block appends each piece that it has written.
    """
    pieces: list[Piece] = []
    try:
        yield pieces
    except BaseException:
        for piece in pieces:
            with suppress(OSError):
                (draft / piece.file).unlink()
        raise


def write_piece(
    draft: Path, file: str, data: bytes, kind: str, writer: Rank, *, shard: str = "", table: str = ""
) -> Piece:
    """Write a small piece, durably.

    Args:
        draft: directory of the draft.
        file: name of the new file inside it.
        data: its contents.
        kind: ``shard``, ``rank_local`` or ``job``.
        writer: the rank that writes.
        shard: the shard; empty for other kinds of pieces.
        table: JSON that describes the contents.

    Raises:
        OSError: the disk refused.
    """
    write_durably(draft / file, data)
    return Piece(file, len(data), digest_bytes(data), kind, shard, writer, table)
