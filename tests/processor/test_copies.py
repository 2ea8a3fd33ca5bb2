"""Second copies of shards that only one rank holds: made beside the training, and used for a save."""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.processor.copying_rank import LAYOUT, ME, OTHER, PATIENCE_S, Source
from tests.processor.fake_source import no_thread
from ttp.config import Config, RankEnv
from ttp.core import messages as m
from ttp.core.copy_messages import CopyTo
from ttp.core.decide import How
from ttp.core.layout import Layout, Rank, Shard, Version
from ttp.core.rank import actions as act
from ttp.core.rank import events as ev
from ttp.core.replication import NOBODY
from ttp.errors import CheckpointError
from ttp.processor.copies import copier
from ttp.processor.copies.copier import Copying
from ttp.processor.copies.transfer import Receiver
from ttp.processor.local_state.pages import PageWriter
from ttp.processor.processor import Processor
from ttp.processor.rank_job import RankJob
from ttp.processor.source import Cancelled
from ttp.testing.scenario import grid

# -------------------------------------------------------------------------------------------------------------- copying


class Copies:
    """The copies that a rank keeps; the test's thread acts as the training thread."""

    def __init__(self, pages: Path, rank: Rank = ME, *, named: bool = True) -> None:
        self.pages, self.source = pages, Source()
        self.told: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.receiver = Receiver(Config(), "job")
        env = RankEnv(rank, LAYOUT.world_size, 0, "127.0.0.1", "job", 0)
        job = RankJob(Config(buddy_every=10), env, LAYOUT, self.source, Path("unused"))
        self.copying = Copying(job, self.receiver, self.told.put)
        self.copying.joined(pages, 3, anew=True)
        if named:
            self.copying.named(CopyTo(ME, 1, NOBODY, ""))

    def made(self, version: int) -> Any:
        self.copying.updated(Version(version))
        return self.hear()

    def hear(self) -> Any:
        return self.told.get(timeout=PATIENCE_S)

    def settled(self, version: int, *, whole: bool) -> None:
        self.copying.settle(act.SettleCopy(Version(version), whole))
        done = threading.Event()
        self.copying._worker.submit(done.set)
        assert done.wait(PATIENCE_S)

    @property
    def held(self) -> list[tuple[int, int]]:
        return [(copy.of, copy.version) for copy in self.copying.held()]


@pytest.fixture
def copies(tmp_path: Path) -> Iterator[Copies]:
    made = Copies(tmp_path / "pages")
    yield made
    made.source.go_on.set()
    made.copying.close()


def test_every_tenth_version_is_kept_and_two_at_most(copies: Copies) -> None:
    for version in range(10):
        copies.copying.updated(Version(version))
    assert copies.source.calls == [], "it is not their turn"
    assert copies.made(10) == ev.CopyMade(Version(10), True)
    assert copies.source.calls[0] == m.SaverOrder(ME, (Shard("s0"),), How.AS_IS, (ME,), True)
    copies.settled(10, whole=True)
    copies.made(20)
    assert copies.held == [(0, 10), (0, 20)]
    copies.settled(20, whole=False)
    copies.made(30)
    assert copies.held == [(0, 10), (0, 30)]
    copies.settled(30, whole=True)
    assert copies.held == [(0, 30)]


def test_before_a_buddy_is_named_nothing_is_kept(tmp_path: Path) -> None:
    copies = Copies(tmp_path, named=False)
    copies.copying.updated(Version(10))
    copies.copying.close()
    assert copies.source.calls == []


