"""Encodes and decodes the rank-local state of one version as an image: the bytes in pages and checkpoints.

An image consists of a header, a description of extra states and buffers (msgpack), the length of each section, the
sections (random streams, each object of ``extra_state``), the buffers, and the large arrays of ``extra_state``. It
contains no pickle.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
import xxhash
from torch import Tensor

from ttp.adapters.torch.local_state.buffers import BufferInfo, decode_buffer
from ttp.core.messages import Piece
from ttp.errors import GARBLED, CheckpointError, ToldAs
from ttp.processor.local_state.local_piece import Change, Changes, read_local_image
from ttp.processor.local_state.sections import Sections
from ttp.store.encoding import EncodingError, encode, values_in
from ttp.store.encoding import decode as decode_values

BUFFER, _VALUE, _OBJECT = "buffer:", "value:", "object:"
"""Begin the names of buffers, and of values in the state of an object, among the names of objects whose digests are
compared. ``_OBJECT`` precedes the name of an object that begins with one of these."""
VALUES_MAX = 32
"""An object whose state has more values is only compared as a whole: a table of them would fill the manifest."""

_MAGIC = b"TTPL\x01"
_MAGIC_APART = b"TTPL\x02"
"""First bytes of an image that ends with large arrays of extra states."""
_HEADER = struct.Struct("<5sxHI")  # magic, number of extra states, bytes of the description

_UNREADABLE = (*GARBLED, struct.error, msgpack.UnpackException, EncodingError)


@dataclass(frozen=True, slots=True)
class LocalState:
    """The rank-local state of one version, as it was saved.

    Args:
        rng: the random streams, for ``RngState.restore``; empty: they could not be captured.
        buffers: every captured buffer of the model by name, on the CPU.
        extra: encoded states of objects by name, for ``ExtraState.restore``.
    """

    rng: bytes
    buffers: Mapping[str, Tensor]
    extra: Mapping[str, bytes]


def encode_head(extra: Sequence[str], buffers: Sequence[BufferInfo], apart: Sequence[Sequence[int]]) -> bytes:
    """Encode the header and the description of an image.

    Args:
        extra: names of the objects of ``extra_state``.
        buffers: descriptions of the buffers, in their order in the image.
        apart: sizes, in bytes, of the large arrays of each object; empty: there are none.
    """
    description: dict[str, Any] = {"extra": extra}
    description["buffers"] = [[info.name, info.dtype, info.shape] for info in buffers]
    if apart:
        description["apart"] = apart
    packed = msgpack.packb(description)
    return _HEADER.pack(_MAGIC_APART if apart else _MAGIC, len(extra), len(packed)) + bytes(packed)


def decode(data: bytes) -> LocalState:
    """Decode an image.

    Raises:
        CheckpointError: the bytes are no image.
    """
    with ToldAs(CheckpointError, f"{len(data)} bytes of rank-local state cannot be read", *_UNREADABLE):
        image = _parse(memoryview(data))
        extra = {name: bytes(section) for name, section in image.extra.items()}
        for name, parts in image.apart.items():
            extra[name] = encode(decode_values(extra[name], [bytes(part) for part in parts]))
        buffers = {info.name: decode_buffer(info, bytes(section)) for info, section in image.buffers}
        return LocalState(bytes(image.rng), buffers, extra)


def read_local_state(path: Path, pieces: Sequence[Piece], rank: int) -> LocalState | None:
    """Read the rank-local state of ``rank`` from the checkpoint at ``path``; None: the checkpoint has none.

    Raises:
        CheckpointError: a piece cannot be read.
    """
    image = read_local_image(path, pieces, rank)
    return None if image is None else decode(image)


def name_of(name: str, key: str | None = None) -> str:
    """Return what an object of ``extra_state``, or a value in its state, is called where digests are compared."""
    if key is not None:
        return _VALUE + json.dumps([name, key])
    return _OBJECT + name if name.startswith((BUFFER, _VALUE, _OBJECT)) else name


def object_digests(data: bytes, _finished: bool = False) -> dict[str, str]:
    """Return a digest of each object of ``extra_state``, of each value in its state if that is a dict without large
    arrays, and of each buffer, in an image; none if it is no image.

    Equal states have equal digests on all ranks.
    """
    try:
        image = _parse(memoryview(data))
    except _UNREADABLE:
        return {}
    digests = {}
    for name, section in image.extra.items():
        digest = xxhash.xxh3_128(section)
        for part in image.apart.get(name, ()):
            digest.update(part)
        digests[name_of(name)] = digest.hexdigest()
        values = {} if name in image.apart else values_in(section, VALUES_MAX)
        if len(values) > 1:
            digests |= {name_of(name, key): xxhash.xxh3_128_hexdigest(value) for key, value in values.items()}
    for info, section in image.buffers:
        digests[BUFFER + info.name] = xxhash.xxh3_128_hexdigest(section)
    return digests


def without_still(changes: Changes) -> Changes:
    """Return changes without those of buffers that stay as they are in the update, as a model may have hundreds, and of
    values in objects that do.

    What a rank that died in the update had before it is kept.
    """
    found = dict[str, Mapping[Change, list[int]]]()
    for name, by_change in changes.items():
        known = by_change
        if name.startswith(BUFFER):
            moved = any(before and after and before != after for before, after in by_change)
            known = {change: ranks for change, ranks in by_change.items() if change[0] and (moved or not change[1])}
        elif name.startswith(_VALUE):
            owner = name_of(json.loads(name.removeprefix(_VALUE))[0])
            known = by_change if any(before != after for before, after in changes[owner]) else {}
        if known:
            found[name] = known
    return found


@dataclass(frozen=True, slots=True)
class _Parts:
    """Where everything is in an image."""

    rng: memoryview
    extra: dict[str, memoryview]
    apart: dict[str, list[memoryview]]
    buffers: list[tuple[BufferInfo, memoryview]]


def _parse(data: memoryview) -> _Parts:
    magic, extra_count, description_size = _HEADER.unpack_from(data)
    if magic not in (_MAGIC, _MAGIC_APART):
        raise ValueError(f"they begin with {magic!r}")
    sections = Sections(data, _HEADER.size)
    description = msgpack.unpackb(sections.take(description_size))
    names = [str(name) for name in description["extra"]]
    if len(names) != extra_count:
        raise ValueError(f"{extra_count} extra states with {len(names)} names")
    lengths = struct.Struct(f"<{1 + extra_count}Q")
    rng_size, *extra_sizes = lengths.unpack(sections.take(lengths.size))
    rng = sections.take(rng_size)
    parts = [(name, sections.take(size)) for name, size in zip(names, extra_sizes, strict=True)]
    extra = {name: part for name, part in parts if part}
    buffers: list[tuple[BufferInfo, memoryview]] = []
    for name, dtype, shape in description["buffers"]:
        info = BufferInfo(str(name), str(dtype), tuple(int(extent) for extent in shape))
        buffers.append((info, sections.take(info.size)))
    listed = zip(names, description.get("apart", ()), strict=False)
    arrays = [(name, [sections.take(size) for size in sizes]) for name, sizes in listed]
    sections.end()
    return _Parts(rng, extra, {name: parts for name, parts in arrays if parts and name in extra}, buffers)
