"""Makes the file ``.metadata``, stock torch's index of a checkpoint, from the tables of the pieces."""

from __future__ import annotations

import io
import pickle
import uuid
from collections.abc import Sequence
from functools import cache
from math import prod
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from ttp.adapters.torch.saving.piece_index import IndexEntry, described, items_of
from ttp.adapters.torch.sharding.names import first_of
from ttp.core.layout import Rank
from ttp.core.messages import Piece
from ttp.errors import CheckpointError
from ttp.store.digest import digest_bytes
from ttp.store.durable import write_durably

METADATA_FILE = ".metadata"
METADATA_KIND = "metadata"
NOBODY = Rank(-1)
NO_GAPS = "\0"
"""A prefix that no name has."""
_LISTED_MAX = 5


def finalise(draft: Path, pieces: Sequence[Piece], *, writer: Rank = NOBODY, gaps: str = NO_GAPS) -> list[Piece]:
    """Write ``draft/.metadata``, which describes the shards among ``pieces``; return when the file is durable.

    Args:
        draft: the draft directory with all pieces in it.
        pieces: the pieces of all shards; pieces of other kinds are ignored.
        writer: the rank that the manifest names as the writer of the file.
        gaps: see ``fitting``.

    Returns:
        A list with one piece: the new file.

    Raises:
        CheckpointError: the shards do not contain every element of every tensor exactly once.
        OSError: the storage failed.
    """
    # No checkpoint_id: it would be the draft's path, and stock torch does not read it.
    metadata = build_metadata(items_of(pieces), StorageMeta(save_id=str(uuid.uuid4())), gaps)
    buffer = io.BytesIO()
    pickle.dump(metadata, buffer)
    data = buffer.getvalue()
    write_durably(draft / METADATA_FILE, data)
    return [Piece(METADATA_FILE, len(data), digest_bytes(data), METADATA_KIND, "", writer)]


def build_metadata(items: Sequence[IndexEntry], storage_meta: StorageMeta, gaps: str = NO_GAPS) -> Metadata:
    """Make stock torch's description of a checkpoint with these items.

    If several shards contain the same plain value or chunk, the description points to the first of them.

    Args:
        items: the items of all shards.
        storage_meta: part of the description.
        gaps: see ``fitting``.

    Raises:
        CheckpointError: see ``fitting``.
    """
    by_key = fitting(items, gaps)
    metadata = Metadata(
        state_dict_metadata={key: _describe(chunks) for key, chunks in by_key.items()},
        planner_data={key: chunks[0].path for key, chunks in by_key.items()},
        storage_data=dict(_place(chunk, index) for chunks in by_key.values() for index, chunk in enumerate(chunks)),
        storage_meta=storage_meta,
    )
    if (version := getattr(filesystem, "CURRENT_DCP_VERSION", None)) is not None:
        metadata.version = version  # torch 2.7 has neither the constant nor the field
    return metadata


def _describe(chunks: Sequence[IndexEntry]) -> TensorStorageMetadata | BytesStorageMetadata:
    first = chunks[0]
    if not first.is_tensor:
        return BytesStorageMetadata()
    return TensorStorageMetadata(
        properties=_properties(first.torch_dtype, _strides(first)),
        size=torch.Size(first.shape),
        chunks=[ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)) for chunk in chunks],
    )


@cache
def _properties(dtype: torch.dtype, strides: tuple[int, ...] | None) -> TensorProperties:
    """Return the same object for all tensors of a kind, so that the pickle holds it once and refers to it."""
    properties: Any = TensorProperties(dtype=dtype)
    if strides is not None:
        properties.strides = strides
    return cast(TensorProperties, properties)


def _strides(item: IndexEntry) -> tuple[int, ...] | None:
    """Return the strides of the whole tensor; None: this torch, older than 2.15, has no place for them."""
    if not hasattr(TensorProperties, "strides"):
        return None
    return torch.empty_permuted(item.shape, item.order or tuple(range(len(item.shape))), device="meta").stride()


