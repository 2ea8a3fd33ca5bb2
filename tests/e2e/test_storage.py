"""Storage that fails in a real job: another saver or the fallback directory takes over, or the error names the
errno.
"""

from __future__ import annotations

import errno
import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.disks.bad_disk import BadDisk, Rule
from tests.e2e.conftest import Run, solo_env
from tests.e2e.forked import Forked
from tests.e2e.harness import MakeJob, Unbroken, newest_of_survivors, watch_events
from tests.ports import free_port
from tests.waiting import until
from ttp.cli.incident_reader import incident_files, read_incident
from ttp.cli.main import main

PIECE = r"\.distcp$"
STALL = {"TTP_STALL_S": "2", "TTP_HEARTBEAT_S": "0.2"}


@pytest.fixture
def place(solo: Run, bad_disk: BadDisk) -> BadDisk:
    """Return a ``bad_disk`` whose save_dir has a whole checkpoint of version 4."""
    done = solo(bad_disk.mountpoint, 4, SOLO_SAVE="4")
    assert "\nsaved 4" in done.stdout, done.stdout + done.stderr
    return bad_disk


def version_4_is_whole(place: BadDisk) -> None:
    """Check version 4 in the directory below the mount, because the mount may hang."""
    assert main(["verify", str(place.directory)]) == 0
    assert [p.name for p in place.directory.glob("tft*")] == ["tft_saved_checkpoints-step_4"]


def story(directory: Path) -> str:
    """Return all lines of the newest incident in a directory."""
    return json.dumps([[line.kind, dict(line.facts)] for line in read_incident(incident_files(directory)[0]).lines])


# ------------------------------------------------------------------------------------------------------------ default


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_checkpoint_on_request_while_the_storage_hangs(solo: Run, place: BadDisk, tmp_path: Path) -> None:
    """The checkpoint goes to the fallback, training goes on, and the process ends while a thread hangs in a write."""
    place.rules(Rule(("WRITE",), PIECE, hang="mount"))
    env = STALL | {"TTP_FALLBACK_DIR": str(tmp_path / "other"), "SOLO_SAVE": "6"}
    done = solo(place.mountpoint, 8, **env)
    assert done.returncode == 0 and "start 4" in done.stdout and "weights" in done.stdout, done.stderr
    assert f"\nsaved 6 {tmp_path / 'other'}/tft_saved_checkpoints-step_6" in done.stdout, done.stdout
    assert "the storage took no byte for 2 s (TTP_STALL_S)" in story(tmp_path / "other")
    version_4_is_whole(place)
    place.thaw()
    place.rules()
    resumed = solo(place.mountpoint, 8, on=False, TTP_FALLBACK_DIR=str(tmp_path / "other"))
    assert "start 6" in resumed.stdout and resumed.stdout.split("weights ")[1] == done.stdout.split("weights ")[1]
    assert "start 4" in solo(place.mountpoint, 8, on=False).stdout


@contextmanager
def training(save_dir: Path, tmp_path: Path, **env: str) -> Iterator[Forked]:
    """Run ``solo.py`` with a training that does not end by itself."""
    env = solo_env(tmp_path) | {"SOLO_TELL": "1"} | env
    process = Forked("tests.e2e.solo", env, tmp_path / "training.out", (save_dir, 100_000_000))
    try:
        process.wait_for("trained")
        yield process
    finally:
        process.kill()


@pytest.mark.timeout(300)
def test_a_rank_leaves_although_its_save_hangs(place: BadDisk, tmp_path: Path) -> None:
    env = STALL | {"TTP_FALLBACK_DIR": str(tmp_path / "other")}
    with training(place.mountpoint, tmp_path, **env) as process:
        place.rules(Rule(("WRITE",), PIECE, hang="mount"))
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 75
    assert main(["verify", str(tmp_path / "other")]) == 0
    version_4_is_whole(place)


def test_a_rank_that_was_released_makes_no_more_updates(tmp_path: Path) -> None:
    """However long its process takes to end: nothing that the program does there would be in the checkpoint."""
    notes = tmp_path / "notes"
    with training(tmp_path / "ck", tmp_path, SOLO_NOTES=str(notes)) as process:
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 75
    (checkpoint,) = (tmp_path / "ck").glob("tft*")
    assert checkpoint.name.endswith(f"step_{notes.read_text()}")


