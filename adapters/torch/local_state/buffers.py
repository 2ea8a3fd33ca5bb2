"""Captures and restores the buffers of a module as bytes: BatchNorm statistics, queues, masks and other buffers.

Small buffers are captured every time, as live memory that is copied once, into the page. Large buffers have a stamp,
and are copied again only when the stamp changes: a causal mask of 48 MB costs nothing per step. The stamp is made of
the identity of the tensor, its memory, and torch's version counter. Two kinds of writes do not raise that counter:
those of BatchNorm's kernels (such buffers count as small, whatever their size), and writes through ``.data``. Because
of the latter the first captures compare bytes, and a buffer that changed under the same stamp is captured every time
from then on.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from operator import is_

import torch
import xxhash
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from ttp.adapters.torch.sharding.names import takes_any_shape, walk
from ttp.adapters.torch.tensor_memory import copied_bytes, flat_bytes, is_plain
from ttp.errors import CheckpointError
from ttp.processor.local_state.host_rng import memory_at
from ttp.processor.local_state.pages import Buffer, Kept

LARGE_BYTES = 64 << 10
"""Size in bytes from which on a buffer counts as large."""
_LEARNING_CAPTURES = 8
"""Number of captures that compare the bytes of large buffers: those of the first four updates."""

_serials = itertools.count(1)


@dataclass(frozen=True, slots=True)
class BufferInfo:
    """Name, dtype and shape of a buffer."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """The size of the buffer in bytes.

        Raises:
            CheckpointError: dtype or shape are not valid.
        """
        dtype = getattr(torch, self.dtype, None)
        if not isinstance(dtype, torch.dtype) or min(self.shape, default=0) < 0:
            raise CheckpointError(f"saved buffer {self.name} has no valid dtype or shape: {self.dtype} {self.shape}")
        return math.prod(self.shape) * dtype.itemsize


@dataclass(slots=True, eq=False)
class BufferEntry:
    """A buffer of a module, as the last scan found it."""

    owner: dict[str, Tensor | None]  # the dictionary of buffers that holds it
    key: str
    info: BufferInfo
    tensor: Tensor
    address: int
    serial: int
    counted: bool  # every write to the buffer raises its version counter, as far as is known
    digest: int = 0
    digest_of: Hashable = None  # the stamp under which ``digest`` was computed

    @property
    def size(self) -> int:
        """The size of the buffer in bytes."""
        return self.tensor.numel() * self.tensor.element_size()

    @property
    def is_dense(self) -> bool:
        """Whether the memory is the elements in order, and not those that a view conjugates or negates."""
        return self.tensor.is_contiguous() and not (self.tensor.is_conj() or self.tensor.is_neg())

    def copied(self) -> bytes:
        """Return a copy of the elements, on the host, as bytes."""
        return copied_bytes(self.tensor)

    def stamp(self) -> Hashable:
        """Return a value that changes when the bytes do; None: only a comparison of the bytes shows a change."""
        return (self.serial, self.tensor._version) if self.counted else None


class BufferTable:
    """Lists the buffers of a module, by the names that checkpoints use, and notices when they are replaced."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.skipped: list[str] = []
        """Names of buffers that are no plain memory (sparse, quantized, distributed), and so cannot be captured."""
        self.layout = 0
        """A number that is raised whenever ``infos`` may have changed."""
        self.small: list[BufferEntry] = []
        self.large: list[BufferEntry] = []
        self._absent: list[tuple[dict[str, Tensor | None], str]] = []
        # The dictionaries of all buffers, also of those that are None, and their names there.
        self._owners: list[dict[str, Tensor | None]] = []
        self._keys: list[str] = []
        self._found: list[Tensor | None] = []
        self._tensors: list[Tensor] = []
        self._addresses: list[int] = []
        self._uncounted: set[str] = set()
        self.scan()

    @property
    def infos(self) -> tuple[BufferInfo, ...]:
        """The descriptions of the small buffers, then of the large ones."""
        return tuple(entry.info for entry in (*self.small, *self.large))

    def is_current(self) -> bool:
        """Return whether the buffers found by the last scan are still the same tensors in the same memory.

        A ResNet has 160 buffers, so no Python code runs here for each of them.
        """
        same = all(map(is_, map(dict.get, self._owners, self._keys), self._found))
        return same and [*map(Tensor.data_ptr, self._tensors)] == self._addresses

    def refresh(self) -> None:
        """Scan again if a buffer was replaced since the last scan."""
        if not self.is_current():
            self.scan()

    def scan(self) -> None:
        """Find the buffers of the module and its submodules anew."""
        self.small, self.large, self._absent, self.skipped = [], [], [], []
        self.layout += 1
        for _, prefix, owner in walk(self._module):
            for key, tensor in owner._buffers.items():
                if tensor is None:
                    self._absent.append((owner._buffers, key))
                elif tensor.is_meta or not is_plain(tensor.detach()):
                    self.skipped.append(prefix + key)
                else:
                    self._add(owner, key, prefix + key, tensor)
        entries = [*self.small, *self.large]
        self._owners = [entry.owner for entry in entries] + [owner for owner, _ in self._absent]
        self._keys = [entry.key for entry in entries] + [key for _, key in self._absent]
        self._tensors = [entry.tensor for entry in entries]
        self._found = self._tensors + [None] * len(self._absent)
        self._addresses = [entry.address for entry in entries]

    def _add(self, owner: nn.Module, key: str, name: str, tensor: Tensor) -> None:
        info = BufferInfo(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        trusted = name not in self._uncounted and not tensor.is_inference()  # such a tensor has no counter
        entry = BufferEntry(owner._buffers, key, info, tensor, tensor.data_ptr(), next(_serials), trusted)
        large = entry.size >= LARGE_BYTES and entry.is_dense and not isinstance(owner, _NormBase)
        (self.large if large else self.small).append(entry)

    def compare(self, entry: BufferEntry, stamp: Hashable, view: Buffer) -> None:
        """Compare the bytes of a large buffer with the last time.

        If they have changed while the stamp has not, the buffer is read at every capture from now on.

        Args:
            entry: the buffer.
            stamp: its stamp when ``view`` held its bytes; None: it had none.
            view: the bytes.
        """
        digest = xxhash.xxh3_64_intdigest(view)
        if stamp is not None and entry.digest_of == stamp and entry.digest != digest:
            entry.counted = False
            self._uncounted.add(entry.info.name)
        entry.digest, entry.digest_of = digest, stamp


class BufferSet:
    """Captures all buffers of a module on the CPU, without copying them."""

    def __init__(self, module: nn.Module) -> None:
        self.table = BufferTable(module)
        self._captures = 0
        self._viewed = 0
        self._views: list[Buffer | None] = []  # memory of the small buffers; None: not dense, copied each time
        self._plain: list[Buffer] = []  # the views that are not None
        self._large_views: list[Buffer] = []
        self._kept: list[Kept] = []

    def capture(self) -> tuple[Sequence[Buffer], Sequence[Kept]]:
        """Return the bytes of all buffers, mostly as live memory: copy them before the next forward pass.

        Returns:
            The bytes of each small buffer, and a list of the large buffers with their stamps, which is the same object
            as the last time if none of them has changed.
        """
        table = self.table
        if not table.is_current():
            table.scan()
        if self._viewed != table.layout:
            self._views = [_live(e.tensor) if e.is_dense else None for e in table.small]
            self._large_views = [_live(e.tensor) for e in table.large]
            self._plain = [view for view in self._views if view is not None]
            self._viewed, self._kept = table.layout, []
        parts = self._plain
        if len(parts) < len(table.small):
            parts = [
                view if view is not None else entry.copied()
                for view, entry in zip(self._views, table.small, strict=True)
            ]
        return parts, self._capture_large() if table.large else ()

    def _capture_large(self) -> Sequence[Kept]:
        if self._captures < _LEARNING_CAPTURES:
            self._captures += 1
            for entry, view in zip(self.table.large, self._large_views, strict=True):
                if (stamp := entry.stamp()) is not None:
                    self.table.compare(entry, stamp, view)
        stamps = [entry.stamp() for entry in self.table.large]
        if None in stamps or stamps != [stamp for stamp, _ in self._kept]:
            self._kept = list(zip(stamps, self._large_views, strict=True))
        return self._kept


def _live(tensor: Tensor) -> memoryview:
    """Return a view of the memory of a dense CPU tensor. The view keeps the tensor alive."""
    return memory_at(tensor.data_ptr(), tensor.nbytes, tensor)


def restore_buffers(module: nn.Module, saved: Mapping[str, Tensor]) -> list[str]:
    """Copy saved buffers into those of ``module``.

    A buffer that may take any shape is replaced by the saved one. A non-persistent buffer that has another shape or
    dtype than the saved one counts as a cache, and stays as this program has made it.

    Args:
        module: the registered model.
        saved: tensors by the names that checkpoints use.

    Returns:
        Notes for the log on buffers that only one side has, or that differ.

    Raises:
        CheckpointError: a persistent buffer has another shape or dtype than the saved one; nothing has been modified.
    """
    live = [(prefix + key, owner, key) for _, prefix, owner in walk(module) for key in owner._buffers]
    wanted: list[tuple[nn.Module, str, Tensor]] = []
    wrong: list[str] = []
    notes: list[str] = []
    for name, owner, key in live:
        tensor, value = owner._buffers[key], saved.get(name)
        if value is None:
            notes += [] if tensor is None else [f"buffer {name} was not saved"]
        elif takes_any_shape(owner, key) or _form(tensor) == _form(value):
            wanted.append((owner, key, value))
        else:
            other = f"the buffer {name} was {_form(value)} when it was saved and is {_form(tensor)} here"
            (notes if key in owner._non_persistent_buffers_set else wrong).append(other)
    if wrong:
        raise CheckpointError("buffers do not fit the model: " + "; ".join(wrong[:5]) + ("; ..." if wrong[5:] else ""))
    home = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
    with torch.no_grad():
        for owner, key, value in wanted:
            tensor = owner._buffers[key]
            if tensor is None or _form(tensor) != _form(value) or not _writable(tensor):
                owner._buffers[key] = value.to(home if tensor is None else tensor.device)
            else:
                tensor.copy_(value)
    unknown = sorted(saved.keys() - {name for name, _, _ in live})
    return notes + [f"buffer {name} was saved and is not in this model" for name in unknown]


def _writable(tensor: Tensor) -> bool:
    """Return whether torch writes to a tensor in place: not to overlapping ones, nor to those of inference mode."""
    return not (overlaps(tensor) or tensor.is_inference())


def overlaps(tensor: Tensor) -> bool:
    """Return whether elements of a tensor share memory, as in an expanded tensor, to which torch refuses to write."""
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def _form(tensor: Tensor | None) -> str:
    return "None" if tensor is None else f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def decode_buffer(info: BufferInfo, data: bytes) -> Tensor:
    """Make the tensor of a buffer from its bytes; ``data`` has ``info.size`` bytes."""
    tensor = torch.empty(info.shape, dtype=getattr(torch, info.dtype), device="cpu")
    if data:
        flat_bytes(tensor).copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    return tensor
