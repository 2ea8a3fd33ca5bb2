"""The index of a checkpoint, ``.metadata``: tensors of several shards become one, and every element is there exactly
once.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.metadata import StorageMeta, TensorProperties

from tests.adapters.torch.checkpoints import whole_checkpoint
from ttp.adapters.torch.restoring.reader import read_values
from ttp.adapters.torch.saving.checkpoint import Chunk, write_shard
from ttp.adapters.torch.saving.metadata import build_metadata, finalise
from ttp.adapters.torch.saving.piece_index import IndexEntry, items_of
from ttp.core.layout import Rank, Shard
from ttp.core.messages import Piece
from ttp.errors import CheckpointError
from ttp.store.digest import digest_file

WHOLE = torch.arange(24.0).reshape(4, 6)


def chunk(top: int, left: int, height: int, width: int) -> Chunk:
    return Chunk(WHOLE[top : top + height, left : left + width], (4, 6), (top, left))


def shards(draft: Path, *states: dict[str, Any]) -> list[Piece]:
    return [
        write_shard(draft, f"__{index}_0.distcp", state, shard=Shard(f"s{index}"), writer=Rank(index))
        for index, state in enumerate(states)
    ]


def test_a_tensor_that_is_spread_over_shards_is_one_again(tmp_path: Path) -> None:
    norm = torch.ones(3)
    pieces = shards(
        tmp_path,
        {"w": chunk(0, 0, 2, 6), "norm": norm, "lr": 0.1, "only here": 5},
        {"w": chunk(2, 0, 2, 4), "norm": norm, "lr": 0.1},
        {"w": chunk(2, 4, 2, 2), "norm": norm, "lr": 0.1},
    )
    manifest = whole_checkpoint(tmp_path, pieces, version=3)
    ours = read_values(tmp_path, items_of(manifest.pieces))
    assert torch.equal(ours["w"], WHOLE) and torch.equal(ours["norm"], norm)
    assert (ours["lr"], ours["only here"]) == (0.1, 5)
    stock: dict[str, Any] = {"w": torch.zeros(4, 6), "lr": 0}
    with pytest.warns(UserWarning, match="torch.distributed"):
        state_dict_loader.load(stock, checkpoint_id=tmp_path)
    assert torch.equal(stock["w"], WHOLE) and stock["lr"] == 0.1


@pytest.mark.parametrize(
    ("states", "text"),
    [
        ([{"w": chunk(0, 0, 2, 6)}, {"w": chunk(3, 0, 1, 6)}], r"w has 18 of 24 elements"),
        ([{"w": chunk(0, 0, 3, 6)}, {"w": chunk(2, 0, 2, 6)}], r"overlap, in __0_0.distcp and __1_0.distcp"),
        ([{"w": chunk(0, 0, 3, 6)}, {"w": chunk(2, 0, 1, 6)}], r"overlap"),
        ([{"w": chunk(0, 0, 1, 6)}, {"w": chunk(3, 0, 1, 6)}, {"w": chunk(0, 0, 2, 6)}], r"overlap"),
        ([{"w": Chunk(WHOLE, (4, 6), (1, 0))}], r"outside of \[4, 6\]"),
        ([{"w": Chunk(WHOLE, (4, 6), (0,))}], r"outside of \[4, 6\]"),
        ([{"w": torch.ones(2)}, {"w": torch.ones(3)}], r"w is float32 \[2\] in __0_0.distcp and float32 \[3\]"),
        ([{"w": torch.ones(2)}, {"w": torch.ones(2).double()}], r"and float64 \[2\] in __1_0.distcp"),
        ([{"w": torch.ones(2)}, {"w": 5}], r"and a plain value in __1_0.distcp"),
        ([{"a": {"b.c": torch.ones(2)}}, {"a.b": {"c": torch.ones(2)}}], r"a.b.c is"),
    ],
)
def test_shards_that_do_not_fit_together_are_refused(tmp_path: Path, states: list[Any], text: str) -> None:
    with pytest.raises(CheckpointError, match=text):
        finalise(tmp_path, shards(tmp_path, *states))
    assert not (tmp_path / ".metadata").exists()


def test_only_what_may_have_gaps_may_have_them(tmp_path: Path) -> None:
    """In a Megatron job all layers of a kind are one tensor, and frozen layers have no moments."""
    for gaps in ("state.", "other."):
        parts = shards(tmp_path, {"state": {"w": chunk(0, 0, 2, 6)}}, {"state": {"w": chunk(3, 0, 1, 6)}})
        if gaps == "state.":
            assert finalise(tmp_path, parts, gaps=gaps)
            continue
        with pytest.raises(CheckpointError, match=r"state.w has 18 of 24 elements"):
            finalise(tmp_path, parts, gaps=gaps)
    overlapping = shards(tmp_path, {"state": {"w": chunk(0, 0, 3, 6)}}, {"state": {"w": chunk(2, 0, 1, 6)}})
    with pytest.raises(CheckpointError, match="overlap"):
        finalise(tmp_path, overlapping, gaps="state.")


@st.composite
def boxes(draw: st.DrawFn) -> list[tuple[int, int, int, int]]:
    numbers = st.integers(0, 3)
    return draw(st.lists(st.tuples(numbers, numbers, st.integers(0, 4), st.integers(0, 4)), max_size=6))


@given(boxes())
def test_exact_covers_are_recognised(found: list[tuple[int, int, int, int]]) -> None:
    """Compared with counting every element."""
    items = [
        IndexEntry(("w",), f"{n}", 0, 1, "float32", (4, 4), (top, left), (height, width))
        for n, (top, left, height, width) in enumerate(found)
    ]
    counts = torch.zeros(8, 8, dtype=torch.int64)
    for top, left, height, width in set(found):  # an equal chunk of another shard is a replica
        counts[top : top + height, left : left + width] += 1
    covered = bool((counts[:4, :4] == 1).all() and counts.sum() == 16)
    inside = all(top + height <= 4 and left + width <= 4 for top, left, height, width in found)
    try:
        metadata = build_metadata(items, StorageMeta())
    except CheckpointError:
        assert not (covered and inside)
    else:
        assert not items or (covered and inside)
        assert len(metadata.storage_data or {}) <= len(items)


def test_the_metadata_is_a_piece_like_any_other(tmp_path: Path) -> None:
    (piece,) = finalise(tmp_path, [*shards(tmp_path, {"a": 1}), Piece("x", 1, "", "job", "", Rank(0))], writer=Rank(4))
    assert (piece.file, piece.kind, piece.writer) == (".metadata", "metadata", 4)
    assert digest_file(tmp_path / ".metadata") == (piece.size, piece.digest)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".metadata", "__0_0.distcp"]


def test_our_reader_touches_neither_pickle_nor_metadata_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = whole_checkpoint(tmp_path, shards(tmp_path, {"a": {"b": 1, "t": torch.ones(2)}}), version=1)
    (tmp_path / ".metadata").unlink()
    monkeypatch.setattr(pickle, "load", None)
    unsafe = torch.load
    monkeypatch.setattr(torch, "load", lambda *a, **k: unsafe(*a, **k) if k.get("weights_only") else 1 / 0)
    items = items_of(manifest.pieces)
    state = read_values(tmp_path, items)
    assert state["a"]["b"] == 1 and torch.equal(state["a"]["t"], torch.ones(2))
    assert build_metadata(items, StorageMeta()).planner_data == {"a.b": ("a", "b"), "a.t": ("a", "t")}


def test_from_torch_2_15_on_strides_tell_the_order_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As stock torch writes them, also of a whole that is spread over shards."""
    monkeypatch.setattr(TensorProperties, "strides", None, raising=False)
    images = torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last)
    tensors = {"turned": torch.ones(3, 2).T, "images": images, "one": torch.tensor(1.0), "empty": torch.ones(0, 5)}
    found = build_metadata(items_of(shards(tmp_path, {**tensors, "cut": chunk(0, 0, 4, 6)})), StorageMeta())
    described: Any = found.state_dict_metadata
    strides = {name: described[name].properties.strides for name in described}
    assert strides == {name: tensor.stride() for name, tensor in (*tensors.items(), ("cut", WHOLE))}


def test_a_truncated_file_is_a_clear_error(tmp_path: Path) -> None:
    manifest = whole_checkpoint(tmp_path, shards(tmp_path, {"a": torch.ones(2000)}), version=1)
    with (tmp_path / "__0_0.distcp").open("r+b") as file:
        file.truncate(700)
    with pytest.raises(CheckpointError, match=r"a in .*__0_0.distcp cannot be read: it would end at byte"):
        read_values(tmp_path, items_of(manifest.pieces))
