"""The job under test reports where it stands to the driver."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the jobs of chaos train with it")

from ttp.chaos import job
from ttp.chaos.vocabulary import START_PHASES
from ttp.config import Config
from ttp.processor import continuing


class Groups:
    def renew(self, launch: int) -> None:
        """See the ``Groups`` of torch."""


def test_a_rank_that_goes_on_reports_its_stages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    groups: Any = Groups()
    survivor = continuing.Continuing(Config(run_dir=str(tmp_path)), groups, None)
    monkeypatch.setattr(continuing, "_continuing", survivor)
    met: list[str] = []
    monkeypatch.setattr(job.Here, "at", lambda _self, phase: met.append(phase))
    job.meet_where_it_goes_on()
    groups.renew(1)
    survivor.clock.start(1)
    survivor.update_begins()
    survivor.update_begins()  # of the next update: only the first one is a stage of the start
    assert met == ["regrouping", "updating"] and set(met) < set(START_PHASES)
