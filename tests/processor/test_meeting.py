"""Ranks of a host meet: none leaves before all have come, and none sleeps on after that or after its gate is closed."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path

import pytest

from tests.processor.meeting_model import Host, World, Wrong
from tests.processor.meeting_ranks import Ranks
from ttp.processor.gate.gate import Gate
from ttp.processor.gate.meeting import (
    BELL,
    FRONT,
    BrokenError,
    Meeting,
    OwnWords,
    SharedWords,
    Words,
    reached,
    run,
    size_of,
    slot,
)
from ttp.processor.liveness.futex import Mapping

PATIENCE_S = 60.0

# -------------------------------------------------------------------------------------------------- every interleaving


@pytest.mark.parametrize(
    ("hosts", "turns", "closes", "kills", "absent"),
    [
        (((0, 1),), 2, 1, 0, ()),
        (((0, 1),), 2, 0, 1, ()),
        (((0, 1, 2),), 1, 0, 0, ()),
        (((0,), (1,)), 1, 0, 0, ()),
        (((0, 1),), 1, 1, 1, (1,)),
        (((0,), (1,)), 1, 1, 0, (1,)),
        pytest.param(((0, 1),), 2, 1, 1, (), marks=pytest.mark.slow),
        pytest.param(((0, 1),), 3, 1, 0, (), marks=pytest.mark.slow),
        pytest.param(((0, 1, 2),), 1, 0, 1, (), marks=pytest.mark.slow),
        pytest.param(((0, 1, 2),), 1, 1, 0, (), marks=pytest.mark.slow),
        pytest.param(((0, 1, 2),), 2, 0, 0, (), marks=pytest.mark.slow),
        pytest.param(((0,), (1,)), 1, 0, 1, (), marks=pytest.mark.slow),
        pytest.param(((0,), (1,)), 1, 1, 0, (), marks=pytest.mark.slow),
        pytest.param(((0, 1), (2,)), 1, 0, 0, (), marks=pytest.mark.slow),
    ],
)
def test_every_order(hosts: tuple[Host, ...], turns: int, closes: int, kills: int, absent: Host) -> None:
    world = World(hosts, turns, closes, kills, absent)
    print(f"{hosts}, {turns} turns: {world.explore(3_000_000)} states, ends {sorted(world.ends)}")
    assert all(end in ("ended", "dead", "waits") for ends in world.ends for end in ends)
    assert kills or absent or world.ends == {("ended",) * sum(map(len, hosts))}, "nobody is left behind for ever"


class ForgetsTheFence(Meeting):
    async def come(self, turn: int) -> bool:
        await self._words.store(slot(self._place), turn)
        if await self._all_came(turn):
            await self._words.wake(BELL)
        return False


class RingsFirst(Meeting):
    async def come(self, turn: int) -> bool:
        await self._words.add_one(BELL)
        await self._words.store(slot(self._place), turn)
        if await self._all_came(turn):
            await self._words.wake(BELL)
        return False


class WakesNobody(Meeting):
    async def come(self, turn: int) -> bool:
        await self._words.store(slot(self._place), turn)
        await self._words.add_one(BELL)
        return await self._all_came(turn)


class GoesOnForItsHost(Meeting):
    """Wrong: the last rank of a host goes on although other hosts have not come."""

    async def come(self, turn: int) -> bool:
        await super().come(turn)
        return await self._all_came(turn)


class HearsTooLate(Meeting):
    async def wait(self, turn: int, leave: object) -> bool:
        while True:
            if await self.over(turn):
                return True
            await self._words.sleep(BELL, await self._words.load(BELL))


class RingsInSilence(Meeting):
    async def ring(self) -> None:
        await self._words.wake(BELL)


class Counts(Meeting):
    """Wrong: one counter for all ranks. A rank that leaves by order and comes again is counted as another rank."""

    async def come(self, turn: int) -> bool:
        await self._words.add_one(BELL)
        if await self.over(turn):
            await self._words.wake(BELL)
        return False

    async def over(self, turn: int) -> bool:
        return await self._words.load(BELL) >= turn * len(self._slots)


class BelievesItsHost(Meeting):
    async def over(self, turn: int) -> bool:
        return await self._all_came(turn)


class WarnsInSilence(Meeting):
    async def warn(self) -> None:
        await self.ring()


class DoesNotWatch(Meeting):
    async def _check(self, turn: int) -> None:
        pass


class AsksOnce(Meeting):
    async def _check(self, turn: int) -> None:
        for place in range(len(self._slots)):
            came = reached(await self._words.load(slot(place)), turn)
            if place != self._place and not came and await self._gone(place):
                raise BrokenError("it may have come meanwhile")


ONE_HOST: tuple[Host, ...] = ((0, 1),)
TWO_HOSTS: tuple[Host, ...] = ((0,), (1,))


@pytest.mark.parametrize(
    ("kind", "hosts", "turns", "closes", "kills", "absent", "text"),
    [
        (ForgetsTheFence, ONE_HOST, 1, 0, 0, (), "sleeps on"),
        (RingsFirst, ONE_HOST, 1, 0, 0, (), "sleeps on"),
        (WakesNobody, ONE_HOST, 1, 0, 0, (), "sleeps on"),
        (HearsTooLate, ONE_HOST, 1, 0, 0, (), "sleeps on"),
        (RingsInSilence, ONE_HOST, 1, 1, 0, (1,), "sleeps on"),
        (Counts, ONE_HOST, 2, 1, 0, (), "leaves meeting"),
        (GoesOnForItsHost, TWO_HOSTS, 1, 0, 0, (), "leaves meeting"),
        (BelievesItsHost, TWO_HOSTS, 1, 0, 0, (), "leaves meeting"),
        (WarnsInSilence, ONE_HOST, 1, 0, 1, (), "sleeps on"),
        (DoesNotWatch, ONE_HOST, 1, 0, 1, (), "sleeps on"),
    ],
)
def test_what_would_be_wrong_is_found_out(
    kind: type[Meeting], hosts: tuple[Host, ...], turns: int, closes: int, kills: int, absent: Host, text: str
) -> None:
    with pytest.raises(Wrong, match=text):
        World(hosts, turns, closes, kills, absent, kind).explore()


def test_who_looks_after_a_while_asks_twice() -> None:
    """A rank may come and end between two looks at it: the meeting is not broken then."""
    World(ONE_HOST, 1, kills=1, impatient=True).explore()
    with pytest.raises(Wrong, match="broken"):
        World(ONE_HOST, 1, kills=1, impatient=True, kind=AsksOnce).explore()


# ---------------------------------------------------------------------------------------------------------- in memory


@pytest.fixture(params=["shared", "own"])
def words(request: pytest.FixtureRequest) -> Words:
    return SharedWords(Mapping(-1, 4096, writable=True)) if request.param == "shared" else OwnWords()


async def nobody(_place: int) -> bool:
    return False


async def stay() -> bool:
    return False


def meetings(words: Words, count: int, *, wide: bool = False) -> list[Meeting]:
    return [Meeting(words, place, count, wide=wide, gone=nobody) for place in range(count)]


def test_threads_meet_again_and_again(words: Words) -> None:
    if isinstance(words, SharedWords) and size_of(3) > 4096:
        pytest.skip("the mapping of this test is smaller")
    held, early = [0] * 3, []

    def train(place: int, meeting: Meeting) -> None:
        for turn in range(1, 200):
            held[place] = turn
            assert run(meeting.come(turn)) or run(meeting.wait(turn, stay))
            if min(held) < turn:
                early.append((place, turn))

    threads = [threading.Thread(target=train, args=pair, daemon=True) for pair in enumerate(meetings(words, 3))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert held == [199] * 3
    assert not early


def test_whoever_closes_the_gate_wakes_the_training_thread(words: Words, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ttp.processor.gate.meeting.NET_S", 3600.0)
    gate, (meeting, _) = Gate(), meetings(words, 2)
    left: list[bool] = []

    async def leave() -> bool:
        return gate.closed and gate.stand_aside()

    def train() -> None:
        with gate.nearby(lambda: run(meeting.ring())):
            run(meeting.come(1))
            left.append(not run(meeting.wait(1, leave)))

    thread = threading.Thread(target=train, daemon=True)
    thread.start()
    while not gate.state().near:
        pass
    gate.close()
    while not gate.admit():
        assert thread.is_alive()
    thread.join(PATIENCE_S)
    assert left == [True]


def test_a_sleeper_is_woken(words: Words, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise each update would begin late: the sleeper looks again after ``NET_S``."""
    monkeypatch.setattr("ttp.processor.gate.meeting.NET_S", 20.0)
    woken: list[bool] = []
    sleeper = threading.Thread(target=lambda: woken.append(run(words.sleep(0, 0))), daemon=True)
    sleeper.start()
    while sleeper.is_alive():
        run(words.wake(0))  # again and again, as it may not sleep yet
        sleeper.join(0.01)
    assert woken == [True]


