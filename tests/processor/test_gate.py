"""The gate: one atomic check-and-set, seen from two threads."""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable

import pytest

from tests.waiting import until
from ttp.core.layout import Version
from ttp.core.messages import Phase
from ttp.processor.gate.gate import Gate, GateState, Halted


def test_updates_count_versions() -> None:
    gate = Gate()
    for _ in range(3):
        gate.begin_update()
        assert gate.state().phase is Phase.UPDATING
        gate.end_update()
    assert gate.state() == GateState(Version(3), Phase.IDLE, parked=False)


def test_a_program_may_number_its_versions_itself() -> None:
    gate = Gate()
    gate.begin_update()
    gate.end_update(Version(41))
    assert gate.version == 41


@pytest.mark.parametrize("halts", [False, True])
def test_a_redone_update_is_not_left_before_the_gate_opens_or_the_loop_is_to_be_left(halts: bool) -> None:
    gate, ended = Gate(), queue.SimpleQueue[type[BaseException] | None]()

    def train() -> None:
        gate.begin_update()
        gate.end_update()
        try:
            gate.stay_redone()
        except Halted:
            ended.put(Halted)
        else:
            ended.put(None)

    gate.close()
    thread = threading.Thread(target=train, daemon=True)
    thread.start()
    until(gate.admit)
    until(lambda: gate.version == 1)
    with pytest.raises(queue.Empty):
        ended.get(timeout=0.05)
    (gate.halt if halts else gate.open)()
    assert ended.get(timeout=10) is (Halted if halts else None)
    thread.join(10)


def test_a_closed_gate_parks_the_training_thread_until_it_opens() -> None:
    parked = threading.Event()
    gate = Gate(lambda: parked.set() if gate.state().parked else None)
    assert gate.close() == GateState(Version(0), Phase.IDLE, parked=False)
    passed = threading.Event()

    def train() -> None:
        gate.begin_update()
        passed.set()

    thread = threading.Thread(target=train)
    thread.start()
    assert parked.wait(10)
    assert not passed.is_set() and gate.state().phase is Phase.IDLE
    gate.open()
    assert passed.wait(10)
    thread.join()
    assert gate.state() == GateState(Version(0), Phase.UPDATING, parked=False, closure=1)


def test_whoever_is_admitted_makes_one_update() -> None:
    """The gate stays closed, so the next update waits again."""
    stands: queue.SimpleQueue[int] = queue.SimpleQueue()
    gate = Gate(lambda: stands.put(gate.version) if gate.state().parked else None)
    gate.close()
    assert not gate.admit(), "nobody stands there yet"

    def train() -> None:
        for _ in range(2):
            gate.begin_update()
            gate.end_update()
        stands.put(-1)

    thread = threading.Thread(target=train, daemon=True)
    thread.start()
    assert stands.get(timeout=10) == 0
    assert gate.admit()
    assert stands.get(timeout=10) == 1
    gate.open()
    thread.join()
    assert gate.version == 2


def test_whoever_is_admitted_is_about_to_update() -> None:
    """After the permission the update may begin at any moment, so the state is not quiet any more."""
    seen: list[Phase] = []

    def on_quiet() -> None:  # on the training thread, before it waits
        if gate.state().parked and gate.admit():
            seen.append(gate.state().phase)

    gate = Gate(on_quiet)
    gate.close()
    gate.begin_update()
    assert seen == [Phase.UPDATING]


def test_who_stands_between_two_steps_of_one_version_is_of_none() -> None:
    quiet: list[Phase] = []
    gate = Gate(lambda: quiet.append(gate.state().phase))
    gate.begin_update()
    gate.stand_between()
    assert gate.state().phase is Phase.UPDATING and not quiet, "nobody asks: the update goes on"
    assert gate.close().phase is Phase.TORN, "answered at once"
    went_on = threading.Thread(target=gate.begin_update)
    went_on.start()
    until(lambda: gate.state().parked)
    assert quiet == [Phase.TORN] and not gate.admit(), "there is no gradient of a whole update"
    gate.open()
    went_on.join()
    gate.end_update()
    assert gate.close().phase is Phase.IDLE and gate.version == 1


def test_an_update_that_comes_between_two_steps_under_a_closed_gate_is_told() -> None:
    quiet: list[Phase] = []
    gate = Gate(lambda: quiet.append(gate.state().phase))
    gate.begin_update()
    assert gate.close().phase is Phase.UPDATING
    gate.stand_between()
    assert quiet == [Phase.TORN]
    gate.revive(Version(0))
    assert gate.state().phase is Phase.IDLE


class Terminated(threading.Event):
    """Lets a signal handler of the program raise in the thread that waits for this event."""

    def __init__(self, meanwhile: Callable[[], object]) -> None:
        super().__init__()
        self.meanwhile = meanwhile

    def wait(self, timeout: float | None = None) -> bool:
        self.meanwhile()
        raise SystemExit(143)


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("way", ["begin_update", "stand_aside"])
def test_whoever_leaves_the_gate_by_an_exception_stands_there_no_more(way: str, ordered: bool) -> None:
    """Otherwise an update would be ordered that nobody makes, or one that was ordered would be waited for."""
    told: list[GateState] = []
    stood: list[bool] = []
    gate = Gate(lambda: stood.append(gate.state().parked), lambda: told.append(gate.state()))
    gate.close()
    gate._opened = Terminated(gate.admit if ordered else lambda: None)
    with pytest.raises(SystemExit):
        getattr(gate, way)()
    assert gate.state() == GateState(Version(0), Phase.IDLE, parked=False)
    assert not gate.admit()
    assert told == [gate.state()] * ordered
    assert stood == [True, *[False] * ordered], "a freeze may wait for the end of the update"


