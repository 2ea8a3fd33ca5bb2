"""An incident is written down whatever the storage does, as the storage may be the cause of the incident."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from tests.disks.bad_disk import BadDisk, Rule, why_not
from tests.store.storage import fill, small_disk
from tests.waiting import until
from ttp.cli.incident_reader import read_incident
from ttp.controller import journal as module
from ttp.controller.journal import Journal, RecordedEvent
from ttp.launch.run_dir import allow_journal
from ttp.store.history import FILE, Launch, fruitless, line_of, read_launches

NAME = Path("incidents", "one.jsonl")


class Teller:
    """Writes one incident to a journal, event after event."""

    def __init__(self, folder: Path) -> None:
        self.run_dir, self.save_dir = folder / "run", folder / "checkpoints"
        self.journal = Journal(self.run_dir, [str(folder / "other")])
        self.kinds: list[str] = []

    def tell(self, kind: str, **facts: Any) -> None:
        recorded = RecordedEvent(len(self.kinds) + 1, 1.8e9, 50.0, kind, "one", json.dumps(facts))
        self.kinds.append(kind)
        self.journal._told |= {str(self.save_dir)}  # which tests change
        self.journal.write(str(self.save_dir), recorded)

    def finish(self, timeout_s: float = 60) -> None:
        self.journal.close(timeout_s)


@pytest.fixture
def teller(tmp_path: Path) -> Iterator[Teller]:
    made = Teller(tmp_path)
    yield made
    made.finish()


def begin_launch(journal: Journal, save_dir: Path, *, run_id: str = "job", resumed: bool = False) -> None:
    """Record that a launch begins, or, if ``resumed``, that another controller has begun to lead it."""
    facts = json.dumps({"run_id": run_id, "incarnation": 1, "resumed": resumed})
    recorded = RecordedEvent(1, 1.8e9, 50.0, "incarnation", "", facts)
    journal.launch_begins(str(save_dir), recorded, lambda *_: None)


def kinds(place: Path) -> list[str]:
    """Return the kinds of the lines in a directory; all lines must be readable."""
    log = read_incident(place / NAME)
    assert log.unreadable == 0
    return [line.kind for line in log.lines]


def test_a_story_is_in_save_dir_and_nowhere_else(teller: Teller) -> None:
    for kind in ("opened", "plan", "closed"):
        teller.tell(kind)
    teller.finish()
    assert kinds(teller.save_dir) == teller.kinds
    assert not teller.run_dir.exists()


def test_what_save_dir_refuses_is_in_run_dir_from_the_beginning(teller: Teller) -> None:
    teller.save_dir.write_text("a file in the way")
    teller.tell("opened")
    teller.tell("plan")
    teller.tell("released")
    teller.finish()
    assert kinds(teller.run_dir) == teller.kinds


def test_a_story_follows_its_checkpoint_to_the_fallback(teller: Teller, tmp_path: Path) -> None:
    teller.tell("opened")
    teller.tell("save_failed", text="OSError: [errno 28] No space left on device")
    teller.tell("fallback", directory=str(tmp_path / "other"))
    teller.tell("committed", version=12)
    teller.finish()
    assert kinds(tmp_path / "other") == kinds(teller.save_dir) == teller.kinds


def test_lines_are_made_durable_with_their_name(teller: Teller, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(Path(f"/proc/self/fd/{fd}").readlink()))
    teller.tell("opened")
    teller.tell("committed")
    teller.finish()
    assert synced[-2:] == [teller.save_dir / NAME, teller.save_dir / "incidents"]
    assert teller.save_dir in synced, "a new directory is a name too"


@pytest.mark.parametrize("refused", [False, True])
def test_lines_wait_until_a_thread_can_be_started(
    teller: Teller, monkeypatch: pytest.MonkeyPatch, refused: bool
) -> None:
    """A host that is out of threads may be the cause of the incident."""
    if refused:
        teller.tell("opened")
        until((teller.save_dir / NAME).exists)
        shutil.rmtree(teller.save_dir)
        teller.save_dir.write_text("a file in the way")
    monkeypatch.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
    teller.tell("evidence")
    until(lambda: not refused or teller.run_dir in teller.journal._incidents["one"].places)
    monkeypatch.undo()
    teller.tell("released")
    teller.finish()
    assert kinds(teller.run_dir if refused else teller.save_dir) == teller.kinds


@pytest.fixture
def full_disk() -> Iterator[Path]:
    if reason := why_not():
        pytest.skip(reason)
    with small_disk() as place:
        yield place


def test_a_line_that_did_not_fit_is_written_when_there_is_room(
    tmp_path: Path, full_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The part of the line that was written does not spoil the next line."""
    teller = Teller(tmp_path)
    teller.save_dir = full_disk / "checkpoints"
    refused = threading.Event()
    tell_run_dir = teller.journal._refused

    def refuse(incident: str) -> None:
        tell_run_dir(incident)
        refused.set()

    monkeypatch.setattr(teller.journal, "_refused", refuse)
    teller.tell("opened", detail="x" * 3800)
    teller.tell("evidence")
    teller.journal._writers[teller.save_dir].end()
    assert teller.journal._writers[teller.save_dir].join(60)
    filler = fill(full_disk)
    teller.tell("save_failed", text="y" * 2000)
    assert refused.wait(60)
    filler.unlink()
    teller.tell("released")
    teller.finish()
    assert kinds(teller.save_dir) == kinds(teller.run_dir) == teller.kinds


