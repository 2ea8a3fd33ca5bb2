"""Values as bytes and back, types included, without ever running what is read.

Theory of operation
-------------------
``encode`` turns a value into one that msgpack knows: what msgpack has no type for (or would blur, such as a tuple)
becomes an extension whose payload is msgpack again or raw bytes. In front go a magic word and a checksum of the rest:
garbage is refused before it is looked at.

Large arrays may be kept apart: ``Encoder`` leaves their bytes to the caller, and the payload says which they are.

``decode`` allocates no more than a multiple of what it was given: lengths are checked by a pass that builds nothing
before anything is built, and shapes are checked against the bytes that are there.

Known: None, bool, int of any size, float, complex, str, bytes, bytearray, list, tuple, dict, OrderedDict, Counter, set,
frozenset, numpy arrays and scalars of plain dtypes, torch tensors and parameters (strided, any dtype; they come back on
the CPU).
"""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgpack
import xxhash

from ttp.errors import TtpError
from ttp.store import arrays

_MAGIC = b"ttp\x01"
_CHECKSUM_SIZE = 8
_DEPTH_MAX = 100
"""Containers inside containers. Deeper is a mistake, most likely a container inside itself."""

_TUPLE, _SET, _FROZENSET, _BIG_INT, _PAIRS, _ORDERED, _BYTEARRAY, _COMPLEX, _COUNTER = range(1, 10)
_NUMPY_ARRAY, _NUMPY_SCALAR, _TENSOR = 16, 17, 32

_NATIVE = frozenset({type(None), bool, int, float, str, bytes})


class EncodingError(TtpError):
    """A value that cannot become bytes, named by its path; or bytes that are not what ``encode`` made."""


def encode(obj: object, name: str = "state") -> bytes:
    """``obj`` as bytes.

    Args:
        obj: see the top of this module for what it may consist of.
        name: what to call ``obj`` in an error.

    Raises:
        EncodingError: it holds something else; the text says where, as in ``state['x'][3]``.
    """
    try:
        body = _pack(_plain(obj, 0))
    except _RefusedError as refused:
        raise EncodingError(f"{name}{''.join(reversed(refused.path))}: {refused.why}") from None
    return b"".join((_MAGIC, _checksum(body), body))


def decode(data: bytes | bytearray | memoryview, apart: Sequence[bytes] = ()) -> Any:
    """The value that ``encode`` was given.

    Args:
        data: what it made.
        apart: the bytes of the arrays that an ``Encoder`` kept apart, in its order.

    Raises:
        EncodingError: these bytes were not made by ``encode``, or are damaged, or need a library that is not installed.
    """
    view = memoryview(data)
    start = len(_MAGIC) + _CHECKSUM_SIZE
    if view[: len(_MAGIC)] != _MAGIC:
        raise EncodingError(f"{len(view)} bytes do not begin like encoded state: {bytes(view[:8])!r}")
    if _checksum(view[start:]) != view[len(_MAGIC) : start]:
        raise EncodingError(f"{len(view)} bytes of encoded state are damaged: the checksum does not match")
    try:
        return _Decoder(apart).unpack(view[start:])
    except (EncodingError, MemoryError):
        raise
    except Exception as problem:  # msgpack, numpy and torch raise a dozen kinds on bytes that somebody forged
        raise EncodingError(f"encoded state cannot be read: {type(problem).__name__}: {problem}") from problem


def _checksum(body: bytes | memoryview) -> bytes:
    return xxhash.xxh3_64_digest(body)


# ------------------------------------------------------------------------------------------------------------- encoding


class _RefusedError(Exception):
    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why
        self.path: list[str] = []  # innermost first


def _pack(plain: object) -> bytes:
    packer = msgpack.Packer(default=_big_int, unicode_errors="surrogatepass", buf_size=4096)
    return bytes(packer.pack(plain))


def _plain(obj: Any, depth: int) -> Any:
    """``obj`` as something that msgpack gives back unchanged."""
    kind = type(obj)
    if kind in _NATIVE:
        return obj
    container = _CONTAINERS.get(kind)
    if container is not None:
        if depth >= _DEPTH_MAX:
            raise _RefusedError(f"nested deeper than {_DEPTH_MAX}: does it contain itself?")
        return container(obj, depth + 1)
    if kind is bytearray:
        return _extension(_BYTEARRAY, bytes(obj))
    if kind is complex:
        return _extension(_COMPLEX, _pack([obj.real, obj.imag]))
    return _foreign(obj)


def _foreign(obj: Any) -> Any:
    """Values of libraries, which are not imported for it: if one is not, ``obj`` is none of its."""
    try:
        if (numpy := sys.modules.get("numpy")) is not None:
            if type(obj) is numpy.ndarray:
                return _extension(_NUMPY_ARRAY, _pack(arrays.pack_array(obj)))
            if isinstance(obj, numpy.generic):
                return _extension(_NUMPY_SCALAR, _pack(arrays.pack_array(numpy.asarray(obj))))
        if (torch := sys.modules.get("torch")) is not None and isinstance(obj, torch.Tensor):
            return _extension(_TENSOR, _pack(arrays.pack_tensor(obj)))
    except arrays.NotPlainError as problem:
        raise _RefusedError(str(problem)) from None
    kind = type(obj)
    raise _RefusedError(
        f"object of type {kind.__module__}.{kind.__qualname__}; give its state instead, made of None, bool, int, float,"
        " str, bytes, list, tuple, dict, set, numpy arrays and torch tensors"
    )


