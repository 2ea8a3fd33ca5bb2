"""A limit of file sizes is found by the first save only, unless something looks before."""

from __future__ import annotations

import logging
import resource
from pathlib import Path

import pytest

from tests.adapters.torch.test_trial import Job
from ttp.core.layout import Layout, Rank, Shard


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
