"""Pages kept on another host: which are sent, which are kept, and which are refused."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.processor.page_records import record_of
from ttp.aside import aside
from ttp.core.copy_messages import Keep
from ttp.core.layout import Rank, Version
from ttp.processor.local_state import mirror, page_file
from ttp.processor.local_state.mirror import KeptPages, PageMirror, kept_directory, read_page_or_kept
from ttp.processor.local_state.pages import Page, PageWriter, page_name, read_page

INCARNATION = 5
RANK, OTHER = 2, 7
PATIENCE_S = 30


@pytest.fixture
def pages(tmp_path: Path) -> Path:
    path = tmp_path / "pages"
    path.mkdir(mode=0o700)
    return path


class Receiver:
    """The receiver of a mirror's pages; can be slow."""

    def __init__(self) -> None:
        self.got: list[tuple[int, bool, int, bytes]] = []
        self.open = threading.Event()
        self.open.set()
        self.arrived = threading.Condition()

    def __call__(self, version: int, final: bool, incarnation: int, data: bytes) -> None:
        with self.arrived:
            self.got.append((version, final, incarnation, data))
            self.arrived.notify_all()
        self.open.wait(PATIENCE_S)

    def wait_for(self, what: Callable[[], bool]) -> None:
        with self.arrived:
            assert self.arrived.wait_for(what, PATIENCE_S), self.got


class Host:
    """A rank that writes its page, with a mirror."""

    def __init__(self, pages: Path) -> None:
        self.receiver = Receiver()
        self.writer = PageWriter(pages, RANK, incarnation=INCARNATION)
        self.mirror = PageMirror(pages, RANK, INCARNATION, self.receiver)

    def write(self, version: int, final: bool, data: bytes) -> None:
        assert self.writer.write(version, final, [data])
        self.mirror.changed(version, final)

    def wait_for(self, *page: object) -> None:
        self.receiver.wait_for(lambda: self.receiver.got[-1:] == [page])


@pytest.fixture
def host(pages: Path) -> Iterator[Host]:
    made = Host(pages)
    yield made
    made.receiver.open.set()
    made.mirror.close()
    made.writer.close()


