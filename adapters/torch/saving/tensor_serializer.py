"""Writes tensors in the format of ``torch.save``, small ones much faster than ``torch.save`` does.

``torch.save`` makes some forty small writes for one tensor, and an Adam optimizer has a ``step`` tensor of four bytes
for every parameter. Without crc32, the files of two tensors of the same dtype, shape and strides differ only in the
bytes of the tensors. So the bytes before and after them, the template, are made once for each layout and used again.
Each template is checked against two results of ``torch.save``; if they do not fit it, ``torch.save`` writes all tensors
of that layout.
"""

from __future__ import annotations

import io
import zipfile
from typing import Any

import torch
from torch import Tensor

from ttp.processor.local_state.host_rng import memory_at

_TEMPLATE_BYTES_MAX = 1 << 16
"""The largest tensor, in bytes, for which a template is used. A larger tensor takes longer to write than the rest."""

Template = tuple[bytes, bytes]
"""The bytes before and after those of the tensor."""


class TensorWriter:
    """Writes tensors to ``stream``, a file object, with the bytes that ``torch.save`` would write with crc32 off."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._templates: dict[tuple[Any, ...], Template | None] = {}

    def write(self, tensor: Tensor) -> None:
        """Append ``tensor``, which is on the CPU and owns all of its storage."""
        template = self._template(tensor) if 0 < tensor.nbytes <= _TEMPLATE_BYTES_MAX else None
        if template is None:
            torch.save(tensor, self._stream)
            return
        before, after = template
        self._stream.write(memoryview(before))
        self._stream.write(_memory(tensor))
        self._stream.write(memoryview(after))

    def _template(self, tensor: Tensor) -> Template | None:
        layout = (tensor.dtype, tensor.shape, tensor.stride())
        if layout not in self._templates:
            self._templates[layout] = _make_template(tensor)
        return self._templates[layout]


def _make_template(tensor: Tensor) -> Template | None:
    data = bytes(_memory(tensor))
    other = tensor.clone()
    if other.stride() != tensor.stride():
        return None
    _flip(other)
    one, two = _saved(tensor), _saved(other)
    start = _position(one)
    end = start + len(data)
    same_around = one[:start] == two[:start] and one[end:] == two[end:]
    holds = same_around and one[start:end] == data and two[start:end] == bytes(_memory(other))
    return (one[:start], one[end:]) if holds else None


def _saved(tensor: Tensor) -> bytes:
    buffer = io.BytesIO()
    torch.save(tensor, buffer)
    return buffer.getvalue()


def _position(data: bytes) -> int:
    """Return where the bytes of the only storage begin in ``data``, a zip archive that ``torch.save`` made."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        (entry,) = (entry for entry in archive.infolist() if entry.filename.endswith("/data/0"))
    header = data[entry.header_offset : entry.header_offset + 30]
    names, extra = int.from_bytes(header[26:28], "little"), int.from_bytes(header[28:30], "little")
    return entry.header_offset + 30 + names + extra


def _memory(tensor: Tensor) -> memoryview:
    storage = tensor.untyped_storage()
    return memory_at(storage.data_ptr(), storage.nbytes())


def _flip(tensor: Tensor) -> None:
    flat = torch.empty(0, dtype=torch.uint8, device="cpu").set_(tensor.untyped_storage())
    flat.bitwise_not_()
