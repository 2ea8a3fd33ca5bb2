"""Second copies, and pages, in the memory of a host, and their transfer to it: real sockets, and the job's token."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from grpc import insecure_channel

from tests.damage import flip
from tests.processor.copying_rank import ME, OTHER, held, kept, never, piece
from tests.wire.certificates import Authority
from ttp.config import Config
from ttp.core.copy_messages import Keep, MirrorTo
from ttp.core.layout import Rank, Version
from ttp.errors import CheckpointError
from ttp.processor.copies.store import INDEX, Copy, CopyStore, NoRoomError
from ttp.processor.copies.transfer import Receiver, Sender, SendError
from ttp.processor.local_state.mirror import PAGE_BYTES_MAX
from ttp.processor.local_state.page_sender import PageSender
from ttp.processor.source import Cancelled
from ttp.store.piece_file import copy_piece
from ttp.wire import tls
from ttp.wire.channel import metadata
from ttp.wire.v1 import buddy_pb2 as pb
from ttp.wire.v1 import buddy_pb2_grpc as rpc


@pytest.fixture
def store(tmp_path: Path) -> CopyStore:
    return CopyStore(tmp_path / "here", 3)


# ---------------------------------------------------------------------------------------------------------------- store


def test_a_copy_is_there_when_it_is_whole(store: CopyStore) -> None:
    draft = store.begin(ME, Version(10))
    made = piece(draft, "a.bin", "shard", "s0", 10)
    assert held(store) == []
    copy = store.finish(draft, ME, Version(10), [made])
    assert held(store) == [(0, 10)]
    assert store.read(ME, Version(10)) == copy
    assert copy.pieces == (made,)
    kept(store, OTHER, 10)
    kept(store, OTHER, 20)
    store.drop(ME, Version(10))
    store.drop_others(OTHER, {20, 30})
    assert held(store) == [(1, 20)]
    assert len(list(copy.path.parent.iterdir())) == 1


def test_a_copy_that_lacks_something_is_none(store: CopyStore) -> None:
    draft = store.begin(ME, Version(10))
    made = piece(draft, "a.bin", "shard", "s0", 10)
    (draft / "a.bin").write_bytes(b"short")
    with pytest.raises(CheckpointError, match=r"incomplete: a\.bin"):
        store.finish(draft, ME, Version(10), [made])
    with pytest.raises(CheckpointError, match="cannot be read"):
        store.read(ME, Version(10))
    whole = kept(store)
    whole.path.rename(whole.path.with_name("0-20"))
    with pytest.raises(CheckpointError, match=r"the index of .* is not of rank"):
        store.read(ME, Version(20))
    (whole.path.with_name("0-20") / INDEX).write_bytes(b"\xc1 no index")
    with pytest.raises(CheckpointError, match="cannot be read"):
        store.read(ME, Version(20))


def test_copies_of_an_older_launch_go(tmp_path: Path) -> None:
    kept(CopyStore(tmp_path, 3))
    newer = CopyStore(tmp_path, 4)
    assert held(newer) == []
    assert [path.name for path in (tmp_path / "copies").iterdir()] == ["4"]


def test_copies_of_an_earlier_start_that_was_counted_alike_go(tmp_path: Path) -> None:
    kept(CopyStore(tmp_path, 3))
    assert held(CopyStore(tmp_path, 3)) != [], "another rank of this host has made it"
    assert held(CopyStore(tmp_path, 3, anew=True)) == []


def test_a_piece_is_verified_when_it_is_brought(store: CopyStore, tmp_path: Path) -> None:
    copy = kept(store)
    counted: list[int] = []
    copy_piece(copy.pieces[0], copy.path / "a.bin", tmp_path / "out", counted.append)
    assert (tmp_path / "out").read_bytes() == (copy.path / "a.bin").read_bytes()
    assert sum(counted) >= copy.pieces[0].size
    flip(copy.path / "a.bin")
    with pytest.raises(CheckpointError, match="damaged"):
        copy_piece(copy.pieces[0], copy.path / "a.bin", tmp_path / "out", counted.append)
    assert not (tmp_path / "out").exists()


def test_too_little_memory_says_what_to_change(store: CopyStore, monkeypatch: pytest.MonkeyPatch) -> None:
    stat = SimpleNamespace(f_bavail=200, f_frsize=1 << 20, f_blocks=1000)
    monkeypatch.setattr(os, "statvfs", lambda _: stat)
    store.check_room(100 << 20)
    with pytest.raises(NoRoomError, match=r"200 MiB of the 1,000 MiB .* four times the state"):
        store.check_room(101 << 20)


# ----------------------------------------------------------------------------------------------------------------- wire


@pytest.fixture
def receiver(tmp_path: Path) -> Iterator[Receiver]:
    made = Receiver(Config(bind="127.0.0.1", token="secret"), "job")
    made.store = CopyStore(tmp_path / "there", 3)
    yield made
    made.close()


@pytest.fixture
def sender(receiver: Receiver) -> Iterator[Sender]:
    made = Sender(f"127.0.0.1:{receiver.port}", "secret", "job")
    yield made
    made.close()


def send(sender: Sender, copy: Copy, version: int = 10, incarnation: int = 3, keep: tuple[int, ...] = ()) -> None:
    sender.send(copy, ME, Version(version), incarnation, keep=[Version(v) for v in keep], cancelled=never)


def test_a_copy_arrives(sender: Sender, receiver: Receiver, store: CopyStore) -> None:
    assert receiver.store is not None
    for version, keep in ((10, ()), (20, (10,)), (30, (20,))):
        send(sender, kept(store, version=version), version, keep=keep)
    assert held(receiver.store) == [(0, 20), (0, 30)], "10 was not to be kept any longer"
    here, there = store.read(ME, Version(30)), receiver.store.read(ME, Version(30))
    assert here.pieces == there.pieces
    assert all((here.path / p.file).read_bytes() == (there.path / p.file).read_bytes() for p in here.pieces)


def test_what_is_not_right_is_refused(sender: Sender, receiver: Receiver, store: CopyStore) -> None:
    copy = kept(store)
    with pytest.raises(SendError, match="another launch"):
        send(sender, copy, incarnation=2)
    with pytest.raises(SendError, match=r"the index of .* is not of rank"):
        send(sender, copy, version=20)
    stranger = Sender(sender.address, "another secret", "job")
    with pytest.raises(SendError, match="token"):
        send(stranger, copy)
    stranger.close()
    receiver.rank = ME
    with pytest.raises(SendError, match="its own copies"):
        send(sender, copy)
    receiver.rank = OTHER
    receiver.frozen = True
    with pytest.raises(SendError, match="frozen"):
        send(sender, copy)
    receiver.frozen = False
    flip(copy.path / "a.bin")
    with pytest.raises(SendError, match=r"'a.bin' does not have the size and digest in its index"):
        send(sender, copy)
    assert receiver.store is not None
    assert held(receiver.store) == []
    assert list(receiver.store.begin(ME, Version(1)).parent.iterdir()) == [receiver.store.begin(ME, Version(1))]


def test_copies_travel_encrypted_from_who_is_not_revoked(
    tmp_path: Path, store: CopyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sender with the stolen certificate has no revocation list."""
    authority = Authority(tmp_path / "authority")
    own, stolen = authority.sign(), authority.sign(file="stolen")
    for name, value in {**own, "TTP_TLS_CRL": str(authority.revoke("stolen"))}.items():
        monkeypatch.setenv(name, value)
    receiver = Receiver(Config(bind="127.0.0.1", token="secret"), "job")
    receiver.store = CopyStore(tmp_path / "there", 3)
    address = f"127.0.0.1:{receiver.port}"
    sender = Sender(address, "secret", "job")
    monkeypatch.delenv("TTP_TLS_CRL")
    for name, value in stolen.items():
        monkeypatch.setenv(name, value)
    thief = Sender(address, "secret", "job")
    try:
        assert tls.speaks_tls("127.0.0.1", receiver.port)
        with pytest.raises(SendError, match="certificate revoked"):
            send(thief, kept(store))
        assert held(receiver.store) == []
        send(sender, kept(store))
        assert held(receiver.store) == [(0, 10)]
    finally:
        thief.close()
        sender.close()
        receiver.close()


