"""Reads the page of another rank, dead or alive, and checks everything that the file says; see ``pages``."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from ttp.processor.local_state.page_file import (
    FINISHED,
    HEADER,
    HEADER_BYTES,
    MAGIC,
    PREFIX,
    RECORD,
    REFERENCE,
    SEQUENCE,
    SLOTS,
    UnsafeError,
    open_file,
    page_name,
    record_at,
)

_ATTEMPTS = 5
"""Number of attempts. A living writer finishes a slot within microseconds; the slot of a dead writer stays torn."""


@dataclass(frozen=True, slots=True)
class Page:
    """The rank-local state that was read from a page.

    Args:
        version: number of finished updates of the state.
        final: written after that update; False: before it.
        data: the parts that were given to ``PageWriter.write``, joined.
    """

    version: int
    final: bool
    data: bytes


def read_page(page_dir: Path, rank: int, version: int, incarnation: int) -> Page | str:
    """Read what ``rank`` stored for ``version``, whether the rank lives or not.

    Args:
        page_dir: directory of the job on this host.
        rank: the rank whose page to read.
        version: the version to read.
        incarnation: launch of the job.

    Returns:
        The newest whole page of that version, or a text that says why there is none: no file, a file that another user
        may have written, torn, another version, another incarnation, garbled. Never raises for the file's contents.
    """
    name = page_name(rank)
    try:
        with open_file(page_dir, name) as fd:
            return _Reader(fd, rank, incarnation).read(version)
    except FileNotFoundError:
        return f"there is no page {page_dir / name}"
    except _UNUSABLE as problem:
        return f"page {page_dir / name} cannot be used: {problem}"


def read_early(page_dir: Path, rank: int, version: int, incarnation: int) -> list[bytes]:
    """Return what is left of the states that ``rank`` wrote before the update to ``version``: at its gate, and earlier.

    Never raises for the file's contents.
    """
    with contextlib.suppress(*_UNUSABLE), open_file(page_dir, page_name(rank)) as fd:
        return _Reader(fd, rank, incarnation).read_early(version)
    return []


def newest_pages(page_dir: Path, rank: int, pid: int, count: int, start: int = 0) -> tuple[int, list[Page]]:
    """Read what the process ``pid`` stored as ``rank``, whichever versions these are.

    Args:
        page_dir: directory of a job on this host.
        rank: the rank.
        pid: its process.
        count: the most pages to return.
        start: when that process started, as containers may have equal pids; 0: not known.

    Returns:
        The incarnation of the process, and its newest ``count`` whole pages, the oldest first; none if there is no page
        of that process. Never raises for the file's contents.
    """
    with contextlib.suppress(*_UNUSABLE), open_file(page_dir, page_name(rank)) as fd:
        header = os.pread(fd, HEADER_BYTES, 0).ljust(HEADER.size, b"\0")
        _, _, _, owner, incarnation, began = HEADER.unpack_from(header)
        reader, mine = _Reader(fd, rank, incarnation), owner == pid and start in (0, began)
        return incarnation, reader.read_newest(count) if mine else []
    return 0, []


class _BadPageError(Exception):
    """A slot or file is invalid; the text says why."""


_UNUSABLE = (OSError, MemoryError, UnsafeError, _BadPageError)


@dataclass(frozen=True, slots=True)
class _Body:
    slot: int
    sequence: int
    version: int
    incarnation: int
    writes: int
    early: bool
    final: bool
    references: tuple[tuple[int, int, int], ...]
    small: bytes


@dataclass(slots=True)
class _Reader:
    fd: int
    rank: int
    incarnation: int
    size: int = 0
    reasons: list[str] = field(default_factory=list)

    def read(self, version: int) -> Page | str:
        self._check_header()
        for _ in range(_ATTEMPTS):
            self.reasons.clear()
            page = self._newest_whole(version)
            if page is not None:
                return page
        return f"the page of rank {self.rank} does not hold version {version}: " + "; ".join(self.reasons)

    def read_newest(self, count: int) -> list[Page]:
        self._check_header()
        versions = sorted({body.version for body in self._bodies()})
        found = (self._newest_whole(version) for version in versions)
        return [page for page in found if page is not None][-count:]

    def read_early(self, version: int) -> list[bytes]:
        self._check_header()
        found = []
        for body in self._bodies():
            if body.version == version and body.early:
                with contextlib.suppress(_BadPageError):
                    found.append(self._complete(body).data)
        return found

    def _check_header(self) -> None:
        header = os.pread(self.fd, HEADER_BYTES, 0)
        if len(header) < HEADER_BYTES:
            raise _BadPageError(f"it is cut short ({len(header)} bytes)")
        magic, slots, owner, *_ = HEADER.unpack_from(header)
        if magic != MAGIC or slots != SLOTS:
            raise _BadPageError(f"it is not a page of this version of ttp (it begins with {magic!r})")
        if owner != self.rank:
            raise _BadPageError(f"it says that it belongs to rank {owner}")

    def _newest_whole(self, version: int) -> Page | None:
        bodies = self._bodies()
        others = sorted({body.version for body in bodies if body.version != version})
        if others or not bodies:
            self.reasons.append("versions held: " + (", ".join(map(str, others)) or "none"))
        for body in sorted(bodies, key=lambda b: -b.writes):
            if body.version == version:
                try:
                    return self._complete(body)
                except _BadPageError as problem:
                    self.reasons.append(f"slot {body.slot} {problem}")
        return None

    def _bodies(self) -> list[_Body]:
        self.size = os.fstat(self.fd).st_size  # a living writer may make it grow
        return [body for body in map(self._try_body, range(SLOTS)) if body is not None]

    def _try_body(self, slot: int) -> _Body | None:
        try:
            body = self._read_body(slot)
        except _BadPageError as problem:
            self.reasons.append(f"slot {slot} {problem}")
            return None
        if body is not None and body.incarnation != self.incarnation:
            self.reasons.append(f"slot {slot} is of incarnation {body.incarnation}, not {self.incarnation}")
            return None
        return body

    def _read_body(self, slot: int) -> _Body | None:
        """Return what a slot holds; None if it was never written."""
        raw = os.pread(self.fd, SEQUENCE.size + RECORD.size, record_at(slot))
        if len(raw) < SEQUENCE.size + RECORD.size:
            raise _BadPageError("is cut short")
        (sequence,) = SEQUENCE.unpack_from(raw)
        if sequence % 2:
            raise _BadPageError("is torn: its writer died in it or is still writing")
        if sequence == 0:
            return None
        offset, length, digest = RECORD.unpack_from(raw, SEQUENCE.size)
        data = self._read_span(offset, length, digest)
        self._check_unchanged(slot, sequence)
        return self._parse(slot, sequence, data)

    def _parse(self, slot: int, sequence: int, data: bytes) -> _Body:
        if len(data) < PREFIX.size:
            raise _BadPageError("is garbled: too short")
        version, incarnation, writes, owner, flags, small = PREFIX.unpack_from(data)
        table_end = PREFIX.size + (flags >> 1) * REFERENCE.size
        if owner != self.rank or table_end + small != len(data):
            raise _BadPageError("is garbled: its rank or its lengths do not fit")
        references = tuple(REFERENCE.iter_unpack(data[PREFIX.size : table_end]))
        early = not flags & 1
        final = not early or bool(sequence & FINISHED)
        return _Body(slot, sequence, version, incarnation, writes, early, final, references, data[table_end:])

    def _complete(self, body: _Body) -> Page:
        if sum(length for _, length, _ in body.references) > self.size:
            raise _BadPageError("is garbled: it refers to more bytes than there are")
        parts = [body.small]
        for offset, length, digest in body.references:
            parts.append(self._read_span(offset, length, digest))
        self._check_unchanged(body.slot, body.sequence)
        return Page(body.version, body.final, b"".join(parts))

    def _read_span(self, offset: int, length: int, digest: int) -> bytes:
        if offset < HEADER_BYTES or offset + length > self.size:
            raise _BadPageError("is garbled: it points outside of the file")
        data = _read_fully(self.fd, offset, length)
        if xxhash.xxh3_64_intdigest(data) != digest:
            raise _BadPageError("is torn or garbled: its digest does not match")
        return data

    def _check_unchanged(self, slot: int, sequence: int) -> None:
        (now,) = SEQUENCE.unpack(os.pread(self.fd, SEQUENCE.size, record_at(slot)).ljust(SEQUENCE.size, b"\0"))
        if (now ^ sequence) & ~FINISHED:  # a state that becomes final stays as it is
            raise _BadPageError("was written to while it was read")


def _read_fully(fd: int, offset: int, length: int) -> bytes:
    """Read a span in full. ``pread`` stops at 2 GiB, and a file may have been cut since its size was read."""
    parts: list[bytes] = []
    at, end = offset, offset + length
    while at < end:
        part = os.pread(fd, end - at, at)
        if not part:
            raise _BadPageError("is cut short")
        parts.append(part)
        at += len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)