def _place(item: IndexEntry, index: int) -> tuple[MetadataIndex, filesystem._StorageInfo]:
    where = MetadataIndex(item.key, item.offsets, index) if item.is_tensor else MetadataIndex(item.key)
    return where, filesystem._StorageInfo(item.file, item.offset, item.length)


# ------------------------------------------------------------------------------------------------------- exact covering


def fitting(items: Sequence[IndexEntry], gaps: str = NO_GAPS) -> dict[str, list[IndexEntry]]:
    """Return the distinct items of each name, after a check that they make up whole tensors.

    Args:
        items: the items of all shards.
        gaps: prefix of the names of tensors that need not be complete.

    Raises:
        CheckpointError: chunks overlap, reach outside of their tensor or leave gaps, or shards give different shapes or
            dtypes for one tensor.
    """
    distinct = {(item.path, item.dtype, item.shape, item.offsets, item.sizes): item for item in reversed(items)}
    by_key: dict[str, list[IndexEntry]] = {}
    for item in reversed(distinct.values()):
        by_key.setdefault(item.key, []).append(item)
    problems = [problem for chunks in by_key.values() if (problem := _problem(chunks, gaps))]
    if problems:
        raise CheckpointError(f"the shards do not fit together: {first_of(problems, _LISTED_MAX, '; ')}")
    return by_key


def _problem(chunks: Sequence[IndexEntry], gaps: str) -> str:
    """Return why these chunks do not make up one tensor; an empty string if they do.

    They do if they are disjoint, inside of the tensor, and together have as many elements as the tensor, or fewer if
    its name begins with ``gaps``.
    """
    first = chunks[0]
    for other in chunks[1:]:
        if (other.path, other.dtype, other.shape) != (first.path, first.dtype, first.shape):
            one, two = (described(item.dtype, item.shape) for item in (first, other))
            return f"{first.key} is {one} in {first.file} and {two} in {other.file}"
    if any(not _inside(chunk) for chunk in chunks):
        return f"{first.key} has a chunk that reaches outside of {list(first.shape)}"
    if (pair := _overlap(chunks)) is not None:
        return f"{first.key} has chunks that overlap, in {pair[0].file} and {pair[1].file}"
    present = sum(prod(chunk.sizes) for chunk in chunks)
    if present != prod(first.shape) and not first.key.startswith(gaps):
        return f"{first.key} has {present} of {prod(first.shape)} elements"
    return ""


def _inside(chunk: IndexEntry) -> bool:
    if not len(chunk.offsets) == len(chunk.sizes) == len(chunk.shape):
        return False
    return all(
        offset + size <= length for offset, size, length in zip(chunk.offsets, chunk.sizes, chunk.shape, strict=True)
    )


def _overlap(chunks: Sequence[IndexEntry]) -> tuple[IndexEntry, IndexEntry] | None:
    """Return two chunks that overlap, or None. The algorithm sweeps along the dimension that is cut most often."""
    solid = [chunk for chunk in chunks if prod(chunk.sizes)]
    if len(solid) < 2:
        return None
    cuts = [len({chunk.offsets[dim] for chunk in solid}) for dim in range(len(solid[0].shape))]
    sweep = cuts.index(max(cuts)) if cuts else 0
    active: list[IndexEntry] = []
    for chunk in sorted(solid, key=lambda item: item.offsets[sweep : sweep + 1]):
        active = [other for other in active if other.offsets[sweep] + other.sizes[sweep] > chunk.offsets[sweep]]
        for other in active:
            if _intersect(chunk, other):
                return other, chunk
        active.append(chunk)
    return None


def _intersect(one: IndexEntry, two: IndexEntry) -> bool:
    spans = zip(one.offsets, one.sizes, two.offsets, two.sizes, strict=True)
    return all(a < b + b_size and b < a + a_size for a, a_size, b, b_size in spans)