def _items(items: Iterable[Any], depth: int) -> list[Any]:
    plain: list[Any] = []
    for index, item in enumerate(items):
        try:
            plain.append(_plain(item, depth))
        except _RefusedError as refused:
            refused.path.append(f"[{index}]")
            raise
    return plain


def _list(obj: Any, depth: int) -> list[Any]:
    if _NATIVE.issuperset(map(type, obj)):
        return list(obj)  # long and flat, as the 625 numbers of a random generator are
    return _items(obj, depth)


def _as_tuple(obj: Any, depth: int) -> Any:
    return _extension(_TUPLE, _pack(_list(obj, depth)))


def _as_set(obj: Any, depth: int) -> Any:
    return _extension(_SET, _pack(_members(obj, depth)))


def _as_frozenset(obj: Any, depth: int) -> Any:
    return _extension(_FROZENSET, _pack(_members(obj, depth)))


def _members(obj: Any, depth: int) -> list[Any]:
    plain: list[Any] = []
    for item in obj:
        try:
            plain.append(_plain(item, depth))
        except _RefusedError as refused:
            refused.path.append(f"{{{item!r:.60}}}")
            raise
    return plain


def _as_dict(obj: Any, depth: int) -> Any:
    if all(type(key) is str for key in obj):
        return {key: _value(key, value, depth) for key, value in obj.items()}
    return _extension(_PAIRS, _pack(_pairs(obj, depth)))


def _as_ordered(obj: Any, depth: int) -> Any:
    return _extension(_ORDERED, _pack(_pairs(obj, depth)))


def _as_counter(obj: Any, depth: int) -> Any:
    return _extension(_COUNTER, _pack(_pairs(obj, depth)))


def _pairs(obj: Any, depth: int) -> list[Any]:
    flat: list[Any] = []
    for key, value in obj.items():
        try:
            flat.append(_plain(key, depth))
        except _RefusedError as refused:
            refused.path.append(f" key {key!r:.60}")
            raise
        flat.append(_value(key, value, depth))
    return flat


def _value(key: Any, value: Any, depth: int) -> Any:
    try:
        return _plain(value, depth)
    except _RefusedError as refused:
        refused.path.append(f"[{key!r:.60}]")
        raise


_CONTAINERS: dict[type, Callable[[Any, int], Any]] = {
    list: _list,
    tuple: _as_tuple,
    set: _as_set,
    frozenset: _as_frozenset,
    dict: _as_dict,
    OrderedDict: _as_ordered,
    Counter: _as_counter,
}


def _big_int(value: int) -> Any:
    """What msgpack asks for when it cannot hold an int in 64 bits; nothing else gets as far as msgpack."""
    return _extension(_BIG_INT, value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))


def _extension(code: int, payload: bytes) -> Any:
    return msgpack.ExtType(code, payload)


# ------------------------------------------------------------------------------------------------- again and again

APART_BYTES = 64 << 10
"""Arrays of this size and more are kept apart."""

_WHOLE = frozenset({type(None), int, str, bytes})
"""Types whose values are the same for every purpose when they are equal; 0.0 and -0.0 are not."""

_DICTS, _TEXT = frozenset({dict, OrderedDict}), frozenset({str})

_LONG = 16
"""Shorter lists are packed as fast as they are compared."""


_NOTHING = object()


class _Part:
    """What is known of a value at one place of the state."""

    __slots__ = ("copy", "inside", "key", "last", "packed")

    def __init__(self, key: bytes) -> None:
        self.key = key
        self.last: object = _NOTHING  # what ``packed`` is of, if it cannot change
        self.inside: dict[Any, _Part] = {}
        self.copy: list[Any] | None = None
        self.packed = b""


