"""``ttp verdict`` on save_dirs that are made up, damaged, or of another job."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Controller, Ttp
from tests.store.storage import fill, small_disk
from tests.waiting import until
from ttp.launch import other_jobs
from ttp.launch.run_dir import note_port
from ttp.launch.token_file import write_token
from ttp.store.history import FILE, WORD, leave_word, line_of, read_launches, read_word

Facts = dict[str, Any]


def begins(run_id: str = "job", at_s: float = 100.0, **facts: Any) -> str:
    return line_of("incarnation", at_s, {"run_id": run_id, "incarnation": 1, **facts})


SAVED = line_of("committed", 110.0, {"version": 7}) + line_of("released", 111.0, {"exit_code": 75, "text": "saved"})
NOTHING_NEW = line_of("released", 111.0, {"exit_code": 75, "text": "is on disk already", "progress": False})
PREEMPTED = line_of(
    "released", 111.0, {"exit_code": 75, "text": "nothing to lose", "progress": False, "preempted": True}
)
LOST = line_of("released", 111.0, {"exit_code": 70, "text": "no copy is whole"})
DONE = line_of("finished", 120.0, {"version": 9})
WRONG = line_of("wrong", 109.0, {"text": "rank 3 exited with code 64"})

STORIES: dict[str, tuple[str, str, int]] = {
    "trained": (begins() + DONE, "trained", 0),
    "interrupted": (begins() + line_of("finished", 120.0, {"exit_code": 70, "text": "Ctrl-C"}), "lost", 70),
    "saved": (begins() + SAVED, "saved", 75),
    "lost": (begins() + LOST, "lost", 70),
    "saved, but for a rank that reached only another controller": (begins() + SAVED + LOST, "saved", 75),
    "wrong, then saved": (begins() + WRONG + SAVED, "wrong", 64),
    "saved, then wrong": (begins() + SAVED + WRONG, "wrong", 64),
    "saved, then trained": (begins() + SAVED + begins() + DONE, "trained", 0),
    "trained, then cut off": (begins() + DONE + begins(), "lost", 70),
    "twice in vain": (2 * (begins() + NOTHING_NEW), "saved", 75),
    "three times in vain": (3 * (begins() + NOTHING_NEW), "lost", 70),
    "three times preempted": (3 * (begins() + PREEMPTED), "saved", 75),
    "twice in vain, with a preemption in between": (
        begins() + NOTHING_NEW + begins() + PREEMPTED + begins() + NOTHING_NEW,
        "saved",
        75,
    ),
    "three times in vain, with a preemption in between": (
        begins() + NOTHING_NEW + begins() + PREEMPTED + 2 * (begins() + NOTHING_NEW),
        "lost",
        70,
    ),
    "twice cut off, then in vain": (2 * begins() + begins() + NOTHING_NEW, "lost", 70),
    "a new version in between": (begins() + NOTHING_NEW + begins() + SAVED + 2 * (begins() + NOTHING_NEW), "saved", 75),
    "half a line": (begins() + SAVED[:-20], "lost", 70),
    "half a line before whole ones": (begins() + LOST[:-9] + begins() + SAVED, "saved", 75),
    "garbage": ("\0\xff{[\n" + begins() + 'null\n{"kind": 3}\n"x"\n' + SAVED + "[" * 500, "saved", 75),
    "facts that are none": (
        begins() + '{"kind": "released", "exit_code": "75", "unix_s": NaN}\n{"kind": "released", "exit_code": true}\n',
        "lost",
        70,
    ),
    "a code that is none of ours": (begins() + line_of("released", 111.0, {"exit_code": 1, "text": ""}), "lost", 70),
    "nothing": ("", "lost", 70),
}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "incidents").mkdir()
    return tmp_path


@pytest.fixture
def running(place: Path, start: Callable[..., Controller]) -> Callable[..., Controller]:
    """Return a function that starts a job which saves to ``place``, and waits until its launch is recorded."""

    def run(save_dir: Path = place, **settings: str) -> Controller:
        controller = start(**settings)
        controller.save_dir = str(save_dir)
        controller.form(2, version=7)
        history = save_dir / "incidents" / FILE
        until(lambda: history.exists() and "formed" in history.read_text())
        return controller

    return run


@pytest.mark.parametrize("name", STORIES)
def test_one_word_and_its_exit_code(name: str, place: Path, ttp: Ttp) -> None:
    story, word, wanted = STORIES[name]
    (place / "incidents" / FILE).write_text(story, errors="surrogateescape")
    code, out, err = ttp("verdict", place)
    assert (out, code) == (f"{word}\n", wanted)
    assert err.strip(), "why is said too"


@pytest.mark.parametrize(("presence", "word"), [("refused", "running"), ("controller", "lost"), ("nobody", "lost")])
def test_a_job_that_cannot_be_asked_is_not_called_lost(
    presence: str, word: str, place: Path, ttp: Ttp, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch script would give up a job that trains, because its own environment lacks the token."""
    (place / "incidents" / FILE).write_text(begins(controller="far.invalid:5"))
    monkeypatch.setattr(other_jobs, "probe", lambda address, port, token: presence)
    found = ttp("verdict", place)
    assert found.out == f"{word}\n"
    assert ("listens at far.invalid:5" in found.err and "Set TTP_TOKEN_FILE" in found.err) == (word == "running")