def test_where_no_thread_can_be_started_training_goes_on(copies: Copies, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        made = copies.made(10)
        assert not made.stored and "can't start new thread" in made.text
        copies.copying.hold()
        assert copies.copying.waited_s == 0
        copies.copying.freeze()
        copies.copying.settle(act.SettleCopy(Version(10), False))
        copies.copying.thaw()  # and then the gate opens
    assert copies.made(20) == ev.CopyMade(Version(20), True), "it is tried again"


def test_a_turn_is_skipped_while_the_last_copy_is_open(copies: Copies) -> None:
    copies.made(10)
    assert copies.made(20) == ev.CopySkipped(Version(20))
    copies.settled(10, whole=True)
    assert copies.made(30) == ev.CopyMade(Version(30), True)


def test_copies_that_come_to_nothing_are_tried_less_often(copies: Copies) -> None:
    """Every second turn, every fourth, every eighth; after a whole copy every turn again."""
    tried = []
    for version in range(10, 330, 10):
        calls = len(copies.source.calls)
        made = copies.made(version)
        if len(copies.source.calls) > calls:
            tried.append(version)
        elif version > 10:
            assert not made.stored and "this one is left out" in made.text
        copies.settled(version, whole=False)
    assert tried == [10, 20, 40, 80, 160, 240, 320]
    for version in (330, 340, 350, 360, 370, 380, 390):
        copies.made(version)
        copies.settled(version, whole=False)
    assert copies.made(400).stored
    copies.settled(400, whole=True)
    assert copies.made(410).stored


def test_the_next_update_waits_for_a_copy(copies: Copies) -> None:
    copies.copying.hold()
    copies.source.go_on.clear()
    copies.copying.updated(Version(10))
    updating = threading.Event()

    def train() -> None:
        copies.copying.hold()
        updating.set()

    trainer = threading.Thread(target=train)
    trainer.start()
    assert copies.source.started.wait(PATIENCE_S)
    assert not updating.is_set()
    copies.source.go_on.set()
    assert updating.wait(PATIENCE_S)
    trainer.join()
    assert copies.hear().stored
    assert copies.copying.waited_s > 0
    before = copies.copying.waited_s
    copies.copying.hold()
    assert copies.copying.waited_s == before, "through"


@pytest.mark.parametrize("deaf", [False, True])
def test_a_copy_that_takes_too_long_is_dropped(
    copies: Copies, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, deaf: bool
) -> None:
    copies.source.deaf = deaf
    monkeypatch.setattr(copier, "HOLD_S", 0.01)
    copies.source.go_on.clear()
    copies.copying.updated(Version(10))
    copies.copying.hold()  # gives up
    monkeypatch.setattr(copier, "HOLD_S", PATIENCE_S * 10)
    copies.copying.hold()  # does not wait again
    assert copies.copying._attempt is not None and not copies.copying._attempt.through.is_set()
    copies.source.go_on.set()
    made = copies.hear()
    assert not made.stored
    assert "was not finished after the next update" in made.text
    assert copies.held == [], "it may have been changed while it was copied"
    assert "no second copy of version 10" in caplog.text


def test_a_freeze_ends_what_is_being_copied_and_keeps_what_is_there(copies: Copies) -> None:
    copies.made(10)
    copies.settled(10, whole=True)
    copies.made(20)
    copies.copying.freeze()
    copies.settled(20, whole=True)
    assert copies.held == [(0, 10), (0, 20)], "it has been said to be there"
    copies.copying.updated(Version(30))  # made on request
    assert copies.hear() == ev.CopySkipped(Version(30))
    copies.copying.thaw()
    copies.settled(40, whole=True)  # of another one: only waits
    assert copies.held == [(0, 20)]
    copies.source.go_on.clear()
    copies.copying.updated(Version(40))
    assert copies.source.started.wait(PATIENCE_S)
    copies.copying.freeze()
    copies.source.go_on.set()
    copies.copying.quiesce()
    assert copies.hear() == ev.CopyMade(Version(40), False, "the job was frozen")


def test_what_fails_is_said_once_and_tried_again(copies: Copies, caplog: pytest.LogCaptureFixture) -> None:
    copies.source.problem = OSError(28, "no space left on device")
    for version in (10, 20):
        made = copies.made(version)
        assert (made.stored, "no space left" in made.text) == (False, True)
        copies.settled(version, whole=False)
    assert [r.levelno for r in caplog.records if r.levelno >= logging.WARNING] == [logging.WARNING]
    copies.source.problem = None
    assert copies.made(40).stored, "not 30: see below"


def test_too_little_memory_stops_the_copy_before_it_is_full(copies: Copies, monkeypatch: pytest.MonkeyPatch) -> None:
    copies.source.go_on.clear()
    copies.copying.updated(Version(10))
    assert copies.source.started.wait(PATIENCE_S)
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=9, f_frsize=1 << 20, f_blocks=100))
    copies.source.go_on.set()
    made = copies.hear()
    assert not made.stored
    assert "9 MiB of the 100 MiB" in made.text


def test_a_copy_goes_to_the_buddy_too(copies: Copies, tmp_path: Path) -> None:
    buddy = Copies(tmp_path / "other host", OTHER)
    copies.copying.named(CopyTo(ME, 1, OTHER, f"127.0.0.1:{buddy.receiver.port}"))
    assert copies.made(10).stored
    assert buddy.held == [(0, 10)]
    copies.settled(10, whole=True)
    buddy.copying.close()
    assert not copies.made(20).stored
    assert copies.held == [(0, 10), (0, 20)], "whole here; whether it can be used is decided by all"


# --------------------------------------------------------------------------------------------------------------- saving


