"""``extra_state`` of a rank that died before it could save it comes from ranks that had an equal one."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.adapters.torch.stub_processor import INCARNATION, Stateful, StubProcessor, save
from tests.adapters.torch.test_local_piece import adapter
from ttp.adapters.torch.adapter import TorchAdapter
from ttp.adapters.torch.local_state.image import BUFFER, without_still
from ttp.adapters.torch.restoring.rank_local import Replicas
from ttp.core.layout import Layout, Rank, Shard
from ttp.core.messages import Piece
from ttp.processor.local_state.local_piece import LOCAL_KIND, UpdateChanges
from ttp.store.manifest import Manifest

SMALL, LARGE = 4, 1 << 15
"""Numbers of values. Arrays of 64 KiB and more are kept apart from the rest of an image."""


class Peers:
    """Ranks in one process, which all make the same update. Rank 0 saves."""

    def __init__(self, root: Path, world_size: int = 3) -> None:
        self.pages, self.world_size = root / "pages", world_size
        self.processor: Any = StubProcessor(root / "checkpoints", layout=Layout.data_parallel(world_size))
        self.adapters: list[TorchAdapter] = []

    def join(self, extra: Any = None) -> TorchAdapter:
        """Let the next rank begin, with these objects as its ``extra_state``."""
        made = adapter(extra)
        made.source.on_welcome(Rank(len(self.adapters)), INCARNATION, self.pages)
        if not self.adapters:
            made.attach(self.processor)
        self.adapters.append(made)
        return made

    def save(self) -> Path:
        """Save what the ranks that have joined left in their pages; the hosts of the others are lost."""
        ranks = tuple(map(Rank, range(self.world_size)))
        there = len(self.adapters)
        return save(self.adapters[0], self.processor, 0, pages=ranks[:there], missing=ranks[there:])


def averaged(root: Path, updates: Sequence[Sequence[Any]], size: int = SMALL) -> tuple[Path, dict[int, float]]:
    """Let each rank change an average in an update: before it, after it, and at the gate, if it comes there.

    A rank without an average after the update dies in it.

    Returns:
        The checkpoint, and the average that each rank has after it has loaded that; -1: it keeps its initial one.
    """
    job = Peers(root)
    for before, after, *gate in updates:
        average = Stateful(values=torch.full((size,), before))
        capture = job.join({"ema": average}).capture
        capture.capture(0, final=False)
        for value in gate:
            average.state["values"].fill_(value)
            capture.look_again(0)
        if after is not None:
            average.state["values"].fill_(after)
            capture.capture(0, final=True)
    path = job.save()
    found = {}
    for rank in range(3):
        average = Stateful(values=torch.full((size,), -1.0))
        adapter({"ema": average}).load(path, rank, 3, protected=False)
        (found[rank],) = {*average.state["values"].tolist()}
    return path, found


@pytest.mark.supports("EMA")
@pytest.mark.parametrize("size", [SMALL, LARGE])
@pytest.mark.parametrize(
    ("updates", "expected"),
    [
        pytest.param([(1, 2), (1, None), (5, 6)], [2, 2, 6], id="in its update, one other had the same"),
        # The loop counts between the backward pass and optimizer.step(), which the dead rank did not reach.
        pytest.param([(1, 2, 2), (1, None), (1, 2, 2)], [2, 2, 2], id="before its gate, by the backward pass"),
        pytest.param([(1, 3, 2), (1, None), (1, 3, 2)], [3, 3, 3], id="before its gate, changed there and later"),
        pytest.param([(1, 3, 2), (1, None, 2), (1, 3, 2)], [3, 3, 3], id="behind its gate, changed there and later"),
    ],
)
def test_a_rank_that_died_gets_the_average_of_ranks_that_had_the_same_where_it_died(
    tmp_path: Path, size: int, updates: list[tuple[Any, ...]], expected: list[float]
) -> None:
    assert [*averaged(tmp_path, updates, size)[1].values()] == expected


BEHIND, ANEW = "one update behind", "extra_state['ema'] was not saved: it keeps its initial state"


@pytest.mark.parametrize(
    ("updates", "rank", "has", "said"),
    [
        (
            [(1, 2, 2), (1, None, 3), (1, 2, 2)],
            1,
            3,
            BEHIND,
        ),  # at its gate it had another state
        ([(1, 2), (1, None), (1, 3)], 1, 1, BEHIND),  # the others disagree
        ([(1, 1), (1, None), (1, 1)], 1, 1, ""),  # the update did not change it
        ([(1, 1), (5, None), (7, 7)], 1, 5, ""),  # such as random streams, which the loop moves before the forward pass
        ([(1, 2), (1, 2)], 2, 2, "no rank-local state of rank 2"),  # its host was lost
        ([(1, 2), (1, 3)], 2, -1, ANEW),  # so it was, and the others disagree
    ],
)
def test_what_a_rank_has_that_gets_nothing_from_others_is_told(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    updates: list[tuple[Any, ...]],
    rank: int,
    has: float,
    said: str,
) -> None:
    assert averaged(tmp_path, updates)[1][rank] == has and said in caplog.text
    assert [text for text in (BEHIND, ANEW) if text in caplog.text] == [text for text in (BEHIND, ANEW) if text == said]
    for text in (
        "rank 1 died in the update to version 0",
        "what the loop changes there once the last backward pass has begun is one update behind",
        "differs between ranks (a mean of its losses) in an object",
    ):
        assert (text in caplog.text) == (said == BEHIND)


def test_an_object_that_takes_what_it_lacks_from_others_itself_is_not_behind(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the Trainer's and Lightning's callbacks: the warning would be of a state that the user never gave."""
    monkeypatch.setattr(Stateful, "ttp_completes_itself", True, raising=False)
    assert averaged(tmp_path, [(1, 2), (1, None), (1, 3)])[1][1] == 1 and "behind" not in caplog.text


