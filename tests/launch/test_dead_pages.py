"""The pages of dead workers that the launcher hands over when no rank is left on their host."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processor.page_records import record_of
from ttp.core.copy_messages import Mirror
from ttp.launch import dead_pages
from ttp.launch.dead_pages import DeadPages
from ttp.launch.proc_files import start_of
from ttp.processor.local_state import page_file
from ttp.processor.local_state.pages import PageWriter

INCARNATION = 3


@pytest.fixture
def in_memory(tmp_path: Path) -> Path:
    """Return the page directory of a job in shared memory."""
    path = tmp_path / f"ttp-{os.getuid()}-0123456789ab"
    path.mkdir(mode=0o700)
    return path


@pytest.fixture(params=["in memory", "in the run directory"])
def written(request: pytest.FixtureRequest, in_memory: Path, tmp_path: Path) -> Iterator[dict[int, PageWriter]]:
    """Return writers whose pages, of ranks 4 and 5, hold three versions, the last of them provisional."""
    where = in_memory if request.param == "in memory" else tmp_path / "run" / "pages"
    writers = {rank: PageWriter(where, rank, incarnation=INCARNATION) for rank in (4, 5)}
    for rank, writer in writers.items():
        for version in (7, 8, 9):
            assert writer.write(version, version < 9, [b"%d at %d" % (rank, version)])
    yield writers
    for writer in writers.values():
        writer.close()


def left(tmp_path: Path, **pids: int) -> DeadPages:
    return DeadPages(tmp_path / "run", {int(name[1:]): pid for name, pid in pids.items()}, tmp_path)


def said(pages: list[Mirror]) -> list[tuple[int, int, bool, bytes]]:
    assert {page.incarnation for page in pages} <= {INCARNATION}
    return [(page.rank, page.version, page.final, page.data) for page in pages]


def test_the_last_one_to_die_leaves_the_pages_of_all(written: dict[int, PageWriter], tmp_path: Path) -> None:
    """Two versions of each rank are sent, the older one first, and only once."""
    pages = left(tmp_path, r4=os.getpid(), r5=os.getpid())
    assert pages.after(5, os.getpid()) == [], "rank 4 lives and will see to it"
    assert said(pages.after(4, os.getpid())) == [
        (4, 8, True, b"4 at 8"),
        (4, 9, False, b"4 at 9"),
        (5, 8, True, b"5 at 8"),
        (5, 9, False, b"5 at 9"),
    ]
    assert pages.after(4, os.getpid()) == pages.after(5, os.getpid()) == []


def test_pages_of_another_process_are_not_believed(written: dict[int, PageWriter], tmp_path: Path) -> None:
    pages = left(tmp_path, r4=os.getpid() + 1, r5=os.getpid())
    assert pages.after(4, os.getpid() + 1) == []
    assert {page.rank for page in pages.after(5, os.getpid())} == {5}


def test_the_end_of_who_had_the_seat_before_says_nothing_of_who_has_it(
    written: dict[int, PageWriter], tmp_path: Path
) -> None:
    pages = left(tmp_path, r4=os.getpid(), r5=os.getpid())
    assert pages.after(4, os.getpid() + 1) == pages.after(5, os.getpid()) == []
    assert pages.after(4, os.getpid())


def test_what_was_being_written_is_left_out(written: dict[int, PageWriter], tmp_path: Path) -> None:
    """The version before it is sent instead."""
    with written[4].path.open("r+b") as file:
        file.seek(record_of(written[4], 9))
        file.write(page_file.SEQUENCE.pack(3))
    assert [page.version for page in left(tmp_path, r4=os.getpid()).after(4, os.getpid())] == [7, 8]


def test_a_page_that_is_too_large_stays(
    written: dict[int, PageWriter], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(dead_pages, "PAGE_BYTES_MAX", 5)
    assert left(tmp_path, r4=os.getpid()).after(4, os.getpid()) == []
    assert "larger than 5 bytes" in caplog.text


@pytest.mark.parametrize("what", ["nothing", "rubbish", "a link", "a directory"])
def test_whatever_lies_there_nobody_is_hurt(in_memory: Path, tmp_path: Path, what: str) -> None:
    path = in_memory / page_file.page_name(4)
    match what:
        case "rubbish":
            path.write_bytes(b"\7" * 100)
        case "a link":
            path.symlink_to("/dev/zero")
        case "a directory":
            path.mkdir()
    assert left(tmp_path, r4=os.getpid()).after(4, os.getpid()) == []


def test_the_page_of_an_equal_pid_in_another_container_is_not_taken(
    written: dict[int, PageWriter], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Containers may share memory without sharing pids: the same image starts its ranks with equal ones."""
    monkeypatch.setattr(dead_pages, "start_of", lambda pid: start_of(pid) + 1)
    assert left(tmp_path, r4=os.getpid()).after(4, os.getpid()) == []