@pytest.mark.parametrize("then", ["the next launch begins", "the controller ends"])
def test_an_incident_that_is_over_comes_home_when_there_is_room(tmp_path: Path, full_disk: Path, then: str) -> None:
    """No further line of it follows. It stayed in the run directory, and save_dir knew of no failure."""
    teller = Teller(tmp_path)
    teller.save_dir = full_disk / "checkpoints"
    teller.save_dir.mkdir()
    filler = fill(full_disk)
    for kind in ("opened", "released", "closed"):
        teller.tell(kind)
    until(lambda: (teller.run_dir / NAME).exists() and kinds(teller.run_dir) == teller.kinds)
    filler.unlink()
    if then == "the next launch begins":
        begin_launch(teller.journal, teller.save_dir)
        until(lambda: bool(read_launches(teller.save_dir)))
        assert kinds(teller.save_dir) == teller.kinds
    teller.finish()
    assert kinds(teller.save_dir) == teller.kinds


def test_a_full_disk_holds_no_empty_story_beside_the_one_in_run_dir(tmp_path: Path, full_disk: Path) -> None:
    teller = Teller(tmp_path)
    teller.save_dir = full_disk / "checkpoints"
    (teller.save_dir / "incidents").mkdir(parents=True)
    fill(full_disk)
    teller.tell("opened")
    teller.tell("released")
    teller.finish()
    assert kinds(teller.run_dir) == teller.kinds
    assert not list((teller.save_dir / "incidents").iterdir())


def test_a_directory_that_hangs_keeps_nobody_waiting(tmp_path: Path, teller: Teller) -> None:
    if reason := why_not():
        pytest.skip(reason)
    with BadDisk(teller.save_dir, tmp_path / "below") as disk:
        disk.rules(Rule(("WRITE",), hang="mount"))
        teller.tell("opened")
        disk.wait_hit()
        teller.tell("evidence")
        teller.tell("released")
        teller.finish(timeout_s=1.0)
        assert kinds(teller.run_dir) == teller.kinds
        disk.thaw()


