"""Reads a checkpoint through ``torch.distributed.checkpoint``, but without unpickling data that could run code."""

from __future__ import annotations

import io
import os
import warnings
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.utils import _create_file_view

from ttp.adapters.torch.saving.checkpoint import Chunk
from ttp.adapters.torch.saving.flatten_state import put
from ttp.adapters.torch.saving.metadata import build_metadata
from ttp.adapters.torch.saving.piece_index import IndexEntry, StatePath, items_of
from ttp.core.messages import Piece
from ttp.errors import CheckpointError, ToldAs
from ttp.store.manifest import Manifest
from ttp.store.plain_file import open_plain


class ManifestReader(FileSystemReader):
    """A storage reader that takes the checkpoint's metadata from the manifest, not from the pickle ``.metadata``.

    Args:
        path: the directory of the checkpoint.
        pieces: the pieces in the manifest.

    Raises:
        CheckpointError: the tables of contents are garbled, or the shards do not fit together.
    """

    def __init__(self, path: Path, pieces: Sequence[Piece]) -> None:
        super().__init__(path)
        self._metadata = build_metadata(items_of(pieces), StorageMeta())

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return what ``.metadata`` would contain, made from the manifest."""
        if self._metadata.storage_meta is not None:
            self._metadata.storage_meta.load_id = self.load_id
        return self._metadata


class SafeLoadPlanner(DefaultLoadPlanner):
    """The default planner, except that plain values are loaded with ``weights_only=True``."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Load one plain value and put it into the state dict."""
        loaded = torch.load(value, weights_only=True)
        name = read_item.dest_index.fqn
        if self.flatten_state_dict:
            put(self.original_state_dict, self.mappings[name], loaded)
        else:
            self.state_dict[name] = loaded


def load(path: Path, manifest: Manifest, state_dict: dict[str, Any], *, partial: bool = False) -> None:
    """Fill ``state_dict`` in place from the checkpoint, without any communication.

    Args:
        path: the directory of the checkpoint.
        manifest: its manifest.
        state_dict: nested as in torch: ``{"model": ..., "optim": ...}``. Its tensors (plain or distributed, of any
            sharding) are overwritten; its other values are placeholders and are replaced.
        partial: True to leave values unchanged that the checkpoint does not have; False: they are an error.

    Raises:
        CheckpointError: the checkpoint does not have a name, or has another shape for it, or cannot be read.
    """
    _load(ManifestReader(path, manifest.pieces), state_dict, partial=partial)


def load_chunks(path: Path, manifest: Manifest, wanted: Iterable[tuple[StatePath, Sequence[Chunk]]]) -> None:
    """Fill chunks of tensors that torch's own loader cannot fill: several chunks of one tensor on one rank.

    Only saved chunks that overlap these chunks are read, one at a time, so the call takes the memory of one saved
    chunk.

    Args:
        path: the directory of the checkpoint.
        manifest: its manifest.
        wanted: for each tensor its path in the nested state, and the chunks to fill.

    Raises:
        CheckpointError: see ``load``.
    """
    chunks = {tuple(map(str, steps)): found for steps, found in wanted if found}
    saved: dict[tuple[str, ...], list[IndexEntry]] = defaultdict(list)
    for item in items_of(manifest.pieces) if chunks else ():
        if (steps := tuple(map(str, item.path))) in chunks:
            saved[steps].append(item)
    for steps, found in chunks.items():
        if not saved[steps] or tuple(saved[steps][0].shape) != tuple(found[0].shape):
            raise CheckpointError(f"{path} has no tensor {'.'.join(steps)} of shape {tuple(found[0].shape)}")
        for item in saved[steps]:
            copy_overlaps(path, item, found)


def copy_overlaps(path: Path, item: IndexEntry, chunks: Sequence[Chunk]) -> None:
    """Copy one saved chunk into ``chunks``, where they overlap. The file is not read if they do not overlap.

    Raises:
        CheckpointError: the file cannot be read, or does not match its table of contents.
    """
    piece: Tensor | None = None
    for chunk in chunks:
        common = overlap(item.offsets, item.sizes, chunk.offsets, chunk.tensor.shape)
        if common is None:
            continue
        piece = read_value(path, item) if piece is None else piece
        source, target = common
        chunk.tensor.detach()[target].copy_(piece[source])


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


def _load(reader: ManifestReader, state_dict: dict[str, Any], *, partial: bool = False) -> None:
    planner = SafeLoadPlanner(allow_partial_load=partial)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            state_dict_loader.load(state_dict, storage_reader=reader, planner=planner, no_dist=True)
    except (Exception, CheckpointException) as problem:  # torch derives the latter from BaseException
        causes = [failure[0] for failure in getattr(problem, "failures", {}).values()] or [problem]
        raise CheckpointError(f"{reader.path} cannot be loaded: {causes[0]}") from problem


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


def read_value(path: Path, item: IndexEntry) -> Any:
    """Read one item to the CPU, without a second copy of its bytes in memory.

    Raises:
        CheckpointError: the file cannot be read, or does not match its table of contents.
    """
    with ToldAs(CheckpointError, f"{item.key} in {path / item.file} cannot be read", Exception):
        with open_plain(path / item.file) as file:
            size = os.fstat(file.fileno()).st_size
            if item.offset + item.length > size:
                raise ValueError(f"it would end at byte {item.offset + item.length}, and the file has {size} bytes")
            view: Any = _create_file_view(file, item.offset, item.length)
            value = torch.load(view, weights_only=True, map_location="cpu")
    told = (item.torch_dtype, tuple(item.sizes)) if item.is_tensor else None
    if told and (not isinstance(value, Tensor) or (value.dtype, tuple(value.shape)) != told):
        raise CheckpointError(
            f"{item.key} in {path / item.file} is not a tensor of {item.dtype} {list(item.sizes)}, as the manifest says"
        )
    return value
