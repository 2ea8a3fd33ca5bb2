"""Tensors are serialised to the bytes of ``torch.save``, faster than by calling it for each."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ttp.adapters.torch.saving import tensor_serializer
from ttp.adapters.torch.saving.checkpoint import _without_crc32
from ttp.adapters.torch.saving.tensor_serializer import TensorWriter

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8, torch.complex64, torch.float8_e5m2]
SHAPES = st.lists(st.integers(0, 5), max_size=4)


def saved(tensor: torch.Tensor) -> bytes:
    buffer = io.BytesIO()
    torch.save(tensor, buffer)
    return buffer.getvalue()


def random_tensor(shape: list[int], dtype: torch.dtype, transpose: bool) -> torch.Tensor:
    count = torch.Size(shape).numel() * torch.empty((), dtype=dtype).element_size()
    data = torch.randint(0, 2, (count,), dtype=torch.uint8)
    return data.view(dtype).view(shape).t() if transpose and len(shape) == 2 else data.view(dtype).view(shape)


@given(SHAPES, st.sampled_from(DTYPES), st.booleans())
def test_the_bytes_are_those_of_torch_save(shape: list[int], dtype: torch.dtype, transpose: bool) -> None:
    stream: Any = io.BytesIO()
    writer = TensorWriter(stream)
    first, second = (random_tensor(shape, dtype, transpose) for _ in range(2))
    with _without_crc32():
        writer.write(first)
        writer.write(second)
        assert stream.getvalue() == saved(first) + saved(second)


def test_small_tensors_of_one_layout_are_saved_by_torch_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    save = torch.save

    def counted(*args: Any) -> None:
        calls.append(args)
        save(*args)

    monkeypatch.setattr(torch, "save", counted)
    writer = TensorWriter(io.BytesIO())
    with _without_crc32():
        for number in range(10):
            writer.write(torch.full((3,), float(number)))
    assert len(calls) == 2  # to make the template and to check it


def test_where_the_rest_depends_on_the_data_torch_writes_every_tensor() -> None:
    stream: Any = io.BytesIO()
    writer = TensorWriter(stream)
    tensors = [torch.full((3,), float(number)) for number in range(3)]
    for tensor in tensors:
        writer.write(tensor)  # with crc32
    assert stream.getvalue() == b"".join(map(saved, tensors))


def test_a_large_tensor_is_not_copied_for_a_template(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_asked_for(tensor: torch.Tensor) -> None:
        raise AssertionError("no template for this one")

    monkeypatch.setattr(tensor_serializer, "_make_template", none_asked_for)
    TensorWriter(io.BytesIO()).write(torch.ones(tensor_serializer._TEMPLATE_BYTES_MAX // 4 + 1))
