"""The files that an exiting rank leaves."""

from __future__ import annotations

import io
import json
import logging
import os
import sys
from pathlib import Path

import pytest

from ttp.config import Config
from ttp.launch.log_format import configure_logging
from ttp.processor.last_words import asked_for, complain, leave_word, log_error, write_error_file
from ttp.store.history import read_word


def test_the_report_of_an_error_is_there_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may end the process at any moment, but readers never see half a file."""
    path, before = tmp_path / "0" / "error.json", tmp_path / "before"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    write_error_file(ValueError("first"))
    os.link(path, before)
    write_error_file(ValueError("second"))
    told = [json.loads(file.read_text())["message"]["message"] for file in (before, path)]
    assert told == ["ValueError: first", "ValueError: second"]
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(("named", "setting"), [("ck", ""), ("other", "ck")])
def test_the_word_is_left_in_the_directory_that_was_asked_for(
    named: str, setting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TTP_PORT", "1")
    monkeypatch.setenv("TTP_SAVE_DIR", setting)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    asked_for(named)
    monkeypatch.chdir(tmp_path / "elsewhere")
    leave_word("it")
    assert (tmp_path / "ck" / "incidents" / "wrong.json").exists() and not list((tmp_path / "elsewhere").iterdir())


@pytest.mark.parametrize("why", ["no model", "rank 3 exits with 64: no model"])
def test_the_word_names_its_rank_once(why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``ttp verdict`` said: rank 3 exited with 64: rank 3 exits with 64: no model."""
    monkeypatch.setenv("TTP_PORT", "1")
    monkeypatch.setenv("RANK", "3")
    asked_for(str(tmp_path))
    leave_word(why)
    word = read_word(tmp_path)
    assert word is not None and word.text == "rank 3 exited with 64: no model"


@pytest.mark.parametrize("where", ["nowhere", "stderr", "stderr of the root", "file", "stderr, but no errors"])
@pytest.mark.parametrize(("level", "propagate"), [(0, True), (0, False), (logging.CRITICAL, True)])
def test_an_error_that_ends_the_process_is_shown_once(
    where: str,
    level: int,
    propagate: bool,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    handler = logging.NullHandler() if where == "file" else logging.StreamHandler(sys.stderr)
    if where == "stderr, but no errors":
        handler.setLevel(logging.CRITICAL)
    place = {"nowhere": "another", "stderr of the root": ""}.get(where, "ttp")
    for name in ("ttp", ""):
        monkeypatch.setattr(logging.getLogger(name), "handlers", [handler] if name == place else [])
    monkeypatch.setattr(logging.getLogger("ttp"), "propagate", propagate)
    caplog.set_level(level, "ttp")
    complain("TTP_KEEP='x' is not valid")
    assert capsys.readouterr().err.count("TTP_KEEP='x' is not valid") == 1


def test_a_program_that_has_closed_its_stderr_is_reported_like_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ttp", ""):
        monkeypatch.setattr(logging.getLogger(name), "handlers", [])
    stderr = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stderr)
    configure_logging(Config(port=1))
    logging.getLogger("ttp").error("before")
    said = stderr.getvalue()
    stderr.close()
    assert "ValueError: x" in log_error(0, ValueError("x"))
    complain("y")
    assert "before" in said


@pytest.mark.parametrize(("rank", "shown"), [("3", 3), ("", "?")])
def test_the_rank_of_a_json_line_is_a_number(rank: str, shown: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Collectors compare it with the ranks of incidents, which are numbers."""
    for name in ("ttp", ""):
        monkeypatch.setattr(logging.getLogger(name), "handlers", [])
    monkeypatch.setattr(sys, "stderr", stderr := io.StringIO())
    monkeypatch.setenv("RANK", rank)
    configure_logging(Config(port=1, log_format="json"))
    logging.getLogger("ttp").error("x")
    assert json.loads(stderr.getvalue())["rank"] == shown
