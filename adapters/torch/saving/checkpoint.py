"""Writes one shard as one ``.distcp`` file, without a process group, a store, or the main thread."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ttp.adapters.torch.saving.flatten_state import StateValue, ToHost, dump, leaves, whole
from ttp.adapters.torch.saving.piece_index import SHARD_KIND, IndexEntry, encode_table
from ttp.adapters.torch.saving.tensor_serializer import TensorWriter
from ttp.adapters.torch.tensor_memory import is_plain, memory_order
from ttp.core.layout import Rank, Shard
from ttp.core.messages import Piece
from ttp.errors import CheckpointError
from ttp.processor.source import Cancelled
from ttp.store.digest import HashingFile, Progress
from ttp.store.piece_file import piece_file

_log = logging.getLogger("ttp.adapters.torch")

_SLICE = 8 << 20
"""Bytes written between two calls of ``cancelled``."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A rectangular part of a tensor that is spread over several shards.

    Args:
        tensor: the elements of the part, in the memory of this rank.
        shape: shape of the whole tensor.
        offsets: where the part begins in the whole tensor, one number per dimension.
        dtype: element type on disk; None: that of ``tensor``. Weights may be written from their fp32 copy.
        placed: see ``IndexEntry``.
    """

    tensor: Tensor
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    dtype: torch.dtype | None = None
    placed: tuple[int, ...] = ()

    @property
    def stored_dtype(self) -> torch.dtype:
        """The element type on disk."""
        return self.dtype or self.tensor.dtype

    @property
    def nbytes(self) -> int:
        """The size of the elements on disk, in bytes."""
        return self.tensor.numel() * self.stored_dtype.itemsize


TensorOrChunks = Tensor | tuple[Chunk, ...]
"""One tensor of the state: the whole tensor, or the chunks of it that this rank holds. A chunk without elements is not
written, unless the whole tensor has none."""

Select = Callable[[Iterable[StateValue]], tuple[Iterable[StateValue], str]]
"""Takes the entries of a shard; returns those that belong to one part of it, and a digest of how it was divided."""


def write_shard(
    draft: Path,
    file: str,
    state: Mapping[str, Any],
    *,
    shard: Shard,
    writer: Rank,
    to_host: ToHost = Tensor.cpu,
    cancelled: Callable[[], bool] = lambda: False,
    progress: Progress | None = None,
    select: Select | None = None,
    lacking: Sequence[str] = (),
) -> Piece:
    """Write the shard ``state`` to ``draft/file``; return when the file is durable.

    Args:
        draft: the draft directory; it exists.
        file: name of the new file in the draft.
        state: nested mappings and lists of tensors, tuples of ``Chunk``s, and plain values. It must not
            change during the call.
        shard: the shard that the piece belongs to.
        writer: this rank.
        to_host: returns a CPU tensor itself, and for a tensor of an accelerator a copy on the CPU, without waiting for
            queued work that may never end. ``write_shard`` has written the copy before it calls ``to_host`` again.
        cancelled: returns True to give up the save; called between tensors, and every 8 MiB within a tensor.
        progress: see ``HashingFile``.
        select: selects the entries to write if the piece is a part of a shard; see ``Select``. None: all entries.
        lacking: keys of values that ``state`` lacks, for the table: whoever restores the checkpoint is told.

    Returns:
        The piece, with size, digest and table of the file.

    Raises:
        Cancelled: ``cancelled`` returned true.
        CheckpointError: a tensor has no stable form on disk: it is sparse, quantised or of a subclass of ``Tensor``.
        OSError: the storage failed.
    """
    entries, cut = (leaves(state), "") if select is None else select(leaves(state))
    with piece_file(draft / file, progress) as target:
        with _without_crc32():
            shard_writer = _ShardWriter(_Stream(target, cancelled), file, to_host)
            shard_writer.write(entries)
        size, digest = target.sync_and_close()
    for key in shard_writer.left_out:
        _log.warning("%s is not in the checkpoint: it cannot be stored in a form that is safe to load", key)
    table = encode_table(shard_writer.items, [*shard_writer.left_out, *lacking])
    return Piece(file, size, digest, SHARD_KIND, shard, writer, table, cut)


class _ShardWriter:
    """Writes the values of a shard one after the other and records where each is."""

    def __init__(self, stream: _Stream, file: str, to_host: ToHost) -> None:
        self._stream = stream
        self._file = file
        self._to_host = to_host
        self._serializer = TensorWriter(stream)
        # Tied weights are stored once, and listed under all their names. Step counts, equal in all parameters, are
        # encoded once.
        self._tensors: dict[tuple[Any, ...], IndexEntry] = {}
        self._numbers: dict[tuple[type, str], bytes | None] = {}
        self.items: list[IndexEntry] = []
        self.left_out: list[str] = []

    def write(self, entries: Iterable[StateValue]) -> None:
        """Append the bytes of all values, and record where each of them is."""
        for path, int_keys, value in entries:
            self._stream.check()
            name = IndexEntry(path, self._file, self._stream.position, 0, int_keys=int_keys)
            if (chunks := chunks_of(value)) is not None:
                self.items += [self._write_tensor(name, chunk) for chunk in chunks]
            elif (data := self._dump(value)) is not None:
                self._stream.write(memoryview(data))
                self.items.append(replace(name, length=len(data)))
            else:
                self.left_out.append(name.key)
        self._stream.check()

    def _write_tensor(self, name: IndexEntry, chunk: Chunk) -> IndexEntry:
        tensor = chunk.tensor.detach()
        if why := objection(name.key, tensor):
            raise CheckpointError(why)
        dtype = chunk.stored_dtype
        layout = (dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg())
        same = (tensor.device, tensor.data_ptr(), *layout, chunk.offsets, chunk.shape)
        first = self._tensors.get(same) if tensor.numel() else None
        if first is not None:
            return replace(first, path=name.path, int_keys=name.int_keys, placed=chunk.placed)
        at = self._stream.position
        copied = whole(self._to_host(tensor).to(dtype))
        self._serializer.write(copied)
        _give_back(copied, tensor)
        item = replace(
            name,
            offset=at,
            length=self._stream.position - at,
            dtype=str(dtype).removeprefix("torch."),
            shape=tuple(chunk.shape),
            offsets=tuple(chunk.offsets),
            sizes=tuple(tensor.shape),
            device=tensor.device.type,
            order=_order(tensor),
            placed=chunk.placed,
        )
        self._tensors[same] = item
        return item

    def _dump(self, value: Any) -> bytes | None:
        if type(value) not in (int, float, bool, type(None)):
            return dump(value, self._to_host)
        number = (type(value), repr(value))
        if number not in self._numbers:
            self._numbers[number] = dump(value, self._to_host)
        return self._numbers[number]


def chunks_of(value: Any) -> Sequence[Chunk] | None:
    """Return the chunks to write for a tensor; None if ``value`` is neither a tensor nor chunks of one."""
    if isinstance(value, Tensor):
        return (Chunk(value, tuple(value.shape), (0,) * value.dim()),)
    if not (isinstance(value, tuple) and value and all(isinstance(part, Chunk) for part in value)):
        return None
    return [chunk for chunk in value if chunk.tensor.numel() or not prod(chunk.shape)]


def _order(tensor: Tensor) -> tuple[int, ...]:
    """Return the dimensions as they lie in memory, see ``IndexEntry``. Elements that share memory have no order."""
    return () if tensor.is_contiguous() or 0 in tensor.stride() else tuple(memory_order(tensor))


def _give_back(copy: Tensor, of: Tensor) -> None:
    """Free the memory of ``copy`` now, unless it is the memory of ``of``.

    ``torch.save`` leaves ``copy`` in a reference cycle, which the garbage collector would free much later.
    """
    storage = copy.untyped_storage()
    shares = copy.data_ptr() == of.data_ptr() or storage.data_ptr() == of.untyped_storage().data_ptr()
    if copy.numel() and not shares and storage.resizable():
        storage.resize_(0)


def objection(key: str, tensor: Tensor) -> str:
    """Return why stock torch could not load this tensor without unpickling classes; an empty string if it could."""
    if is_plain(tensor):
        return ""
    advice = (
        "Use an optimizer that keeps plain tensors (for 8 bits that of bitsandbytes, not torchao's)"
        if key.startswith("optim.")
        else "Train plain parameters and convert them in the forward pass; register a buffer that the program can make "
        "again with persistent=False"
    )
    return (
        f"{key} is a {type(tensor).__name__} of layout {tensor.layout}, dtype {tensor.dtype}: ttp stores plain dense "
        f"tensors only, which torch loads without unpickling a class. {advice}"
    )


class _Stream:
    """The stream that ``torch.save`` writes to. After an error, ``write`` discards all data and raises nothing.

    torch's zip writer does not survive an exception from ``write``: it raises one of its own instead, and in some
    versions ends the process from a destructor. So ``write`` keeps the first exception, and ``check`` raises it.
    """

    def __init__(self, target: HashingFile, cancelled: Callable[[], bool]) -> None:
        self._target = target
        self._cancelled = cancelled
        self._problem: BaseException | None = None
        self.position = 0

    def write(self, data: memoryview) -> int:
        """Append ``data``; never raises."""
        self.position += data.nbytes
        for start in range(0, data.nbytes, _SLICE):
            if self._problem is None:
                self._write(data[start : start + _SLICE])
        return data.nbytes

    def flush(self) -> None:
        """Do nothing: the file is flushed once, at the end."""

    def check(self) -> None:
        """Raise the first exception of a write, or ``Cancelled`` if ``cancelled`` returns True."""
        if self._problem is None and self._cancelled():
            self._problem = Cancelled()
        if self._problem is not None:
            raise self._problem

    def _write(self, data: memoryview) -> None:
        try:
            self.check()
            self._target.write(data)
        except BaseException as problem:
            self._problem = problem


@contextmanager
def _without_crc32() -> Iterator[None]:
    """Switch crc32 off in ``torch.save``, because pieces have a better digest and crc32 costs a third of the speed.

    Newer versions of torch keep this setting per thread.
    """
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)
