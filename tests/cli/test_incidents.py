"""``ttp incidents``: incident files as tables, as JSON, and damaged or hostile ones."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import REPOSITORY, Ttp
from tests.cli.test_saved import keys_in_help
from tests.store.storage import as_nobody
from ttp.cli import incident_reader
from ttp.cli.incident_reader import incident_files, read_incident
from ttp.cli.main import main
from ttp.cli.timeline import _WORDS, ALIKE_MAX, rows, words
from ttp.controller.journal import Journal, RecordedEvent
from ttp.core.controller.evidence import EXPLAINS
from ttp.core.messages import FaultKind
from ttp.store.history import FILE, line_of
from ttp.store.plain_file import open_plain

Story = Sequence[tuple[float, str, dict[str, Any]]]

SAVED: list[tuple[float, str, dict[str, Any]]] = [
    (0.0, "opened", {"incarnation": 2, "term": 1, "world_size": 4, "snapshot": False, "recovered": False}),
    (0.1, "evidence", {"rank": 0, "evidence": "collective", "text": "rank 0 raised", "detail": "Trace\nback"}),
    (0.2, "evidence", {"rank": 3, "evidence": "lost", "text": "rank 3 was lost", "detail": "", "witness": None}),
    (0.9, "acknowledged", {"ranks": [1], "version": 11, "phase": "updating", "stuck": False, "settled": True}),
    (1.0, "answer", {"ranks": [0], "version": 12, "phase": "idle", "stuck": False, "settled": True}),
    (1.5, "answer", {"ranks": [2], "version": 12, "phase": "idle", "stuck": False, "settled": True}),
    (2.0, "answer", {"ranks": [1], "version": 12, "phase": "idle", "stuck": True, "settled": False}),
    (2.1, "plan", {"version": 12, "reason": "the newest", "savers": {"model": 0}, "how": {"model": "redo"}}),
    (9.0, "saved", {"rank": 0, "pieces": [{"file": "a", "size": 1500}, {"file": "b", "size": 500}]}),
    (9.1, "commit", {"rank": 0, "generation": 0}),
    (12.0, "committed", {"rank": 0, "version": 12, "path": "/x/step_12", "size": 2000}),
    (1012.0, "released", {"exit_code": 75, "text": "saved version 12"}),
    (1100.0, "closed", {"left_behind": []}),
]


def write(save_dir: Path, incident: str, story: Story, started_s: float = 50.0) -> Path:
    """Write an incident as the controller does: through its journal."""
    journal = Journal(save_dir / "elsewhere", [str(save_dir)])
    for sequence, (at_ms, kind, facts) in enumerate(story, start=1):
        at_s = at_ms / 1e3
        recorded = RecordedEvent(sequence, 1.8e9 + at_s, started_s + at_s, kind, incident, json.dumps(facts))
        journal.write(str(save_dir), recorded)
    journal.close(30)
    return save_dir / "incidents" / f"{incident}.jsonl"


def test_reads_what_the_journal_writes(tmp_path: Path) -> None:
    log = read_incident(write(tmp_path, "one", SAVED))
    assert [line.at_ms for line in log.lines] == pytest.approx([at_ms for at_ms, _, _ in SAVED], abs=0.01)
    assert [(line.kind, line.facts) for line in log.lines] == [(kind, facts) for _, kind, facts in SAVED]
    assert (log.id, log.cause, log.version, log.saved, log.unreadable) == ("one", "rank 3 was lost", 12, True, 0)
    assert log.checkpoint == "/x/step_12"
    assert log.saved_after_ms == pytest.approx(12, abs=0.01)
    assert log.outcome == "exit 75: saved version 12"


@pytest.mark.parametrize(("attempts", "rows_of_attempts"), [(4, 20), (5, 16), (40, 16)])
def test_many_attempts_on_a_full_disk_are_counted(attempts: int, rows_of_attempts: int, tmp_path: Path) -> None:
    refused: list[tuple[str, dict[str, Any]]] = [
        ("plan", {"version": 12, "reason": "the newest", "savers": {"model": 0}, "how": {}}),
        ("saved", {"rank": 1, "pieces": []}),
        ("save_failed", {"rank": 0, "text": "OSError: No space left on device"}),
        ("replan", {"lost_savers": [0]}),
        ("retry", {"after_s": 10, "failures": {}, "reason": "full"}),
    ]
    again = [(3.0 + i, kind, facts) for i in range(attempts) for kind, facts in refused]
    late = (again[-10][0] - 0.5, "answer", {"ranks": [3], "version": 12, "phase": "idle"})  # of one that came back
    again.insert(-10, late)
    shown = list(rows(read_incident(write(tmp_path, "one", [*SAVED[:7], *again]))))
    told = [f"{attempts - 3} attempts more, which the storage refused too"] * (attempts > 4)
    assert [text for _, text in shown if "attempts more" in text] == told
    assert len(shown) == len(list(rows(read_incident(write(tmp_path, "two", SAVED[:7]))))) + rows_of_attempts + 1
    assert [line.at_ms for line, _ in shown] == sorted(line.at_ms for line, _ in shown)


def test_a_torn_last_line(tmp_path: Path) -> None:
    path = write(tmp_path, "one", SAVED)
    data = path.read_bytes()
    for lost in range(1, 40):
        path.write_bytes(data[:-lost])
        log = read_incident(path)
        torn = int(lost > 1)  # else only the newline is missing: the line is whole
        assert (len(log.lines), log.unreadable) == (len(SAVED) - torn, torn), lost
        assert log.cause == "rank 3 was lost"


def test_half_a_character_is_replaced_and_a_whole_one_stays(tmp_path: Path) -> None:
    cause = "a \ud83d b \ud83c\udfd6 c"
    log = read_incident(write(tmp_path, "one", [(0.0, "evidence", {"rank": 1, "evidence": "lost", "text": cause})]))
    assert log.cause == "a \ufffd b \U0001f3d6 c"


def test_an_empty_file(tmp_path: Path, ttp: Ttp) -> None:
    path = write(tmp_path, "one", SAVED)
    path.write_bytes(b"")
    log = read_incident(path)
    assert (log.saved, log.version, log.opened_unix_s) == (False, None, 0.0)
    assert "no evidence" in ttp("incidents", tmp_path, "one").out


def test_a_takeover_on_another_host(tmp_path: Path) -> None:
    path = write(tmp_path, "one", SAVED[:4], started_s=5000.0)
    second: Story = [
        (40.0, "opened", {"recovered": True, "term": 2}),
        (41.5, "released", {"exit_code": 70, "text": "why"}),
    ]
    write(tmp_path, "one", second, started_s=3.0)
    log = read_incident(path)
    assert [line.at_ms for line in log.lines][-2:] == [pytest.approx(40, abs=0.01), pytest.approx(41.5, abs=0.01)]
    assert not log.saved
    assert "term 2" in words(log.lines[-2])


def test_what_was_taken_back_is_no_cause(tmp_path: Path) -> None:
    story = [*SAVED[:3], (0.3, "retracted", {"rank": 3, "evidence": "lost"})]
    assert read_incident(write(tmp_path, "one", story)).cause == "rank 0 raised"
    alone = [SAVED[2], (0.3, "retracted", {"rank": 3, "evidence": "lost"})]
    assert read_incident(write(tmp_path, "two", alone)).cause == "rank 3 was lost"


def test_the_cause_is_chosen_as_the_controller_does() -> None:
    assert set(EXPLAINS) == set(FaultKind)


def test_every_kind_that_an_incident_can_record_has_words() -> None:
    recorded = set()
    for file in [path for room in ("core", "mindio") for path in (REPOSITORY / "ttp" / room).rglob("*.py")]:
        recorded |= set(re.findall(r"record\(\s*\"(\w+)\"", file.read_text()))
    without_incident = {"formed", "incarnation", "finished", "stopped"}
    assert {"opened", "plan", "released"} <= recorded, "the search finds nothing: has record() another name now?"
    assert recorded - without_incident - {"answer", "acknowledged"} <= set(_WORDS)


def test_the_newest_first(tmp_path: Path, ttp: Ttp) -> None:
    ids = ["20261120-094512-9-ffff", "20261120-094512-10-0000", "20261121-000000-1-0000"]
    for incident in ids:
        write(tmp_path, incident, SAVED)
    assert [path.stem for path in incident_files(tmp_path)] == ids[::-1]
    assert [path.stem for path in incident_files(tmp_path / "incidents")] == ids[::-1]
    assert [row["id"] for row in ttp("incidents", tmp_path, "--json").json] == ids[::-1]
    assert ttp("incidents", tmp_path, "--last", "--json").json["id"] == ids[-1]
    assert ttp("incidents", tmp_path, "ffff", "--json").json["id"] == ids[0]
    ambiguous = ttp("incidents", tmp_path, "20261120")
    assert ambiguous.code == 64
    assert "2 incidents" in ambiguous.err
    unknown = ttp("incidents", tmp_path, "bogus")
    assert unknown.code == 64
    assert ids[0] in unknown.err


def test_one_that_cannot_be_read_does_not_hide_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = write(tmp_path, "20261120-094513-2-abcd", SAVED)
    write(tmp_path, "20261120-094512-1-abcd", SAVED)

    def opened(path: Path) -> io.FileIO:
        if path == broken:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return open_plain(path)

    monkeypatch.setattr(incident_reader, "open_plain", opened)
    assert main(["incidents", str(tmp_path), "--json"]) == 0
    out, err = capsys.readouterr()
    assert [each["id"] for each in json.loads(out)] == ["20261120-094512-1-abcd"]
    assert f"cannot read {broken}: Input/output error" in err.replace("\n", " ")


def test_like_answers_are_one_row(tmp_path: Path) -> None:
    log = read_incident(write(tmp_path, "one", SAVED))
    told = [text for line, text in rows(log) if line.kind in ("answer", "acknowledged")]
    assert told == [
        "rank 1 in the update after version 11: its gate is closed, it finishes this update first",
        "ranks 0,2 frozen at version 12, idle",
        "rank 1 frozen at version 12, idle, main thread waits in a collective (its processor can save), "
        "scheduler not stepped yet",
    ]
    assert sum(line.kind != "answer" for line, _ in rows(log)) == len(SAVED) - 3


def test_evidence_names_its_witness(tmp_path: Path) -> None:
    seen = {("exited", -1): "its launcher", ("outside", -1): "an operator or a monitor", ("exited", 2): "rank 2"}
    story = [(0.1, "evidence", {"rank": 3, "evidence": kind, "text": "x", "witness": who}) for kind, who in seen]
    told = [text for _, text in rows(read_incident(write(tmp_path, "one", story)))]
    assert told == [f"{kind}: x (told by {who})" for (kind, _), who in seen.items()]


def test_a_thousand_ranks_that_report_the_same_are_not_a_thousand_rows(tmp_path: Path) -> None:
    """The page for browsers shows some hundred rows, of which these would hide the rest."""
    broken: dict[str, Any] = {"evidence": "collective", "text": "closed by peer"}
    story = [*SAVED[:2], *((0.2, "evidence", {"rank": r, **broken}) for r in range(1, 1000)), *SAVED[2:]]
    log = read_incident(write(tmp_path, "one", story))
    told = [(line.facts["evidence"], text) for line, text in rows(log) if line.kind == "evidence"]
    assert len(told) == ALIKE_MAX + 2
    assert told[ALIKE_MAX] == ("collective", "984 more like these: ranks 16-999")
    assert told[-1] == ("lost", "lost: rank 3 was lost")
    assert len([*rows(log)]) == len([*rows(read_incident(write(tmp_path, "two", SAVED)))]) + ALIKE_MAX


def test_equal_reports_between_attempts_on_a_full_disk_are_all_counted(tmp_path: Path) -> None:
    retry: tuple[float, str, dict[str, Any]] = (1.0, "retry", {"reason": "full", "after_s": 1})
    told = [(1.0, "evidence", {"rank": r, "evidence": "collective", "text": "closed"}) for r in range(40)]
    log = read_incident(write(tmp_path, "one", [SAVED[0], *[retry] * 3, *told[:30], *[retry] * 3, *told[30:]]))
    assert [text for line, text in rows(log) if line.kind == "evidence"][-1] == "24 more like these: ranks 16-39"


def test_reports_of_attempts_that_are_not_shown_are_not_waited_for(tmp_path: Path) -> None:
    """Of six attempts the first two and the last are shown."""
    failed = [(1.0, "save_failed", {"rank": r, "text": "disk full"}) for r in range(20)]
    attempt = [*failed, (1.0, "retry", {"reason": "full", "after_s": 1})]
    log = read_incident(write(tmp_path, "one", [SAVED[0], *attempt * 6]))
    told = [text for line, text in rows(log) if line.kind == "save_failed"]
    assert len(told) == ALIKE_MAX + 1 and told[-1] == "44 more like these: ranks 0-19", told


def test_the_timeline(tmp_path: Path, ttp: Ttp) -> None:
    write(tmp_path, "one", SAVED)
    said = ttp("incidents", tmp_path, "one")
    assert said.code == 0
    for line in (
        "cause:   rank 3 was lost",
        "+0.0 ms  opened       first sign of a fault: all of 4 ranks told to freeze (incarnation 2)",
        "+1.5 ms  answer       ranks 0,2 frozen at version 12, idle",
        "+2.1 ms  plan         version 12: rank 0 writes model, after redo model. the newest",
        "+9.0 ms  saved        rank 0: a, b durable, 2.0 kB",
        "+12.0 ms  committed    version 12 exists: step_12, 2.0 kB",
        "+1012.0 ms  released     every rank exits with 75: saved version 12",
        "+1100.0 ms  closed       all have left",
    ):
        assert line in said.out, line
    assert "Trace" not in said.out
    assert "Trace\n" in ttp("incidents", tmp_path, "--last", "--detail").out


def test_an_incident_during_a_restore_tells_of_the_restore_in_words(tmp_path: Path, ttp: Ttp) -> None:
    restores: list[tuple[float, str, dict[str, Any]]] = [
        (0.1, "restore", {"version": 12, "name": "step_12", "error": ""}),
        (0.2, "restored", {"version": 12, "size": 2000}),
        (0.3, "restore", {"version": 0, "name": "", "error": ""}),
        (0.4, "restore", {"version": 0, "name": "", "error": "the ranks do not see one common checkpoint"}),
    ]
    write(tmp_path, "one", [SAVED[0], *restores])
    said = ttp("incidents", tmp_path, "one").out
    for text in (
        "all ranks are to read step_12",
        "all ranks have read version 12, 2.0 kB",
        "there is no checkpoint: training begins with step 1",
        "no restore: the ranks do not see one common checkpoint",
    ):
        assert text in said, said


def test_a_kind_of_the_future_is_shown_as_it_is(tmp_path: Path, ttp: Ttp) -> None:
    write(tmp_path, "one", [(0.0, "teleported", {"rank": 3, "to": "moon"})])
    assert '"to": "moon"' in ttp("incidents", tmp_path, "one").out


def test_missing_fields_do_no_harm(tmp_path: Path, ttp: Ttp) -> None:
    kinds = {kind for _, kind, _ in SAVED} | set(_WORDS)
    for kind in kinds:
        write(tmp_path, kind, [(0.0, kind, {})])
        assert re.search(rf"^ +\+0.0 ms  {kind}", ttp("incidents", tmp_path, kind).out, re.MULTILINE), kind
    listed = ttp("incidents", tmp_path)
    assert listed.code == 0 and all(kind in listed.out for kind in kinds)


def test_json(tmp_path: Path, ttp: Ttp) -> None:
    write(tmp_path, "one", SAVED)
    (row,) = ttp("incidents", tmp_path, "--json").json
    one = ttp("incidents", tmp_path, "one", "--json").json
    assert {*one} == {*row, "lines"}
    assert {*one, *one["lines"][0]} <= keys_in_help(ttp, "incidents")
    assert one["lines"][-1] == {
        "kind": "closed",
        "at_ms": pytest.approx(1100, abs=0.01),
        "unix_s": pytest.approx(1.8e9 + 1.1),
        "monotonic_s": pytest.approx(51.1),
        "facts": {"left_behind": []},
    }


def test_brackets_are_not_markup(tmp_path: Path, ttp: Ttp) -> None:
    write(tmp_path, "one", [(0.0, "evidence", {"rank": 0, "evidence": "exception", "text": "x[bold] is [/] wrong"})])
    assert "x[bold] is [/] wrong" in ttp("incidents", tmp_path).out
    assert "x[bold] is [/] wrong" in ttp("incidents", tmp_path, "one").out


def test_a_hostile_text_neither_steers_the_terminal_nor_forges_lines(tmp_path: Path, ttp: Ttp) -> None:
    evil = "\x1b[2J\x1b]0;mine\x07\u202e\noutcome: exit 0\n       +0.0 ms  committed    forged"
    write(tmp_path, "one", [*SAVED[:3], (0.4, "stack", {"rank": 1, "text": evil}), (0.5, "released", {"text": evil})])
    for said in (ttp("incidents", tmp_path).out, ttp("incidents", tmp_path, "one", "--detail").out):
        assert not set(said) & set("\x1b\x07\u202e")
    assert len([line for line in said.splitlines() if line.startswith("outcome:")]) == 1
    assert not [line for line in said.splitlines() if line.startswith("       +0.0 ms  committed")]


@pytest.mark.parametrize(
    "where",
    [
        " and all ranks are at the same place (step 1050, point 1): a collective or a device does not finish; {known}",
        ": ranks 0-3,8-9 at step 1050, point 1, ranks 4-7 at step 1050, point 2; {known}. Most ranks are behind, so no "
        "rank is suspected",
    ],
)
def test_what_ttp_says_of_a_hang_is_not_cut(where: str, tmp_path: Path) -> None:
    """The words that name the suspects come last; docs/operations.md explains them."""
    text = "no rank has moved for 62.5 s" + where.format(known="the longest wait of this job so far was 1.2 s")
    log = read_incident(write(tmp_path, "one", [(0.0, "evidence", {"rank": 0, "evidence": "hung", "text": text})]))
    assert words(log.lines[0]).startswith(f"hung: {text}")


def test_long_errors_are_cut_for_people_only(tmp_path: Path, ttp: Ttp) -> None:
    error = "pair.cc:537 " * 100
    write(tmp_path, "one", [(0.0, "evidence", {"rank": 0, "evidence": "collective", "text": error})])
    timeline = ttp("incidents", tmp_path, "one").out.splitlines()[-1]
    assert "collective: pair.cc:537 pair.cc:537" in timeline
    assert len(timeline) < 320
    assert ttp("incidents", tmp_path, "one", "--json").json["lines"][0]["facts"]["text"] == error


def test_none(tmp_path: Path, ttp: Ttp) -> None:
    assert ttp("incidents", tmp_path).code == 0
    assert ttp("incidents", tmp_path, "--json").json == []
    last = ttp("incidents", tmp_path, "--last")
    assert (last.code, last.out) == (1, "")


def test_only_the_directory_of_a_job_says_that_no_launch_has_failed(tmp_path: Path, ttp: Ttp) -> None:
    assert "is it the save_dir of a job?" in ttp("incidents", tmp_path).out
    (tmp_path / "incidents").mkdir()
    assert "no failure of a rank is recorded; `ttp verdict`" in ttp("incidents", tmp_path).out
    lines = line_of("incarnation", 1.0, {"run_id": "job"}) + line_of("released", 2.0, {"exit_code": 70})
    (tmp_path / "incidents" / FILE).write_text(lines)
    said = ttp("incidents", tmp_path)
    assert (said.code, said.out) == (0, "") and "the last launch is not here" in said.err
    assert ttp("incidents", tmp_path / "incidents").err == said.err
    write(tmp_path, "one", SAVED)
    assert ttp("incidents", tmp_path).err == ""
    lines += line_of("incarnation", 1.9e9, {"run_id": "job"}) + line_of("released", 2e9, {"exit_code": 70})
    (tmp_path / "incidents" / FILE).write_text(lines)
    assert "the last launch is not here" in ttp("incidents", tmp_path).err, "what is here is of an earlier launch"


def test_an_incident_that_a_full_disk_did_not_take_is_missed_after_the_restart(tmp_path: Path, ttp: Ttp) -> None:
    """Nothing was said of 186 lost versions, and no text named the directory in which their incident is."""
    known = {"run_id": "job", "controller": "n1:1234", "run_dir": "/run/job"}
    lines = line_of("incarnation", 1.7e9, known) + line_of("released", 1.75e9, {"exit_code": 70})
    lines += line_of("incarnation", 1.76e9, {"run_id": "job"})
    (tmp_path / "incidents").mkdir()
    (tmp_path / "incidents" / FILE).write_text(lines)
    said = ttp("incidents", tmp_path)
    assert said.out == "" and "the incident that ended the launch of 2023-11-14" in said.err
    assert "/run/job/incidents on n1" in said.err
    write(tmp_path, "one", SAVED)
    said = ttp("incidents", tmp_path, "--json")
    assert len(said.json) == 1 and "the launch of 2023-11-14" in said.err, "this one is of the second launch"


def test_a_file_whose_name_is_not_utf_8(tmp_path: Path, ttp: Ttp) -> None:
    write(tmp_path, "caf\udce9", SAVED)
    assert "caf\ufffd" in ttp("incidents", tmp_path).out
    assert ttp("incidents", tmp_path, "--last", "--trace", tmp_path / "trace.json").code == 0
    assert "caf\ufffd" in (tmp_path / "trace.json").read_text()


def test_what_may_not_be_listed_is_not_empty(ttp: Ttp) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as name:  # tmp_path lies in a directory of root alone
        place = Path(name)
        place.chmod(0o755)
        (place / "incidents").mkdir(mode=0)
        with as_nobody():
            found = ttp("incidents", place)
    assert found.code == 1 and "cannot list" in found.err


def test_a_false_alarm_and_a_failure(tmp_path: Path, ttp: Ttp) -> None:
    write(tmp_path, "1", [*SAVED[:3], (5.0, "thawed", {"reason": "nothing is broken after all"})])
    write(tmp_path, "2", [*SAVED[:3], (5.0, "released", {"exit_code": 70, "text": "not saved: no copy"})])
    write(tmp_path, "3", SAVED[:3])
    by_id = {row["id"]: (row["saved"], row["outcome"]) for row in ttp("incidents", tmp_path, "--json").json}
    assert by_id == {
        "1": (False, "training went on: nothing is broken after all"),
        "2": (False, "exit 70: not saved: no copy"),
        "3": (False, "not over, or its controller was lost"),
    }
    assert "no copy" in ttp("incidents", tmp_path).out