def test_a_thread_that_comes_back_after_a_repair_waits_at_the_gate() -> None:
    gate = Gate()
    gate.close()
    gate.halt()
    gate.revive(Version(4))
    gate._opened = Terminated(lambda: None)
    with pytest.raises(SystemExit):
        gate.begin_update()


def test_states_of_two_closures_differ() -> None:
    gate = Gate()
    first = gate.close()
    gate.open()
    assert gate.close() != first
    assert gate.state() == gate.close()


def test_a_running_update_ends_before_the_state_is_quiet() -> None:
    quiet = threading.Event()
    gate = Gate(quiet.set)
    gate.begin_update()
    assert gate.close().phase is Phase.UPDATING
    assert not quiet.is_set()
    gate.end_update()
    assert quiet.is_set()
    assert gate.state() == GateState(Version(1), Phase.IDLE, parked=False)


def at_the_gate(gate: Gate, again: bool = False) -> threading.Thread:
    """Return a training thread that has begun an update, or waits at the gate."""
    thread = threading.Thread(target=gate.begin_update, args=(again,), daemon=True)
    thread.start()
    while not gate.state().parked and thread.is_alive():
        time.sleep(0.001)
    return thread


def test_an_update_that_was_left_does_not_pass_a_closed_gate() -> None:
    """The program has caught the exception and begins the next update, but half an update is not a version."""
    gate = Gate()
    gate.begin_update()
    gate.close()
    thread = at_the_gate(gate)
    assert gate.state() == GateState(Version(0), Phase.TORN, parked=True)
    assert not gate.admit(), "there is nothing to make an update from"
    gate.open()
    thread.join(10)
    assert gate.state().phase is Phase.UPDATING
    gate.end_update()
    assert gate.state() == GateState(Version(2), Phase.IDLE, parked=False, closure=1), "two steps, of which one failed"


def test_an_update_that_is_made_again_keeps_its_number() -> None:
    gate = Gate()
    gate.begin_update()
    gate.leave_update()
    assert gate.left and gate.state().phase is Phase.TORN
    gate.begin_update(again=True)
    assert gate.state().phase is Phase.UPDATING
    gate.end_update()
    assert not gate.left and gate.state() == GateState(Version(1), Phase.IDLE, parked=False)


def test_who_is_told_late_that_an_update_was_left_is_told() -> None:
    told: list[Phase] = []
    gate = Gate(lambda: told.append(gate.state().phase))
    gate.begin_update()
    assert gate.close().phase is Phase.UPDATING
    gate.leave_update()
    assert told == [Phase.TORN]
    gate.revive(Version(0))
    assert gate.state().phase is Phase.IDLE and not gate.left


def test_who_stands_between_two_steps_may_leave_the_update() -> None:
    gate = Gate()
    gate.begin_update()
    gate.stand_between()
    gate.leave_update()
    assert gate.left and gate.state().phase is Phase.TORN
    gate.begin_update()
    gate.end_update()
    assert gate.version == 2 and gate.state().phase is Phase.IDLE


def test_without_an_update_nothing_is_left() -> None:
    gate = Gate()
    gate.leave_update()
    gate.begin_update()
    gate.end_update()
    assert gate.version == 1 and not gate.left


def test_a_thread_that_never_wakes_does_not_stand_at_an_open_gate() -> None:
    """A thread that ends while it waits leaves its mark behind, which may not count any more."""
    gate = Gate()
    gate.close()
    with gate._lock:
        gate._parked = True  # all that such a thread leaves behind
    gate.open()
    assert not gate.state().parked
    assert not gate.close().parked and not gate.admit()


def test_an_update_left_by_an_exception_is_torn_for_good() -> None:
    gate = Gate()
    gate.mark_torn()
    assert gate.state().phase is Phase.IDLE  # no update was running
    gate.begin_update()
    gate.mark_torn()
    assert gate.state().phase is Phase.TORN
    gate.mark_done()
    assert gate.state().phase is Phase.TORN


def test_done_is_quiet() -> None:
    gate = Gate()
    gate.mark_done()
    assert gate.close().phase is Phase.DONE


@pytest.mark.parametrize("seed", range(5))
def test_nothing_is_written_between_a_quiet_answer_and_the_thaw(seed: int) -> None:
    """Random freezes of a thread that trains as fast as it can: no write follows an idle answer."""
    chance = random.Random(seed)
    gate, stop = Gate(), threading.Event()
    writes = [0]

    def train() -> None:
        while not stop.is_set():
            gate.begin_update()
            writes[0] += 1
            gate.end_update()

    thread = threading.Thread(target=train)
    thread.start()
    idle = 0
    for _ in range(300):
        state = gate.close()
        deadline = time.monotonic() + 10
        while state.phase is Phase.UPDATING:
            state = gate.state()
            assert time.monotonic() < deadline
        before = writes[0]
        for _ in range(chance.randrange(200)):
            pass
        time.sleep(0)  # let the other thread run, if it can
        assert (writes[0], gate.version) == (before, state.version)
        idle += state.phase is Phase.IDLE
        gate.open()
    stop.set()
    gate.open()
    thread.join(10)
    assert idle == 300 and gate.version == writes[0] > 0
