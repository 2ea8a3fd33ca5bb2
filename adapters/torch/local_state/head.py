"""The head of an image, which precedes the buffers: its description, the random streams, and ``extra_state``."""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Collection, Sequence
from functools import partial

from ttp.adapters.torch.local_state.buffers import BufferTable
from ttp.adapters.torch.local_state.extra_state import ExtraState
from ttp.adapters.torch.local_state.image import encode_head
from ttp.adapters.torch.local_state.rng import RngState
from ttp.processor.local_state.pages import Buffer, Kept

log = logging.getLogger("ttp.adapters.torch")

_STREAMS = "the random streams"

Section = tuple[bytes, Sequence[Kept]]
"""An encoded extra state, and its large arrays."""

Changed = Callable[[str, bool, Section, Section], None]
"""Takes the name of an extra state that has changed; whether it has since the end of a version; and it before and after
the change."""

_GIVEN_UP: Section = (b"", ())
"""The section of an extra state that cannot be captured, or was not captured yet."""


NOWHERE: tuple[int, bytes, Sequence[Kept]] = (-1, b"", ())
"""Stands for version, image and large parts of a provisional page if there is none."""


class Head:
    """Captures random streams and extra states. What cannot be captured is left out from then on; never raises.

    Args:
        streams: the random streams.
        extra: the user's objects of ``extra_state``.
    """

    def __init__(self, streams: RngState, extra: ExtraState) -> None:
        self._streams, self.names = streams, extra.changing
        self._readers: dict[str, Callable[[], Section]] = {n: partial(extra.capture, n) for n in self.names}
        self.moving: set[str] = set()
        """Extra states that were seen to change between the captures of one version."""
        self.given_up: dict[str, str] = {}
        """What is left out, and why: a text for each part of the rank-local state."""
        self._lengths = struct.Struct(f"<{1 + len(self.names)}Q")
        self._sections: dict[str, Section] = dict.fromkeys(self.names, _GIVEN_UP)
        self._large: list[Sequence[Kept]] = []  # large arrays, of each extra state that has any
        self._joined: tuple[list[Sequence[Kept]], Sequence[Kept]] = ([], ())  # lists of large parts; these as one
        self._parts: list[Buffer] = []  # as ``parts`` returned them last; the sections are at the end
        self._covered: Callable[[], bool] = _never  # whether these parts still cover all streams and extra states
        self._table: BufferTable | None = None  # the buffers that the parts describe, and their layout
        self._layout = 0
        self._described: tuple[object, bytes] = (None, b"")

    def read(
        self, names: Collection[str], *, compare: bool, changed: Changed | None = None, late: bool = False
    ) -> bool:
        """Read extra states; with ``compare``, note in ``moving`` which of them have changed since the last read.

        Args:
            names: the names of the extra states.
            compare: whether the last read was for the same version.
            changed: called for each that has changed; may not raise.
            late: whether the last read was the final one of a version, and this one is for the next.

        Returns:
            Whether any has changed.
        """
        moved = False
        for name in names:
            before = self._sections[name]
            try:
                section = self._readers[name]()
            except Exception as problem:
                section, self._readers[name] = _GIVEN_UP, lambda: _GIVEN_UP
                self.give_up(f"extra_state {name!r}", problem)
            self._sections[name] = section
            if section[1] is not before[1] or len(section[0]) != len(before[0]):
                self._covered = _never  # the layout of the image changes
                self._large = [apart for _, apart in self._sections.values() if apart]
            elif section[0] != before[0]:
                if self._parts:
                    self._parts[self.names.index(name) - len(self.names)] = section[0]
            else:
                continue
            moved = True
            if compare:
                self.moving.add(name)
            if changed is not None:
                changed(name, late, before, section)
        return moved

    def parts(self, table: BufferTable) -> Sequence[Buffer]:
        """Return the head of an image with these buffers, in parts to join: some of them are live memory.

        The parts of the last call are returned again as long as all of them are live memory, or bytes that ``read``
        replaces in the list when an extra state changes.
        """
        if not (self._table is table and self._layout == table.layout and self._covered()):
            streams = self._capture_streams()
            sections = [section for section, _ in self._sections.values()]
            lengths = self._lengths.pack(sum(map(len, streams)), *map(len, sections))
            self._parts = [self._description(table), lengths, *streams, *sections]
            self._table, self._layout = table, table.layout
            self._covered = (self._streams.standing() or _never) if streams else lambda: True
        return self._parts

    def joined(self, table: BufferTable) -> bytes:
        """Return a copy of the head of an image with these buffers."""
        return b"".join(self.parts(table))

    def streams(self) -> bytes:
        """Return a copy of the random streams; empty if they cannot be captured."""
        return b"".join(self._capture_streams())

    def with_apart(self, kept: Sequence[Kept]) -> Sequence[Kept]:
        """Return large buffers and large arrays of extra states together; the same list as before if none changed."""
        if not self._large:
            return kept
        lists, (known, joined) = [kept, *self._large], self._joined
        if len(lists) != len(known) or any(a is not b for a, b in zip(lists, known, strict=True)):
            self._joined = lists, (joined := [part for one in lists for part in one])
        return joined

    def give_up(self, part: str, problem: Exception) -> None:
        """Leave a part of the state out from now on, and log a warning, once."""
        if part not in self.given_up:
            self.given_up[part] = f"{part} could not be captured ({type(problem).__name__}: {problem})"
            log.warning("%s; training goes on, but a resumed run will not have this state", self.given_up[part])

    def _capture_streams(self) -> list[Buffer]:
        if _STREAMS not in self.given_up:
            try:
                return self._streams.capture()
            except Exception as problem:
                self.give_up(_STREAMS, problem)
        return []

    def _description(self, table: BufferTable) -> bytes:
        """Return header and description of the image, made anew only if buffers or large arrays were replaced."""
        sizes = [[len(data) for _, data in kept] for _, kept in self._sections.values()]
        facts = table, table.layout, sizes
        if self._described[0] != facts:
            self._described = facts, encode_head(self.names, table.infos, sizes if any(sizes) else [])
        return self._described[1]


def _never() -> bool:
    return False
