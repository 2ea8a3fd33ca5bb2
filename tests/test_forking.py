"""How tests fork processes, and how the workers of a run of all tests share what they have imported."""

from __future__ import annotations

import sys
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest

from tests import forking, workers


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


@pytest.mark.filterwarnings("ignore")
def test_a_file_that_warns_when_it_is_imported_is_left_to_the_workers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """They would not import it again, and their collection would not find the warning, which is an error there."""
    folder = tmp_path / "imported_once"
    folder.mkdir()
    (folder / "test_warns.py").write_text("import warnings\nwarnings.warn('deprecated', DeprecationWarning)\n")
    (folder / "test_fine.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(workers, "HERE", folder)
    workers.Imports().pytest_cmdline_main()
    imported = [sys.modules.pop(f"imported_once.{name}", None) for name in ("test_fine", "test_warns")]
    assert imported[0] and not imported[1]