def order(version: int, **more: Any) -> m.Save:
    wanted = m.SaverOrder(ME, more.pop("shards", ()), How.AS_IS, more.pop("pages", ()), more.pop("job", False), **more)
    return m.Save(ME, 1, "i", 7, Version(version), "draft", wanted)


def test_what_is_brought_and_what_is_written_anew(copies: Copies) -> None:
    copies.made(10)
    kept_orders = order(10, kept=(Shard("s0"),), pages=(ME, OTHER), job=True)
    live, from_kept = copies.copying.split(kept_orders, Version(17))
    assert (live.shards, live.pages, live.job_state, live.kept) == ((), (OTHER,), False, ())
    assert (from_kept.shards, from_kept.pages, from_kept.job_state, from_kept.kept) == ((), (ME,), True, ("s0",))
    usual = order(17, shards=(Shard("s0"),), pages=(ME, OTHER), job=True)
    live, from_kept = copies.copying.split(usual, Version(17))
    assert live == usual.order
    assert not (from_kept.pages or from_kept.job_state or from_kept.kept)


def test_a_page_that_is_alive_is_taken_before_a_kept_one(copies: Copies) -> None:
    copies.made(10)
    live, from_kept = copies.copying.split(order(10, pages=(ME,)), Version(10))
    assert (live.pages, from_kept.pages) == ((), (ME,))
    writer = PageWriter(copies.pages, ME, incarnation=3)
    assert writer.write(10, True, [b"page"])
    live, from_kept = copies.copying.split(order(10, pages=(ME,)), Version(10))
    writer.close()
    assert (live.pages, from_kept.pages) == ((ME,), ())


def test_pieces_of_a_copy_come_into_the_draft(copies: Copies, tmp_path: Path) -> None:
    copies.made(10)
    draft = tmp_path / "draft"
    draft.mkdir()
    save = order(10, kept=(Shard("s0"),), pages=(ME,), job=True)
    _, from_kept = copies.copying.split(save, Version(17))
    pieces = copies.copying.write_kept(from_kept, save, draft, lambda: False, lambda _: None)
    assert [(p.kind, p.shard, p.file) for p in pieces] == [
        ("shard", "s0", "shard_0_10-k7.bin"),
        ("rank_local", "", "rank_local_0_10-k7.bin"),
        ("job", "", "job_0_10-k7.bin"),
    ]
    assert all((draft / p.file).stat().st_size == p.size and p.table == "a table" for p in pieces)
    with pytest.raises(Cancelled):
        copies.copying.write_kept(from_kept, save, draft, lambda: True, lambda _: None)
    with pytest.raises(CheckpointError, match="cannot be read"):
        copies.copying.write_kept(from_kept, order(20), draft, lambda: False, lambda _: None)


# ------------------------------------------------------------------------------------------------------------ processor


def processor(layout: Layout, tmp_path: Path) -> Processor:
    env = RankEnv(0, layout.world_size, 0, "127.0.0.1", "job", 0)
    config = Config(port=1, run_dir=str(tmp_path), address="10.0.0.7")
    return Processor(config, env, layout, Source(), str(tmp_path), buddy=True)


def test_where_every_shard_has_replicas_nothing_is_kept(tmp_path: Path) -> None:
    assert processor(grid(1, 2), tmp_path).copying is None


def test_where_one_has_none_a_port_is_announced(tmp_path: Path) -> None:
    made = processor(grid(2, 1), tmp_path)
    assert made.copying is not None
    assert made._machine._greeting().copies_at == f"10.0.0.7:{made.copying._receiver.port}"
    assert made.copying.every == 10
    made.copying.close()


def test_a_save_brings_and_writes(copies: Copies, tmp_path: Path) -> None:
    made = processor(grid(2, 1), tmp_path)
    assert made.copying is not None
    made.copying.close()
    made._saver._copying, made._saver._source = copies.copying, copies.source
    copies.made(10)
    made.gate.set_version(Version(17))
    draft = tmp_path / "draft"
    draft.mkdir()
    save = order(10, kept=(Shard("s0"),), pages=(ME,), job=True)
    assert [p.kind for p in made._saver.pieces(save, draft, lambda: False)] == ["shard", "rank_local", "job"]
    assert len(copies.source.calls) == 1, "the state that is alive is of another version"
    assert made.written > 0
    both = order(17, shards=(Shard("s0"),), pages=(ME,), job=True)
    assert [p.file for p in made._saver.pieces(both, draft, lambda: False)] == [
        "shard_0_7.bin",
        "rank_local_0_7.bin",
        "job_0_7.bin",
    ]
