"""The table of contents of a shard file: which values are in it, and where. Stored in the manifest."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from ttp.core.messages import Piece
from ttp.errors import GARBLED, CheckpointError, ToldAs
from ttp.store.json_text import parse_json
from ttp.store.manifest import safe_path

FORMAT = 1
SHARD_KIND = "shard"

DIMENSIONS_MAX = 64
INDEX_MAX = 1 << 20
"""The most entries that a list in the state may have."""
NUMBER_MAX = 1 << 62

StatePath = tuple[str | int, ...]
"""The path of a value in the nested state: a string is a key of a mapping, a number an index into a list."""


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """One value in one shard file.

    Args:
        path: path of the value in the nested state.
        file: the shard file, relative to the checkpoint's directory.
        offset: position of the value's first byte in the file.
        length: number of the value's bytes in the file.
        dtype: ``float32`` and so on; empty for a value that is not a tensor.
        shape: shape of the whole tensor, over all shards.
        offsets: where this chunk begins in the whole tensor, one number per dimension.
        sizes: shape of this chunk, one number per dimension.
        device: type of the device on which the tensor was: ``cpu``, ``cuda``.
        int_keys: positions in ``path`` at which the mapping's key was an ``int`` and became a string.
        order: the tensor's dimensions as they lie in memory, the outermost first; empty: row by row. The results of
            matrix products depend on it.
        placed: of a ``DTensor`` for each dimension of its mesh 0 if it is replicated over it, or the dimension of the
            tensor that is cut over it, counted from 1; empty: no ``DTensor``, or one that is cut in another way.
    """

    path: StatePath
    file: str
    offset: int
    length: int
    dtype: str = ""
    shape: tuple[int, ...] = ()
    offsets: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()
    device: str = "cpu"
    int_keys: tuple[int, ...] = ()
    order: tuple[int, ...] = ()
    placed: tuple[int, ...] = ()

    @property
    def key(self) -> str:
        """The flattened name, as torch's own planner makes it."""
        return ".".join(map(str, self.path))

    @property
    def is_tensor(self) -> bool:
        """Whether the value is a tensor; other values are stored as ``torch.save`` writes them."""
        return bool(self.dtype)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The element type, as a ``torch.dtype``.

        Raises:
            CheckpointError: the installed torch does not have this dtype.
        """
        found = getattr(torch, self.dtype, None)
        if not isinstance(found, torch.dtype):
            raise CheckpointError(f"{self.key} has the dtype {self.dtype!r}, which torch {torch.__version__} lacks")
        return found


def described(dtype: str, shape: Sequence[int]) -> str:
    """Describe a value for a message; without ``dtype`` it is not a tensor."""
    return f"{dtype} {list(shape)}" if dtype else "a plain value"


def encode_table(items: Iterable[IndexEntry], left_out: Sequence[str] = ()) -> str:
    """Encode the table of a shard file as JSON. ``left_out`` names values that could not be stored safely."""
    table: dict[str, Any] = {"format": FORMAT, "items": [_item_to_json(item) for item in items]}
    if left_out:
        table["left_out"] = list(left_out)
    return json.dumps(table, separators=(",", ":"))


def items_of(pieces: Iterable[Piece]) -> list[IndexEntry]:
    """Return every item of every shard file among ``pieces``.

    Raises:
        CheckpointError: a table is absent, garbled or of a newer format.
    """
    found: list[IndexEntry] = []
    for piece in pieces:
        if piece.kind == SHARD_KIND:
            found += _decode_items(piece)
    _check_tree(found)
    return found


def left_out_of(pieces: Iterable[Piece]) -> list[str]:
    """Return the names of the values that the writers of these pieces had to leave out, sorted."""
    names: list[str] = []
    for piece in pieces:
        if piece.kind == SHARD_KIND:
            listed = _parse(piece).get("left_out", [])
            names += [str(name) for name in listed] if isinstance(listed, list) else []
    return sorted(set(names))


def _item_to_json(item: IndexEntry) -> dict[str, Any]:
    row: dict[str, Any] = {"path": item.path, "at": (item.offset, item.length)}
    if item.is_tensor:
        row |= {"dtype": item.dtype, "shape": item.shape}
        if item.sizes != item.shape or item.offsets != (0,) * len(item.shape):
            row["chunk"] = (item.offsets, item.sizes)
        if item.device != "cpu":
            row["device"] = item.device
        if item.order:
            row["order"] = item.order
        if item.placed:
            row["placed"] = item.placed
    if item.int_keys:
        row["int_keys"] = item.int_keys
    return row


def _parse(piece: Piece) -> dict[str, Any]:
    with ToldAs(CheckpointError, f"{piece.file} has no readable table of contents", *GARBLED, reason=repr):
        table = parse_json(piece.table)
        written = int(table["format"])
    if written > FORMAT:
        raise CheckpointError(
            f"{piece.file} was written in format {written}, this ttp reads up to {FORMAT}: update ttp"
        )
    return dict(table)


def _decode_items(piece: Piece) -> list[IndexEntry]:
    table = _parse(piece)
    if not safe_path(piece.file):
        raise CheckpointError(f"the manifest names a file outside of the checkpoint: {piece.file!r}")
    with ToldAs(CheckpointError, f"the table of contents of {piece.file} is garbled", *GARBLED, reason=repr):
        return [_item_from_json(piece.file, row) for row in table["items"]]


def _item_from_json(file: str, row: dict[str, Any]) -> IndexEntry:
    path = _path(row["path"])
    offset, length = _numbers(row["at"])
    int_keys = _numbers(row.get("int_keys", []))
    if not all(position < len(path) and str(path[position]).lstrip("-").isdecimal() for position in int_keys):
        raise ValueError(f"{path!r:.60} has keys that are no numbers at the positions {int_keys}")
    if "dtype" not in row:
        return IndexEntry(path, file, offset, length, int_keys=int_keys)
    shape = _numbers(row["shape"])
    offsets, sizes = map(_numbers, row.get("chunk", ([0] * len(shape), shape)))
    device = str(row.get("device", "cpu"))
    order = _numbers(row.get("order", []))
    if order and sorted(order) != list(range(len(shape))):
        raise ValueError(f"{order} is no order of {len(shape)} dimensions")
    placed = _numbers(row.get("placed", []))
    if placed and max(placed) > len(shape):
        raise ValueError(f"{placed} cuts more than {len(shape)} dimensions")
    cut = shape, offsets, sizes
    item = IndexEntry(path, file, offset, length, str(row["dtype"]), *cut, device, int_keys, order, placed)
    dtype = getattr(torch, item.dtype, None)
    if isinstance(dtype, torch.dtype) and prod(sizes) * dtype.itemsize > length:
        raise ValueError(f"{item.key} of {dtype} {sizes} does not fit into {length} bytes")
    return item


def _path(steps: Any) -> StatePath:
    if not isinstance(steps, list) or not steps:
        raise TypeError(f"{steps!r:.60} is not a path")
    path = tuple(step if type(step) is int else str(step) for step in steps)
    if any(isinstance(step, int) and not 0 <= step < INDEX_MAX for step in path):
        raise ValueError(f"{path!r:.60} has a list index out of range")
    return path


def _numbers(values: Any) -> tuple[int, ...]:
    if len(values) > DIMENSIONS_MAX or not all(type(value) is int and abs(value) < NUMBER_MAX for value in values):
        raise ValueError(f"{values!r:.60} is not a list of sizes")
    if values and min(values) < 0:
        raise ValueError(f"negative number in {values}")
    return tuple(values)


def _check_tree(items: Iterable[IndexEntry]) -> None:
    """Check that the paths form one tree: no path is both a value and a container, or both a list and a mapping."""
    holds_index: dict[StatePath, bool] = {}
    paths = {item.path: item.file for item in items}
    for path, file in paths.items():
        for depth, step in enumerate(path):
            if holds_index.setdefault(path[:depth], isinstance(step, int)) is not isinstance(step, int):
                raise CheckpointError(f"the table of contents of {file} is garbled: {path[:depth]} is list and mapping")
    both = next((path for path in holds_index if path in paths), None)
    if both is not None:
        raise CheckpointError(f"the table of contents of {paths[both]} is garbled: {both} is value and container")