def test_storage_that_refuses_for_a_moment_is_tried_again(place: BadDisk, tmp_path: Path) -> None:
    """With one rank and no fallback, the save is repeated until there is room again."""
    with training(place.mountpoint, tmp_path) as process:
        place.rules(Rule(("WRITE",), PIECE, error=errno.ENOSPC))
        process.send_signal(signal.SIGTERM)
        until(lambda: "retry" in told(place), 30)
        place.rules()
        assert process.wait(60) == 75
    assert main(["verify", str(place.directory)]) == 0
    assert len(list(place.directory.glob("tft*"))) == 2
    assert f"[errno {errno.ENOSPC}]" in told(place)


def told(place: BadDisk) -> str:
    """Return all lines of the newest incident so far; empty if there is none."""
    return story(place.directory) if incident_files(place.directory) else ""


@pytest.mark.slow
def test_a_restart_does_not_throw_away_what_was_committed(solo: Run, tmp_path: Path) -> None:
    """A lost mount looks like an empty directory, so the same controller refuses it. A new controller accepts it."""
    job = {"TTP_PORT": str(free_port()), "TTP_ABANDONED_S": "100"}
    with training(tmp_path / "ck", tmp_path, **job) as process:
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 75
    (committed,) = (tmp_path / "ck").glob("tft*")
    committed.rename(tmp_path / "removed")
    again = solo(tmp_path / "ck", 2, TORCHELASTIC_RESTART_COUNT="1", **job)
    assert again.returncode == 64 and "start" not in again.stdout
    assert f"was committed as {committed}, and the ranks find no checkpoint at all" in again.stderr
    assert "start 0" in solo(tmp_path / "ck", 2).stdout


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_another_saver_then_another_place(make_job: MakeJob, unbroken: Unbroken, bad_disk: BadDisk) -> None:
    """First one write fails; later the disk is full for all ranks, and still full when the job restarts."""
    faults = [
        {"id": "one", "rank": 1, "step": 4, "phase": "backward", "action": "kill"},
        {"id": "two", "rank": 2, "step": 9, "phase": "backward", "action": "kill"},
    ]
    fallback = bad_disk.directory.with_name("other")
    env = {"TTP_SAVE_DIR": str(bad_disk.mountpoint), "TTP_FALLBACK_DIR": str(fallback)}
    job = make_job(ranks=3, steps=12, max_restarts=2, faults=faults, env=env).start()
    bad_disk.rules(Rule(("WRITE",), PIECE, times=1, error=errno.EIO))
    events = watch_events(job)
    assert any(kind == "committed" for kind, _ in events)
    assert any(kind == "formed" for kind, _ in events)  # by then the first incident is written down
    bad_disk.rules(Rule(("WRITE",), "", error=errno.ENOSPC))
    assert job.wait(300) == 0, job.story()
    first, second = (
        read_incident(path) for path in (incident_files(bad_disk.directory)[-1], *incident_files(fallback))
    )
    (failed,) = first.of("save_failed")
    assert f"[errno {errno.EIO}] Input/output error: {bad_disk.mountpoint}" in failed.facts["text"]
    assert [line.facts["lost_savers"] for line in first.of("replan")] == [[failed.facts["rank"]]]
    assert {line.facts["rank"] for line in second.of("save_failed")} == {0, 1}
    assert all(f"[errno {errno.ENOSPC}]" in line.facts["text"] for line in second.of("save_failed"))
    assert [line.facts["directory"] for line in second.of("fallback")] == [str(fallback)]
    versions = [newest_of_survivors(job, 0, {1}), newest_of_survivors(job, 1, {2})]
    assert job.starts() == [0, *versions] == [0, first.version, second.version], job.story()
    assert Path(second.checkpoint).parent == fallback
    for directory in (bad_disk.mountpoint, fallback):
        assert job.ttp("verify", str(directory)).returncode == 0
    assert job.results() == unbroken(job)


# --------------------------------------------------------------------------------------------------- the rest, slow

