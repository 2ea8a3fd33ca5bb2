"""Pages are sent from rank to rank over real sockets, with the job's token."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from ttp.config import Config
from ttp.core.copy_messages import Keep, MirrorTo
from ttp.core.layout import Rank
from ttp.processor.copies.transfer import Receiver
from ttp.processor.local_state.mirror import PAGE_BYTES_MAX
from ttp.processor.local_state.page_sender import PageSender

ME, KEEPER = Rank(3), Rank(0)


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
        return MirrorTo(ME, 1, KEEPER, f"127.0.0.1:{self.receiver.port}")


@pytest.fixture
def keeper() -> Iterator[Keeper]:
    made = Keeper()
    yield made
    made.receiver.close()


@pytest.fixture
def sender() -> Iterator[PageSender]:
    made = PageSender(ME, "secret", "job")
    yield made
    made.close()


def test_a_page_arrives(keeper: Keeper, sender: PageSender) -> None:
    sender.send(6, True, 2, b"nobody is named yet")
    sender.named(keeper.order)
    sender.send(7, False, 2, b"page")
    sender.send(8, True, 2, bytes(PAGE_BYTES_MAX))
    assert keeper.kept[0] == Keep(KEEPER, 0, ME, keeper.kept[0].version, False, 2, b"page")
    assert [(k.version, k.final, len(k.data)) for k in keeper.kept] == [(7, False, 4), (8, True, PAGE_BYTES_MAX)]


def test_pages_follow_a_keeper_that_is_elsewhere(keeper: Keeper, sender: PageSender) -> None:
    before = Keeper()
    sender.named(before.order)
    before.receiver.close()
    sender.send(7, True, 2, b"lost")
    sender.named(keeper.order)
    sender.send(8, True, 2, b"page")
    assert [k.version for k in keeper.kept] == [8]


def test_what_is_refused_is_said_once(keeper: Keeper, sender: PageSender, caplog: pytest.LogCaptureFixture) -> None:
    keeper.objection = "there is no room"
    sender.named(keeper.order)
    with caplog.at_level(logging.WARNING):
        sender.send(7, True, 2, b"page")
        sender.send(8, True, 2, b"page")
    assert [r.getMessage() for r in caplog.records if "there is no room" in r.getMessage()] == [
        f"rank 0 at {keeper.order.address} did not store the page of this rank: there is no room"
    ]


def test_strangers_are_refused(keeper: Keeper, caplog: pytest.LogCaptureFixture) -> None:
    for token, run_id, text in (("wrong", "job", "token"), ("secret", "other", "another job")):
        stranger = PageSender(ME, token, run_id)
        stranger.named(keeper.order)
        with caplog.at_level(logging.WARNING):
            stranger.send(7, True, 2, b"page")
        stranger.close()
        assert text in caplog.text
    assert keeper.kept == []


def test_a_sender_that_was_closed_is_silent(keeper: Keeper, sender: PageSender) -> None:
    sender.named(keeper.order)
    sender.send(7, True, 2, b"page")
    sender.close()
    sender.send(8, True, 2, b"page")
    assert [k.version for k in keeper.kept] == [7]
