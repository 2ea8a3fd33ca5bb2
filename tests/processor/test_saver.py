"""A saver makes its pieces durable before it reports them."""

from __future__ import annotations

import errno
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.processor.fake_source import FakeSource
from ttp.config import Config, RankEnv
from ttp.core.decide import How
from ttp.core.layout import Layout, Rank, Shard, Version
from ttp.core.messages import Save, SaverOrder
from ttp.core.rank.events import Event, PiecesWritten, WriteFailed
from ttp.processor.saver import Saver


def save(source: FakeSource, save_dir: Path) -> Event | None:
    """Save version 2 of a job of one rank, and return the saver's report."""
    saver = Saver(
        Config(), RankEnv(0, 1, 0, "127.0.0.1", "job", 0), Layout.data_parallel(1), source, save_dir, None,
        version=lambda: Version(2), wait_pages=lambda _: True, put=lambda _: None, wrote=lambda _: None,
        look_again=lambda: None,
    )  # fmt: skip
    order = SaverOrder(Rank(0), (Shard("s0"),), How.AS_IS, (), False)
    return saver._save(Save(Rank(0), 1, "i", 1, Version(2), ".draft", order), threading.Event())


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
    assert isinstance(save(Refusing(problem), tmp_path), WriteFailed)
    record = caplog.records[-1]
    assert "version 2 was not saved: " in record.message and problem.args[-1] in record.message
    assert bool(record.exc_info) == traceback


@pytest.mark.parametrize("there", [True, False])
def test_a_directory_that_is_made_at_the_failure_has_its_name_for_good(
    there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_dir = tmp_path / "job" / "checkpoints"
    if there:
        save_dir.mkdir(parents=True)
    synced: list[Path] = []
    monkeypatch.setattr("ttp.store.durable.sync_directory", lambda path: synced.append(Path(path)))
    assert isinstance(save(FakeSource(), save_dir), PiecesWritten)
    assert sorted(synced) == ([] if there else [tmp_path, tmp_path / "job"])