def test_ranks_of_other_shards_are_not_asked(tmp_path: Path) -> None:
    """An average may be sharded as the weights are."""
    path, _ = averaged(tmp_path, [(1, 2), (1, 2)])
    manifest = Manifest.load(path)
    sharded = replace(manifest, groups={Shard("a"): (Rank(0), Rank(1)), Shard("b"): (Rank(2),)})
    assert Replicas(manifest, 2).lend(path, None).extra.keys() == {"ema"}
    assert Replicas(sharded, 2).lend(path, None).extra == {}


def test_ranks_with_equal_states_share_an_entry_in_the_manifest(tmp_path: Path) -> None:
    pieces = Manifest.load(averaged(tmp_path, [(1, 2), (1, 2), (1, None)])[0]).pieces
    (table,) = (json.loads(piece.table) for piece in pieces if piece.kind == LOCAL_KIND)
    (both, dead) = table["changes"]["ema"]
    assert both[2] == [0, 1] and dead[2] == [2] and dead[:2] == [both[0], ""]
    assert [name for name in UpdateChanges(pieces).names if not name.startswith(BUFFER)] == ["ema"]


BIAS, MEAN = "norm.num_batches_tracked", "norm.running_mean"
"""Stand for a buffer that is equal on all ranks, as the bias of a load balance is, and for one that is not."""


def buffers_after(
    root: Path, updates: Sequence[tuple[float, float | None]], earlier: float | None = None
) -> tuple[Path, list[Piece]]:
    """Let each rank have these values in a buffer before and after an update; None: it dies in the update.

    It may have another value in an ``earlier`` backward pass of the version.
    """
    job = Peers(root, len(updates))
    for rank, (before, after) in enumerate(updates):
        each = job.join()
        buffers = dict(each._model.named_buffers())
        buffers[MEAN].fill_(rank)
        if earlier is not None:
            buffers[BIAS].fill_(earlier)
            each.capture.capture(0, final=False)
        buffers[BIAS].fill_(before)
        each.capture.capture(0, final=False)
        if after is not None:
            buffers[BIAS].fill_(after)
            each.capture.capture(0, final=True)
    path = job.save()
    return path, [piece for piece in Manifest.load(path).pieces if piece.kind == LOCAL_KIND]


def buffers_of(path: Path, rank: int, world_size: int) -> tuple[float, float]:
    fresh = adapter()
    fresh.load(path, rank, world_size, protected=False)
    buffers = dict(fresh._model.named_buffers())
    return float(buffers[BIAS]), float(buffers[MEAN][0])


@pytest.mark.supports("buffers written after the step")
def test_a_rank_that_died_in_its_update_gets_the_buffers_of_ranks_that_had_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The bias of a load balance is written after the step, on all ranks alike."""
    path, _ = buffers_after(tmp_path, [(1, 2), (1, None), (5, 6)])
    assert [buffers_of(path, rank, 3) for rank in range(3)] == [(2, 0), (2, 1), (6, 2)]
    assert "before that update" not in caplog.text


def test_buffers_that_the_update_makes_equal_from_different_values_are_lent(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Counts of an iteration, which differ between ranks, are set to zero before the step (Megatron's router)."""
    path, _ = buffers_after(tmp_path, [(4, 0), (5, None), (3, 0)])
    assert [buffers_of(path, rank, 3) for rank in range(3)] == [(0, 0), (0, 1), (0, 2)]
    assert "before that update" not in caplog.text


