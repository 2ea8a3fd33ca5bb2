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
from ttp.adapters.torch.restoring.rank_local import from_peers
from ttp.core.layout import Layout, Rank, Shard
from ttp.core.messages import Piece
from ttp.processor.local_state.local_piece import LOCAL_KIND, lender, objects_kept
from ttp.store.manifest import Manifest

SMALL, LARGE = 4, 1 << 15
"""Numbers of values. Arrays of 64 KiB and more are kept apart from the rest of an image."""


def average_of(size: int, value: float) -> Stateful:
    """Return an average that is no module; all its values are equal."""
    return Stateful(values=torch.full((size,), value))


class Job:
    """Ranks in one process, whose update changes an average from ``before`` to ``after``. Rank 0 saves."""

    def __init__(self, root: Path, size: int = SMALL, world_size: int = 3) -> None:
        self.size, self.pages, self.world_size = size, root / "pages", world_size
        self.processor: Any = StubProcessor(root / "checkpoints", layout=Layout.data_parallel(world_size))
        self.adapters: list[TorchAdapter] = []

    def rank(self, before: float, after: float | None, gate: float | None = None) -> None:
        """Let the next rank write its page, and die in the update if there is no ``after``.

        At the gate its state is ``gate``, if it comes there.
        """
        average = average_of(self.size, before)
        made = adapter({"ema": average})
        made.source.on_welcome(Rank(len(self.adapters)), INCARNATION, self.pages)
        if not self.adapters:
            made.attach(self.processor)
        made.capture.capture(0, final=False)
        if gate is not None:
            average.state["values"].fill_(gate)
            made.capture.look_again(0)
        if after is not None:
            average.state["values"].fill_(after)
            made.capture.capture(0, final=True)
        self.adapters.append(made)

    def save(self) -> Path:
        ranks = [Rank(rank) for rank in range(self.world_size)]
        there = len(self.adapters)
        return save(self.adapters[0], self.processor, 0, pages=tuple(ranks[:there]), missing=tuple(ranks[there:]))


def restored(path: Path, rank: int, size: int = SMALL, world_size: int = 3) -> float:
    """Return the average that a rank has after it has loaded the checkpoint; -1: it keeps its initial one."""
    average = average_of(size, -1)
    adapter({"ema": average}).load(path, rank, world_size, protected=False)
    (value,) = {*average.state["values"].tolist()}
    return float(value)


@pytest.mark.supports("EMA")
@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_a_rank_that_died_in_its_update_gets_the_average_of_ranks_that_had_the_same(tmp_path: Path, size: int) -> None:
    job = Job(tmp_path, size)
    job.rank(1, 2)
    job.rank(1, None)
    job.rank(5, 6)
    path = job.save()
    assert [restored(path, rank, size) for rank in range(3)] == [2, 2, 6]


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_a_rank_that_died_before_its_gate_is_compared_with_the_backward_pass_of_others(
    tmp_path: Path, size: int
) -> None:
    """The loop counts between the backward pass and ``optimizer.step()``, which the dead rank did not reach."""
    job = Job(tmp_path, size)
    job.rank(1, 2, gate=2)
    job.rank(1, None)
    job.rank(1, 2, gate=2)
    path = job.save()
    assert [restored(path, rank, size) for rank in range(3)] == [2, 2, 2]


