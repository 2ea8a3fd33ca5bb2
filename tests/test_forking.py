"""How tests fork processes: the workers of a run of all tests share one process that has imported torch."""

from __future__ import annotations

from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest

from tests import forking


def test_who_is_told_of_a_process_to_fork_from_starts_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each start of one would take six seconds of a processor."""
    this: Any = forkserver._forkserver
    for name in ("_forkserver_address", "_forkserver_alive_fd"):
        monkeypatch.setattr(this, name, None)
    monkeypatch.setattr(this, "ensure_running", lambda: pytest.fail("it starts one"))  # to be put back at the end
    monkeypatch.setattr(forkserver, "ensure_running", this.ensure_running)
    monkeypatch.setenv(forking.SERVER, str(tmp_path / "there is none"))
    with pytest.raises(FileNotFoundError):
        forking.fork(print, ())
