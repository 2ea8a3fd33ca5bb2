"""Incident files that are torn, mixed up or foreign: the readable parts are shown."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from tests.fuzz.files import changed_bytes, changed_json, ttp
from tests.fuzz.places import place
from tests.fuzz.profile import at_most, fuzz
from ttp.cli import incident_reader as subject
from ttp.cli.incidents import describe
from ttp.cli.timeline import rows

ID = "20261120-094512-1-3fa9"
FACTS: dict[str, dict[str, Any]] = {
    "opened": {"incarnation": 1, "term": 1, "world_size": 2, "save_dir": "/s", "snapshot": False, "recovered": False},
    "evidence": {"rank": 1, "evidence": "lost", "text": "rank 1 was lost", "detail": "x", "witness": None},
    "acknowledged": {"ranks": [0], "version": 3, "phase": "updating"},
    "answer": {"ranks": [0], "version": 4, "phase": "idle", "stuck": True, "settled": False, "after_ms": 1.5},
    "plan": {"version": 4, "savers": {"model": 0}, "how": {"model": "redo"}, "reason": "newest", "draft": "d"},
    "saved": {"rank": 0, "generation": 0, "pieces": [{"file": "f", "size": 10, "digest": "d", "shard": "model"}]},
    "replan": {"generation": 0, "lost_savers": [0]},
    "waits": {"reason": "a rank may come back"},
    "commit": {"rank": 0, "generation": 0},
    "committed": {"rank": 0, "version": 4, "path": "/s/step_4", "size": 10, "after_ms": 9.0},
    "stack": {"rank": 1, "witness": 0, "text": "File x, line 1", "of": ID},
    "witness": {"rank": 0, "subject": 1, "host": "h", "reachable": True, "text": "pong"},
    "retracted": {"rank": 1, "evidence": "lost"},
    "released": {"exit_code": 75, "text": "saved"},
    "closed": {"left_behind": [1]},
    "unheard-of": {"a": {"b": [1]}},
}
STORY: list[dict[str, Any]] = [
    {"sequence": n, "unix_s": 1e9 + n, "monotonic_s": 5.0 + n, "kind": kind, "incident": ID, **facts}
    for n, (kind, facts) in enumerate(FACTS.items())
]
TEXT = "".join(json.dumps(line) + "\n" for line in STORY).encode()


def tell(data: bytes) -> subject.IncidentLog:
    """Read the file and produce every output from it."""
    path = place("incidents/incidents") / f"{ID}.jsonl"
    path.write_bytes(data)
    log = subject.read_incident(path)
    json.dumps(describe(log), allow_nan=False)
    for line, text in rows(log):
        assert line.kind is not None and isinstance(text, str)
        json.dumps(dict(line.facts), indent=2, allow_nan=False)
    return log


def test_the_good_one_is_read_whole() -> None:
    log = tell(TEXT)
    assert (len(log.lines), log.unreadable, log.version, log.saved) == (len(STORY), 0, 4, True)


@fuzz(changed_bytes(TEXT) | st.binary(max_size=80), examples=75)
def test_changed_bytes(data: bytes) -> None:
    log = tell(data)
    assert len(log.lines) + log.unreadable <= data.count(b"\n") + 1


@fuzz(changed_json(STORY), examples=125)
def test_lines_that_say_something_else(story: Any) -> None:
    lines = story if isinstance(story, list) else [story]
    tell("".join(json.dumps(line) + "\n" for line in lines).encode())


@fuzz(changed_json(STORY), examples=12, campaign=50)
def test_nonsense_on_the_command_line(story: Any) -> None:
    lines = story if isinstance(story, list) else [story]
    path = place("told/incidents") / f"{ID}.jsonl"
    path.write_bytes("".join(json.dumps(line) + "\n" for line in lines).encode())
    for arguments in ((), ("--last",), ("--last", "--detail"), (ID, "--json"), ("--json",)):
        assert ttp("incidents", str(path.parent.parent), *arguments)[0] == 0


@pytest.mark.parametrize(
    "line",
    [
        b"\0" * 1000,
        b"[" * 100_000,
        b'{"kind": ' + b"[" * 500 + b"]" * 500 + b"}",
        b'{"kind": "x", "a": 1e999}',
        b"\xff\xfe",
        b"[1]",
        b'{"kind": 5}',
        b'"opened"',
    ],
)
def test_a_line_that_is_none_is_counted(line: bytes) -> None:
    log = tell(TEXT + line + b"\n" + TEXT)
    assert (len(log.lines), log.unreadable) == (2 * len(STORY), 1)


def test_a_gigantic_line_is_not_read_into_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "LINE_MAX", 10_000)
    path = place("incidents/incidents") / f"{ID}.jsonl"
    with path.open("wb") as file:
        file.write(TEXT)
        file.truncate(300 << 20)  # of zeros, and takes no room
        file.seek(0, 2)
        file.write(b"\n" + TEXT)
    monkeypatch.setattr(subject, "FILE_MAX", 1 << 30)
    with at_most(1):
        log = subject.read_incident(path)
    assert (len(log.lines), log.unreadable) == (2 * len(STORY), 1)
    monkeypatch.setattr(subject, "FILE_MAX", 1 << 20)
    log = subject.read_incident(path)
    assert (len(log.lines), log.unreadable) == (len(STORY), 2)


def test_whatever_lies_among_incident_files_is_passed_over(tmp_path: Path) -> None:
    folder = tmp_path / "incidents"
    folder.mkdir()
    (folder / f"{ID}.jsonl").write_bytes(TEXT)
    os.mkfifo(folder / "pipe.jsonl")
    (folder / "folder.jsonl").mkdir()
    (folder / "loop.jsonl").symlink_to("loop.jsonl")
    (folder / "zero.jsonl").symlink_to("/dev/zero")
    os.close(os.open(os.fsencode(folder) + b"/\xff\n\x1b[2J.jsonl", os.O_CREAT | os.O_WRONLY))
    code, said, _ = ttp("incidents", str(tmp_path), "--json")  # a table may be too narrow for the name
    assert code == 0 and ID in said and "pipe" not in said and "zero" not in said
    code, said, _ = ttp("incidents", str(tmp_path), "--json")
    assert len(json.loads(said)) == 2


def test_a_folder_of_incidents_that_is_something_else(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "incidents")
    assert ttp("incidents", str(tmp_path))[0] == 0
    assert ttp("incidents", str(tmp_path / "incidents"))[0] == 64
    assert ttp("incidents", str(tmp_path), "--last")[0] == 1
