"""The files by which ranks ask their launcher for time to save."""

from __future__ import annotations

import errno
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from tests.store.storage import fill, small_disk
from ttp.errors import ConfigError
from ttp.launch.leases import FRESH_S, Leases, worker_of, write_whole
from ttp.launch.proc_files import start_of
from ttp.launch.run_dir import prepare_run_dir
from ttp.launch.token_file import forget_token, read_token, write_token
from ttp.launch.worker_stops import _ignores
from ttp.processor.liveness.stacks import take


@pytest.fixture
def leases(tmp_path: Path) -> Leases:
    return Leases(tmp_path / "run")


def test_nothing_there_means_nobody(leases: Leases) -> None:
    assert leases.armed() == set()
    assert leases.deadlines() == {}
    leases.sweep()
    leases.disarm(1)
    leases.revoke(1)


def test_arm_and_grant_are_seen_by_others(leases: Leases, tmp_path: Path) -> None:
    leases.arm(10)
    leases.grant(10, 1234.5678901234567)
    other = Leases(tmp_path / "run")
    assert other.armed() == {10}
    assert other.deadlines() == {10: 1234.5678901234567}


def test_two_processes_may_write_the_same_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """All ranks of a host note there where the checkpoint in memory is."""
    path, write_text = tmp_path / "run" / "held", Path.write_text
    theirs = (
        f"from pathlib import Path; from ttp.launch.leases import write_whole; write_whole(Path({str(path)!r}), 'x')"
    )

    def meanwhile(draft: Path, text: str) -> int:
        written = write_text(draft, text)
        subprocess.run([sys.executable, "-c", theirs], check=True)
        return written

    monkeypatch.setattr(Path, "write_text", meanwhile)
    write_whole(path, "x")
    assert (path.read_text(), caplog.text) == ("x", "")


def test_the_end_of_a_program_is_seen_until_its_number_is_used_again(leases: Leases, tmp_path: Path) -> None:
    leases.arm(10)
    leases.disarm(10)
    assert not leases.has_ended(10)
    leases.end(10)
    assert Leases(tmp_path / "run").has_ended(10) and not leases.has_ended(11)
    leases.arm(10)
    assert not leases.has_ended(10)
    leases.end(2**22 + 1)  # no such process can be
    leases.sweep()
    assert not leases.has_ended(2**22 + 1)


def test_a_later_grant_replaces_and_a_revoke_removes(leases: Leases) -> None:
    leases.arm(10)
    leases.grant(10, 1.0)
    leases.grant(10, 2.0)
    assert leases.deadlines() == {10: 2.0}
    leases.revoke(10)
    assert leases.deadlines() == {}
    assert leases.armed() == {10}


def test_disarm_takes_the_lease_along(leases: Leases) -> None:
    leases.arm(10)
    leases.grant(10, 1.0)
    leases.disarm(10)
    assert (leases.armed(), leases.deadlines()) == (set(), {})


def test_a_rank_whose_shell_has_left_belongs_to_the_worker_of_its_session() -> None:
    script = "(sleep 100 & echo $!); exec sleep 100"  # the parent of the first sleep ends at once
    with subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE, start_new_session=True) as worker:
        try:
            assert worker.stdout is not None
            rank = int(worker.stdout.readline())
            assert worker_of(rank, {worker.pid}) == worker.pid
            assert worker_of(rank, {1 << 22}) == rank
        finally:
            os.killpg(worker.pid, signal.SIGKILL)


def test_sweep_removes_the_dead_only(leases: Leases) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    for pid in (dead.pid, os.getpid()):
        leases.arm(pid)
        leases.grant(pid, 5.0)
    leases.sweep()
    assert leases.armed() == {os.getpid()}
    assert leases.deadlines() == {os.getpid(): 5.0}


