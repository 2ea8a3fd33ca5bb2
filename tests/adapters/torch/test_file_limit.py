"""A limit of file sizes is found by the first save only, unless something looks before."""

from __future__ import annotations

import logging
import resource
from pathlib import Path

import pytest

from tests.adapters.torch.test_trial import Job


@pytest.mark.parametrize(("limit", "told"), [(-1, False), (328, False), (327, True)])
def test_a_limit_below_the_state_is_told_after_the_first_update(
    limit: int, told: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """26 weights, two moments of each, and the count of steps of each of four parameters: 4 bytes each."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, -1))
    job = Job(tmp_path).wrap()
    job.step()
    with caplog.at_level(logging.WARNING):
        job.step()
    warned = [record.getMessage() for record in caplog.records if "RLIMIT_FSIZE" in record.getMessage()]
    assert bool(warned) is told and all("larger than 327 bytes" in text and "Raise" in text for text in warned), warned
