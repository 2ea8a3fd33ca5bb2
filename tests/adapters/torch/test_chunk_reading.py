"""The chunks of a tensor are read from the pieces that overlap them, and from no others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.adapters.torch.checkpoints import whole_checkpoint
from ttp.adapters.torch.restoring import reader
from ttp.adapters.torch.restoring.reader import load_chunks
from ttp.adapters.torch.saving.checkpoint import Chunk, write_shard
from ttp.adapters.torch.saving.piece_index import IndexEntry, items_of
from ttp.core.layout import Rank, Shard
from ttp.errors import CheckpointError
from ttp.store.plain_file import open_plain

WHOLE = torch.arange(32.0).reshape(8, 4)


@pytest.fixture
def saved(tmp_path: Path) -> Any:
    """Return a tensor of eight rows that is stored in four files of two rows."""
    pieces = [
        write_shard(
            tmp_path,
            f"__{n}_0.distcp",
            {"model": {"w": Chunk(WHOLE[2 * n : 2 * n + 2], (8, 4), (2 * n, 0))}},
            shard=Shard(f"model-{n}"),
            writer=Rank(n),
        )
        for n in range(4)
    ]
    return items_of(whole_checkpoint(tmp_path, pieces, 1, 4).pieces)


def test_only_what_overlaps_is_read(saved: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    inherited = reader.read_value

    def noted(path: Path, item: IndexEntry, files: Any) -> Any:
        read.append(item.file)
        return inherited(path, item, files)

    monkeypatch.setattr(reader, "read_value", noted)
    row, rows = torch.zeros(1, 2), torch.zeros(2, 4)
    load_chunks(tmp_path, saved, [(("model", "w"), [Chunk(row, (8, 4), (2, 2)), Chunk(rows, (8, 4), (3, 0))])])
    assert torch.equal(row, WHOLE[2:3, 2:]) and torch.equal(rows, WHOLE[3:5])
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
    assert torch.equal(found[:8], WHOLE) and torch.equal(found[8], torch.full((4,), 5.0))
    with pytest.raises(CheckpointError, match=r"is incomplete: 8 elements of model\.w are in none of its pieces"):
        load_chunks(tmp_path, saved[:3], [(("model", "w"), [Chunk(torch.zeros(8, 4), (8, 4), (0, 0))])])


def test_each_file_is_opened_once_for_all_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {name: torch.randn(4, 3) for name in "abc"}
    pieces = [
        write_shard(
            tmp_path,
            f"__{n}_0.distcp",
            {name: Chunk(tensor[2 * n : 2 * n + 2], (4, 3), (2 * n, 0)) for name, tensor in tensors.items()},
            shard=Shard(f"s-{n}"),
            writer=Rank(n),
        )
        for n in range(2)
    ]
    opened: list[Any] = []

    def noted(path: Path) -> Any:
        opened.append(open_plain(path))
        return opened[-1]

    monkeypatch.setattr(reader, "open_plain", noted)
    found = {name: torch.zeros(4, 3) for name in tensors}
    load_chunks(tmp_path, items_of(pieces), [((name,), [Chunk(t, (4, 3), (0, 0))]) for name, t in found.items()])
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    assert [file.closed for file in opened] == [True] * 2


def test_nothing_wanted_reads_nothing(saved: Any, tmp_path: Path) -> None:
    load_chunks(tmp_path / "nowhere", saved, [(("model", "w"), [])])