class LongCopy:
    """Stands for the lock of a receiver that is busy with one copy while others come."""

    def __init__(self) -> None:
        self.waiting, self.over = threading.Semaphore(0), threading.Event()

    def __enter__(self) -> None:
        self.waiting.release()
        self.over.wait(60)

    def __exit__(self, *_: object) -> None:
        """Let the next copy in."""


def test_a_page_does_not_wait_for_the_copies_of_a_larger_host(receiver: Receiver) -> None:
    """Each of its eight ranks has the same buddy."""
    taking: Any = LongCopy()
    receiver._one_copy = taking
    receiver.keep = lambda _: ""
    with insecure_channel(f"127.0.0.1:{receiver.port}") as channel:
        buddy, said = rpc.BuddyStub(channel), metadata("secret")
        copies = [buddy.Store.future(iter([pb.StoreRequest()]), metadata=said) for _ in range(8)]
        assert all(taking.waiting.acquire(timeout=60) for _ in range(4))
        try:
            assert not buddy.Keep(pb.KeepRequest(run_id="job"), metadata=said, timeout=10).refused
        finally:
            taking.over.set()
        assert all(isinstance(copy.exception(60), Exception) for copy in copies)


def test_a_copy_that_is_given_up_leaves_nothing(sender: Sender, receiver: Receiver, store: CopyStore) -> None:
    def cancelled() -> None:
        raise Cancelled

    with pytest.raises(Cancelled):
        sender.send(kept(store), ME, Version(10), 3, keep=[], cancelled=cancelled)
    send(sender, kept(store, version=20), 20)
    assert receiver.store is not None
    assert held(receiver.store) == [(0, 20)]


