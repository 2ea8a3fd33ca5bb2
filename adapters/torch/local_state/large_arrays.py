"""Large arrays in the ``extra_state``: their memory, and whether it has changed since it was last looked at.

An average of the weights that is no module is such a state: megabytes that change once a step. They are copied to the
page as the memory that they are, once for each change. What has changed is told by torch's version counter where the
program was seen to raise it: the counter of the same memory moved. Else, and for numpy, the bytes are compared by their
digest, which costs a third of copying them.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import xxhash
from torch import Tensor

from ttp.processor.local_state.pages import Buffer, Kept

_MOVES = 2
"""So often the counter of one memory must have moved before it is believed to tell of every change."""

_serials = itertools.count(1)


@dataclass(slots=True)
class _Place:
    """One array of the state, as it was when last looked at.

    Args:
        array: kept, so that its memory is nobody else's.
        address: of its memory.
        version: torch's counter; -1 for numpy.
        view: its memory.
        stamp: equal as long as the bytes are.
        digest: of the bytes; None: not known.
        moves: how often the counter moved; -1: the bytes changed without it.
    """

    array: Any
    address: int
    version: int
    view: Buffer
    stamp: int
    digest: int | None = None
    moves: int = 0


class ApartMemory:
    """The large arrays of one object's state, in their order."""

    def __init__(self) -> None:
        self._places: list[_Place] = []
        self._kept: list[Kept] = []

    def look_at(self, arrays: Sequence[Any]) -> Sequence[Kept]:
        """Their live memory, with stamps; the same list as the last time when nothing has changed."""
        if not arrays and not self._kept:
            return self._kept
        del self._places[len(arrays) :]
        for index, array in enumerate(arrays):
            if index == len(self._places):
                self._places.append(_placed(array))
            elif _has_changed(self._places[index], array):
                self._places[index].stamp = next(_serials)
        if len(self._kept) != len(arrays) or any(map(_differs, self._places, self._kept)):
            self._kept = [(place.stamp, place.view) for place in self._places]
        return self._kept


def _differs(place: _Place, kept: Kept) -> bool:
    return place.stamp != kept[0] or place.view is not kept[1]


def _placed(array: Any) -> _Place:
    address, version, size = _facts(array)
    view = _memory(array, address, size)
    return _Place(array, address, version, view, next(_serials), xxhash.xxh3_64_intdigest(view))


def _has_changed(place: _Place, array: Any) -> bool:
    """Whether the bytes are others than the last time; ``place`` is of ``array`` then."""
    address, version, size = _facts(array)
    same = address == place.address and size == len(place.view)
    moved = version != place.version
    if same and version >= 0 and place.moves >= _MOVES:
        place.array, place.version, place.digest = array, version, None if moved else place.digest
        return moved
    if not same:
        place.view = _memory(array, address, size)
    digest = xxhash.xxh3_64_intdigest(place.view)
    changed = digest != place.digest
    if same and moved:
        place.moves += place.moves >= 0
    elif same and changed:
        place.moves = -1
    place.array, place.address, place.version, place.digest = array, address, version, digest
    return changed


def _facts(array: Any) -> tuple[int, int, int]:
    """Address, counter and bytes."""
    if isinstance(array, Tensor):
        version = -1 if array.is_inference() else array._version  # such a tensor has no counter
        return array.data_ptr(), version, array.numel() * array.element_size()
    return array.ctypes.data, -1, array.nbytes


def _memory(array: Any, address: int, size: int) -> Buffer:
    memory: Any = (ctypes.c_char * size).from_address(address)
    memory._array = array  # so that a view of it does not outlive the array
    return memoryview(memory).cast("B")
