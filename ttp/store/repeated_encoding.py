"""Encodes the state of one object repeatedly, and reuses the encoding of values that have not changed."""

from __future__ import annotations

import contextlib
import copy
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

import msgpack

from ttp.store import arrays
from ttp.store.encoding import (
    DEPTH_MAX,
    MAGIC,
    NATIVE,
    NUMPY_ARRAY,
    ORDERED,
    TENSOR,
    EncodingError,
    RefusedError,
    big_int,
    checksum,
    described,
    encode,
    extension,
    metadata_of,
    pack,
    to_plain,
)

APART_BYTES = 64 << 10
"""Arrays of at least this many bytes are kept apart."""

_WHOLE = frozenset({type(None), int, str, bytes})
"""Types whose equal values have equal encodings; floats do not, because of 0.0 and -0.0."""

_DICTS, _TEXT = frozenset({dict, OrderedDict}), frozenset({str})

_LONG = 16
"""Lists of at least this many elements are compared with a copy; shorter ones are packed as fast as compared."""


_NOTHING = object()


class _Part:
    """The cached encoding of the value at one place of the state."""

    __slots__ = ("copy", "inside", "key", "last", "metadata", "packed")

    def __init__(self, key: bytes) -> None:
        self.key = key
        self.last: object = _NOTHING  # the value that ``packed`` encodes, if it cannot change
        self.inside: dict[Any, _Part] = {}
        self.copy: list[Any] | None = None
        self.packed = b""
        self.metadata: tuple[Any, Any] = (None, None)  # of an OrderedDict: a copy, and it encoded


class RepeatedEncoder:
    """Encodes the state of one object repeatedly, for ``encoding.decode``; unchanged values cost little.

    A long list that equals the list of the last time is not packed again.

    Args:
        name: what to call the state in an error.
    """

    def __init__(self, name: str) -> None:
        self.apart: list[Any] = []
        """The arrays that the last ``encode`` left to the caller: contiguous, on the CPU."""
        self._name = name
        self._root = _Part(b"")
        self._packer = msgpack.Packer(default=big_int, unicode_errors="surrogatepass", buf_size=4096)

    def encode(self, obj: object) -> bytes:
        """Encode ``obj``. The bytes of large arrays are not in the result: the arrays are left in ``apart``.

        Raises:
            EncodingError: it holds something that cannot be stored; the text says where.
        """
        self.apart = []
        try:
            body = self._value(self._root, obj, 0)
        except RefusedError:
            encode(obj, self._name)  # raises an error that says where
            raise EncodingError(f"{self._name}: it changed while it was encoded") from None
        return b"".join((MAGIC, checksum(body), body))

    def _value(self, part: _Part, value: Any, depth: int) -> bytes:
        kind = type(value)
        if kind in NATIVE:
            return self._packed(value)
        if kind in _DICTS and depth < DEPTH_MAX and _TEXT.issuperset(map(type, value)):
            ordered = kind is OrderedDict
            pack_header = self._packer.pack_array_header if ordered else self._packer.pack_map_header
            metadata, depth = metadata_of(value) if ordered else {}, depth + 1
            header = pack_header(len(value) << ordered)
            packed = self._inside(part, header, value.items(), depth + bool(metadata), keyed=True)
            return self._described(part, metadata, extension(ORDERED, packed), depth) if ordered else packed
        if kind is list and depth < DEPTH_MAX:
            return self._list(part, value, depth + 1)
        if arrays.may_be_apart(value, APART_BYTES):
            self.apart.append(value)
            return self._packed(_array_apart(value, len(self.apart) - 1))
        return self._packed(to_plain(value, depth))

    def _described(self, part: _Part, metadata: dict[Any, Any], packed: Any, depth: int) -> bytes:
        if metadata:
            last, encoded = part.metadata
            same = False
            with contextlib.suppress(Exception):  # such as of a tensor, which is neither true nor false
                same = last == metadata
            if not same:
                encoded = to_plain(metadata, depth)
                part.metadata = copy.deepcopy(metadata), encoded
            packed = described(packed, encoded)
        return self._packed(packed)

    def _list(self, part: _Part, value: list[Any], depth: int) -> bytes:
        kinds = set(map(type, value))
        if part.copy is not None and kinds <= _WHOLE and part.copy == value:  # 1 == True, and None == an array raises
            return part.packed
        part.copy, part.last = None, _NOTHING
        if not kinds <= NATIVE:
            return self._inside(part, self._packer.pack_array_header(len(value)), enumerate(value), depth, keyed=False)
        packed = self._packed(value)
        if len(value) >= _LONG and kinds <= _WHOLE:
            part.copy, part.packed = value.copy(), packed
        return packed

    def _inside(
        self, part: _Part, header: bytes, items: Iterable[tuple[Any, Any]], depth: int, *, keyed: bool
    ) -> bytes:
        inside, pieces = part.inside, [header]
        for key, item in items:
            found = inside.get(key)
            if found is None:
                found = inside[key] = _Part(self._packed(key) if keyed else b"")
            if type(item) not in NATIVE:
                pieces += (found.key, self._value(found, item, depth))
                continue
            if item is not found.last:
                found.last, found.packed, found.copy = item, self._packer.pack(item), None
            pieces += (found.key, found.packed)
        if 2 * len(inside) >= len(pieces):
            part.inside = {}  # some keys are gone: drop the cache of all
        return b"".join(pieces)

    def _packed(self, plain: object) -> bytes:
        return bytes(self._packer.pack(plain))


def _array_apart(value: Any, index: int) -> Any:
    code, fields = (TENSOR, arrays.pack_tensor) if arrays.is_tensor(value) else (NUMPY_ARRAY, arrays.pack_array)
    return extension(code, pack(fields(value, index)))
