"""A saver makes its pieces durable before it reports them."""

from __future__ import annotations

import errno
import logging
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.processor.fake_source import FakeSource, no_thread
from ttp.config import Config, RankEnv
from ttp.core.decide import How
from ttp.core.layout import Layout, Rank, Shard, Version
from ttp.core.messages import Save, Saved, SaveFailed, SaverOrder
from ttp.core.rank.events import Event, Worked
from ttp.processor import saver as saver_module
from ttp.processor.holding import Holding
from ttp.processor.rank_job import RankJob
from ttp.processor.saver import Saver

PATIENCE_S = 60.0


def saver_of(source: FakeSource, save_dir: Path, put: Callable[[Event], None] = lambda _: None) -> Saver:
    """Return the saver of a job of one rank, whose state has version 2."""
    env = RankEnv(0, 1, 0, "127.0.0.1", "job", 0)
    job = RankJob(Config(), env, Layout.data_parallel(1), source, save_dir)
    return Saver(
        job, None, Holding(job, may=False), version=lambda: Version(2), wait_pages=lambda _: True, put=put,
        wrote=lambda _: None, look_again=lambda: None,
    )  # fmt: skip


def order_of(generation: int) -> Save:
    order = SaverOrder(Rank(0), (Shard("s0"),), How.AS_IS, (), False)
    return Save(Rank(0), 1, "i", generation, Version(2), ".draft", order)


def save(source: FakeSource, save_dir: Path) -> Saved | SaveFailed | None:
    """Save version 2, and return the saver's report."""
    return saver_of(source, save_dir)._save(order_of(1), threading.Event())


class Refusing(FakeSource):
    """A state whose pieces cannot be written."""

    def __init__(self, problem: Exception) -> None:
        super().__init__()
        self.problem = problem

    def write_pieces(self, **_: Any) -> list[Any]:
        raise self.problem


@pytest.mark.parametrize(
    ("problem", "traceback"),
    [(OSError(errno.ENOSPC, "No space left on device", "piece"), False), (ValueError("odd"), True)],
)
def test_a_traceback_is_logged_for_an_error_of_the_code_and_not_for_a_full_disk(
    problem: Exception, traceback: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saver = saver_of(Refusing(problem), tmp_path)
    for generation in (1, 2):
        assert isinstance(saver._save(order_of(generation), threading.Event()), SaveFailed)
    record, *again = (each for each in caplog.records if each.levelno == logging.ERROR)
    assert bool(again) == traceback, "a disk that stays full filled the log for TTP_OT"
    assert "version 2 was not saved: " in record.message and problem.args[-1] in record.message
    assert bool(record.exc_info) == traceback != record.message.endswith("repair the storage before")


@pytest.mark.parametrize("there", [True, False])
def test_a_directory_that_is_made_at_the_failure_has_its_name_for_good(
    there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_dir = tmp_path / "job" / "checkpoints"
    if there:
        save_dir.mkdir(parents=True)
    synced: list[Path] = []
    monkeypatch.setattr("ttp.store.durable.sync_directory", lambda path: synced.append(Path(path)))
    assert isinstance(save(FakeSource(), save_dir), Saved)
    assert sorted(synced) == ([] if there else [tmp_path, tmp_path / "job"])


class HangsAtFirst(FakeSource):
    """A state whose first save hangs in the kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.ends = threading.Event()

    def write_pieces(self, **order: Any) -> list[Any]:
        if order["generation"] == 1:
            self.ends.wait(PATIENCE_S)
        return super().write_pieces(**order)


def test_a_save_that_hangs_does_not_keep_the_next_one_which_was_ordered_before_it_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, late = HangsAtFirst(), list[threading.Thread]()
    said: queue.Queue[Event] = queue.Queue()

    def start_later(thread: threading.Thread) -> None:
        late.append(thread)

    with monkeypatch.context() as slow:
        slow.setattr(threading.Thread, "start", start_later)
        saver = saver_of(source, tmp_path, said.put)
        saver.save(order_of(1))
    saver.cancel()
    saver.save(order_of(2))
    late[0].start()
    report = said.get(timeout=PATIENCE_S / 2)
    source.ends.set()
    saver.close()
    assert isinstance(report, Worked) and isinstance(report.result, Saved) and report.result.generation == 2


def test_a_restore_does_not_fail_because_no_thread_can_remove_old_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tidied = list[tuple[object, ...]]()
    monkeypatch.setattr(saver_module, "tidy", lambda *asked, **_: tidied.append(asked))
    saver = saver_of(FakeSource(), tmp_path)
    with monkeypatch.context() as crowded:
        crowded.setattr(threading.Thread, "start", no_thread)
        saver.tidy(tmp_path, 1, "newest", verified=True)
    saver.tidy(tmp_path, 1, "newer", verified=True)
    assert saver._tidying.wait_done(PATIENCE_S)
    assert tidied == [(tmp_path, 1, "newer")], "not on the caller's thread, and the next time again"
    saver.close()


def test_what_failed_saves_left_is_removed_when_no_save_can_last_so_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the restart it may still be written; the next save may need its room."""
    draft = tmp_path / ".draft-step_12-failed"
    draft.mkdir()
    timers = list[tuple[float, Callable[..., None], list[Callable[[], None]]]]()

    class Planned(threading.Thread):
        def __init__(self, *planned: Any) -> None:
            timers.append(planned)
            super().__init__()

    monkeypatch.setattr(threading, "Timer", Planned)
    saver = saver_of(FakeSource(), tmp_path)
    for verified in (False, True):
        saver.tidy(tmp_path, 1, "newest", verified=verified)
    assert saver._tidying.wait_done(PATIENCE_S) and draft.exists()
    ((wait_s, call, (job,)),) = timers
    assert wait_s > saver._job.config.rescue_patience_s
    call(job)
    assert saver._tidying.wait_done(PATIENCE_S) and not draft.exists()
    saver.close()
