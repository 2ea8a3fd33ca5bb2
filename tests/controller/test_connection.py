"""Orders for a peer that does not read them, and errors of the machine: memory stays bounded, and the controller goes
on.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from tests.controller.conftest import hello, on_a_loop
from tests.core.talk import PATIENCE
from tests.waiting import until
from ttp.controller import connection as subject
from ttp.controller import driver as driving
from ttp.controller.connection import Connection
from ttp.controller.driver import Driver, Watch
from ttp.controller.journal import Journal, RecordedEvent
from ttp.core import messages as m
from ttp.core.controller import events as ce
from ttp.core.layout import Rank


@on_a_loop
async def test_orders_come_out_in_order_and_a_refusal_is_the_last() -> None:
    stream = Connection(ce.ConnectionId(1), lambda: None)
    welcome, refused = m.Welcome(Rank(0), 1, 1, "x"), m.Refused(Rank(0), m.RefusalCode.BUSY, "x")
    assert stream.put(welcome) and stream.put(refused) and stream.put(welcome)
    assert [await stream.next() for _ in range(3)] == [welcome, refused, None]


def test_a_stream_that_nobody_reads_is_ended() -> None:
    ended: list[bool] = []
    stream = Connection(ce.ConnectionId(1), lambda: ended.append(True))
    welcome = m.Welcome(Rank(0), 1, 1, "x")
    taken = sum(stream.put(welcome) for _ in range(subject.ORDERS_MAX))
    assert (taken, ended) == (subject.ORDERS_MAX, [])
    assert not stream.put(welcome)
    assert ended == [True] and stream.closing
    stream.put(welcome)
    assert ended == [True]


def recorded(facts: str = "{}") -> RecordedEvent:
    return RecordedEvent(1, 0.0, 0.0, "x", "", facts)


def test_a_watcher_that_lags_is_let_go() -> None:
    watch = Watch([recorded()])
    assert all(watch.add(recorded()) for _ in range(driving.WATCH_MAX - 1))
    assert not watch.add(recorded())
    assert watch.queue.qsize() == driving.WATCH_MAX + 1


@on_a_loop
async def test_history_is_bounded_in_number_and_bytes(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driving, "HISTORY_MAX", 5)
    monkeypatch.setattr(driving, "HISTORY_BYTES_MAX", 2000)
    driver = Driver(PATIENCE, journal)
    for number in range(8):
        driver.feed(ce.Received(ce.ConnectionId(number), hello(0, protocol_major=9, host=f"h{number}")))
    assert [json.loads(h.facts)["host"] for h in driver.history] == ["h3", "h4", "h5", "h6", "h7"]
    driver.feed(ce.Received(ce.ConnectionId(9), hello(0, protocol_major=9, host="h" * 3000)))
    assert len(driver.history) == 1


@on_a_loop
async def test_after_a_tick_that_fails_there_is_another(
    journal: Journal, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(driving, "RETRY_S", 0.0)
    driver, ticks = Driver(PATIENCE, journal), list[ce.Event]()

    def fail(event: ce.Event, now: float, *, more: bool) -> list[ce.Action]:
        ticks.append(event)
        raise ZeroDivisionError

    monkeypatch.setattr(driver.machine, "on_event", fail)
    monkeypatch.setattr(driver.machine, "deadline", lambda: 0.0)
    driver._tick()
    while len(ticks) < 3:
        await asyncio.sleep(0)
    assert "an error in a timed action of the controller" in caplog.text


def test_a_save_dir_that_cannot_be_a_path_does_not_stop_the_journal(journal: Journal, tmp_path: Path) -> None:
    for save_dir, incident in (("\0", "one"), ("", "two")):
        journal.write(save_dir, RecordedEvent(1, 0.0, 0.0, "opened", incident, "{}"))
    until(lambda: all((tmp_path / "incidents" / f"{name}.jsonl").exists() for name in ("one", "two")))