def test_a_rank_that_died_behind_its_gate_is_compared_with_the_gate_of_others(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.rank(1, 2, gate=2)
    job.rank(1, None, gate=3)
    path = job.save()
    assert restored(path, 1) == 3


@pytest.mark.parametrize("gate", [None, 2])
@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_what_changes_before_and_after_the_update_is_compared_where_the_rank_died(
    tmp_path: Path, size: int, gate: float | None
) -> None:
    job = Job(tmp_path, size)
    job.rank(1, 3, gate=2)
    job.rank(1, None, gate=gate)
    job.rank(1, 3, gate=2)
    path = job.save()
    assert [restored(path, rank, size) for rank in range(3)] == [3, 3, 3]


def test_it_stays_behind_where_others_disagree(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    job = Job(tmp_path)
    job.rank(1, 2)
    job.rank(1, None)
    job.rank(1, 3)
    path = job.save()
    assert restored(path, 1) == 1
    assert "rank 1 died in the update to version 0" in caplog.text and "one update behind" in caplog.text
    assert "keep what differs between ranks (a mean of its losses) in an object of its own" in caplog.text


def test_an_object_that_takes_what_it_lacks_from_others_itself_is_not_behind(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the Trainer's and Lightning's callbacks: the warning would be of a state that the user never gave."""
    job = Job(tmp_path)
    job.rank(1, 2)
    job.rank(1, None)
    job.rank(1, 3)
    path = job.save()
    monkeypatch.setattr(Stateful, "ttp_completes_itself", True, raising=False)
    assert restored(path, 1) == 1 and "behind" not in caplog.text


def test_a_state_that_the_update_did_not_change_is_not_behind(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    job = Job(tmp_path, world_size=2)
    job.rank(1, 1)
    job.rank(1, None)
    path = job.save()
    assert restored(path, 1, world_size=2) == 1 and "behind" not in caplog.text


def test_what_no_update_changes_is_not_behind_although_each_rank_has_its_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The random streams of each rank, or its place in the data, which the loop moves before the forward pass."""
    job = Job(tmp_path, world_size=2)
    job.rank(1, 1)
    job.rank(5, None)
    path = job.save()
    assert restored(path, 1, world_size=2) == 5 and "behind" not in caplog.text


def test_a_rank_whose_host_was_lost_gets_what_all_others_have(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    job = Job(tmp_path)
    job.rank(1, 2)
    job.rank(1, 2)
    path = job.save()
    assert restored(path, 2) == 2
    assert "extra_state['ema'] was not saved" not in caplog.text and "no rank-local state of rank 2" in caplog.text


def test_it_begins_anew_where_others_disagree(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    job = Job(tmp_path)
    job.rank(1, 2)
    job.rank(1, 3)
    path = job.save()
    assert restored(path, 2) == -1 and "extra_state['ema'] was not saved: it keeps its initial state" in caplog.text


def test_ranks_of_other_shards_are_not_asked(tmp_path: Path) -> None:
    """An average may be sharded as the weights are."""
    job = Job(tmp_path)
    job.rank(1, 2)
    job.rank(1, 2)
    path = job.save()
    manifest = Manifest.load(path)
    sharded = replace(manifest, groups={Shard("a"): (Rank(0), Rank(1)), Shard("b"): (Rank(2),)})
    assert from_peers(path, manifest, 2, None).extra.keys() == {"ema"}
    assert from_peers(path, sharded, 2, None).extra == {}


def test_ranks_with_equal_states_share_an_entry_in_the_manifest(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.rank(1, 2)
    job.rank(1, 2)
    job.rank(1, None)
    pieces = Manifest.load(job.save()).pieces
    (table,) = (json.loads(piece.table) for piece in pieces if piece.kind == LOCAL_KIND)
    (both, dead) = table["changes"]["ema"]
    assert both[2] == [0, 1] and dead[2] == [2] and dead[:2] == [both[0], ""]
    assert [name for name in objects_kept(pieces) if not name.startswith(BUFFER)] == ["ema"]


BIAS, MEAN = "norm.num_batches_tracked", "norm.running_mean"
"""Stand for a buffer that is equal on all ranks, as the bias of a load balance is, and for one that is not."""


def buffers_after(
    root: Path, updates: Sequence[tuple[float, float | None]], earlier: float | None = None
) -> tuple[Path, list[Piece]]:
    """Let each rank have these values in a buffer before and after an update; None: it dies in the update.

    It may have another value in an ``earlier`` backward pass of the version.
    """
    processor: Any = StubProcessor(root / "checkpoints", layout=Layout.data_parallel(len(updates)))
    made = [adapter() for _ in updates]
    for rank, (each, (before, after)) in enumerate(zip(made, updates, strict=True)):
        buffers = dict(each._model.named_buffers())
        each.source.on_welcome(Rank(rank), INCARNATION, root / "pages")
        if rank == 0:
            each.attach(processor)
        buffers[MEAN].fill_(rank)
        if earlier is not None:
            buffers[BIAS].fill_(earlier)
            each.capture.capture(0, final=False)
        buffers[BIAS].fill_(before)
        each.capture.capture(0, final=False)
        if after is not None:
            buffers[BIAS].fill_(after)
            each.capture.capture(0, final=True)
    path = save(made[0], processor, 0, pages=tuple(map(Rank, range(len(updates)))))
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
    assert objects_kept(pieces) == [BUFFER + BIAS]
    path, pieces = buffers_after(tmp_path / "still", [(1, 1), (1, 1)])
    assert objects_kept(pieces) == []
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
    assert lender(pieces({"x": changes}), "x", rank, replicas) == expected
    if isinstance(changes, list):
        assert lender(pieces(*({"x": [change]} for change in changes)), "x", rank, replicas) == expected


def test_tables_of_other_forms_name_no_objects() -> None:
    wrong: Iterable[Any] = ([], "x", None, 5)
    assert objects_kept(pieces(*wrong)) == [] and lender(pieces(*wrong), "x", 1, (0, 1)) is None