def test_files_of_another_users_process_stay(leases: Leases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leases.arm(10)
    monkeypatch.setattr(os, "kill", Mock(side_effect=PermissionError))
    leases.sweep()
    assert (tmp_path / "run" / "armed" / "10").exists()


def test_files_are_touched_once_an_hour(leases: Leases, monkeypatch: pytest.MonkeyPatch) -> None:
    leases.arm(10)
    monkeypatch.setattr(os, "utime", touch := Mock())
    leases.keep()
    assert not touch.called
    leases._touched_s -= FRESH_S
    leases.keep()
    touched = touch.call_count
    leases.keep()
    assert touch.call_count == touched > 0


@pytest.mark.parametrize("text", ["", "soon", "nan", "inf", "1.5.3", "\x00"])
def test_a_garbled_lease_is_none(text: str, leases: Leases, tmp_path: Path) -> None:
    leases.grant(10, 1.0)
    (tmp_path / "run/leases/10").write_text(text)
    assert leases.deadlines() == {}


def test_a_lease_that_is_read_half_written_is_none(leases: Leases, tmp_path: Path) -> None:
    """On a full disk a lease is written over the room for it, and launchers read at any moment."""
    path = tmp_path / "run/leases/10"
    leases.arm(10)
    room = path.read_text()
    leases.grant(10, 1234.5)
    lease = path.read_text()
    assert len(room) == len(lease)
    for written in range(1, len(lease)):
        path.write_text(lease[:written] + room[written:])
        assert leases.deadlines() == {}
        path.write_text(room[:written] + lease[written:])
        assert leases.deadlines() == {}


def test_foreign_files_are_ignored(leases: Leases, tmp_path: Path) -> None:
    leases.arm(10)
    (tmp_path / "run/armed/.11.draft").touch()
    (tmp_path / "run/armed/readme").touch()
    (tmp_path / "run/armed/²").touch()
    assert leases.armed() == {10}


def test_a_run_dir_that_cannot_be_written_stops_nobody(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "run").write_text("a file where the directory should be")
    Leases(tmp_path / "run").arm(10)
    Leases(tmp_path / "run").grant(10, 1.0)
    assert "may not learn that this rank saves" in caplog.text


def test_directories_are_private(leases: Leases, tmp_path: Path) -> None:
    leases.arm(10)
    assert stat.S_IMODE((tmp_path / "run").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "run/armed").stat().st_mode) == 0o700


def test_token_is_private_and_comes_back(tmp_path: Path) -> None:
    run_dir = prepare_run_dir(tmp_path / "a" / "b")
    assert read_token(run_dir) is None
    write_token(run_dir, "first")
    write_token(run_dir, "sesame")
    assert read_token(run_dir) == "sesame"
    assert stat.S_IMODE((run_dir / "token").stat().st_mode) == 0o600


@pytest.mark.parametrize(("mode", "run_dir", "text"), [(0o770, "", "chmod 700"), (0o777, "run", "all users may write")])
def test_a_run_dir_that_others_may_write_to_or_replace_is_refused(
    mode: int, run_dir: str, text: str, tmp_path: Path
) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(mode)
    with pytest.raises(ConfigError, match=text):
        prepare_run_dir(tmp_path / "open" / run_dir)


def test_a_run_dir_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(ConfigError, match="belongs to uid"):
        prepare_run_dir(tmp_path / "run")


def test_a_run_dir_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="TTP_RUN_DIR"):
        prepare_run_dir(tmp_path / "file" / "run")


# --------------------------------- a process whose name is no text: the kernel has cut it in the middle of a letter

ROOT = Path(__file__).parents[2]


def script(folder: Path, does: str) -> Path:
    """Return a script with 15 bytes of its name in ``/proc``, the last of which is the first half of a letter."""
    path = folder / "fourteen-bytesé.sh"
    path.write_text(f"#!/bin/sh\n{does}\n")
    path.chmod(0o700)
    return path


def test_a_program_below_it_can_import_ttp(tmp_path: Path) -> None:
    path = script(tmp_path, f'"{sys.executable}" -c "import ttp"; exit $?')
    env = {**os.environ, "TTP_PORT": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([path], env=env, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_it_is_seen_like_any_other(tmp_path: Path) -> None:
    with subprocess.Popen([script(tmp_path, "read line")], stdin=subprocess.PIPE) as process:
        assert worker_of(process.pid, {os.getpid()}) == os.getpid()
        assert not _ignores(process.pid, signal.SIGTERM)
        assert start_of(process.pid) > 0
        assert "no handler that dumps stacks" in take(process.pid, tmp_path, 1.0)


def test_a_token_on_a_disk_that_has_become_read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job has ended, and an error would take the place of its exit code."""

    def refused(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    write_token(prepare_run_dir(tmp_path / "run"), "sesame")
    with monkeypatch.context() as broken:
        broken.setattr(Path, "unlink", refused)
        forget_token(tmp_path / "run", "sesame")
    assert read_token(tmp_path / "run") == "sesame"


def test_a_rank_asks_for_time_on_a_disk_that_is_full(caplog: pytest.LogCaptureFixture) -> None:
    """Core dumps of the failure may have filled it. Else the launcher would end a rank in a save of half a minute."""
    with small_disk("16k") as disk:
        leases, launchers = Leases(disk / "run"), Leases(disk / "run")
        leases.arm(10)
        fill(disk)
        assert launchers.deadlines() == {}
        leases.grant(10, 1234.5678901234567)
        assert launchers.deadlines() == {10: 1234.5678901234567}
        leases.revoke(10)
        assert (launchers.armed(), launchers.deadlines(), caplog.text) == ({10}, {}, "")