def test_memory_is_bounded(teller: Teller, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LINES_MAX", 10)
    for incident in range(3 * module.INCIDENTS_MAX):
        for _ in range(20):
            teller.journal.write("", RecordedEvent(1, 0.0, 0.0, "answer", str(incident), "{}"))
    assert len(teller.journal._incidents) == module.INCIDENTS_MAX
    assert all(len(written.lines) == 10 for written in teller.journal._incidents.values())


def test_what_has_come_meanwhile_is_one_write(teller: Teller, monkeypatch: pytest.MonkeyPatch) -> None:
    """The write is made durable at once if any of its lines has to be."""
    begun, go_on = threading.Event(), threading.Event()
    appends: list[tuple[int, bool]] = []
    append = module._append

    def slow(folder: Path, name: str, data: bytes, durable: bool) -> None:
        appends.append((data.count(b"\n"), durable))
        begun.set()
        assert go_on.wait(60)
        append(folder, name, data, durable)

    monkeypatch.setattr(module, "_append", slow)
    teller.tell("opened")
    assert begun.wait(60)
    for rank in range(1000):
        teller.tell("answer", rank=rank)
    teller.tell("committed", version=7)
    teller.tell("answer", rank=0)
    go_on.set()
    teller.finish()
    assert appends == [(1, False), (1002, True)]
    assert kinds(teller.save_dir) == teller.kinds


def test_a_directory_that_was_named_once_is_remembered_when_a_cleaner_has_removed_the_run_directory(
    tmp_path: Path,
) -> None:
    run_dir, save_dir = tmp_path / "run", tmp_path / "checkpoints"
    save_dir.mkdir()
    allow_journal(run_dir, save_dir)
    journal = Journal(run_dir)
    begin_launch(journal, save_dir, run_id="a")
    until(lambda: bool(read_launches(save_dir)))
    shutil.rmtree(run_dir)
    journal.write(str(save_dir), RecordedEvent(2, 1.8e9, 50.0, "opened", "one", "{}"))
    journal.close(60)
    assert kinds(save_dir) == ["opened"] and not run_dir.exists()


def test_a_launch_whose_first_rank_joins_from_another_host_is_written_down(tmp_path: Path) -> None:
    """The controller may write only where a process of its own host saves, which may join later."""
    save_dir = tmp_path / "checkpoints"
    save_dir.mkdir()
    journal = Journal(tmp_path / "run")
    begin_launch(journal, save_dir)
    passed = threading.Event()
    journal._writers[save_dir].read(None, lambda *_: passed.set())  # in its turn, after the line
    assert passed.wait(60)
    assert not (save_dir / "incidents").exists()
    allow_journal(tmp_path / "run", save_dir)
    journal.launch_goes_on(str(save_dir), RecordedEvent(2, 1.8e9, 50.0, "finished", "", '{"version": 7}'))
    journal.close(60)
    (launch,) = read_launches(save_dir)
    assert (launch.run_id, launch.code) == ("job", 0)


def test_launches_are_written_down_in_the_fallback_directory_too(tmp_path: Path) -> None:
    """A job whose ``save_dir`` is broken records the end of a launch where it saves."""
    places = [tmp_path / name for name in ("broken", "fallback")]
    for place in places:
        place.mkdir()
    journal = Journal(tmp_path / "run", map(str, places), str(places[1]))
    (places[0] / "incidents").write_text("in the way")
    begin_launch(journal, places[0])
    journal.launch_goes_on(str(places[0]), RecordedEvent(2, 1.8e9, 50.0, "finished", "", '{"version": 7}'))
    journal.close(60)
    (launch,) = read_launches(places[1])
    assert (launch.run_id, launch.code) == ("job", 0)


@pytest.mark.parametrize("taken_over", [False, True])
def test_a_launch_names_the_controller_that_leads_it(tmp_path: Path, taken_over: bool) -> None:
    """Another job that is started in the directory asks this controller."""
    for address in ("first:1", "second:2")[: 1 + taken_over]:
        journal = Journal(tmp_path / "run", [str(tmp_path)], address=address)
        begin_launch(journal, tmp_path, resumed=address != "first:1")
        journal.close(60)
    (launch,) = read_launches(tmp_path)
    assert (launch.run_id, launch.controller) == ("job", "second:2" if taken_over else "first:1")


def test_a_controller_that_was_replaced_does_not_tell_how_the_launch_ended(tmp_path: Path) -> None:
    """It was stopped for a while, and finds that all of its ranks are gone."""
    old, new = (Journal(tmp_path / "run", [str(tmp_path)], address=address) for address in ("first:1", "second:2"))

    def released(journal: Journal, code: int) -> int | None:
        recorded = RecordedEvent(2, 1.8e9, 50.0, "released", "one", json.dumps({"exit_code": code}))
        journal.launch_goes_on(str(tmp_path), recorded)
        journal.close(60)
        (launch,) = read_launches(tmp_path)
        return launch.code

    for journal in (old, new):
        begin_launch(journal, tmp_path, resumed=journal is new)
        journal.close(60)
    assert released(old, 70) is None
    assert released(new, 75) == 75
    assert released(old, 70) == 75


def test_a_controller_that_wakes_after_its_launch_tells_nothing_of_the_next_one(tmp_path: Path) -> None:
    """Its host was paused. Another host has taken its place, and the job has been trained to the end there."""
    lines = [
        line_of("incarnation", 1.8e9, {"run_id": "job", "incarnation": 1, "controller": "first:1"}),
        line_of("incarnation", 1.8e9, {"run_id": "job", "incarnation": 2, "controller": "second:2"}),
        line_of("finished", 1.8e9, {"run_id": "job", "incarnation": 2, "controller": "second:2"}),
    ]
    (tmp_path / "incidents").mkdir()
    (tmp_path / "incidents" / FILE).write_text("".join(lines))
    journal = Journal(tmp_path / "run", [str(tmp_path)], address="first:1")
    recorded = RecordedEvent(2, 1.8e9, 50.0, "released", "one", json.dumps({"exit_code": 75}))
    journal.launch_goes_on(str(tmp_path), recorded, ("job", 1))
    journal.close(60)
    assert [launch.code for launch in read_launches(tmp_path)] == [75, 0]


def test_the_incident_is_written_before_the_history_of_launches(
    teller: Teller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are made durable. If the controller is killed meanwhile, the incident's file is what tells the outcome."""
    both_queued = threading.Event()
    monkeypatch.setattr("ttp.controller.journal.time.sleep", lambda _seconds: both_queued.wait())
    written: list[str] = []
    monkeypatch.setattr(module, "_append", lambda _folder, name, _data, _durable: written.append(name))
    teller.save_dir.mkdir(parents=True)
    teller.tell("opened")
    teller.journal.launch_goes_on(str(teller.save_dir), RecordedEvent(2, 1.8e9, 50.0, "released", "one", "{}"))
    teller.tell("released")
    both_queued.set()
    teller.finish()
    assert written == ["one.jsonl", "launches.log"]


@pytest.mark.parametrize(
    ("launches", "count"),
    [
        ([], 0),
        ([{"code": 75}, {"code": None}, {"code": 70}], 3),
        ([{"code": 75}, {"code": 75, "progress": True}, {"code": 75}], 1),
        ([{"code": 75}, {"code": 64}, {"code": 75}], 1),
        ([{"code": 75}, {"code": 75, "preempted": True}, {"code": 75}], 2),
    ],
    ids=["none", "all", "progress", "wrong", "preempted"],
)
def test_how_many_launches_in_a_row_have_saved_nothing_new(launches: list[dict[str, Any]], count: int) -> None:
    assert fruitless([Launch("job", number, float(number), **facts) for number, facts in enumerate(launches)]) == count
