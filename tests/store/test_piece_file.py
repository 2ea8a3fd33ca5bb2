"""If one piece of an order cannot be written, no piece of that order is left."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from ttp.core.layout import Rank
from ttp.store.piece_file import all_or_nothing, piece_file, write_piece


def test_pieces_before_one_that_fails_are_removed_and_nobody_elses(tmp_path: Path) -> None:
    (tmp_path / "of another rank").write_bytes(b"1")
    with pytest.raises(OSError, match="full"), all_or_nothing(tmp_path) as pieces:
        pieces.append(write_piece(tmp_path, "first", b"2", "job", Rank(0)))
        assert (tmp_path / "first").exists()
        raise OSError(errno.ENOSPC, "full")
    assert [path.name for path in tmp_path.iterdir()] == ["of another rank"]


def test_whole_orders_stay(tmp_path: Path) -> None:
    with all_or_nothing(tmp_path) as pieces:
        pieces.append(write_piece(tmp_path, "first", b"2", "job", Rank(0)))
    assert (tmp_path / pieces[0].file).read_bytes() == b"2"


def test_a_large_piece_that_is_not_finished_is_closed_and_removed(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="full"), piece_file(tmp_path / "large") as file:
        file.write(b"1")
        raise OSError(errno.ENOSPC, "full")
    assert file.closed and not [*tmp_path.iterdir()]
