"""Finds the memory of large arrays in ``extra_state``, and whether it has changed since the last look.

An average of the weights that is not a module is an example: megabytes that change once a step. Such arrays are copied
to the page as raw memory, once for each change. Torch's version counter is trusted to show a change once it was seen to
do so ``_MOVES`` times for the same memory. Until then, and for numpy, the bytes are compared by a digest, which costs a
third of copying them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import xxhash
from torch import Tensor

from ttp.processor.local_state.host_rng import memory_at
from ttp.processor.local_state.pages import Buffer, Kept

_MOVES = 2
"""How often the version counter of the same memory must have moved before it is trusted to show every change."""

_serials = itertools.count(1)


@dataclass(slots=True)
class _Place:
    """One array of the state, as it was at the last look.

    Args:
        array: the array; it is kept alive so that its memory is not reused.
        address: address of its memory.
        version: torch's version counter; -1: there is none (numpy, inference tensors).
        view: its memory.
        stamp: a number that stays the same as long as the bytes do.
        digest: digest of the bytes; None: not known.
        moves: how often the counter has moved; -1: the bytes changed while the counter did not, so it is never trusted.
    """

    array: Any
    address: int
    version: int
    view: Buffer
    stamp: int
    digest: int | None = None
    moves: int = 0


class LargeArrays:
    """Follows the large arrays in the state of one object, by their order."""

    def __init__(self) -> None:
        self._places: list[_Place] = []
        self._kept: list[Kept] = []

    def look_at(self, arrays: Sequence[Any]) -> Sequence[Kept]:
        """Return the memory of these arrays, with stamps that change when the bytes do.

        Args:
            arrays: the large arrays of the state, always in the same order.

        Returns:
            Pairs of stamp and memory; the same list object as the last time if nothing has changed.
        """
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
    view = memory_at(address, size, array)
    return _Place(array, address, version, view, next(_serials), xxhash.xxh3_64_intdigest(view))


def _has_changed(place: _Place, array: Any) -> bool:
    """Return whether the bytes differ from the last look. Makes ``place`` describe ``array``."""
    address, version, size = _facts(array)
    same = address == place.address and size == len(place.view)
    moved = version != place.version
    if same and version >= 0 and place.moves >= _MOVES:
        place.array, place.version, place.digest = array, version, None if moved else place.digest
        return moved
    if not same:
        place.view = memory_at(address, size, array)
    digest = xxhash.xxh3_64_intdigest(place.view)
    changed = digest != place.digest
    if same and moved:
        place.moves += place.moves >= 0
    elif same and changed:
        place.moves = -1
    place.array, place.address, place.version, place.digest = array, address, version, digest
    return changed


def _facts(array: Any) -> tuple[int, int, int]:
    """Return address, version counter and size in bytes of an array."""
    if isinstance(array, Tensor):
        version = -1 if array.is_inference() else array._version  # inference tensors have no counter
        return array.data_ptr(), version, array.numel() * array.element_size()
    return array.ctypes.data, -1, array.nbytes