# tests/store/test_faults.py has every kind of refusal.


@pytest.mark.slow
@pytest.mark.parametrize("fallback", [False, True], ids=["", "fallback"])
@pytest.mark.parametrize("gone", ["dies", "vanishes"])
def test_a_mount_that_goes_while_a_job_trains(place: BadDisk, tmp_path: Path, gone: str, fallback: bool) -> None:
    env = {"TTP_FALLBACK_DIR": str(tmp_path / "other")} if fallback else {"TTP_OT": "5"}
    with training(place.mountpoint, tmp_path, **env) as process:
        place.die() if gone == "dies" else place.vanish()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == (75 if fallback else 70)
    version_4_is_whole(place)
    code = errno.ENOTCONN if gone == "dies" else errno.ENODEV
    told = tmp_path / ("other" if fallback else "run")
    assert f"[errno {code}]" in story(told)
    if gone == "vanishes":
        assert list(place.mountpoint.iterdir()) == [], "nothing is written below the mount point"
    if fallback:
        assert main(["verify", str(told)]) == 0


@pytest.mark.slow
@pytest.mark.parametrize(("op", "name"), [("MKDIR", "draft"), ("FSYNC", PIECE), ("LINK", ""), ("RENAME", "^tft")])
def test_storage_that_hangs_at_any_point(solo: Run, place: BadDisk, tmp_path: Path, op: str, name: str) -> None:
    """After the draft directory is made, in a piece, in the commit, and after the rename."""
    place.rules(Rule((op,), name, hang="mount"))
    env = STALL | {"TTP_FALLBACK_DIR": str(tmp_path / "other"), "SOLO_SAVE": "6"}
    done = solo(place.mountpoint, 8, **env)
    assert done.returncode == 0 and f"\nsaved 6 {tmp_path / 'other'}" in done.stdout, done.stdout + done.stderr
    place.thaw()
    place.rules()
    assert "start 6" in solo(place.mountpoint, 8, on=False, TTP_FALLBACK_DIR=env["TTP_FALLBACK_DIR"]).stdout


@pytest.mark.slow
def test_storage_that_hangs_without_a_fallback(solo: Run, place: BadDisk) -> None:
    place.rules(Rule(("WRITE",), PIECE, hang="mount"))
    done = solo(place.mountpoint, 8, SOLO_SAVE="6", **STALL)
    assert done.returncode == 0 and "weights" in done.stdout, done.stderr
    assert "\nnot saved" in done.stdout and "the storage took no byte for 2 s (TTP_STALL_S)" in done.stdout
    version_4_is_whole(place)


@pytest.mark.slow
def test_a_slow_disk_is_waited_for(solo: Run, place: BadDisk, tmp_path: Path) -> None:
    """The save takes much longer than TTP_STALL_S, but no single write does."""
    place.rules(Rule(("WRITE", "FSYNC", "LINK", "CREATE"), "", delay_s=0.4))
    env = {"TTP_FALLBACK_DIR": str(tmp_path / "other"), "TTP_STALL_S": "4", "TTP_HEARTBEAT_S": "0.2", "SOLO_SAVE": "6"}
    done = solo(place.mountpoint, 8, **env)
    assert f"\nsaved 6 {place.mountpoint}" in done.stdout, done.stdout + done.stderr
    there = [str(each.relative_to(tmp_path / "other")) for each in (tmp_path / "other").rglob("*")]
    assert there == ["incidents", "incidents/launches.log"], "the history of launches, and no checkpoint"


@pytest.mark.slow
def test_one_directory_for_nobody(solo: Run, place: BadDisk, tmp_path: Path) -> None:
    """The fallback is a file. A job's first launch is refused; a later one goes on in its save_dir."""
    (tmp_path / "other").write_text("a file")
    done = solo(place.mountpoint / "first", 8, TTP_FALLBACK_DIR=str(tmp_path / "other"))
    assert done.returncode == 64 and "TTP_FALLBACK_DIR" in done.stderr
    done = solo(place.mountpoint, 8, TTP_FALLBACK_DIR=str(tmp_path / "other"))
    assert done.returncode == 0 and "start 4" in done.stdout
