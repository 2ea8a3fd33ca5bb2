"""The index of a checkpoint, ``.metadata``: tensors of several shards become one, and every element is there exactly
once. The chunks of a tensor are read from the pieces that overlap them, and from no others.
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

from tests.adapters.torch.checkpoints import shards, whole_checkpoint
from ttp.adapters.torch.restoring import reader
from ttp.adapters.torch.restoring.reader import load_chunks, read_values
from ttp.adapters.torch.saving.checkpoint import Chunk
from ttp.adapters.torch.saving.metadata import build_metadata, finalise
from ttp.adapters.torch.saving.piece_index import IndexEntry, items_of
from ttp.core.layout import Rank
from ttp.core.messages import Piece
from ttp.errors import CheckpointError
from ttp.store.digest import digest_file
from ttp.store.plain_file import open_plain

WHOLE = torch.arange(24.0).reshape(4, 6)


def chunk(top: int, left: int, height: int, width: int) -> tuple[Chunk]:
    return (Chunk(WHOLE[top : top + height, left : left + width], (4, 6), (top, left)),)


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
        ([{"w": (Chunk(WHOLE, (4, 6), (1, 0)),)}], r"outside of \[4, 6\]"),
        ([{"w": (Chunk(WHOLE, (4, 6), (0,)),)}], r"outside of \[4, 6\]"),
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
    parts = shards(tmp_path, {"state": {"w": chunk(0, 0, 2, 6)}}, {"state": {"w": chunk(3, 0, 1, 6)}})
    assert finalise(tmp_path, parts, gaps="state.")
    with pytest.raises(CheckpointError, match=r"state.w has 18 of 24 elements"):
        finalise(tmp_path, parts, gaps="other.")
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


ROWS = torch.arange(32.0).reshape(8, 4)


@pytest.fixture
def saved(tmp_path: Path) -> Any:
    """Return a tensor of eight rows that is stored in four files of two rows."""
    states = ({"model": {"w": (Chunk(ROWS[at : at + 2], (8, 4), (at, 0)),)}} for at in (0, 2, 4, 6))
    return items_of(whole_checkpoint(tmp_path, shards(tmp_path, *states), 1, 4).pieces)


def test_only_what_overlaps_is_read(saved: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    inherited = reader.read_value

    def noted(path: Path, item: IndexEntry, files: Any) -> Any:
        read.append(item.file)
        return inherited(path, item, files)

    monkeypatch.setattr(reader, "read_value", noted)
    row, rows = torch.zeros(1, 2), torch.zeros(2, 4)
    load_chunks(tmp_path, saved, [(("model", "w"), [Chunk(row, (8, 4), (2, 2)), Chunk(rows, (8, 4), (3, 0))])])
    assert torch.equal(row, ROWS[2:3, 2:]) and torch.equal(rows, ROWS[3:5])
    assert sorted(read) == ["__1_0.distcp", "__2_0.distcp"]


def test_a_tensor_that_is_not_there_or_has_another_shape(saved: Any, tmp_path: Path) -> None:
    chunk = Chunk(torch.zeros(1, 4), (9, 4), (8, 0))
    for name in ("w", "v"):
        with pytest.raises(CheckpointError, match=rf"has no tensor model\.{name} of shape \(9, 4\)"):
            load_chunks(tmp_path, saved, [(("model", name), [chunk])])


def test_elements_that_no_piece_has(saved: Any, tmp_path: Path) -> None:
    """Those of a padded tensor stay as they are; of any other tensor they are an error."""
    found = torch.full((9, 4), 5.0)
    wanted = [(("model", "w"), [Chunk(found, (9, 4), (0, 0))])]
    load_chunks(tmp_path, saved, wanted, padded={("model", "w")})
    assert torch.equal(found[:8], ROWS) and torch.equal(found[8], torch.full((4,), 5.0))
    with pytest.raises(CheckpointError, match=r"is incomplete: 8 elements of model\.w are in none of its pieces"):
        load_chunks(tmp_path, saved[:3], [(("model", "w"), [Chunk(torch.zeros(8, 4), (8, 4), (0, 0))])])


def test_each_file_is_opened_once_for_all_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {name: torch.randn(4, 3) for name in "abc"}
    states = ({name: (Chunk(t[at : at + 2], (4, 3), (at, 0)),) for name, t in tensors.items()} for at in (0, 2))
    pieces = shards(tmp_path, *states)
    opened: list[Any] = []

    def noted(path: Path) -> Any:
        opened.append(open_plain(path))
        return opened[-1]

    monkeypatch.setattr(reader, "open_plain", noted)
    found = {name: torch.zeros(4, 3) for name in tensors}
    load_chunks(tmp_path, items_of(pieces), [((name,), [Chunk(t, (4, 3), (0, 0))]) for name, t in found.items()])
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    assert [file.closed for file in opened] == [True] * 2


def test_nothing_wanted_reads_nothing(saved: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = list[Path]()
    monkeypatch.setattr(reader, "open_plain", opened.append)
    load_chunks(tmp_path, saved, [(("model", "w"), [])])
    assert not opened
