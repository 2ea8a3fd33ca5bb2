"""A ``save_dir`` is tried at the start; one that cannot be used is refused with path, reason and remedy."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.store.storage import as_nobody
from ttp.core.restore_choice import LOOK_AGAIN_S
from ttp.errors import ConfigError, StorageAwayError
from ttp.store.disk import Disk
from ttp.store.history import FILE, was_launched
from ttp.store.writable import absolute, check_places, check_writable

METHODS = ["make_directory", "write", "sync_directory", "rename"]


def test_it_is_made_and_left_empty(tmp_path: Path) -> None:
    assert check_writable(str(tmp_path / "a" / "b")) == tmp_path / "a" / "b"
    assert list((tmp_path / "a" / "b").iterdir()) == []


def test_everything_that_a_commit_needs_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, str]] = []

    def spy(name: str) -> Callable[..., object]:
        real = getattr(Disk, name)

        def method(self: Disk, path: Path, *rest: object) -> object:
            seen.append((name, "probe" if path.parent == tmp_path else path.name))
            return real(self, path, *rest)

        return method

    for name in METHODS:
        monkeypatch.setattr(Disk, name, spy(name))
    check_writable(str(tmp_path))
    assert seen == [
        ("make_directory", "probe"),
        ("write", "piece"),
        ("sync_directory", "probe"),
        ("rename", "probe"),
        ("sync_directory", tmp_path.name),
    ]


def test_the_path_is_absolute_and_home_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert check_writable("checkpoints") == check_writable("~/checkpoints") == tmp_path / "checkpoints"


def test_two_dots_lead_where_the_kernel_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "far" / "deep").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "far" / "deep")
    monkeypatch.chdir(tmp_path)
    assert absolute("link/../saved").resolve() == tmp_path / "far" / "saved"
    assert absolute("far/../saved") == tmp_path / "saved", "equal on all ranks, however they are told"


def test_what_a_killed_rank_was_trying_is_removed(tmp_path: Path) -> None:
    old, new = tmp_path / ".ttp-probe-speed-old", tmp_path / ".ttp-probe-speed-new"
    folder = tmp_path / ".ttp-probe-folder"
    folder.mkdir()
    for path in (old, new, folder / "piece"):
        path.touch()
    for path in (old, folder):
        os.utime(path, (1e9, 1e9))
    check_writable(str(tmp_path))
    assert list(tmp_path.iterdir()) == [new]


def test_a_rank_whose_clock_is_ahead_leaves_the_trials_of_other_hosts_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would be refused (64), with a directory that has vanished under their hands."""
    (tmp_path / ".ttp-probe-of-another-host").mkdir()
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 7200)
    check_writable(str(tmp_path))
    assert (tmp_path / ".ttp-probe-of-another-host").is_dir()


def test_all_ranks_may_ask_at_once(tmp_path: Path) -> None:
    problems: list[BaseException] = []

    def ask() -> None:
        try:
            check_writable(str(tmp_path / "checkpoints"))
        except ConfigError as problem:
            problems.append(problem)

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    assert list((tmp_path / "checkpoints").iterdir()) == []


URLS = ["s3://bucket/x", "gs://b", "file:///data/x", "hdfs://a/b", "simplecache::s3://b/x", str(Path("gs://b/x"))]


@pytest.mark.parametrize(
    ("place", "text"),
    [
        *((url, "is a URL; ttp writes to mounted file systems only: mount") for url in URLS),
        # a name with letters beyond ASCII in the locale C, or in another encoding anywhere
        (os.fsdecode(b"k\xe4se"), r"k\\udce4se' is not UTF-8 .*set LC_ALL=C\.UTF-8"),
        ("a\0b", r"save_dir 'a\\x00b' contains a null character; choose another save_dir"),
        ("", "save_dir is empty; give"),
        ("  ", "save_dir is empty; give"),
        ("below/" * 650, r"\(ENAMETOOLONG\); the path is too long; choose another save_dir"),
    ],
)
def test_what_can_be_no_directory_is_refused_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, text: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=text):
        check_writable(place)
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match=r"\((EEXIST|ENOTDIR)\); a file.* is in the way; choose another save_dir"):
            check_writable(str(path))


