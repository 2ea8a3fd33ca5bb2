"""Encodes values as bytes and decodes them with their types; decoding never executes code.

Theory of operation
-------------------
``encode`` turns a value into one that msgpack can pack. A type that msgpack lacks or does not distinguish, such as a
tuple, becomes an extension whose payload is msgpack again or raw bytes. The result begins with a magic word and a
checksum of the rest, so garbage is refused before it is parsed.

Large arrays may be kept apart: ``repeated_encoding`` leaves their bytes to its caller, and the payload has the index of
each such array.

``decode`` allocates at most a multiple of its input: a first pass that builds no objects checks all lengths, and shapes
are compared with the number of bytes.

Supported types: None, bool, int of any size, float, complex, str, bytes, bytearray, list, tuple, dict, OrderedDict
(with the ``_metadata`` that ``state_dict()`` of modules and of tensordicts adds), Counter, set, frozenset, numpy arrays
and scalars of plain dtypes, torch tensors and parameters (strided, any dtype; they come back on the CPU, or on a device
if they were on such a one and the process uses it), torch's sizes, dtypes and devices.
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

MAGIC = b"ttp\x01"
_CHECKSUM_SIZE = 8
DEPTH_MAX = 100
"""Most levels of nested containers. Deeper nesting is a mistake, most likely a container inside itself."""

_TUPLE, _SET, _FROZENSET, _BIG_INT, _PAIRS, ORDERED, _BYTEARRAY, _COMPLEX, _COUNTER, _DESCRIBED = range(1, 11)
NUMPY_ARRAY, _NUMPY_SCALAR, _LAID_OUT, TENSOR, _TORCH_WORD = 16, 17, 18, 32, 33

NATIVE = frozenset({type(None), bool, int, float, str, bytes})

_VALUE = "[{!r:.60}]"
"""The place of a value in a list or a dictionary."""


class EncodingError(TtpError):
    """A value that cannot be encoded, named by its path; or bytes that ``encode`` did not make."""


def encode(obj: object, name: str = "state") -> bytes:
    """Return ``obj`` as bytes.

    Args:
        obj: a value of the types that the module's docstring lists.
        name: what to call ``obj`` in an error.

    Raises:
        EncodingError: ``obj`` contains a value of another type; the text says where, as in ``state['x'][3]``.
    """
    try:
        body = pack(to_plain(obj, 0))
    except RefusedError as refused:
        raise EncodingError(f"{name}{''.join(reversed(refused.path))}: {refused.why}") from None
    return b"".join((MAGIC, checksum(body), body))


def decode(data: bytes | bytearray | memoryview, apart: Sequence[bytes] = ()) -> Any:
    """Return the value that ``encode`` was given.

    Args:
        data: the bytes that ``encode`` returned.
        apart: the bytes of the arrays that a ``RepeatedEncoder`` kept apart, in its order.

    Raises:
        EncodingError: these bytes were not made by ``encode``, or are damaged, or need a library that is not installed.
    """
    view = memoryview(data)
    start = len(MAGIC) + _CHECKSUM_SIZE
    if view[: len(MAGIC)] != MAGIC:
        raise EncodingError(f"{len(view)} bytes do not begin like encoded state: {bytes(view[:8])!r}")
    if checksum(view[start:]) != view[len(MAGIC) : start]:
        raise EncodingError(f"{len(view)} bytes of encoded state are damaged: the checksum does not match")
    try:
        return _Decoder(apart).unpack(view[start:])
    except (EncodingError, MemoryError):
        raise
    except Exception as problem:  # msgpack, numpy and torch raise a dozen kinds of errors on forged bytes
        raise EncodingError(f"encoded state cannot be read: {type(problem).__name__}: {problem}") from problem


def values_in(data: memoryview, most: int) -> dict[str, memoryview]:
    """Return the encoded bytes of each value in an encoded dict whose keys are texts.

    Nothing is decoded, so no tensor is made, on whatever device.

    Args:
        data: bytes that ``encode`` returned.
        most: a dict with more values is left alone.

    Returns:
        The bytes by key; {} for anything else.
    """
    body, found = data[len(MAGIC) + _CHECKSUM_SIZE :], dict[str, memoryview]()
    walker = msgpack.Unpacker(max_buffer_size=len(body), strict_map_key=False, unicode_errors="surrogatepass")
    walker.feed(body)
    try:
        count = walker.read_map_header()
        for _ in range(count if count <= most else 0):
            key, start = walker.unpack(), walker.tell()
            walker.skip()
            found[key] = body[start : walker.tell()]
    except (ValueError, msgpack.UnpackException):  # no dict
        return {}
    return found


def checksum(body: bytes | memoryview) -> bytes:
    """Return the checksum that stands in front of ``body``."""
    return xxhash.xxh3_64_digest(body)


# ------------------------------------------------------------------------------------------------------------- encoding


class RefusedError(Exception):
    """A value that cannot be stored; the callers add its path while the exception passes them."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why
        self.path: list[str] = []  # innermost first


