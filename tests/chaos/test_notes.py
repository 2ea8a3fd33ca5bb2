"""The notes of ranks are read, also when a crash has cut the last line off."""

from __future__ import annotations

from pathlib import Path

from ttp.chaos.notes import RankLife, parse, read, reference

LINES = [
    "10.0 0.0 start 0 s0 o0",
    "11.0 0.0 update 1",
    "11.1 0.0 version 1",
    "11.2 0.0 state 1 s1 o1",
    "12.0 0.0 update 2",
    "20.0 0.1 start 1 s1 o1",
    "20.5 0.1 update 2",
    "20.6 0.1 version 2",
    "20.7 0.1 sta",
]


def test_lives_and_versions() -> None:
    assert parse(LINES) == {
        (0, 0): RankLife(0, ("s0", "o0"), begun=2, finished=1, states={1: ("s1", "o1")}),
        (0, 1): RankLife(1, ("s1", "o1"), begun=2, finished=2),
    }


def test_a_rank_that_wrote_nothing_had_no_life(tmp_path: Path) -> None:
    (tmp_path / "rank0.log").write_text("\n".join(LINES[:4]) + "\n12.0 0.0 upda")
    notes = read(tmp_path, 2)
    assert notes[1] == {}
    assert notes[0][0, 0].begun == 1
    del notes[1]  # type: ignore[attr-defined]
    assert reference(notes) == {0: {0: ("s0", "o0"), 1: ("s1", "o1")}}
