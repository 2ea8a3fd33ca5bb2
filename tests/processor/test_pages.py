"""Rank-local pages: a reader gets exactly what was written, or nothing."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.processor.page_records import record_of
from ttp.processor.local_state import page_file, pages
from ttp.processor.local_state.pages import Page, PageWriter, page_name, read_page

ROOT = Path(__file__).parents[2]
RANK, INCARNATION = 2, 5


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    path = tmp_path / "pages"
    path.mkdir(mode=0o700)
    return path


@pytest.fixture
def writer(directory: Path) -> Iterator[PageWriter]:
    made = PageWriter(directory, RANK, capacity=64, incarnation=INCARNATION)
    yield made
    made.close()


def read(directory: Path, version: int) -> Page | str:
    return read_page(directory, RANK, version, INCARNATION)


def data_of(directory: Path, version: int) -> bytes:
    page = read(directory, version)
    assert isinstance(page, Page), page
    assert page.version == version
    return page.data


def test_what_was_written_is_read_back(directory: Path, writer: PageWriter) -> None:
    assert writer.write(7, True, [b"ab", memoryview(b"cde"), bytearray(b"f"), b""])
    assert read(directory, 7) == Page(7, True, b"abcdef")
    assert writer.write(8, True, [b"ab", b"c"]) and data_of(directory, 8) == b"abc"


def test_three_versions_are_held_at_once(directory: Path, writer: PageWriter) -> None:
    for version in range(1, 8):
        writer.write(version, False, [b"early %d" % version])
        writer.write(version, True, [b"late %d" % version])
    assert [data_of(directory, v) for v in (5, 6, 7)] == [b"late 5", b"late 6", b"late 7"]
    assert "versions held: 2, 3, 4, 5, 6, 7" in str(read(directory, 1))  # what is left of older ones is whole


def test_the_newest_write_of_a_version_counts(directory: Path, writer: PageWriter) -> None:
    for text in (b"one", b"two", b"three"):
        writer.write(4, False, [text])
        assert data_of(directory, 4) == text
    writer.write(4, True, [b"four"])
    assert read(directory, 4) == Page(4, True, b"four")


def test_a_torn_final_page_leaves_the_provisional_one(directory: Path, writer: PageWriter) -> None:
    writer.write(4, False, [b"before the update"])
    writer.write(4, True, [b"after the update"])
    with (directory / page_name(RANK)).open("r+b") as file:
        file.seek(record_of(writer, 4))
        file.write(page_file.SEQUENCE.pack(3))
    assert read(directory, 4) == Page(4, False, b"before the update")


def test_what_was_written_provisionally_and_holds_is_final_where_it_stands(directory: Path, writer: PageWriter) -> None:
    for version in range(1, 9):
        writer.write(version, False, [b"%d" % version])
        assert read(directory, version) == Page(version, False, b"%d" % version)
        assert writer.finish(version)
        held = range(max(1, version - 2), version + 1)
        assert [read(directory, v) for v in held] == [Page(v, True, b"%d" % v) for v in held]
    writer.write(9, False, [b"torn"])
    with (directory / page_name(RANK)).open("r+b") as file:
        file.seek(record_of(writer, 9))
        file.write(page_file.SEQUENCE.pack(3))
    assert data_of(directory, 6) == b"6", "the slot that was written was another one"
    writer.close()
    assert not writer.finish(9)


@pytest.mark.parametrize("calls", range(20))
def test_a_state_that_becomes_final_while_it_is_read_is_read(
    directory: Path, writer: PageWriter, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader that took it for torn would take the older state of that version, of the micro-batch before."""
    for micro_batch in range(2):
        writer.write(7, False, [b"micro-batch %d" % micro_batch])
    read_at, left = os.pread, iter(range(calls))

    def pread(*where: int) -> bytes:
        if next(left, None) is None:
            writer.finish(7)
        return read_at(*where)

    monkeypatch.setattr(os, "pread", pread)
    assert data_of(directory, 7) == b"micro-batch 1"


def test_it_grows_and_keeps_what_it_had(directory: Path, writer: PageWriter) -> None:
    writer.write(1, True, [b"small"])
    for version, size in ((2, 10_000), (3, 1_000_000)):
        writer.write(version, True, [bytes([version]) * size])
    assert data_of(directory, 1) == b"small"
    assert data_of(directory, 2) == b"\2" * 10_000
    assert data_of(directory, 3) == b"\3" * 1_000_000
    assert not writer.problem


