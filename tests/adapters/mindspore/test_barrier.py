"""The barrier before each update of a sliced layout, over real sockets and the real gate, with one thread for each
rank.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.making import making
from tests.waiting import until
from ttp.adapters.mindspore import barrier
from ttp.adapters.mindspore.barrier import UpdateBarrier
from ttp.config import Config
from ttp.core.messages import FaultKind
from ttp.errors import ConfigError
from ttp.processor.gate.gate import Gate

DEADLINE_S = 60
Make = Callable[..., Any]
CONFIG = Config(token="the job's")


@dataclass
class Rank:
    """A stand-in for the processor: what the barrier reads, and what it reports."""

    gate: Gate = field(default_factory=Gate)
    reported: list[tuple[FaultKind, str]] = field(default_factory=list)

    def report(self, kind: FaultKind, text: str, detail: str = "") -> None:
        self.reported.append((kind, text))


class World:
    """Any number of ranks; ``enter`` lets one wait in the barrier."""

    def __init__(self, size: int, disturb: Callable[[bytes], None] = lambda _record: None) -> None:
        self.ranks = [Rank() for _ in range(size)]
        self.pool = ThreadPoolExecutor(size)
        told: dict[int, bytes] = {}
        all_told = threading.Barrier(size)

        def make(rank: int) -> UpdateBarrier:
            def gather(record: bytes) -> list[bytes]:
                disturb(record)
                told[rank] = record
                all_told.wait(DEADLINE_S)
                return [told[number] for number in range(size)]

            return UpdateBarrier(rank, size, "127.0.0.1", self.ranks[rank], gather, CONFIG)

        made = [self.pool.submit(make, rank) for rank in range(size)]
        self.barriers = [one.result(DEADLINE_S) for one in made]

    def enter(self, rank: int) -> Future[None]:
        return self.pool.submit(self.barriers[rank].wait)

    def meet(self, *ranks: int) -> None:
        for done in [self.enter(rank) for rank in ranks]:
            done.result(DEADLINE_S)

    def park(self, *ranks: int) -> list[Gate]:
        """Close the gates of ranks that wait in the barrier, and wait until they stand there."""
        gates = [self.ranks[rank].gate for rank in ranks]
        until(lambda: all(gate.state().near for gate in gates))
        for gate in gates:
            gate.close()
        until(lambda: all(gate.state().parked for gate in gates))
        return gates

    def close(self) -> None:
        for one in self.barriers:
            one.close()
        for rank in self.ranks:
            rank.gate.open()
        self.pool.shutdown()


@pytest.fixture
def make() -> Iterator[Make]:
    with making(World, World.close) as make:
        yield make


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_nobody_passes_before_all_have_come(make: Make, size: int) -> None:
    world = make(size)
    came = [0] * size

    def steps(rank: int) -> None:
        for step in range(1, 51):
            came[rank] = step
            world.barriers[rank].wait()
            assert min(came) >= step

    for done in [world.pool.submit(steps, rank) for rank in range(size)]:
        done.result(DEADLINE_S)


def test_who_waits_for_one_that_does_not_come_stands_at_the_closed_gate_and_may_go_on_alone(make: Make) -> None:
    world = make(4)
    waiting = [world.enter(rank) for rank in (0, 1, 3)]
    gates = world.park(0, 1, 3)
    assert not any(done.done() for done in waiting)
    assert all(gate.admit() for gate in gates)
    for done in waiting:
        done.result(DEADLINE_S)
    assert not any(gate.state().near for gate in gates)


@pytest.mark.parametrize("size", [2, 3, 4, 7])
def test_training_goes_on_with_those_that_made_the_update_alone(make: Make, size: int) -> None:
    """As after a checkpoint on request."""
    world = make(size)
    late = size - 1
    alone = [world.enter(rank) for rank in range(late)]
    gates = world.park(*range(late))
    assert all(gate.admit() for gate in gates)
    for done in alone:
        done.result(DEADLINE_S)
    for gate in gates:
        gate.begin_update()
        gate.end_update()
        gate.open()
    world.meet(late)
    for _ in range(3):
        world.meet(*range(size))
    assert not any(rank.reported for rank in world.ranks)


def test_a_false_alarm_changes_nothing(make: Make) -> None:
    world = make(3)
    waiting = [world.enter(rank) for rank in (0, 1)]
    for gate in world.park(0, 1):
        gate.open()
    waiting.append(world.enter(2))
    for done in waiting:
        done.result(DEADLINE_S)
    world.meet(*range(3))


def test_a_peer_that_is_gone_is_reported_and_its_peers_stand_at_the_gate(make: Make) -> None:
    world = make(2)
    survivor = world.ranks[0]
    waiting = world.enter(0)
    until(lambda: survivor.gate.state().near)
    world.barriers[1].close()
    until(lambda: bool(survivor.reported))
    assert survivor.reported == [(FaultKind.COLLECTIVE, "the barrier before the update broke: a rank is gone")]
    survivor.gate.close()
    until(lambda: survivor.gate.state().parked)
    assert survivor.gate.admit()
    waiting.result(DEADLINE_S)


def test_a_broken_barrier_that_nobody_cares_for_is_an_error(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(barrier, "FREEZE_S", 0.01)
    world = make(2)
    world.barriers[1].close()
    with pytest.raises(RuntimeError, match="the barrier before the update broke: "):
        world.enter(0).result(DEADLINE_S)
    assert [kind for kind, _ in world.ranks[0].reported] == [FaultKind.COLLECTIVE]


def test_ranks_at_different_updates_do_not_meet(make: Make) -> None:
    world = make(2)
    world.barriers[1]._count = 1
    both = [world.enter(rank) for rank in (0, 1)]
    until(lambda: bool(world.ranks[0].reported))
    assert "rank 0 is at its update 1, and a peer at 2" in world.ranks[0].reported[0][1]
    assert not both[1].done() and world.ranks[1].gate.state().near
    assert all(gate.admit() for gate in world.park(0, 1))
    for done in both:
        done.result(DEADLINE_S)


def test_strangers_hold_nobody_up(make: Make) -> None:
    strangers: list[socket.socket] = []

    def disturb(record: bytes) -> None:
        _, port, _ = barrier._RECORD.unpack(record)
        for said in (b"", b"GET / HTTP/1.1\r\n\r\n" * 2):
            stranger = socket.create_connection(("127.0.0.1", port))
            strangers.append(stranger)  # one that says nothing stays
            stranger.sendall(said)

    world = make(3, disturb)
    world.meet(*range(3))
    for stranger in strangers:
        stranger.close()


def test_ranks_that_cannot_reach_each_other_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def barrier_of_two(records: Callable[[bytes], list[bytes]], host: str = "127.0.0.1") -> UpdateBarrier:
        return UpdateBarrier(0, 2, host, Rank(), records, CONFIG)

    monkeypatch.setattr(barrier, "CONNECT_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        there = barrier._RECORD.pack(b"127.0.0.1", deaf.getsockname()[1], bytes(16))
        with pytest.raises(ConfigError, match=r"rank 0 cannot reach rank 1 at 127.0.0.1 port .* undo=\"preimage\""):
            barrier_of_two(lambda mine: [mine, there])
    with pytest.raises(ConfigError, match=r"does not know its own address .* TTP_ADDRESS"):
        barrier_of_two(lambda mine: [mine, mine], host="")
    other = barrier._Heard([0], CONFIG)
    try:
        there = barrier._RECORD.pack(b"127.0.0.1", other.port, other.secret)
        with pytest.raises(ConfigError, match=r"rank 1 did not connect to rank 0 within .* TTP_ADDRESS"):
            barrier_of_two(lambda mine: [mine, there])
        monkeypatch.setattr(barrier, "CONNECT_S", DEADLINE_S)
        older = barrier._RECORD.pack(b"127.0.0.1", other.port, bytes(16))
        with pytest.raises(ConfigError, match=r"rank 1 does not let rank 0 into the barrier: .* of this launch"):
            barrier_of_two(lambda mine: [mine, older])
    finally:
        other.close()