def test_records_of_incidents_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints could be, but `ttp verdict` would say "lost" of a job that was saved."""
    records = tmp_path / "incidents"
    records.mkdir()
    check_writable(str(tmp_path))
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != records)  # root may write anywhere
    with pytest.raises(ConfigError, match=r"verdict.*incidents is no directory that this user may write to"):
        check_writable(str(tmp_path))
    monkeypatch.undo()
    records.rmdir()
    records.touch()
    with pytest.raises(ConfigError, match="incidents is no directory"):
        check_writable(str(tmp_path))


def test_no_permission(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with (
        as_nobody(),
        pytest.raises(ConfigError, match=r"Permission denied \(EACCES\); give this user write permission"),
    ):
        check_writable(str(tmp_path / "checkpoints"))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("code", "text"),
    [
        (errno.EACCES, "Permission denied (EACCES); give this user write permission"),
        (errno.EROFS, "Read-only file system (EROFS); the file system is mounted read-only"),
        (errno.ENOSPC, "No space left on device (ENOSPC); the disk is full"),
        (errno.EIO, "Input/output error (EIO); check the file system"),
    ],
)
def test_each_refusal_says_path_reason_and_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, code: int, text: str
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(Disk, method, refuse)
    with pytest.raises(ConfigError) as caught:
        check_writable(str(tmp_path))
    assert f"save_dir {tmp_path} cannot hold checkpoints: {text}" in str(caught.value)
    assert list(tmp_path.iterdir()) == [], "the probe is gone"


# ------------------------------------------------------------------------------------------------------------- fallback


@pytest.fixture
def file(tmp_path: Path) -> str:
    """Return a file, which cannot be a directory."""
    (tmp_path / "file").touch()
    return str(tmp_path / "file")


def test_without_a_fallback_the_save_dir_must_work(tmp_path: Path, file: str) -> None:
    assert check_places(str(tmp_path / "ck"), None) == tmp_path / "ck"
    with pytest.raises(ConfigError, match="choose another save_dir"):
        check_places(file, None, restart=True)


@pytest.mark.parametrize("fallback", [False, True])
@pytest.mark.parametrize(("code", "looks"), [(errno.ENOTCONN, 3), (errno.ENOSPC, 3), (errno.EACCES, 0)])
def test_a_restart_waits_for_storage_that_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, looks: int, fallback: bool
) -> None:
    """A mount that has lost its server for some seconds must not end the job with 64."""
    pauses: list[float] = []
    this = threading.current_thread()

    def wait(seconds: float) -> None:
        if threading.current_thread() is this:  # others may sleep meanwhile
            pauses.append(seconds)

    def refuse(_self: Disk, path: Path) -> None:
        if len(pauses) < 3:
            raise OSError(code, os.strerror(code), str(path))
        path.mkdir()

    monkeypatch.setattr(Disk, "make_directory", refuse)
    monkeypatch.setattr(time, "sleep", wait)
    places = str(tmp_path / "ck"), str(tmp_path / "other") if fallback else None
    with pytest.raises(ConfigError, match="cannot hold checkpoints"):
        check_places(*places)
    assert not pauses, "at the first start it is a mistake"
    if looks:
        assert check_places(*places, restart=True) == tmp_path / "ck"
    else:
        with pytest.raises(ConfigError, match="give this user write permission"):
            check_places(*places, restart=True)
    assert pauses == [*LOOK_AGAIN_S[:looks]]


@pytest.mark.parametrize(("code", "kind"), [(errno.ENOTCONN, StorageAwayError), (errno.ENOSPC, ConfigError)])
def test_storage_that_stays_away_is_no_wrong_configuration_at_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, kind: type[Exception]
) -> None:
    """Another host may still see it; a full disk waits for the operator."""

    def refuse(_self: Disk, path: Path) -> None:
        raise OSError(code, os.strerror(code), str(path))

    monkeypatch.setattr(Disk, "make_directory", refuse)
    monkeypatch.setattr("ttp.store.writable.LOOK_AGAIN_S", (0.0,))
    with pytest.raises(kind, match="cannot hold checkpoints"):
        check_places(str(tmp_path / "ck"), None, restart=True)
    with pytest.raises(ConfigError, match="cannot hold checkpoints"):
        check_places(str(tmp_path / "ck"), None)


def test_what_counts_as_a_restart_of_a_job_that_was_started_anew(tmp_path: Path, file: str) -> None:
    """A requeued job has no launch before it in its environment."""
    assert not was_launched(tmp_path) and not was_launched(tmp_path / "new") and not was_launched(Path(file))
    (tmp_path / "incidents").mkdir()
    (tmp_path / "incidents" / FILE).touch()
    assert was_launched(tmp_path)
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    assert was_launched(tmp_path / "loop"), "storage that does not answer may hold a launch"
    assert was_launched(Path("a\0b")), "the check of the name comes later, and says what to do"


def test_a_fallback_that_cannot_be_used_is_said_at_the_first_start(
    tmp_path: Path, file: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ConfigError, match=rf"TTP_FALLBACK_DIR {file} .*choose another TTP_FALLBACK_DIR"):
        check_places(str(tmp_path / "ck"), file)
    assert check_places(str(tmp_path / "ck"), file, restart=True) == tmp_path / "ck"
    assert "Checkpoints can only go to the save_dir" in caplog.text


@pytest.mark.parametrize("restart", [False, True])
def test_a_broken_save_dir_is_what_the_fallback_is_for(
    tmp_path: Path, file: str, restart: bool, caplog: pytest.LogCaptureFixture
) -> None:
    assert check_places(file, str(tmp_path / "other"), restart=restart) == tmp_path / "file"
    assert f"save_dir {file} cannot hold checkpoints" in caplog.text
    assert "Checkpoints can only go to the TTP_FALLBACK_DIR now" in caplog.text


def test_two_broken_ones_are_both_said(file: str) -> None:
    with pytest.raises(ConfigError, match=rf"save_dir {file} .*; TTP_FALLBACK_DIR {file}/b "):
        check_places(file, f"{file}/b", restart=True)


def test_a_fallback_on_the_same_storage_is_hardly_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigError, match="TTP_FALLBACK_DIR is the save_dir itself"):
        check_places(str(tmp_path / "ck"), str(tmp_path / "ck"))
    check_places(str(tmp_path / "ck"), str(tmp_path / "other"))
    assert "when it is full, both are" in caplog.text


def test_a_new_save_dir_is_there_after_a_power_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    monkeypatch.setattr("ttp.store.durable.sync_directory", lambda path: synced.append(Path(path)))
    check_writable(str(tmp_path / "a" / "b"))
    assert {tmp_path, tmp_path / "a"} <= set(synced)


def test_a_link_to_nothing_is_named(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nowhere" / "at" / "all")
    with pytest.raises(ConfigError, match="a link to nothing, is in the way"):
        check_writable(str(tmp_path / "link" / "checkpoints"))
