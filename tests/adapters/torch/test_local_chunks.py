"""A stretch of memory as boxes: each element of the stretch once, no element of another stretch, and few boxes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ttp.adapters.torch.sharding.local_chunks import boxes


@st.composite
def tensors(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    """Draw memory with distinct numbers, a view of it in memory order, and a stretch of the memory."""
    sizes = draw(st.lists(st.integers(1, 5), min_size=0, max_size=4))
    gaps = draw(st.lists(st.integers(0, 3), min_size=len(sizes), max_size=len(sizes)))
    first, strides, span = draw(st.integers(0, 4)), [0] * len(sizes), 1
    for dim in reversed(range(len(sizes))):
        strides[dim] = span + gaps[dim]
        span = (sizes[dim] - 1) * strides[dim] + span
    memory = torch.arange(first + span + 3)
    begin = draw(st.integers(0, len(memory)))
    end = draw(st.integers(begin, len(memory)))
    return memory, memory.as_strided(sizes, strides, first), begin, end


@given(tensors())
def test_local_chunks_hold_each_element_of_the_stretch_once_and_no_other(
    case: tuple[torch.Tensor, torch.Tensor, int, int],
) -> None:
    memory, view, begin, end = case
    seen: list[int] = []
    found = list(boxes(view.shape, view.stride(), int(view.storage_offset()), begin, end))
    for box in found:
        mine = view[tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))]
        assert torch.equal(box.of(memory[begin:end], begin), mine)
        seen += mine.reshape(-1).tolist()
    assert sorted(seen) == [n for n in sorted(view.reshape(-1).tolist()) if begin <= n < end]
    assert len(set(seen)) == len(seen)
    assert len(found) <= max(1, 2 * view.dim() - 1)


def test_an_empty_tensor_has_no_boxes() -> None:
    assert list(boxes((0, 3), (3, 1), 0, 0, 10)) == []


def test_a_transposed_tensor_is_refused() -> None:
    with pytest.raises(ValueError, match="memory order"):
        list(boxes((2, 3), (1, 2), 0, 0, 6))
