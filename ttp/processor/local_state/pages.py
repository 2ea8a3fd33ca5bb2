"""Writes rank-local state so that it outlives the process: one page file per rank, in shared memory of the host.

State that only one rank has (its random streams, its BatchNorm statistics, its data cursor) dies with the rank unless
others can read it. So each rank keeps it, tagged with the version it belongs to, in a file that a neighbour can read.

Theory of operation
-------------------
The writer maps the file and never makes a system call to write. The reader uses ``pread`` and trusts nothing.

* Nine slots: three versions (a rank may already write n+1 while a peer can still only save n-1), three slots each,
  written in turn. A page is written *provisionally* before the gradients of its version leave the rank and, where
  something has changed since, at the gate and *finally* after the update. A rank killed while it writes the final page
  must not destroy the provisional one, because its peers will reach that version. And what a rank had at all three
  moments is left, to be compared with what a rank had that died between two of them (see ``local_piece``).
* A slot is a sequence word (odd while it is written) and a digest over everything that a reader believes: version,
  incarnation, rank, lengths and bytes. After a death all stores of the dead process are visible, so on any machine the
  digest alone tells a torn page from a whole one; the sequence word makes the usual case cheap.
* Large parts that seldom change (a causal mask, a table of frequencies) are *kept*: a slot only refers to them. They
  are copied and hashed again when their stamp changes, and never over a copy that another slot refers to.
* A caller gives the same list of kept parts as long as nothing in it has changed: the same list again costs nothing.
* Space is allocated (``posix_fallocate``) before it is mapped: a full ``/dev/shm`` is an error at growth, which
  disables the page with one warning, and never a SIGBUS in training.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from ttp.launch.proc_files import start_of
from ttp.processor.local_state.page_file import (
    FINISHED,
    HEADER,
    HEADER_BYTES,
    MAGIC,
    PREFIX,
    RECORD,
    REFERENCE,
    SAFE_OPEN,
    SEQUENCE,
    SLOTS,
    UnsafeError,
    open_directory,
    page_name,
    record_at,
)
from ttp.processor.local_state.page_reader import Page, read_page

__all__ = ["Buffer", "Kept", "Page", "PageWriter", "page_name", "read_page"]

log = logging.getLogger("ttp.processor.local_state.pages")

_PREFIX_SIZE = PREFIX.size
_store_prefix, _store_record, _store_sequence = PREFIX.pack_into, RECORD.pack_into, SEQUENCE.pack_into

Buffer = bytes | bytearray | memoryview
"""Contiguous bytes; a memoryview has one dimension and format ``B``."""

Kept = tuple[Hashable, Buffer]
"""A large part and its stamp: equal stamps promise equal bytes; ``None`` promises nothing."""


@dataclass(slots=True, eq=False)
class _Region:
    """A range of the file. ``users`` counts the slots that refer to it."""

    offset: int
    capacity: int
    stamp: Hashable = None
    digest: int = 0
    users: int = 0


class _Slot:
    """One of the three slots of a version; ``after`` is the one that is written after this one."""

    __slots__ = ("after", "body", "data", "length", "record_at", "refs", "region", "sequence", "version")

    def __init__(self, record: int, arena: _Arena, capacity: int) -> None:
        self.record_at, self.region = record, arena.allocate(capacity + _PREFIX_SIZE)
        self.sequence, self.version, self.refs, self.after = 0, -1, list[_Region](), self
        self.fit(arena, 0)

    def fit(self, arena: _Arena, length: int) -> None:
        """Make the slot fit for a body of ``length`` bytes after its prefix."""
        if _PREFIX_SIZE + length > self.region.capacity:
            arena.free(self.region)
            self.region = arena.allocate(_PREFIX_SIZE + length)
        start = self.region.offset
        self.length = length
        self.body = arena.view[start : start + _PREFIX_SIZE + length]
        self.data = self.body[_PREFIX_SIZE:]


@dataclass(slots=True)
class _KeptPart:
    """A kept part and its copies: at most one for each slot, and a spare one."""

    length: int
    regions: list[_Region] = field(default_factory=list)

    def holding(self, stamp: Hashable) -> _Region | None:
        if stamp is None:
            return None
        return next((region for region in self.regions if region.stamp == stamp), None)


class _Arena:
    """Allocates ranges of the mapped file. Free ranges are used again by size class."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.size = 0
        self._end = HEADER_BYTES
        self._free: dict[int, list[int]] = {}
        self._extend(HEADER_BYTES)

    def _extend(self, size: int) -> None:
        size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        os.posix_fallocate(self.fd, self.size, size - self.size)
        self.map = mmap.mmap(self.fd, size)  # the older mapping goes with its last view
        self.view = memoryview(self.map)
        self.size = size

    def allocate(self, length: int) -> _Region:
        capacity = _size_class(length)
        free = self._free.get(capacity)
        if free:
            return _Region(free.pop(), capacity)
        if self._end + capacity > self.size:
            self._extend(max(self._end + capacity, self.size + self.size // 4))
        region = _Region(self._end, capacity)
        self._end += capacity
        return region

    def free(self, region: _Region) -> None:
        self._free.setdefault(region.capacity, []).append(region.offset)


def _size_class(length: int) -> int:
    """Return the size class of a length, four per power of two: at most a quarter is wasted, freed space is reused."""
    quarter = max(64, 1 << max(0, length - 1).bit_length()) // 8
    return max(64, -(-length // quarter) * quarter)


class PageWriter:
    """Writes the page of one rank. Nothing here raises into training.

    Not for several threads at once. ``write`` costs a few microseconds and the copy and digest of the bytes.

    Args:
        page_dir: directory of the job on this host; made with mode 0700 if it is missing.
        rank: the rank whose page this is.
        capacity: bytes to set aside for each of the nine slots; grows by itself.
        incarnation: launch of the job; readers refuse pages of another one.
    """

    def __init__(self, page_dir: Path, rank: int, capacity: int = 16384, incarnation: int = 0) -> None:
        self.path = page_dir / page_name(rank)
        self.problem = ""
        """Why this page is not written; empty while it is."""
        self._rank = rank
        self._incarnation = incarnation
        self._pid = os.getpid()
        self._writes = 0
        self._older: list[_Slot] = []  # for each version the slot of its three that is written next
        self._kept: list[_KeptPart] = []
        self._orphans: list[_Region] = []  # regions of kept parts that changed their length
        self._placed: Sequence[Kept] | None = None  # the last list of kept parts, whose places follow
        self._regions: list[_Region] = []
        self._table = b""
        self._arena: _Arena | None = None
        try:
            self._open(capacity)
        except (OSError, ValueError, UnsafeError) as problem:
            self._disable(problem)

    def _open(self, capacity: int) -> None:
        """Make the file under another name and rename it: a reader never sees half a header."""
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft = f".{self.path.name}.{self._pid}"
        with open_directory(self.path.parent) as directory:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(draft, dir_fd=directory)
            fd = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | SAFE_OPEN, 0o600, dir_fd=directory)
            try:
                arena = _Arena(fd)
                slots = [_Slot(record_at(index), arena, capacity) for index in range(SLOTS)]
                self._older = slots[::3]
                for one, two, three in zip(self._older, slots[1::3], slots[2::3], strict=True):
                    one.after, two.after, three.after = two, three, one
                self._arena = arena
                self._write_header()
                os.rename(draft, self.path.name, src_dir_fd=directory, dst_dir_fd=directory)
            except BaseException:
                self._arena = None
                os.close(fd)
                os.unlink(draft, dir_fd=directory)
                raise

    def _write_header(self) -> None:
        assert self._arena is not None
        header = MAGIC, SLOTS, self._rank, self._pid, self._incarnation, start_of(self._pid)
        HEADER.pack_into(self._arena.map, 0, *header)

    def write(self, version: int, final: bool, parts: Sequence[Buffer], kept: Sequence[Kept] = ()) -> bool:
        """Store the state of ``version``; the bytes read back are all ``parts`` and then all ``kept``, joined.

        Args:
            version: the version that the state belongs to.
            final: False before the update, when the rank may still die without having made it.
            parts: copied every time.
            kept: copied if their stamp is not that of a copy already in the file. The same list object as last time
                says that nothing has changed; so give another one if a stamp has changed or promises nothing.

        Returns:
            True if it was written. False also means that this page is disabled, see ``problem``.
        """
        arena = self._arena
        if arena is None:
            return False
        try:
            slot = self._older[version % 3]
            if slot.after.after.version != version:  # the first of its version: nobody asks for the one before
                for old in (slot.after, slot.after.after):
                    if old.refs and old.refs is not self._regions:
                        _let_go(old)
            slot.version, slot.sequence = version, (sequence := slot.sequence + 2)
            _store_sequence(arena.map, slot.record_at, sequence - 1)  # odd: being written
            table = self._place(arena, slot, kept) if kept or slot.refs else b""
            data = parts[0] if len(parts) == 1 and not table else b"".join((table, *parts))
            length = len(data)
            if length != slot.length:
                slot.fit(arena, length)
            target, start = arena.map, slot.region.offset
            self._writes = writes = self._writes + 1
            flags, small = final | len(kept) << 1, length - len(table)
            _store_prefix(target, start, version, self._incarnation, writes, self._rank, flags, small)
            slot.data[:] = data
            # Over the stored bytes, not the given ones: a part may be live memory that changes while it is copied.
            digest = xxhash.xxh3_64_intdigest(slot.body)
            _store_record(target, slot.record_at + 8, start, _PREFIX_SIZE + length, digest)
            _store_sequence(target, slot.record_at, sequence)
            self._older[version % 3] = slot.after
        except Exception as problem:  # whatever it is, training goes on
            self._disable(problem)
            return False
        return True

    def finish(self, version: int) -> bool:
        """Mark the last provisional state as the final one of its version, without writing it again.

        Returns:
            False: this page is disabled, see ``problem``.
        """
        arena = self._arena
        if arena is None:
            return False
        slot = self._older[version % 3].after.after
        _store_sequence(arena.map, slot.record_at, slot.sequence | FINISHED)
        return True

    def _place(self, arena: _Arena, slot: _Slot, kept: Sequence[Kept]) -> bytes:
        """Make sure that every kept part is in the file; returns the slot's table of references to them."""
        if kept is self._placed and slot.refs is self._regions:
            return self._table
        _let_go(slot)
        if kept is not self._placed:
            self._placed = None  # no list is placed until all of its parts are
            self._match_lengths(arena, kept)
            parts = zip(self._kept, kept, strict=True)
            self._regions = [part.holding(stamp) or _copy(arena, part, stamp, data) for part, (stamp, data) in parts]
            self._table = b"".join(
                REFERENCE.pack(region.offset, part.length, region.digest)
                for part, region in zip(self._kept, self._regions, strict=True)
            )
            self._placed = kept
        for region in self._regions:
            region.users += 1
        slot.refs = self._regions
        return self._table

    def _match_lengths(self, arena: _Arena, kept: Sequence[Kept]) -> None:
        for index, (_, data) in enumerate(kept):
            if index == len(self._kept):
                self._kept.append(_KeptPart(len(data)))
            elif self._kept[index].length != len(data):
                self._orphans += self._kept[index].regions
                self._kept[index] = _KeptPart(len(data))
        for part in self._kept[len(kept) :]:
            self._orphans += part.regions
        del self._kept[len(kept) :]
        if self._orphans:
            for region in self._orphans:
                if region.users == 0:
                    arena.free(region)
            self._orphans = [region for region in self._orphans if region.users]

    def _disable(self, problem: Exception) -> None:
        self.problem = f"{self.path}: {problem}"
        self._release()
        log.warning(
            "the rank-local state of rank %d will not survive its process (%s); "
            "free some space there, then restart the job",
            self._rank,
            self.problem,
        )

    def _release(self) -> None:
        arena, self._arena = self._arena, None
        self._older = []  # the memory goes with it
        if arena is not None:
            os.close(arena.fd)

    def in_place(self) -> bool:
        """Return whether readers that look for this rank find the file that is written here."""
        arena = self._arena
        with contextlib.suppress(OSError):
            return arena is not None and os.path.samestat(os.fstat(arena.fd), os.lstat(self.path))
        return False

    def close(self) -> None:
        """Stop writing. The file stays for ranks that are saved later, and goes with its directory."""
        self._release()

    def __del__(self) -> None:
        if self._pid == os.getpid():  # in a child the descriptor may be of another file
            self._release()  # a page that was removed, and made again, takes up memory as long as it is open


def _let_go(slot: _Slot) -> None:
    """Make a slot refer to no kept parts. What its record on file says of them is found to be torn later."""
    for region in slot.refs:
        region.users -= 1
    slot.refs = []


def _copy(arena: _Arena, part: _KeptPart, stamp: Hashable, data: Buffer) -> _Region:
    """Copy a kept part to a region that no slot refers to."""
    region = next((r for r in part.regions if r.users == 0), None)
    if region is None:
        region = arena.allocate(part.length)
        part.regions.append(region)
    region.stamp = None  # no copy of anything until it is whole
    end = region.offset + part.length
    arena.map[region.offset : end] = data
    region.digest = xxhash.xxh3_64_intdigest(arena.view[region.offset : end])
    region.stamp = stamp
    return region