def test_changing_lengths_do_not_grow_it_for_ever(directory: Path, writer: PageWriter) -> None:
    sizes = []
    for version in range(800):
        length = 1 + (version * 977) % 9000
        writer.write(version, True, [bytes(length)], [((version, 0), bytes(length * 3)), ((version, 1), b"x" * length)])
        sizes.append((directory / page_name(RANK)).stat().st_size)
    assert sizes[-1] == sizes[400]
    assert len(data_of(directory, 799)) == 5 * (1 + (799 * 977) % 9000)


class TestKeptParts:
    def test_they_follow_the_parts(self, directory: Path, writer: PageWriter) -> None:
        writer.write(1, True, [b"a", b"b"], [((0, 0), b"c" * 100), ((1, 0), b"d" * 50)])
        assert data_of(directory, 1) == b"ab" + b"c" * 100 + b"d" * 50

    def test_they_are_copied_only_when_their_stamp_changes(self, directory: Path, writer: PageWriter) -> None:
        mask = bytearray(b"m" * 100)
        writer.write(1, True, [], [("first", mask)])
        mask[:] = b"n" * 100
        writer.write(2, True, [], [("first", mask)])
        writer.write(3, True, [], [("second", mask)])
        assert [data_of(directory, v)[:1] for v in (1, 2, 3)] == [b"m", b"m", b"n"]

    def test_no_stamp_means_copied(self, directory: Path, writer: PageWriter) -> None:
        for version in (1, 2, 3):
            writer.write(version, True, [], [(None, bytes([version]) * 100)])
        assert [data_of(directory, v)[:1] for v in (1, 2, 3)] == [b"\1", b"\2", b"\3"]

    def test_older_versions_keep_theirs(self, directory: Path, writer: PageWriter) -> None:
        for version in range(1, 40):
            for final in (False, True):
                writer.write(version, final, [b"s"], [((0, version, final), bytes([version]) * 500)])
            for held in range(max(1, version - 2), version + 1):
                assert data_of(directory, held) == b"s" + bytes([held]) * 500

    def test_a_constant_part_takes_its_space_once(self, directory: Path, writer: PageWriter) -> None:
        for version in range(1, 20):
            writer.write(version, True, [b"s"], [("mask", b"m" * 1_000_000)])
        assert (directory / page_name(RANK)).stat().st_size < 2_000_000

    def test_the_same_list_again_costs_nothing(self, writer: PageWriter, monkeypatch: pytest.MonkeyPatch) -> None:
        kept = [("mask", b"m" * 100)]
        for version in range(1, 20):
            if version == 10:
                monkeypatch.setattr(pages, "_let_go", lambda _: pytest.fail("the places of kept parts are looked up"))
            assert writer.write(version, True, [b"s"], kept)

    def test_a_part_that_changes_takes_the_space_of_few_copies(self, directory: Path, writer: PageWriter) -> None:
        """The list of the last update is given again in the backward pass, and another one after the update."""
        kept = [((0,), b"m" * 1_000_000)]
        for version in range(1, 40):
            assert writer.write(version, False, [b"s"], kept)
            kept = [((version,), bytes([version]) * 1_000_000)]
            assert writer.write(version, True, [b"s"], kept)
        assert (directory / page_name(RANK)).stat().st_size < 5_000_000

    def test_they_may_come_and_go(self, directory: Path, writer: PageWriter) -> None:
        for version in range(1, 60):
            kept = [((i, version // 4), bytes([version // 4]) * (100 + i)) for i in range(version % 5)]
            writer.write(version, True, [b"s"], kept)
            assert data_of(directory, version) == b"s" + b"".join(data for _, data in kept)
        assert not writer.problem


def becomes_a_fifo(page: Path) -> None:
    """No reader may hang there."""
    page.unlink()
    os.mkfifo(page, 0o600)


class TestWhoseItIs:
    def test_another_incarnation(self, directory: Path, writer: PageWriter) -> None:
        writer.write(1, True, [b"x"])
        assert "of incarnation 5, not 6" in str(read_page(directory, RANK, 1, 6))

    def test_a_new_process_replaces_the_page_of_the_old_one(self, directory: Path, writer: PageWriter) -> None:
        writer.write(1, True, [b"old"])
        successor = PageWriter(directory, RANK, incarnation=INCARNATION + 1)
        assert "versions held: none" in str(read_page(directory, RANK, 1, INCARNATION + 1))
        writer.write(2, True, [b"still writing"])
        writer.close()
        successor.write(3, True, [b"new"])
        successor.close()
        assert read_page(directory, RANK, 3, INCARNATION + 1) == Page(3, True, b"new"), "it outlives its writer"

    def test_another_rank(self, directory: Path, writer: PageWriter) -> None:
        writer.write(1, True, [b"x"])
        (directory / page_name(RANK)).rename(directory / page_name(RANK + 1))
        assert "belongs to rank 2" in str(read_page(directory, RANK + 1, 1, INCARNATION))

    @pytest.mark.parametrize(
        ("spoil", "why"),
        [
            (lambda page: page.unlink(), "there is no page"),
            (lambda page: shutil.rmtree(page.parent), "there is no page"),
            (lambda page: page.symlink_to(page.rename(page.with_name("elsewhere"))), "cannot be used"),
            (lambda page: page.parent.symlink_to(page.parent.rename(page.parent.with_name("moved"))), "cannot be used"),
            (becomes_a_fifo, "not a plain file"),
            (lambda page: page.chmod(0o622), "others may write"),
        ],
    )
    def test_a_file_that_is_not_to_be_trusted(
        self, directory: Path, writer: PageWriter, spoil: Callable[[Path], object], why: str
    ) -> None:
        writer.write(1, True, [b"x"])
        spoil(writer.path)
        assert why in str(read(directory, 1))

    def test_a_directory_that_others_may_write_to(
        self, directory: Path, writer: PageWriter, caplog: pytest.LogCaptureFixture
    ) -> None:
        writer.write(1, True, [b"x"])
        directory.chmod(0o777)
        assert "others may write" in str(read(directory, 1))
        assert "others may write" in PageWriter(directory, RANK).problem
        assert len(caplog.records) == 1

    def test_files_of_another_user(self, directory: Path, writer: PageWriter, monkeypatch: pytest.MonkeyPatch) -> None:
        writer.write(1, True, [b"x"])
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        assert "of user" in str(read(directory, 1))

    def test_modes(self, tmp_path: Path) -> None:
        writer = PageWriter(tmp_path / "new", RANK)
        assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
        assert (tmp_path / "new" / page_name(RANK)).stat().st_mode & 0o777 == 0o600
        writer.close()


class TestFailure:
    """If a page cannot be written, writing stops with one report, and training goes on."""

    def test_no_directory_can_be_made(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        (tmp_path / "file").write_text("in the way")
        writer = PageWriter(tmp_path / "file" / "pages", RANK)
        assert not writer.write(1, True, [b"x"])
        assert not writer.write(2, True, [b"x"])
        writer.close()
        assert str(tmp_path / "file") in writer.problem
        assert [record.levelno for record in caplog.records] == [logging.WARNING]

    def test_no_room_at_the_start(
        self, directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr("ttp.processor.local_state.pages.os.posix_fallocate", _no_room)
        writer = PageWriter(directory, RANK)
        assert "No space left" in writer.problem
        assert list(directory.iterdir()) == []
        assert len(caplog.records) == 1

    def test_no_room_to_grow(
        self,
        directory: Path,
        writer: PageWriter,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        writer.write(1, True, [b"x"])
        monkeypatch.setattr("ttp.processor.local_state.pages.os.posix_fallocate", _no_room)
        assert not writer.write(2, True, [bytes(1_000_000)])
        assert not writer.write(3, True, [b"x"])
        assert "No space left" in writer.problem
        assert len(caplog.records) == 1
        assert data_of(directory, 1) == b"x", "what was there before is still true"
        assert isinstance(read(directory, 2), str)

    def test_a_part_that_is_no_bytes(self, directory: Path, writer: PageWriter) -> None:
        assert not writer.write(1, True, [object()])  # type: ignore[list-item]
        assert isinstance(read(directory, 1), str)


def _no_room(fd: int, offset: int, length: int) -> None:
    raise OSError(28, "No space left on device")


class TestGarbage:
    """Files with any content: a whole page, or arbitrary bytes."""

    WRITTEN = (
        Page(3, False, b"early" * 30 + b"K" * 300),
        Page(3, True, b"late" * 30 + b"K" * 300),
        Page(4, False, b"next" * 30 + b"L" * 300),
    )

    @pytest.fixture(scope="class")
    @staticmethod
    def image(tmp_path_factory: pytest.TempPathFactory) -> bytes:
        path = tmp_path_factory.mktemp("image") / "pages"
        writer = PageWriter(path, RANK, capacity=256, incarnation=INCARNATION)
        for page in TestGarbage.WRITTEN:
            writer.write(page.version, page.final, [page.data[:-300]], [(page.data[-1], page.data[-300:])])
        writer.close()
        return (path / page_name(RANK)).read_bytes()

    @staticmethod
    def check(directory: Path, image: bytes) -> None:
        path = directory / page_name(RANK)
        path.write_bytes(image)
        path.chmod(0o600)
        for version in (3, 4, 5):
            page = read(directory, version)
            if isinstance(page, Page):  # that a provisional one is final too is a bit that no digest covers
                assert {page, replace(page, final=False)} & {*TestGarbage.WRITTEN}

    @settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
    @given(data=st.data())
    def test_changed_bytes(self, image: bytes, directory: Path, data: st.DataObject) -> None:
        places = st.one_of(
            st.integers(0, 40),
            st.integers(page_file.record_at(0), page_file.record_at(page_file.SLOTS)),
            st.integers(page_file.HEADER_BYTES, len(image) - 1),
        )
        changed = bytearray(image)
        for at, new in data.draw(
            st.lists(st.tuples(places, st.binary(min_size=1, max_size=9)), min_size=1, max_size=4)
        ):
            changed[at : at + len(new)] = new
        self.check(directory, bytes(changed[: len(image)]))

    @settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
    @given(length=st.integers(0, 9000))
    def test_cut_short(self, image: bytes, directory: Path, length: int) -> None:
        self.check(directory, image[:length])

    def test_every_single_byte_that_was_written(self, image: bytes, directory: Path) -> None:
        """After one flipped bit in a used slot no wrong bytes are read, and other versions stay readable."""
        used = [i for i, byte in enumerate(image) if byte and i >= page_file.HEADER_BYTES]
        for at in used[:: max(1, len(used) // 250)]:
            changed = bytearray(image)
            changed[at] ^= 1 << (at % 8)
            self.check(directory, bytes(changed))
            pages = [read(directory, version) for version in (3, 4)]
            assert any(isinstance(page, Page) for page in pages), f"byte {at} cost both versions: {pages}"

    def test_a_table_that_refers_to_the_same_bytes_for_ever(self, directory: Path, writer: PageWriter) -> None:
        """A well-formed forgery may not make the reader allocate without bound."""
        writer.write(1, True, [b"x"], [((0, i), b"k" * 100) for i in range(3)])
        with (directory / page_name(RANK)).open("r+b") as file:
            _forge_references(file.fileno(), record_of(writer, 1))
        assert "refers to more bytes than there are" in str(read(directory, 1))


def _forge_references(fd: int, at: int) -> None:
    """Make every reference of the record's slot span nearly the whole file, with correct digests."""
    offset, length, _ = page_file.RECORD.unpack(os.pread(fd, page_file.RECORD.size, at + 8))
    body = bytearray(os.pread(fd, length, offset))
    span = os.fstat(fd).st_size - page_file.HEADER_BYTES
    for index in range(3):
        where = page_file.PREFIX.size + index * page_file.REFERENCE.size
        page_file.REFERENCE.pack_into(body, where, page_file.HEADER_BYTES, span, 0)
    os.pwrite(fd, body, offset)
    digest = xxhash.xxh3_64_intdigest(bytes(body))
    os.pwrite(fd, page_file.RECORD.pack(offset, length, digest), at + 8)


@pytest.mark.parametrize("seed", [1, 2])
def test_sigkill_at_any_moment_leaves_whole_pages(directory: Path, seed: int) -> None:
    """A real process is killed while it writes. All finished writes stay readable."""
    killer = Path(__file__).with_name("page_killer.py")
    done = subprocess.run(
        [sys.executable, str(killer), str(directory), str(seed), "60"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["problems"] == []
    assert len(set(summary["versions"])) > 30, "the kills came at different moments"
    assert summary["torn"] > 0, "some kills came in the middle of a write, or this test shows nothing"