def test_a_job_that_runs_has_no_verdict_yet(
    place: Path, ttp: Ttp, running: Callable[..., Controller], monkeypatch: pytest.MonkeyPatch
) -> None:
    controller, history = running(), place / "incidents" / FILE
    monkeypatch.setenv("TTP_PORT", str(controller.port))
    found = ttp("verdict", place)
    assert (found.code, found.out) == (1, "running\n") and "2 of 2 ranks live, the newest version is 7" in found.err
    facts = ttp("verdict", place, "--json").json
    assert (facts["word"], facts["launches"], facts["fruitless"]) == ("running", 1, 0)
    other = place / "copy" / "incidents"
    other.mkdir(parents=True)
    (other / FILE).write_text(history.read_text())
    assert ttp("verdict", other.parent).out == "lost\n", "a job that saves elsewhere is another one"
    controller.close()
    found = ttp("verdict", place)
    assert (found.code, found.out) == (70, "lost\n") and "its controller does not answer here" in found.err


def test_a_job_whose_run_directory_does_not_tell_its_port_is_found_by_its_history(
    place: Path, tmp_path: Path, ttp: Ttp, running: Callable[..., Controller], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as a job with TTP_RUN_DIR and without TTP_PORT, or from another host."""
    controller = running(token="of the job")
    monkeypatch.setenv("TTP_RUN_DIR", str(tmp_path / "elsewhere"))
    monkeypatch.setenv("TTP_TOKEN", "of the job")
    found = ttp("verdict", place)
    assert (found.code, found.out) == (1, "running\n") and "2 of 2 ranks live" in found.err
    (place / "incidents" / FILE).unlink()
    assert ttp("verdict", place).code != 1
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    note_port(tmp_path / "elsewhere", controller.port)
    assert ttp("verdict", place).code == 1, "the run directory tells it, as that of `ttp run` does"


def test_a_job_whose_save_dir_was_moved_or_unmounted_under_it_runs_still(
    place: Path, ttp: Ttp, running: Callable[..., Controller], monkeypatch: pytest.MonkeyPatch
) -> None:
    save_dir, moved = place / "checkpoints", place / "moved"
    save_dir.mkdir()
    controller = running(save_dir, TTP_SAVE_DIR=str(save_dir))
    monkeypatch.setenv("TTP_PORT", str(controller.port))
    (launch,) = read_launches(save_dir)
    for began_s in (100.0, launch.began_unix_s + 1):
        cut_off = begins(launch.run_id, began_s, controller=f"127.0.0.1:{controller.port}")
        (place / "incidents" / FILE).write_text(cut_off)
        assert ttp("verdict", place).out == "lost\n", "another job: all are called none that have no rendezvous id"
    save_dir.rename(moved)
    for given in (moved, save_dir):
        found = ttp("verdict", given)
        assert (found.code, found.out) == (1, "running\n") and f"It saves to {save_dir}, where the record" in found.err
    assert ttp("verdict", save_dir, "--run-id", "another").code == 64
    assert ttp("verdict", place / "never").code == 64, "as a mistyped path"
    save_dir.mkdir()  # as the next save does, or below the mount point
    for given in (moved, save_dir):
        assert ttp("verdict", given).out == "running\n"
    controller.close()
    assert (ttp("verdict", moved).code, ttp("verdict", save_dir).code) == (70, 64)


def test_a_job_is_asked_with_the_secret_that_it_was_started_with(
    place: Path, tmp_path: Path, ttp: Ttp, running: Callable[..., Controller], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file was replaced since, for the next job; the secret of this one is in the run directory."""
    controller = running(token="the secret of the running job")
    (tmp_path / "run").mkdir(mode=0o700)
    write_token(tmp_path / "run", "the secret of the running job")
    for name, value in {"PORT": controller.port, "RUN_DIR": tmp_path / "run", "TOKEN": "the next one"}.items():
        monkeypatch.setenv(f"TTP_{name}", str(value))
    assert ttp("verdict", place).out == "running\n"
    monkeypatch.setenv("TTP_TOKEN", controller.token)
    (tmp_path / "run" / "token").chmod(0o644)  # refused, and of no use here
    assert ttp("verdict", place).out == "running\n"


def test_of_two_directories_the_one_that_knows_more_is_believed(
    place: Path, tmp_path: Path, ttp: Ttp, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``save_dir`` was full: it has the beginning or an older launch, and the fallback directory has the end."""
    fallback = tmp_path / "fallback" / "incidents"
    fallback.mkdir(parents=True)
    monkeypatch.setenv("TTP_FALLBACK_DIR", str(fallback.parent))
    for known in (begins(), begins(at_s=50.0) + SAVED, ""):
        (place / "incidents" / FILE).write_text(known)
        (fallback / FILE).write_text(begins() + DONE)
        assert ttp("verdict", place).out == "trained\n"
    (place / "incidents" / FILE).write_text(begins(at_s=300.0) + LOST)
    assert ttp("verdict", place).out == "lost\n", "the newest launch had no fallback directory"
    (place / "incidents" / FILE).unlink()
    (place / "incidents" / FILE).mkdir()
    assert ttp("verdict", place).out == "trained\n", "that of the save_dir cannot be read"
    assert ttp("verdict", place / "unmounted").out == "trained\n"


def test_a_disk_that_is_full_is_named(ttp: Ttp) -> None:
    with small_disk() as disk:
        (disk / "incidents").mkdir()
        (disk / "incidents" / FILE).write_text(begins() + SAVED)
        assert "is full" not in ttp("verdict", disk).err
        fill(disk)
        assert "a start is refused (64)" in ttp("verdict", disk).err.replace("\n", " ")
        found = ttp("verdict", disk, "--run-id", "another", "--launcher-code", 64)
        said = found.err.replace("\n", " ")
        assert found.code == 64 and f"The file system of {disk} is full: what could not be recorded" in said


def test_only_launches_of_the_job_that_is_meant(place: Path, ttp: Ttp) -> None:
    (place / "incidents" / FILE).write_text(begins("one") + DONE + begins("two") + SAVED)
    assert ttp("verdict", place, "--run-id", "one")[:2] == (0, "trained\n")
    assert ttp("verdict", place, "--run-id", "two")[:2] == (75, "saved\n")
    code, out, err = ttp("verdict", place, "--run-id", "three")
    assert (code, out) == (70, "lost\n") and "no launch of this job" in err


def test_an_old_word_is_not_that_of_a_launch_that_left_none(place: Path, ttp: Ttp) -> None:
    (place / "incidents" / FILE).write_text(begins(at_s=100.0) + SAVED)
    assert ttp("verdict", place, "--since", 99)[:2] == (75, "saved\n")
    assert ttp("verdict", place, "--since", 101)[:2] == (70, "lost\n")


def incident(place: Path, name: str, *events: Facts) -> None:
    lines = [json.dumps({"unix_s": 200.0 + n, "monotonic_s": float(n), **event}) for n, event in enumerate(events)]
    (place / "incidents" / f"{name}.jsonl").write_text("\n".join(lines) + '\n{"kind": "rel')


OPENED: Facts = {"kind": "opened", "run_id": "job"}


@pytest.mark.parametrize(
    ("events", "code"),
    [
        ([{"kind": "committed", "version": 3}, {"kind": "released", "exit_code": 75, "text": ""}], 75),
        ([{"kind": "committed", "version": 3}], 75),
        ([{"kind": "released", "exit_code": 70, "text": ""}], 70),
        ([], 70),
    ],
)
def test_an_incident_speaks_for_a_launch_whose_end_was_not_written(
    place: Path, ttp: Ttp, events: list[Facts], code: int
) -> None:
    """Also if an older ttp has written incidents only."""
    incident(place, "20261120-094512-1-3fa9", OPENED, *events)
    incident(place, "20261120-094513-2-3fa9", OPENED, {"kind": "committed"}, {"kind": "thawed", "reason": "a snapshot"})
    assert ttp("verdict", place)[0] == code
    (place / "incidents" / FILE).write_text(begins(at_s=150.0))
    assert ttp("verdict", place, "--run-id", "job")[0] == code
    (place / "incidents" / FILE).write_text(begins(at_s=300.0))
    assert ttp("verdict", place)[0] == 70, "a newer launch is not excused by an old incident"


def word_of_a_rank(place: Path, at_s: float, run_id: str = "job") -> None:
    facts = {"kind": "wrong", "run_id": run_id, "unix_s": at_s, "text": "rank 3 left with 64: no model"}
    (place / "incidents" / WORD).write_text(json.dumps(facts))


LEFT_WITH_64: dict[str, tuple[str, float, int]] = {
    "nobody else came": ("", 50.0, 64),
    "after the end of an older launch": (begins() + SAVED, 112.0, 64),
    "in a launch that is cut off": (begins() + DONE + begins(at_s=130.0), 131.0, 64),
    "a moment before the others of its launch came": (begins(at_s=130.0), 129.0, 64),
    "long before a launch that is cut off": (begins(at_s=9000.0), 129.0, 70),
    "before a launch that was saved": (begins(at_s=130.0) + SAVED.replace("111.0", "140.0"), 129.0, 75),
    "of a stray, while the job went on and trained": (begins() + DONE, 115.0, 0),
}


@pytest.mark.parametrize("name", LEFT_WITH_64)
def test_a_rank_that_left_with_64_before_any_had_joined(name: str, place: Path, ttp: Ttp) -> None:
    story, at_s, wanted = LEFT_WITH_64[name]
    if story:
        (place / "incidents" / FILE).write_text(story)
    word_of_a_rank(place, at_s)
    code, _, err = ttp("verdict", place, "--run-id", "job")
    assert (code, "no model" in err) == (wanted, wanted == 64)


@pytest.mark.parametrize(("before", "later", "wanted"), [
    (begins() + SAVED, begins(at_s=20.0) + DONE, 0),
    (begins(), begins(at_s=20.0) + SAVED, 75),
    (begins(at_s=9e9) + SAVED.replace("111.0", "9e9"), "", 64),
], ids=["trained since", "saved since", "nothing since"])  # fmt: skip
def test_a_clock_that_is_set_back_does_not_change_who_spoke_last(
    before: str, later: str, wanted: int, place: Path, ttp: Ttp
) -> None:
    log = place / "incidents" / FILE
    log.write_text(before)
    leave_word(place, "job", "rank 3 left with 64: no model")
    log.write_text(before + later)
    assert ttp("verdict", place, "--run-id", "job")[0] == wanted


def test_the_word_of_a_rank_of_another_job_or_time(place: Path, ttp: Ttp) -> None:
    word_of_a_rank(place, 50.0, run_id="other")
    assert ttp("verdict", place, "--run-id", "job")[0] == 70
    assert ttp("verdict", place, "--run-id", "other", "--since", 51)[0] == 70
    assert ttp("verdict", place, "--run-id", "other", "--since", 49)[0] == 64
    incident(place, "20261120-094512-1-3fa9", OPENED, {"kind": "released", "exit_code": 75, "text": ""})
    assert ttp("verdict", place)[0] == 75, "a later incident says more"


@pytest.mark.parametrize("content", ["", "null", "[" * 500, '{"unix_s": "x"}', '{"unix_s": NaN}', "\udcff{"])
def test_a_word_that_cannot_be_read_is_none(content: str, place: Path, ttp: Ttp) -> None:
    (place / "incidents" / FILE).write_text(begins() + SAVED)
    (place / "incidents" / WORD).write_text(content, errors="surrogateescape")
    assert ttp("verdict", place)[0] == 75


@pytest.mark.parametrize("kind", ["missing", "file", "foreign"])
def test_a_wrong_directory_is_a_clear_error(kind: str, tmp_path: Path, ttp: Ttp) -> None:
    place = tmp_path / "there"
    if kind == "file":
        place.write_text("x")
    if kind == "foreign":
        place.mkdir()
        (place / "holiday.jpg").write_text("x")
    code, out, err = ttp("verdict", place)
    assert (code, out) == (64, "")
    assert "give the save_dir" in err and len(err.splitlines()) == 1


def test_the_directory_of_incidents_stands_for_its_save_dir(place: Path, ttp: Ttp, monkeypatch: Any) -> None:
    (place / "incidents" / FILE).write_text(begins() + SAVED)
    assert ttp("verdict", place / "incidents")[:2] == (75, "saved\n")
    monkeypatch.chdir(place / "incidents")
    assert ttp("verdict", ".")[:2] == (75, "saved\n")


def make_loop(path: Path) -> None:
    path.symlink_to(path)


@pytest.mark.parametrize("make", [os.mkdir, make_loop, os.mkfifo])
def test_a_history_that_cannot_be_read_is_not_that_of_a_job_that_runs(
    make: Callable[[Path], None], place: Path, ttp: Ttp
) -> None:
    make(place / "incidents" / FILE)
    code, out, err = ttp("verdict", place)
    assert (code, out) == (70, "lost\n") and "cannot read" in err
    facts = ttp("verdict", place, "--json").json
    assert (facts["word"], facts["launches"], facts["fruitless"]) == ("lost", 0, 0)


@pytest.mark.parametrize(("name", "value"), [("TTP_TOKEN_FILE", "/nope"), ("TTP_PROT", "1")])
def test_a_wrong_setting_is_not_the_verdict_on_a_job(
    name: str, value: str, place: Path, ttp: Ttp, monkeypatch: pytest.MonkeyPatch
) -> None:
    (place / "incidents" / FILE).write_text(begins())
    monkeypatch.setenv(name, value)
    found = ttp("verdict", place)
    assert found.out == "lost\n" and name in found.err


def test_a_rank_leaves_its_word_beside_a_history_that_cannot_be_read(place: Path) -> None:
    (place / "incidents" / FILE).mkdir()
    leave_word(place, "job", "no model")
    found = read_word(place)
    assert found is not None and (found.run_id, found.text) == ("job", "no model")


def test_json(place: Path, ttp: Ttp) -> None:
    (place / "incidents" / FILE).write_text(begins() + SAVED + begins() + NOTHING_NEW)
    said = ttp("verdict", place, "--json")
    found = said.json
    assert (said.code, found["word"], found["exit_code"], found["launches"], found["fruitless"]) == (
        75,
        "saved",
        75,
        2,
        1,
    )
    assert found["run_id"] == "job"
    assert ttp("verdict", place, "--run-id", "other", "--json").json["run_id"] == "other"


@pytest.mark.parametrize(("left", "code"), [(143, 75), (64, 64), (1, 70), (75, 70)])
def test_the_launchers_code_is_the_last_word_where_no_rank_had_joined(
    left: int, code: int, place: Path, ttp: Ttp
) -> None:
    """A job that is preempted twice before its ranks have joined continues at the third start."""
    (place / "incidents" / FILE).write_text(begins() + SAVED)
    ask = ("verdict", place, "--run-id", "job", "--launcher-code", left)
    assert ttp(*ask, "--since", 101)[0] == code
    assert ttp(*ask, "--since", 99)[0] == 75, "this launch has left a word"
    nowhere = ttp("verdict", place / "none", "--launcher-code", left)
    assert nowhere[:2] == ((75, "saved\n") if left == 143 else (64, "")), "in its first start there is no directory yet"
