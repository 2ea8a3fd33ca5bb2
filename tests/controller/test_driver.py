"""How the driver carries out the machine's actions, if some of them fail."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.core.talk import PATIENCE, answers
from ttp.controller.connection import Connection
from ttp.controller.driver import Driver
from ttp.controller.journal import Journal
from ttp.controller.log_output import ALIKE_MAX
from ttp.core import messages as m
from ttp.core.controller.events import (
    ConnectionId,
    HostsDrained,
    RankWasWrong,
    Received,
    ReceivedAlike,
    SaveRequested,
    StreamEnded,
)
from ttp.core.layout import Rank, Version
from ttp.core.layout_messages import TellLayout
from ttp.store.history import Launch, read_launches
from ttp.testing.scenario import grid
from ttp.testing.toy import hello


class NoThreads:
    """A journal on a host where no thread can be started."""

    def write(self, *_: Any) -> None:
        raise RuntimeError("can't start new thread")

    launch_begins = launch_goes_on = write


def heard(connection: Connection) -> list[m.Order]:
    return [order for _ in range(connection._queue.qsize()) if (order := connection._queue.get_nowait()) is not None]


def test_a_journal_that_fails_keeps_no_order_from_its_rank(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        journal: Any = NoThreads()
        driver, layout = Driver(PATIENCE, journal), grid(1, 2)
        lost, other = (driver.connect(lambda: None) for _ in range(2))
        for rank, connection in enumerate((lost, other)):
            driver.feed(Received(connection.id, hello(rank, layout)))
            for order in heard(connection):
                if isinstance(order, TellLayout):
                    driver.feed_all(Received(connection.id, part) for part in answers(order, layout))
        assert driver.machine.stage == "training"
        driver.disconnect(lost)
        assert any(isinstance(order, m.Freeze) for order in heard(other))
        driver.close()

    with caplog.at_level(logging.CRITICAL):
        asyncio.run(run())


def frozen_job(driver: Driver) -> tuple[list[Connection], list[m.Frozen]]:
    """Let rank 3 of four fail, and return the streams and answers of the others."""
    layout = grid(1, 4)
    driver.machine.job.learn(layout)
    ranks = [driver.connect(lambda: None) for _ in range(4)]
    for rank, connection in enumerate(ranks):
        driver.feed(Received(connection.id, hello(rank, layout)))
    driver.disconnect(ranks.pop())
    assert driver.machine.incident is not None
    id = driver.machine.incident.id
    return ranks, [m.Frozen(Rank(rank), id, Version(7), m.Phase.IDLE, final=True) for rank in range(3)]


def quietly(run: Callable[[], Coroutine[Any, Any, None]]) -> None:
    logging.disable(logging.ERROR)
    try:
        asyncio.run(run())
    finally:
        logging.disable(logging.NOTSET)


def test_what_follows_from_answers_is_looked_for_once_when_all_that_have_come_are_taken() -> None:
    async def run() -> None:
        journal: Any = NoThreads()
        driver = Driver(PATIENCE, journal)
        ranks, said = frozen_job(driver)
        settle, settled = driver.machine.settle, []
        driver.machine.settle = lambda now: settled.append(now) or settle(now)  # type: ignore[method-assign,func-returns-value]
        for connection, answer in zip(ranks, said, strict=True):
            driver.feed(Received(connection.id, answer), more=True)
        assert not settled and driver.machine.stage == "freezing"
        await asyncio.sleep(0)
        assert len(settled) == 1 and driver.machine.stage == "saving"
        driver.close()

    quietly(run)


def test_what_ranks_say_alike_is_one_event_and_what_comes_later_is_later() -> None:
    async def run() -> None:
        journal: Any = NoThreads()
        driver = Driver(PATIENCE, journal)
        ranks, said = frozen_job(driver)
        said[2] = replace(said[2], has_gradient=True)
        with patch.object(driver.machine, "on_event", wraps=driver.machine.on_event) as take:
            for connection, answer in zip(ranks, said, strict=True):
                driver.feed(Received(connection.id, answer), more=True)
            driver.disconnect(ranks[2])
        together = ReceivedAlike(((ranks[0].id, Rank(0)), (ranks[1].id, Rank(1))), replace(said[0], rank=m.SEVERAL))
        alone = ReceivedAlike(((ranks[2].id, Rank(2)),), replace(said[2], rank=m.SEVERAL))
        assert [call.args[0] for call in take.call_args_list] == [together, alone, StreamEnded(ranks[2].id)]
        await asyncio.sleep(0)
        assert driver.machine.stage == "saving"
        driver.close()

    quietly(run)


def test_a_controller_that_takes_over_learns_what_the_one_before_has_recorded(tmp_path: Path) -> None:
    """Otherwise a drained host would start ranks again, a wrong job would be restarted, and a saved one be lost."""
    layout, save_dir = grid(1, 1), str(tmp_path)

    async def lead(talk: Callable[[Driver, Connection], None], **more: Any) -> Driver:
        journal = Journal(tmp_path / "run", [save_dir])
        driver = Driver(PATIENCE, journal)
        driver.machine.job.learn(layout)
        rank = driver.connect(lambda: None)
        driver.feed(Received(rank.id, replace(hello(0, layout), save_dir=save_dir, host="h", **more)))
        talk(driver, rank)
        journal.close(60)
        await asyncio.sleep(0)  # what the journal has read
        return driver

    def saves(driver: Driver, rank: Connection) -> None:
        driver.feed(SaveRequested(1, "asked"))
        assert driver.machine.incident is not None
        id = driver.machine.incident.id
        driver.feed(Received(rank.id, m.Frozen(Rank(0), id, Version(7), m.Phase.IDLE, final=True)))
        driver.feed(Received(rank.id, m.Saved(Rank(0), id, 0, (m.Piece("p", 1, "d", "shard", "s0", Rank(0)),))))
        driver.feed(Received(rank.id, m.Committed(Rank(0), id, 0, "step_7", 1)))
        driver.feed(HostsDrained(frozenset({"h", "other"})))
        driver.feed(HostsDrained(frozenset({"other"}), drained=False))
        driver.feed(RankWasWrong("rank 3 exited with code 64"))

    async def run() -> None:
        before = await lead(saves)
        known = {"resume": True, "takeover": True, "term_seen": 1}
        driver = await lead(lambda *_: None, incarnation=1, version=Version(7), **known)
        assert driver.machine.rescue.committing.last == before.machine.rescue.committing.last == (7, "step_7")
        assert driver.machine.drained_hosts == ["h"]
        assert driver.machine.verdict == before.machine.verdict and driver.machine.verdict.code == 64
        other = await lead(lambda *_: None, incarnation=2, **known)
        assert other.machine.rescue.committing.last is None and not other.machine.drained_hosts, (
            "that is another launch"
        )

    quietly(run)


def test_what_a_slow_disk_tells_of_the_launch_before_is_not_taken_for_this_one() -> None:
    """Its ranks would be accused as of a drained host, and a version that it saved would not be saved again."""

    async def run() -> None:
        journal: Any = NoThreads()
        told: list[Callable[[int, Launch], None]] = []
        journal.launch_begins = lambda *given: told.append(given[-1])
        driver, layout = Driver(PATIENCE, journal), grid(1, 1)
        driver.machine.job.learn(layout)
        first, second = (driver.connect(lambda: None) for _ in range(2))
        driver.feed(Received(first.id, hello(0, layout, incarnation=1, resume=True, takeover=True, term_seen=1)))
        driver.disconnect(first)
        driver.feed(Received(second.id, hello(0, layout, launch=1, nonce="new")))
        launch = Launch("job", 1, 0.0, code=64, text="wrong", version=7, path="step_7", drained=frozenset({"h"}))
        told[0](2, launch)
        await asyncio.sleep(0)
        assert driver.machine.job.incarnation == 2 and driver.machine.rescue.committing.last is None
        assert driver.machine.verdict.code is None and not driver.machine.drained_hosts
        told[1](2, launch)
        await asyncio.sleep(0)
        assert driver.machine.rescue.committing.last == (7, "step_7")
        driver.close()

    quietly(run)


@pytest.mark.parametrize("first", ["here", "there"])
def test_launches_are_recorded_where_the_host_of_the_controller_sees_the_directory(tmp_path: Path, first: str) -> None:
    """Hosts may mount one directory in different places, and the first rank to join may be on any of them."""
    (tmp_path / "here").mkdir()

    async def run() -> None:
        journal = Journal(tmp_path / "run", [str(tmp_path / "here")])
        driver, layout = Driver(PATIENCE, journal, "here"), grid(1, 2)
        driver.machine.job.learn(layout)
        for rank, host in enumerate(("here", "there") if first == "here" else ("there", "here")):
            stream = driver.connect(lambda: None)
            greeting = replace(hello(rank, layout), host=host, save_dir=str(tmp_path / host))
            driver.feed(Received(stream.id, greeting))
        for number in range(2):
            driver.feed(Received(ConnectionId(number + 1), m.Goodbye(Rank(number), m.GoodbyeReason.DONE, Version(7))))
        driver.close()
        journal.close(60)

    quietly(run)
    (launch,) = read_launches(tmp_path / "here")
    assert (launch.code, launch.text) == (0, "trained to the end") and launch.joined_unix_s


def test_a_launch_that_ends_before_a_rank_of_this_host_has_joined_is_recorded(tmp_path: Path) -> None:
    """A controller may run where no rank does, and its ranks may die before all have joined."""
    save_dir = tmp_path / "checkpoints"
    save_dir.mkdir()

    async def run() -> None:
        journal = Journal(tmp_path / "run", [str(save_dir)])
        driver, layout = Driver(PATIENCE, journal, "here"), grid(1, 2)
        driver.machine.job.learn(layout)
        for launch in range(3):
            stream = driver.connect(lambda: None)
            greeting = replace(hello(0, layout), host="there", save_dir=str(save_dir), launch=launch, nonce=f"{launch}")
            driver.feed(Received(stream.id, greeting))
            driver.disconnect(stream)
        driver.close()
        journal.close(60)

    quietly(run)
    assert [launch.incarnation for launch in read_launches(save_dir)] == [1, 2, 3]


def test_a_large_job_has_no_log_line_for_each_rank(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        journal: Any = NoThreads()
        driver, layout = Driver(PATIENCE, journal), grid(1, 100)
        driver.machine.job.learn(layout)
        ranks = [driver.connect(lambda: None) for _ in range(100)]
        for rank, connection in enumerate(ranks):
            driver.feed(Received(connection.id, hello(rank, layout)))
        for rank, connection in enumerate(ranks):
            lost = m.Fault(Rank(rank), Rank(rank), m.FaultKind.COLLECTIVE, "closed by peer")
            driver.feed(Received(connection.id, lost))
        driver.close()

    with caplog.at_level(logging.INFO, "ttp.controller"):
        asyncio.run(run())
    shown = [record for record in caplog.records if record.levelno == logging.INFO]
    assert 2 * ALIKE_MAX < len(shown) < 2 * ALIKE_MAX + 10