@pytest.mark.parametrize(
    ("biases", "kept"),
    [
        ([(1, 2), (1, None), (1, 3)], 1),  # the others disagree
        ([(1, 2), (5, None), (3, 3)], 5),  # a rank may have had nothing to write in this update
        ([(1, 2), (5, None), (1, 2)], 5),  # the others were equal before, too
        ([(1, 2), (5, None)], 5),
    ],
)
def test_buffers_that_no_other_rank_can_lend_stay_behind_and_that_is_told(
    biases: list[tuple[int, int | None]], kept: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, _ = buffers_after(tmp_path, biases)
    assert buffers_of(path, 1, len(biases)) == (kept, 1)
    assert f"so its buffers ('{BIAS}') were captured before that update" in caplog.text


def test_buffers_that_only_earlier_backward_passes_of_the_version_change_are_not_behind(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Statistics change in each forward pass; in the last backward pass the rank that died had them, too."""
    path, _ = buffers_after(tmp_path, [(1, 1), (5, None)], earlier=0)
    assert buffers_of(path, 1, 2) == (5, 1) and "before that update" not in caplog.text


def test_only_buffers_that_the_update_changes_are_in_the_manifest(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A model may have hundreds, and each rank its own statistics in most of them."""
    _, pieces = buffers_after(tmp_path / "changed", [(1, 2), (1, 2)])
    assert UpdateChanges(pieces).names == [BUFFER + BIAS]
    path, pieces = buffers_after(tmp_path / "still", [(1, 1), (1, 1)])
    assert UpdateChanges(pieces).names == []
    path, pieces = buffers_after(tmp_path / "died", [(1, 1), (1, None)])
    assert buffers_of(path, 1, 2) == (1, 1) and "behind" not in caplog.text


def test_buffers_of_unknown_change_do_not_count_as_changed() -> None:
    """The page of a rank may have lost what was there before the update."""
    entries = {("", "b"): [0], ("a", ""): [1], ("c", "d"): [2]}
    assert without_still({BUFFER + "x": entries}) == {BUFFER + "x": {("a", ""): [1], ("c", "d"): [2]}}
    assert without_still({"ema": entries}) == {"ema": entries}


@pytest.mark.parametrize("first", [None, 2])
def test_another_number_of_ranks_gets_the_buffers_of_a_rank_that_finished(tmp_path: Path, first: float | None) -> None:
    path, _ = buffers_after(tmp_path, [(1, first), (1, 2)])
    assert buffers_of(path, 0, 1)[0] == 2


def pieces(*tables: Any) -> list[Piece]:
    return [Piece("local", 1, "", LOCAL_KIND, "", Rank(0), json.dumps({"changes": table})) for table in tables]


@pytest.mark.parametrize(
    ("changes", "rank", "expected"),
    [
        ([["a", "b", [0]], ["a", "", [1]]], 1, 0),
        ([["a", "b", [0]], ["c", "", [1]]], 1, None),  # it was another state before
        ([["", "b", [0]], ["a", "", [1]]], 1, None),  # whether it was the same is unknown
        ([["a", "b", [0]], ["a", "c", [2]], ["a", "", [1]]], 1, None),  # they disagree
        ([["a", "", [0]], ["a", "", [1]]], 1, None),  # all died
        ([["a", "b", [2, 0]]], 1, 0),  # the state of rank 1 was not saved
        ([["a", "b", [0]], ["", "b", [2]]], 1, 0),
        ([["a", "b", [0]], ["a", "c", [2]]], 1, None),
        ([["a", "b", []], ["a", "b", ["0"]], ["a", 1, [0]], "ab", None], 1, None),  # not of the form that is written
        ("ab", 1, None),
        ([["a", "b", [8]], ["a", "", [1]]], 1, None),  # it holds another shard
        ([["a", "b", [8, 2]]], 1, 2),
        ([["a", "b", [8]], ["a", "c", [2]], ["a", "", [1]]], 1, 2),
    ],
)
def test_who_lends(changes: Any, rank: int, expected: int | None) -> None:
    replicas = (0, 1, 2)
    assert UpdateChanges(pieces({"x": changes})).lender("x", rank, replicas) == expected
    if isinstance(changes, list):
        assert UpdateChanges(pieces(*({"x": [change]} for change in changes))).lender("x", rank, replicas) == expected


def test_tables_of_other_forms_name_no_objects() -> None:
    wrong: Iterable[Any] = ([], "x", None, 5)
    assert UpdateChanges(pieces(*wrong)).names == [] and UpdateChanges(pieces(*wrong)).lender("x", 1, (0, 1)) is None