class Encoder:
    """Encodes the state of one object again and again, at little cost where little has changed; for ``decode``.

    Long lists that are equal to those of the last time are not packed again, nor looked through.

    Args:
        name: what to call the state in an error.
    """

    def __init__(self, name: str) -> None:
        self.apart: list[Any] = []
        """The arrays that the last ``encode`` has left to the caller: contiguous, on the CPU."""
        self._name = name
        self._root = _Part(b"")
        self._packer = msgpack.Packer(default=_big_int, unicode_errors="surrogatepass", buf_size=4096)

    def encode(self, obj: object) -> bytes:
        """``obj`` as bytes, but for those of ``apart``.

        Raises:
            EncodingError: it holds something that cannot be stored; the text says where.
        """
        self.apart = []
        try:
            body = self._value(self._root, obj, 0)
        except _RefusedError:
            encode(obj, self._name)  # says where
            raise EncodingError(f"{self._name}: it changed while it was encoded") from None
        return b"".join((_MAGIC, _checksum(body), body))

    def _value(self, part: _Part, value: Any, depth: int) -> bytes:
        kind = type(value)
        if kind in _NATIVE:
            return self._packed(value)
        if kind in _DICTS and depth < _DEPTH_MAX and _TEXT.issuperset(map(type, value)):
            ordered = kind is OrderedDict
            pack_header = self._packer.pack_array_header if ordered else self._packer.pack_map_header
            packed = self._inside(part, pack_header(len(value) << ordered), value.items(), depth + 1, keyed=True)
            return self._packed(_extension(_ORDERED, packed)) if ordered else packed
        if kind is list and depth < _DEPTH_MAX:
            return self._list(part, value, depth + 1)
        if arrays.may_be_apart(value, APART_BYTES):
            self.apart.append(value)
            return self._packed(_array_apart(value, len(self.apart) - 1))
        return self._packed(_plain(value, depth))

    def _list(self, part: _Part, value: list[Any], depth: int) -> bytes:
        if part.copy is not None and part.copy == value:
            return part.packed
        part.copy, part.last = None, _NOTHING
        kinds = set(map(type, value))
        if not kinds <= _NATIVE:
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
            if type(item) not in _NATIVE:
                pieces += (found.key, self._value(found, item, depth))
                continue
            if item is not found.last:
                found.last, found.packed, found.copy = item, self._packer.pack(item), None
            pieces += (found.key, found.packed)
        if 2 * len(inside) >= len(pieces):
            part.inside = {}  # something is gone, and is forgotten with the rest
        return b"".join(pieces)

    def _packed(self, plain: object) -> bytes:
        return bytes(self._packer.pack(plain))


def _array_apart(value: Any, index: int) -> Any:
    code, fields = (_TENSOR, arrays.pack_tensor) if arrays.is_tensor(value) else (_NUMPY_ARRAY, arrays.pack_array)
    return _extension(code, _pack(fields(value, index)))


# ------------------------------------------------------------------------------------------------------------- decoding


class _Decoder:
    def __init__(self, apart: Sequence[bytes] = ()) -> None:
        self._depth = 0
        self._apart = apart
        self._makers: dict[int, Callable[[bytes], Any]] = {
            _TUPLE: lambda payload: tuple(self._list(payload)),
            _SET: lambda payload: set(self._list(payload)),
            _FROZENSET: lambda payload: frozenset(self._list(payload)),
            _BIG_INT: lambda payload: int.from_bytes(payload, "little", signed=True),
            _PAIRS: lambda payload: dict(self._pairs(payload)),
            _ORDERED: lambda payload: OrderedDict(self._pairs(payload)),
            _COUNTER: lambda payload: Counter(dict(self._pairs(payload))),
            _BYTEARRAY: bytearray,
            _COMPLEX: lambda payload: complex(*self._list(payload)),
            _NUMPY_ARRAY: lambda payload: arrays.unpack_array(self._array(payload)),
            _NUMPY_SCALAR: lambda payload: arrays.unpack_array(self._list(payload))[()],
            _TENSOR: lambda payload: arrays.unpack_tensor(self._array(payload)),
        }

    def unpack(self, body: bytes | memoryview) -> Any:
        if self._depth > _DEPTH_MAX:
            raise EncodingError(f"encoded state is nested deeper than {_DEPTH_MAX}")
        _check_lengths(body)
        return msgpack.unpackb(
            body, raw=False, strict_map_key=False, unicode_errors="surrogatepass", ext_hook=self._extension
        )

    def _extension(self, code: int, payload: bytes) -> Any:
        maker = self._makers.get(code)
        if maker is None:
            raise EncodingError(f"encoded state holds a value of kind {code}, unknown here: a newer ttp wrote it")
        self._depth += 1
        value = maker(payload)
        self._depth -= 1
        return value

    def _list(self, payload: bytes) -> list[Any]:
        value = self.unpack(payload)
        if not isinstance(value, list):
            raise EncodingError(f"encoded state holds {type(value).__name__} where a list belongs")
        return value

    def _array(self, payload: bytes) -> list[Any]:
        """Dtype, shape and bytes; where there is a number instead of the bytes, they were kept apart."""
        fields = self._list(payload)
        if len(fields) > 2 and type(fields[2]) is int:
            fields[2] = self._apart[fields[2]]
        return fields

    def _pairs(self, payload: bytes) -> Iterable[tuple[Any, Any]]:
        flat = self._list(payload)
        return zip(flat[::2], flat[1::2], strict=True)


def _check_lengths(body: bytes | memoryview) -> None:
    """Walk over the whole without building it: a length that promises more than there is ends here, for free."""
    walker = msgpack.Unpacker(max_buffer_size=len(body), strict_map_key=False)
    walker.feed(body)
    try:
        walker.skip()
    except msgpack.OutOfData:
        raise EncodingError(f"{len(body)} bytes of encoded state promise more than they hold") from None
    if walker.tell() != len(body):
        raise EncodingError(f"encoded state ends after {walker.tell()} of {len(body)} bytes")