def pack(plain: object) -> bytes:
    """Pack a value that ``to_plain`` made into bytes."""
    packer = msgpack.Packer(default=big_int, unicode_errors="surrogatepass", buf_size=4096)
    return bytes(packer.pack(plain))


def to_plain(obj: Any, depth: int) -> Any:
    """Return ``obj`` as a value that msgpack gives back unchanged."""
    kind = type(obj)
    if kind in NATIVE:
        return obj
    container = _CONTAINERS.get(kind)
    if container is not None:
        if depth >= DEPTH_MAX:
            raise RefusedError(f"nested deeper than {DEPTH_MAX}: does it contain itself?")
        return container(obj, depth + 1)
    if kind is bytearray:
        return extension(_BYTEARRAY, bytes(obj))
    if kind is complex:
        return extension(_COMPLEX, pack([obj.real, obj.imag]))
    return _foreign(obj)


def _foreign(obj: Any) -> Any:
    """Convert a numpy or torch value. If a library is not loaded, ``obj`` cannot be one of its values."""
    try:
        if (numpy := sys.modules.get("numpy")) is not None:
            if type(obj) is numpy.ndarray:
                return _laid_out(obj, extension(NUMPY_ARRAY, pack(arrays.pack_array(obj))))
            if isinstance(obj, numpy.generic):
                return extension(_NUMPY_SCALAR, pack(arrays.pack_array(numpy.asarray(obj))))
        if (torch := sys.modules.get("torch")) is not None:
            if isinstance(obj, torch.Tensor):
                return _laid_out(obj, extension(TENSOR, pack(arrays.pack_tensor(obj))))
            if (word := arrays.pack_torch_word(obj)) is not None:
                return extension(_TORCH_WORD, pack(word))
    except arrays.NotPlainError as problem:
        raise RefusedError(str(problem)) from None
    kind = type(obj)
    raise RefusedError(
        f"object of type {kind.__module__}.{kind.__qualname__}; give its state instead, made of None, bool, int, float,"
        " str, bytes, list, tuple, dict, set, numpy arrays and torch tensors"
    )


def _laid_out(array: Any, packed: Any) -> Any:
    """Add the order of its dimensions in memory to a packed array, if they do not lie row by row."""
    order = arrays.memory_order(array)
    return extension(_LAID_OUT, pack([packed, order])) if order else packed


def _part(item: Any, depth: int, where: str, name: object) -> Any:
    """Convert an item of a container. If it is refused, the error gets its place: ``where`` with its name put in."""
    try:
        return to_plain(item, depth)
    except RefusedError as refused:
        refused.path.append(where.format(name))
        raise


def _list(obj: Any, depth: int) -> list[Any]:
    if NATIVE.issuperset(map(type, obj)):
        return list(obj)  # fast for long flat lists, such as the 625 numbers of a random generator
    return [_part(item, depth, _VALUE, index) for index, item in enumerate(obj)]


def _members(obj: Any, depth: int) -> list[Any]:
    return [_part(item, depth, "{{{!r:.60}}}", item) for item in obj]


def _as_dict(obj: Any, depth: int) -> Any:
    if all(type(key) is str for key in obj):
        return {key: _part(value, depth, _VALUE, key) for key, value in obj.items()}
    return extension(_PAIRS, pack(_pairs(obj, depth)))