class TestMirror:
    def test_every_change_is_handed_over(self, host: Host) -> None:
        for version in (1, 2):
            for final in (False, True):
                data = f"{version} {final}".encode()
                host.write(version, final, data)
                host.wait_for(version, final, INCARNATION, data)
        assert len(host.receiver.got) == 4, "each of them once"
        assert not host.mirror._wake.is_set(), "it sleeps"

    def test_behind_a_slow_receiver_changes_gather(self, host: Host) -> None:
        host.receiver.open.clear()
        host.write(1, True, b"first")
        host.wait_for(1, True, INCARNATION, b"first")
        for version in range(2, 50):
            host.write(version, False, b"early")
            host.write(version, True, b"late %d" % version)
        host.receiver.open.set()
        host.wait_for(49, True, INCARNATION, b"late 49")
        assert [got[0] for got in host.receiver.got] == [1, 48, 49], "older ones nobody asks for"

    def test_what_cannot_be_handed_over_is_said_once(self, host: Host, caplog: pytest.LogCaptureFixture) -> None:
        called = threading.Semaphore(0)

        def fail(*_: object) -> None:
            called.release()
            raise OSError("the wire is cut")

        host.mirror._hand_over = fail
        for version in (1, 2, 3):
            host.write(version, True, b"x")
            assert called.acquire(timeout=PATIENCE_S)
        host.mirror._hand_over = host.receiver
        host.write(4, True, b"y")
        host.wait_for(4, True, INCARNATION, b"y")
        assert [r.levelno for r in caplog.records] == [logging.WARNING] and "the wire is cut" in caplog.text

    def test_a_page_that_is_too_large_is_not_sent(self, host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(mirror, "PAGE_BYTES_MAX", 10)
        host.write(1, True, b"x" * 11)
        host.write(2, True, b"x" * 10)
        host.wait_for(2, True, INCARNATION, b"x" * 10)
        assert len(host.receiver.got) == 1

    def test_closed_it_ends(self, host: Host) -> None:
        host.mirror.close()
        host.mirror._thread.join(PATIENCE_S)
        assert not host.mirror._thread.is_alive()


def keep(
    version: int, data: bytes = b"state", final: bool = True, of: int = OTHER, incarnation: int = INCARNATION
) -> Keep:
    return Keep(Rank(RANK), 1, Rank(of), Version(version), final, incarnation, data)


@pytest.fixture
def kept(pages: Path) -> Iterator[KeptPages]:
    made = KeptPages(pages, RANK, INCARNATION)
    yield made
    made.close()


def find(pages: Path, version: int, of: int = OTHER, incarnation: int = INCARNATION) -> Page | str:
    return read_page_or_kept(pages, of, version, incarnation)


class TestKept:
    def test_it_is_read_like_a_page_of_this_host(self, pages: Path, kept: KeptPages) -> None:
        assert kept.store(keep(3, b"early", final=False)) == ""
        assert find(pages, 3) == Page(3, False, b"early")
        assert kept.store(keep(3, b"late")) == kept.store(keep(4, b"next")) == ""
        assert find(pages, 3) == Page(3, True, b"late") and find(pages, 4) == Page(4, True, b"next")

    def test_it_outlives_the_keeper(self, pages: Path, kept: KeptPages) -> None:
        kept.store(keep(3))
        kept.close()
        assert find(pages, 3) == Page(3, True, b"state")

    def test_a_page_is_not_closed_while_it_is_written(self, kept: KeptPages, monkeypatch: pytest.MonkeyPatch) -> None:
        """Its descriptor may be that of another file by then, and the page may have to grow."""
        begun, go_on, done = threading.Event(), threading.Event(), list[str]()

        def write(*_: object) -> bool:
            begun.set()
            done.append("written" if go_on.wait(PATIENCE_S) else "late")
            return True

        monkeypatch.setattr(PageWriter, "write", write)
        monkeypatch.setattr(PageWriter, "close", lambda _: done.append("closed"))
        storing = aside("store", lambda: kept.store(keep(3)))
        assert begun.wait(PATIENCE_S)
        closing = aside("close", kept.close)
        closing.join(0.1)
        go_on.set()
        storing.join(PATIENCE_S)
        closing.join(PATIENCE_S)
        assert done == ["written", "closed"]

    def test_a_page_of_this_host_is_neither_overwritten_nor_outshone(self, pages: Path, kept: KeptPages) -> None:
        writer = PageWriter(pages, OTHER, incarnation=INCARNATION)
        writer.write(3, True, [b"its own"])
        kept.store(keep(3, b"from elsewhere"))
        kept.store(keep(4, b"from elsewhere"))
        assert read_page(pages, OTHER, 3, INCARNATION) == find(pages, 3) == Page(3, True, b"its own")
        writer.close()

    def test_another_rank_of_this_host_may_take_over(self, pages: Path, kept: KeptPages) -> None:
        second = KeptPages(pages, RANK, INCARNATION)
        for version, keeper in enumerate((kept, second, kept, second), start=3):
            assert keeper.store(keep(version, b"%d" % version)) == ""
            assert find(pages, version) == Page(version, True, b"%d" % version)
        second.close()

    @pytest.mark.parametrize(
        ("wrong", "why"),
        [
            (keep(4, incarnation=INCARNATION - 1), "of incarnation 4, not 5"),
            (keep(4, incarnation=INCARNATION + 1), "of incarnation 6, not 5"),
            (keep(4, of=RANK), "in the name of"),
            (Keep(Rank(RANK + 1), 1, Rank(OTHER), Version(4), True, INCARNATION, b"x"), "in the name of rank 3"),
            (keep(3, final=False), "version 3 is here already"),
            (keep(1), "version 3 is here already"),
            (keep(4, b"x" * (mirror.PAGE_BYTES_MAX + 1)), "more than"),
        ],
    )
    def test_what_is_refused(
        self, pages: Path, kept: KeptPages, wrong: Keep, why: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        kept.store(keep(2, b"two"))
        kept.store(keep(3, b"three"))
        assert why in kept.store(wrong) and why in caplog.text
        assert [find(pages, v) for v in (2, 3)] == [Page(2, True, b"two"), Page(3, True, b"three")]
        assert isinstance(find(pages, 4), str)

    def test_a_full_disk_is_said_and_hurts_nobody(
        self, pages: Path, kept: KeptPages, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def no_room(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("ttp.processor.local_state.pages.os.posix_fallocate", no_room)
        assert "No space left" in kept.store(keep(3))
        monkeypatch.undo()
        assert kept.store(keep(4)) == "", "there is room again"
        assert find(pages, 4) == Page(4, True, b"state")


class TestFinding:
    """A kept page is checked like any other page."""

    def test_another_version_or_incarnation(self, pages: Path, kept: KeptPages) -> None:
        kept.store(keep(3))
        assert "versions held: 3" in str(find(pages, 5))
        assert "of incarnation 5, not 6" in str(find(pages, 3, incarnation=6))

    def test_a_linked_directory(self, pages: Path, tmp_path: Path) -> None:
        elsewhere = KeptPages(tmp_path / "elsewhere", RANK, INCARNATION)
        elsewhere.store(keep(3))
        elsewhere.close()
        kept_directory(pages).symlink_to(kept_directory(tmp_path / "elsewhere"))
        assert "cannot be used" in str(find(pages, 3))
        writer = KeptPages(pages, RANK, INCARNATION)
        assert writer.store(keep(4)), "nor is it written through"

    def test_a_torn_page_of_this_host_is_made_up_for(self, pages: Path, kept: KeptPages) -> None:
        writer = PageWriter(pages, OTHER, incarnation=INCARNATION)
        writer.write(3, True, [b"its own"])
        with writer.path.open("r+b") as file:
            file.seek(record_of(writer, 3))
            file.write(page_file.SEQUENCE.pack(3))
        assert "torn" in str(find(pages, 3))
        kept.store(keep(3, b"from elsewhere"))
        assert find(pages, 3) == Page(3, True, b"from elsewhere")
        writer.close()


def test_a_body_that_says_it_is_of_another_rank(pages: Path) -> None:
    """Header and slot name different ranks, and all digests are right."""
    for rank in (OTHER, RANK):
        writer = PageWriter(pages, rank, incarnation=INCARNATION)
        writer.write(3, True, [b"state"])
        writer.close()
    path = pages / page_name(OTHER)
    body = (pages / page_name(RANK)).read_bytes()[512:]
    path.write_bytes(path.read_bytes()[:512] + body)
    assert "its rank or its lengths do not fit" in str(read_page(pages, OTHER, 3, INCARNATION))
