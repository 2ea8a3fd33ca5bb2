"""Ranks that were moved to a host that stands by."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ttp.config import Config
from ttp.launch import moved_ranks


def test_they_run_on_while_a_certificate_is_renewed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their launcher cannot offer its host then: the files of the new certificate do not fit each other yet."""
    for name in ("CERT", "KEY", "CA"):
        monkeypatch.setenv(f"TTP_TLS_{name}", str(tmp_path / name))
    monkeypatch.setattr(moved_ranks, "ANSWER_S", 0.0)
    host: Any = SimpleNamespace(wait_for_a_death=time.sleep)
    moved = moved_ranks.MovedRanks(SimpleNamespace(), host)
    job = Config(port=1)
    worker = subprocess.Popen(["sleep", "1"])
    moved._look_after({0: worker}, lambda: moved._offer(job, "127.0.0.1"))
    assert worker.wait() == 0