def _pairs(obj: Any, depth: int) -> list[Any]:
    """Return keys and values by turns."""
    flat: list[Any] = []
    for key, value in obj.items():
        flat += (_part(key, depth, " key {!r:.60}", key), _part(value, depth, _VALUE, key))
    return flat


def _extended(code: int, inside: Callable[[Any, int], list[Any]]) -> Callable[[Any, int], Any]:
    """Return a converter for a container type that msgpack lacks: it packs the list that ``inside`` makes of it."""
    return lambda obj, depth: extension(code, pack(inside(obj, depth)))


def _ordered(obj: Any, depth: int) -> Any:
    metadata = metadata_of(obj)
    packed = extension(ORDERED, pack(_pairs(obj, depth + bool(metadata))))  # ``decode`` counts both extensions
    return described(packed, _part(metadata, depth, ".{}", "_metadata")) if metadata else packed


def metadata_of(ordered: Any) -> dict[Any, Any]:
    """Return what ``state_dict()`` of a module or a TensorDict says about itself, beside the items; {}: nothing."""
    found = getattr(ordered, "_metadata", None)
    return found if isinstance(found, dict) else {}


def described(packed: Any, metadata: Any) -> Any:
    """Add the ``_metadata`` of an OrderedDict to its packed items: ``load_state_dict()`` may need it."""
    return extension(_DESCRIBED, pack([packed, metadata]))


_CONTAINERS: dict[type, Callable[[Any, int], Any]] = {
    list: _list,
    tuple: _extended(_TUPLE, _list),
    set: _extended(_SET, _members),
    frozenset: _extended(_FROZENSET, _members),
    dict: _as_dict,
    OrderedDict: _ordered,
    Counter: _extended(_COUNTER, _pairs),
}


def big_int(value: int) -> Any:
    """Convert an int beyond 64 bits. msgpack calls this for values that it cannot pack, which are only such ints."""
    return extension(_BIG_INT, value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))


def extension(code: int, payload: bytes) -> Any:
    """Return a msgpack extension, which stands for a value of a type that msgpack lacks."""
    return msgpack.ExtType(code, payload)


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
            ORDERED: lambda payload: OrderedDict(self._pairs(payload)),
            _COUNTER: lambda payload: Counter(dict(self._pairs(payload))),
            _DESCRIBED: self._described,
            _BYTEARRAY: bytearray,
            _COMPLEX: lambda payload: complex(*self._list(payload)),
            NUMPY_ARRAY: lambda payload: arrays.unpack_array(self._array(payload)),
            _NUMPY_SCALAR: lambda payload: arrays.unpack_array(self._list(payload))[()],
            _LAID_OUT: lambda payload: arrays.lay_out(*self._list(payload)),
            TENSOR: lambda payload: arrays.unpack_tensor(self._array(payload)),
            _TORCH_WORD: lambda payload: arrays.unpack_torch_word(*self._list(payload)),
        }

    def unpack(self, body: bytes | memoryview) -> Any:
        if self._depth > DEPTH_MAX:
            raise EncodingError(f"encoded state is nested deeper than {DEPTH_MAX}")
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
        """Return dtype, shape and bytes; bytes that were kept apart are looked up by their index."""
        fields = self._list(payload)
        if len(fields) > 2 and type(fields[2]) is int:
            fields[2] = self._apart[fields[2]]
        return fields

    def _described(self, payload: bytes) -> Any:
        ordered, ordered._metadata = self._list(payload)
        return ordered

    def _pairs(self, payload: bytes) -> Iterable[tuple[Any, Any]]:
        flat = self._list(payload)
        return zip(flat[::2], flat[1::2], strict=True)


def _check_lengths(body: bytes | memoryview) -> None:
    """Check all lengths without building objects, so that a length beyond the end of the body allocates no memory."""
    walker = msgpack.Unpacker(max_buffer_size=len(body), strict_map_key=False)
    walker.feed(body)
    try:
        walker.skip()
    except msgpack.OutOfData:
        raise EncodingError(f"{len(body)} bytes of encoded state are fewer than the lengths in them require") from None
    if walker.tell() != len(body):
        raise EncodingError(f"encoded state ends after {walker.tell()} of {len(body)} bytes")
