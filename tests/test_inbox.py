"""Where ``ttp.inbox`` keeps time limits that ``queue.SimpleQueue`` does not."""

from __future__ import annotations

import queue
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from ttp.inbox import Inbox

LATE_S = 20.0


@pytest.fixture
def rescued() -> Iterator[Inbox[str]]:
    """Yield an inbox that gets a text after ``LATE_S``, so that a wait without limit ends."""
    inbox: Inbox[str] = Inbox()
    late = threading.Timer(LATE_S, inbox.put, ["nobody ended the wait"])
    late.daemon = True
    late.start()
    yield inbox
    late.cancel()


def test_a_signal_handler_that_outlasts_the_limit_does_not_lift_it(rescued: Inbox[str]) -> None:
    before: Any = signal.signal(signal.SIGALRM, lambda *_: time.sleep(0.1))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.02)
        with pytest.raises(queue.Empty):
            rescued.get(timeout=0.05)
    finally:
        signal.signal(signal.SIGALRM, before)


def test_a_limit_that_is_over_before_the_wait_begins_is_kept_to(rescued: Inbox[str]) -> None:
    """As when the thread is scheduled late. Afterwards the inbox works like a new one."""
    for turn in range(20_000):
        rescued.put(str(turn))
        assert rescued.get(timeout=1e-6) == str(turn)
        with pytest.raises(queue.Empty):
            rescued.get(timeout=1e-6)


def test_a_handler_may_put_something_into_the_inbox_that_its_thread_waits_for(rescued: Inbox[str]) -> None:
    before: Any = signal.signal(signal.SIGALRM, lambda *_: rescued.put("signal"))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        assert rescued.get() == "signal"
    finally:
        signal.signal(signal.SIGALRM, before)


def test_nothing_is_lost_and_the_order_of_each_thread_is_kept() -> None:
    inbox: Inbox[tuple[int, int]] = Inbox()
    count, threads = 5_000, 4

    def write(place: int) -> None:
        for turn in range(count):
            inbox.put((place, turn))

    writers = [threading.Thread(target=write, args=(place,)) for place in range(threads)]
    for writer in writers:
        writer.start()
    got: list[list[int]] = [[] for _ in writers]
    for _ in range(count * threads):
        place, turn = inbox.get(timeout=LATE_S)
        got[place].append(turn)
    assert got == [list(range(count))] * threads and inbox.empty()
    with pytest.raises(queue.Empty):
        inbox.get_nowait()
