"""Reads a checkpoint by the tables in its manifest. Nothing is unpickled, and ranks do not communicate.

Of a tensor each rank names the chunks that are in its memory. The elements are copied from whichever saved chunks
overlap these, so a checkpoint of any layout can be read in any other.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import os
from collections.abc import Collection, Iterable, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.utils import _create_file_view

from ttp.adapters.torch.saving.checkpoint import Chunk
from ttp.adapters.torch.saving.flatten_state import put
from ttp.adapters.torch.saving.piece_index import IndexEntry, StatePath
from ttp.errors import CheckpointError, ToldAs
from ttp.store.plain_file import open_plain

_SMALL_BYTES = 64 << 10
"""Up to this size a value is read at once: torch makes about twenty small reads for each."""


def load_chunks(
    path: Path,
    items: Iterable[IndexEntry],
    wanted: Iterable[tuple[StatePath, Sequence[Chunk]]],
    *,
    padded: Collection[StatePath] = (),
) -> None:
    """Fill chunks of tensors, on whatever device they are. Their memory is overwritten.

    Only saved chunks that overlap these chunks are read, one at a time, so the call takes the memory of one saved
    chunk.

    Args:
        path: the directory of the checkpoint.
        items: the entries of the checkpoint.
        wanted: for each tensor its path in the nested state, and the chunks to fill.
        padded: paths of tensors that may have another shape in the checkpoint; elements that it lacks stay unchanged.

    Raises:
        CheckpointError: the checkpoint does not have a tensor, or has another shape for it, or cannot be read.
    """
    chunks = {steps: found for steps, found in wanted if found}
    saved = {of_value[0].path: of_value for of_value in by_path(item for item in items if item.path in chunks)}
    for steps, found in chunks.items():  # all, before anything is modified
        if steps not in saved or (steps not in padded and saved[steps][0].shape != tuple(found[0].shape)):
            raise CheckpointError(f"{path} has no tensor {'.'.join(map(str, steps))} of shape {tuple(found[0].shape)}")
    missing = {steps: sum(chunk.tensor.numel() for chunk in found) for steps, found in chunks.items()}
    with _Files() as files:
        for item in sorted(itertools.chain(*saved.values()), key=attrgetter("file", "offset")):
            missing[item.path] -= copy_overlaps(path, item, chunks[item.path], files)
    for steps, count in missing.items():
        if count and steps not in padded:
            key = saved[steps][0].key
            raise CheckpointError(f"{path} is incomplete: {count} elements of {key} are in none of its pieces")


class _Files(contextlib.ExitStack):
    """Keeps the file open that was read last: on shared storage each opening may wait for a server."""

    last: tuple[Path, io.FileIO] | None = None

    def open(self, path: Path) -> io.FileIO:
        """Return an open file, which stays open until the next call for another one."""
        if self.last is None or self.last[0] != path:
            self.close()
            self.last = path, self.enter_context(open_plain(path))
        return self.last[1]


def copy_overlaps(path: Path, item: IndexEntry, chunks: Sequence[Chunk], files: _Files | None = None) -> int:
    """Copy one saved chunk into ``chunks``, where they overlap. The file is not read if they do not overlap.

    Returns:
        The number of copied elements.

    Raises:
        CheckpointError: the file cannot be read, or does not match its table of contents.
    """
    piece: Tensor | None = None
    copied = 0
    for chunk in chunks:
        common = overlap(item.offsets, item.sizes, chunk.offsets, chunk.tensor.shape)
        if common is None:
            continue
        piece = read_value(path, item, files) if piece is None else piece
        source, target = common
        with torch.inference_mode(chunk.tensor.is_inference()):  # else torch writes to no view of it
            here = chunk.tensor.detach()[target]
            here.copy_(piece[source])
        copied += here.numel()
    return copied


Slices = tuple[slice, ...]


def overlap(
    offsets: Sequence[int], sizes: Sequence[int], others: Sequence[int], other_sizes: Sequence[int]
) -> tuple[Slices, Slices] | None:
    """Return the slices of two boxes of a tensor at which they intersect; None if they do not intersect.

    Args:
        offsets: where the first box begins in the tensor, one number per dimension.
        sizes: shape of the first box.
        others: where the second box begins.
        other_sizes: shape of the second box.
    """
    bounds = zip(offsets, sizes, others, other_sizes, strict=True)
    spans = [(max(a, b), min(a + m, b + n)) for a, m, b, n in bounds]
    if any(begin >= end for begin, end in spans):
        return None

    def within(origin: Sequence[int]) -> Slices:
        return tuple(slice(begin - at, end - at) for (begin, end), at in zip(spans, origin, strict=True))

    return within(offsets), within(others)


def read_values(path: Path, items: Iterable[IndexEntry]) -> dict[str, Any]:
    """Read items to the CPU and return them as a nested state, with whole tensors.

    Raises:
        CheckpointError: a file cannot be read, or does not match its table of contents.
    """
    root: dict[str, Any] = {}
    for chunks in by_path(items):
        put(root, chunks[0].path, read_whole(path, chunks), chunks[0].int_keys)
    return root


def by_path(items: Iterable[IndexEntry]) -> list[list[IndexEntry]]:
    """Return the distinct chunks of each value. The values are in the order of the checkpoint."""
    found: dict[StatePath, dict[object, IndexEntry]] = {}
    for item in items:  # replicas may have written a chunk twice: keep the first, as stock torch does
        found.setdefault(item.path, {}).setdefault((item.offsets, item.sizes), item)
    return [list(chunks.values()) for chunks in found.values()]


def read_whole(path: Path, chunks: Sequence[IndexEntry]) -> Any:
    """Read a value of which ``chunks`` are all chunks. Takes the memory of the value and of its largest chunk.

    Raises:
        CheckpointError: a file cannot be read, or does not match its table of contents.
    """
    first = chunks[0]
    if len(chunks) == 1 and first.sizes == first.shape:
        return read_value(path, first)
    full = torch.empty(first.shape, dtype=first.torch_dtype, device="cpu")
    for chunk in chunks:
        copy_overlaps(path, chunk, [Chunk(full, first.shape, (0,) * full.dim())])
    return full


def read_value(path: Path, item: IndexEntry, files: _Files | None = None) -> Any:
    """Read one item to the CPU, without a second copy of its bytes in memory.

    Raises:
        CheckpointError: the file cannot be read, or does not match its table of contents.
    """
    with ToldAs(CheckpointError, f"{item.key} in {path / item.file} cannot be read", Exception):
        with _Files() if files is None else contextlib.nullcontext(files) as opened:
            file = opened.open(path / item.file)
            size = os.fstat(file.fileno()).st_size
            if item.offset + item.length > size:
                raise ValueError(f"it would end at byte {item.offset + item.length}, and the file has {size} bytes")
            view: Any = _create_file_view(file, item.offset, item.length)
            if item.length <= _SMALL_BYTES:
                view = io.BytesIO(view.read())
            value = torch.load(view, weights_only=True, map_location="cpu")
    expected = (item.torch_dtype, tuple(item.sizes)) if item.is_tensor else None
    if expected and (not isinstance(value, Tensor) or (value.dtype, tuple(value.shape)) != expected):
        raise CheckpointError(
            f"{item.key} in {path / item.file} is not a tensor of {item.dtype} {list(item.sizes)}, as the manifest says"
        )
    return value
