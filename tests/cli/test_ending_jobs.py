"""``ttp verdict`` of a job whose launch has ended, while its controller or its launcher is still there."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Controller, Ttp
from tests.store.storage import small_disk
from tests.waiting import until
from ttp.cli import verdict
from ttp.core import messages as m
from ttp.core.layout import Rank, Version
from ttp.launch import other_jobs
from ttp.launch.ring import Ring, write_ring
from ttp.launch.run_dir import allow_journal, forget_launcher, note_launcher, note_port
from ttp.store.history import FILE, Launch, leave_word, line_of, read_launches


@pytest.mark.parametrize("unwritten", ["its end", "its beginning"])
def test_the_end_of_a_job_whose_disk_is_slow_is_waited_for(
    tmp_path: Path, ttp: Ttp, start: Callable[..., Controller], monkeypatch: pytest.MonkeyPatch, unwritten: str
) -> None:
    """A batch script asks as soon as the ranks have exited: a job that has trained to its end was called lost.

    Without the beginning, the word of a rank that left with 64 before it was the last that is known of the job.
    """
    (tmp_path / "incidents").mkdir()
    leave_word(tmp_path, "job", "rank 3 left with 64: no model")
    controller, history = start(), tmp_path / "incidents" / FILE
    monkeypatch.setenv("TTP_PORT", str(controller.port))
    for rank in controller.job(save_dir=str(tmp_path)):
        rank.say(m.Goodbye(Rank(rank.number), m.GoodbyeReason.DONE, Version(7)))
    until(lambda: history.exists() and "finished" in history.read_text())
    text = history.read_text()
    history.write_text(text[: text.index('\n{"kind": "finished"')] if unwritten == "its end" else "")
    looked = []

    def read(save_dir: Path) -> list[Launch]:
        looked.append(save_dir)
        if len(looked) == 2:
            history.write_text(text)
        return read_launches(save_dir)

    monkeypatch.setattr(verdict, "read_launches", read)
    assert ttp("verdict", tmp_path, "--run-id", "job").out == "trained\n"


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize(("saves", "word"), [(True, "saved"), (False, "lost")])
def test_a_job_runs_while_its_launcher_waits_for_other_hosts_between_two_launches(
    tmp_path: Path, ttp: Ttp, start: Callable[..., Controller], monkeypatch: pytest.MonkeyPatch,
    kept: bool, saves: bool, word: str,
) -> None:  # fmt: skip
    """It waits for minutes where a host was lost; a job that is started again meanwhile is a second one."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as launcher:
        controller = start(*["--owner-pid", str(launcher.pid)] * kept, TTP_OT="2")
        monkeypatch.setenv("TTP_PORT", str(controller.port))
        controller.save_dir = str(tmp_path)
        controller.form(2, saves=saves)
        assert ttp("report-fault", "--rank", 1).code == 0
        until(lambda: (launches := read_launches(tmp_path)) and launches[-1].code is not None)
        until(lambda: controller.status().stage == "waiting", every_s=0.2)  # comes after ten seconds
        monkeypatch.setattr(verdict, "PATIENCE_S", 0.2)
        found = ttp("verdict", tmp_path)
        assert (found.out == "running\n") == kept and ("is between two launches" in found.err) == kept
        told = ttp("report-fault", "--rank", 1)
        assert told.code == 1 and ("the job is between two launches" if kept else "the job is over") in told.err
        assert ("between two launches" in ttp("status").out) == kept
        assert ttp("status", "--json").json["between_launches"] == kept
        monkeypatch.setattr(verdict, "PATIENCE_S", 60)
        launcher.kill()
    assert ttp("verdict", tmp_path).out == f"{word}\n", "a launcher that is killed, and whose controller still listens"


@pytest.mark.parametrize(("end", "asked"), [({"kind": "released", "exit_code": 75}, 1), ({"kind": "restored"}, 2)])
def test_other_jobs_of_this_host_are_asked_only_about_a_launch_without_an_end(
    tmp_path: Path, ttp: Ttp, monkeypatch: pytest.MonkeyPatch, end: dict[str, object], asked: int
) -> None:
    """There may be hundreds of their run directories, and a controller that hangs takes seconds."""
    (tmp_path / "incidents").mkdir()
    lines = ({"kind": "incarnation", "run_id": "7", "unix_s": 5, "controller": "127.0.0.1:1"}, end)
    (tmp_path / "incidents" / FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))
    found: list[object] = []
    monkeypatch.setattr(verdict, "known_ports", lambda: [2])
    monkeypatch.setattr(verdict, "_status", found.append)

    def status_of_launch(launch: Launch, _config: object) -> tuple[None, bool]:
        found.append(launch)
        return None, False

    monkeypatch.setattr(other_jobs, "status_of_launch", status_of_launch)
    monkeypatch.delenv("TTP_PORT", raising=False)
    monkeypatch.delenv("TTP_RUN_DIR", raising=False)
    assert ttp("verdict", tmp_path).out == ("lost\n" if asked == 2 else "saved\n")
    assert len(found) == asked


def test_a_launcher_that_waits_without_a_controller_has_no_verdict_yet(
    tmp_path: Path, ttp: Ttp, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first host is lost with the controller, and a standby ends seconds after its rank: it looks over."""
    monkeypatch.setattr(verdict, "PATIENCE_S", 0.0)
    monkeypatch.setenv("TTP_RUN_DIR", str(run_dir := tmp_path / "run"))
    saved = line_of("released", 111.0, {"exit_code": 75, "text": "saved"})
    launch = line_of("incarnation", 100.0, {"run_id": "job", "incarnation": 1})
    (tmp_path / "incidents").mkdir()
    (tmp_path / "incidents" / FILE).write_text(launch + saved)
    allow_journal(run_dir, tmp_path)
    note_port(run_dir, 5)
    write_ring(run_dir, Ring("job", 1, 2, "far.invalid:5", "127.0.0.1:5", ()))
    assert ttp("verdict", tmp_path).out == "saved\n" and "launcher" not in ttp("status").err
    note_launcher(run_dir)
    found = ttp("verdict", tmp_path)
    assert (found.code, found.out) == (1, "running\n") and "waits for those of other hosts" in found.err
    assert "waits for those of other hosts" in ttp("status").err
    (tmp_path / "incidents" / FILE).write_text(launch.replace("job", "other") + saved)
    assert ttp("verdict", tmp_path).out == "saved\n"
    forget_launcher(run_dir)


def test_a_disk_that_takes_no_more_files_is_named(ttp: Ttp) -> None:
    with small_disk("1m,nr_inodes=6") as disk:
        (disk / "incidents").mkdir()
        (disk / "incidents" / FILE).write_text(line_of("incarnation", 100.0, {"run_id": "job", "incarnation": 1}))
        with contextlib.suppress(OSError):
            for number in range(6):
                (disk / str(number)).touch()
        assert f"The file system of {disk} is out of inodes" in ttp("verdict", disk).err.replace("\n", " ")
