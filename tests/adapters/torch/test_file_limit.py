"""What only the first save, or the restart after it, would find, unless something looks before: a limit of file sizes,
a disk without room, and a checkpoint that was not restored.
"""

from __future__ import annotations

import logging
import resource
from pathlib import Path

import pytest

from tests.adapters.torch.stub_processor import StubProcessor
from tests.adapters.torch.test_trial import Job
from ttp.core.layout import Layout, Rank, Shard, Version
from ttp.store.manifest import MANIFEST
from ttp.store.names import checkpoint_name
from ttp.store.room import Room


@pytest.mark.parametrize(
    ("limit", "shards", "told"), [(-1, 1, 0), (328, 1, 0), (327, 1, 328), (164, 2, 0), (163, 2, 164)]
)
def test_a_limit_below_the_state_of_a_shard_is_told_after_the_first_update(
    limit: int,
    shards: int,
    told: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """26 weights, two moments of each, and the count of steps of each of four parameters: 4 bytes each."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, -1))
    job = Job(tmp_path)
    job.processor.layout = Layout(1, {Shard(f"{number}"): (Rank(0),) for number in range(shards)})
    job.wrap().step()
    with caplog.at_level(logging.WARNING):
        job.step()
    warned = [record.getMessage() for record in caplog.records if "RLIMIT_FSIZE" in record.getMessage()]
    story = f"larger than {limit} bytes (RLIMIT_FSIZE, `ulimit -f`), and this rank may have to write {told} bytes"
    assert len(warned) == bool(told) and all(story in text and "Raise" in text for text in warned), warned


@pytest.mark.parametrize(("free", "shards", "told"), [(328, 1, 0), (327, 1, 1), (328, 2, 0), (327, 2, 1)])
def test_a_disk_without_room_for_one_checkpoint_is_told_after_the_first_update(
    free: int, shards: int, told: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Room, "of", lambda save_dir: Room(save_dir, free))
    job = Job(tmp_path)
    job.processor.layout = Layout(1, {Shard(f"{number}"): (Rank(0),) for number in range(shards)})
    job.wrap()
    for _ in range(3):
        job.step()
    warned = [record.getMessage() for record in caplog.records if " B free" in record.getMessage()]
    story = f"{tmp_path} has {free} B free, but a checkpoint needs some 328 B: free"
    assert len(warned) == told and all(text.startswith(story) for text in warned), warned


def test_how_fast_the_storage_has_to_be_for_a_large_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for least, told in ((329, 0), (328, 1)):
        monkeypatch.setattr("ttp.store.room.LARGE", least)
        with caplog.at_level(logging.INFO, "ttp.store"):
            job = Job(tmp_path).wrap()
            for _ in range(3):
                job.step()
        job.adapter.detach()
        assert caplog.text.count("To save it within TTP_OT (360 s) after a failure, the storage has to take 0") == told


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("restored", [False, True])
def test_a_checkpoint_that_was_not_restored_is_told_before_the_first_update(
    rank: int, restored: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for version in (9, 61, 70):
        (tmp_path / checkpoint_name(Version(version))).mkdir()
        (tmp_path / checkpoint_name(Version(version)) / ("theirs" if version == 70 else MANIFEST)).touch()
    job = Job(tmp_path)
    job.processor = StubProcessor(tmp_path, rank=rank, layout=Layout.data_parallel(2))
    job.wrap()
    if restored:
        job.processor.set_base_version(Version(61))
    for _ in range(3):
        job.step()
    told = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(told) == (rank == 0 and not restored), told
    assert all("holds a checkpoint of step 61" in each.getMessage() for each in told)