def test_who_has_left_by_order_is_not_counted_for_somebody_else(words: Words) -> None:
    ahead, behind = meetings(words, 2)

    async def go() -> bool:
        return True

    for turn in (1, 2):
        assert not run(ahead.come(turn))
        assert not run(ahead.wait(turn, go))
    assert not run(ahead.over(1))
    run(behind.come(1))
    assert run(behind.over(1)) and not run(behind.over(2))


def test_a_host_is_let_go_by_its_courier_alone(words: Words) -> None:
    first, second = meetings(words, 2, wide=True)
    for meeting in (first, second):
        run(meeting.come(1))
    assert run(first.all_here(1, stay))
    assert not run(second.over(1))
    run(first.release(1))
    assert run(second.wait(1, stay))
    run(first.break_up())
    run(second.come(2))
    with pytest.raises(BrokenError, match="the barrier between the hosts is broken"):
        run(second.wait(2, stay))


# -------------------------------------------------------------------------------------------------------- of processes


@pytest.mark.parametrize("campaign", [1, pytest.param(60, marks=pytest.mark.slow)])
@pytest.mark.timeout(1200)
def test_processes_that_are_killed_while_they_meet(tmp_path: Path, campaign: int) -> None:
    """No sleep has a timeout here, so a rank that is not woken hangs."""
    chance = random.Random(campaign)
    for number in range(campaign):
        count = chance.choice((3, 4)) if campaign > 1 else 3
        dead = chance.sample(range(count), chance.randint(1, count - 2))
        with Ranks(tmp_path / f"{number}", count) as ranks:
            time.sleep(chance.random() * 0.3)
            for rank in dead:
                ranks.processes[rank].kill()
            told = [ranks.told(rank) for rank in range(count) if rank not in dead]
            assert not any(one["early"] for one in told), "an update before all have their gradients"
            assert all("has ended" in one["why"] for one in told)
            turns = [one["turn"] for one in told]
            assert max(turns) - min(turns) <= 1 and min(turns) > 1
            assert not list((tmp_path / f"{number}" / "pages").glob(".meeting*")), "nothing to clean up"
        print(f"{count} ranks, {dead} killed after {max(turns)} meetings")


def test_meetings_are_counted_past_32_bits() -> None:
    assert reached(5, 5) and reached(6, 5) and not reached(4, 5)
    assert reached(0, 0xFFFFFFFF) and not reached(0xFFFFFFFF, 0)
    assert FRONT != BELL