@pytest.mark.parametrize(
    "parts",
    [
        [],
        [pb.StoreRequest(data=b"x")],
        [pb.StoreRequest(begin=pb.StoreBegin(of=0, version=1, incarnation=3, run_id="job")), pb.StoreRequest(data=b"")],
        [
            pb.StoreRequest(begin=pb.StoreBegin(of=0, version=1, incarnation=3, run_id="job", size=3)),
            pb.StoreRequest(file=pb.StoreFile(name="../a")),
        ],
        [
            pb.StoreRequest(begin=pb.StoreBegin(of=0, version=1, incarnation=3, run_id="job", size=3)),
            pb.StoreRequest(file=pb.StoreFile(name="a")),
            pb.StoreRequest(data=b"four"),
        ],
        [
            pb.StoreRequest(begin=pb.StoreBegin(of=0, version=1, incarnation=3, run_id="job", size=3)),
            pb.StoreRequest(file=pb.StoreFile(name="a")),
            pb.StoreRequest(file=pb.StoreFile(name="a")),
        ],
    ],
    ids=["nothing", "no beginning", "no file", "elsewhere", "too much", "twice"],
)
def test_nonsense_is_refused(receiver: Receiver, parts: list[pb.StoreRequest]) -> None:
    with pytest.raises(CheckpointError):
        receiver._take(iter(parts))
    assert receiver.store is not None
    assert held(receiver.store) == []


# ------------------------------------------------------------------------------------------------ pages of another host

WRITER = Rank(3)


class Keeper:
    """The receiver that keeps pages."""

    def __init__(self, token: str = "secret") -> None:
        self.receiver = Receiver(Config(bind="127.0.0.1", token=token), "job")
        self.receiver.keep = self.keep
        self.kept: list[Keep] = []
        self.objection = ""

    def keep(self, keep: Keep) -> str:
        self.kept.append(keep)
        return self.objection

    @property
    def order(self) -> MirrorTo:
        return MirrorTo(WRITER, 1, ME, f"127.0.0.1:{self.receiver.port}")


@pytest.fixture
def keeper() -> Iterator[Keeper]:
    made = Keeper()
    yield made
    made.receiver.close()


@pytest.fixture
def pages() -> Iterator[PageSender]:
    made = PageSender(WRITER, "secret", "job")
    yield made
    made.close()


def test_a_page_arrives(keeper: Keeper, pages: PageSender) -> None:
    pages.send(6, True, 2, b"nobody is named yet")
    pages.named(keeper.order)
    pages.send(7, False, 2, b"page")
    pages.send(8, True, 2, bytes(PAGE_BYTES_MAX))
    assert keeper.kept[0] == Keep(ME, 0, WRITER, keeper.kept[0].version, False, 2, b"page")
    assert [(k.version, k.final, len(k.data)) for k in keeper.kept] == [(7, False, 4), (8, True, PAGE_BYTES_MAX)]


def test_pages_follow_a_keeper_that_is_elsewhere(keeper: Keeper, pages: PageSender) -> None:
    before = Keeper()
    pages.named(before.order)
    before.receiver.close()
    pages.send(7, True, 2, b"lost")
    pages.named(keeper.order)
    pages.send(8, True, 2, b"page")
    assert [k.version for k in keeper.kept] == [8]


def test_what_is_refused_is_said_once(keeper: Keeper, pages: PageSender, caplog: pytest.LogCaptureFixture) -> None:
    keeper.objection = "there is no room"
    pages.named(keeper.order)
    with caplog.at_level(logging.WARNING):
        pages.send(7, True, 2, b"page")
        pages.send(8, True, 2, b"page")
    assert [r.getMessage() for r in caplog.records if "there is no room" in r.getMessage()] == [
        f"rank 0 at {keeper.order.address} did not store the page of this rank: there is no room"
    ]


def test_strangers_are_refused(keeper: Keeper, caplog: pytest.LogCaptureFixture) -> None:
    for token, run_id, text in (("wrong", "job", "token"), ("secret", "other", "another job")):
        stranger = PageSender(WRITER, token, run_id)
        stranger.named(keeper.order)
        with caplog.at_level(logging.WARNING):
            stranger.send(7, True, 2, b"page")
        stranger.close()
        assert text in caplog.text
    assert keeper.kept == []


def test_a_sender_that_was_closed_is_silent(keeper: Keeper, pages: PageSender) -> None:
    pages.named(keeper.order)
    pages.send(7, True, 2, b"page")
    pages.close()
    pages.send(8, True, 2, b"page")
    assert [k.version for k in keeper.kept] == [7]
