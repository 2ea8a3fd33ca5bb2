"""What a saver does to the storage before it says that its pieces are there."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tests.processor.fake_source import FakeSource
from ttp.config import Config, RankEnv
from ttp.core.decide import How
from ttp.core.layout import Layout, Rank, Shard, Version
from ttp.core.messages import Save, SaverOrder
from ttp.core.rank.events import PiecesWritten
from ttp.processor.saver import Saver


@pytest.mark.parametrize("there", [True, False])
def test_a_directory_that_is_made_at_the_failure_has_its_name_for_good(
    there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_dir = tmp_path / "job" / "checkpoints"
    if there:
        save_dir.mkdir(parents=True)
    synced: list[Path] = []
    monkeypatch.setattr("ttp.store.durable.sync_directory", lambda path: synced.append(Path(path)))
    saver = Saver(
        Config(), RankEnv(0, 1, 0, "127.0.0.1", "job", 0), Layout.data_parallel(1), FakeSource(), save_dir, None,
        version=lambda: Version(2), wait_pages=lambda _: True, put=lambda _: None, wrote=lambda _: None,
        look_again=lambda: None,
    )  # fmt: skip
    order = SaverOrder(Rank(0), (Shard("s0"),), How.AS_IS, (), False)
    done = saver._save(Save(Rank(0), 1, "i", 1, Version(2), ".draft", order), threading.Event())
    assert isinstance(done, PiecesWritten)
    assert sorted(synced) == ([] if there else [tmp_path, tmp_path / "job"])
