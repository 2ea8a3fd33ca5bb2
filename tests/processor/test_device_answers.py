"""The report of a rank whose device is behind its frozen host: soon, and again when the device goes on after all."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.processor.fake_source import FakeSource, alone
from tests.waiting import until
from ttp.core import messages as m
from ttp.core.decide import How
from ttp.core.layout import Rank, Version
from ttp.core.messages import Piece, Save, SaverOrder
from ttp.core.rank.events import NotRedone, Quiet
from ttp.processor import state_inspector
from ttp.processor.source import MovedError
from ttp.processor.state_inspector import Inspection

PATIENCE_S = 60.0


class Device(FakeSource):
    """A device that has finished ``done`` updates, or is in the middle of one (None). Records waits for it."""

    on_device = True

    def __init__(self, done: int | None) -> None:
        self.done = done
        self.held: int | None = None  # the version that it has all for
        self.copies = False
        self.asked: list[float] = []

    @property
    def has_preimage(self) -> bool:
        return self.copies

    def gradient_ready(self) -> bool:
        return self.held is not None

    def redo(self, version: Version) -> bool:
        if self.held == version:
            self.done, self.held = version, None
            return True
        return False

    def device_version(self, version: Version, patience_s: float) -> Version | None:
        if patience_s:
            self.asked.append(patience_s)
        return None if self.done is None else Version(min(version, self.done))


class Rig:
    """The processor of a host that has made three updates, frozen for an incident."""

    def __init__(self, directory: Path, source: Device) -> None:
        self.source, self.processor = source, alone(source, directory)
        self.processor.gate.set_version(Version(3))
        self.looker = self.processor._inspector

    def said(self) -> Any:
        """Return the next final answer, or another event for the machine."""
        while True:
            event = self.processor._inbox.get(timeout=PATIENCE_S)
            if not isinstance(event, Inspection):
                return event
            if event.quiet.phase is not m.Phase.UPDATING:
                return event.quiet

    def save(self, version: int) -> None:
        order = SaverOrder(Rank(0), self.processor.layout.shards_of(Rank(0)), How.AS_IS, (), False)
        self.processor._saver.save(Save(Rank(0), 1, "i", 1, Version(version), ".draft", order))

    def silent(self) -> bool:
        try:
            self.processor._inbox.get(timeout=10 * state_inspector.FOLLOW_S)
        except queue.Empty:
            return True
        return False


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Callable[[int | None], Rig]]:
    made: list[Rig] = []

    def make(done: int | None) -> Rig:
        made.append(Rig(tmp_path, Device(done)))
        return made[-1]

    yield make
    for each in made:
        each.looker.close()
    # nobody follows a device that is not asked for any more
    until(lambda: not any(thread.name == "ttp-follower" for thread in threading.enumerate()))


def test_a_device_that_hangs_costs_milliseconds_where_something_broke(rig: Callable[[int], Rig]) -> None:
    it = rig(2)
    it.looker.freeze(hurry=True)
    quiet: Quiet = it.said()
    assert (quiet.version, quiet.phase) == (2, m.Phase.IDLE)
    assert it.source.asked == [state_inspector.STILL_S] and state_inspector.STILL_S < 0.05
    assert it.silent(), "said once while nothing moves"


def test_for_a_mere_snapshot_it_is_waited_for(rig: Callable[[int], Rig]) -> None:
    it = rig(3)
    it.looker.freeze(hurry=False)
    assert it.said().version == 3 and it.source.asked == [state_inspector.DEVICE_PATIENCE_S]


def test_one_that_goes_on_is_said_to(rig: Callable[[int], Rig]) -> None:
    it = rig(1)
    it.looker.freeze(hurry=True)
    answers = [it.said().version]
    for done in (2, 3):
        it.source.done = done
        answers.append(it.said().version)
    assert answers == [1, 2, 3]


def test_what_was_said_of_a_device_is_not_overruled_by_its_host(rig: Callable[[int], Rig]) -> None:
    """An order may arrive after the next heartbeat, so both must name the same version."""
    it = rig(2)
    assert it.processor._observed().version == 3
    it.looker.freeze(hurry=True)
    assert it.said().version == 2
    observed = it.processor._observed()
    assert (observed.version, observed.phase) == (2, m.Phase.IDLE)
    it.looker.thaw()
    assert it.processor._observed().version == 3


def test_half_an_update_is_torn_until_it_is_whole(rig: Callable[[int | None], Rig]) -> None:
    it = rig(None)
    it.looker.freeze(hurry=True)
    assert it.said().phase is m.Phase.TORN
    it.source.done = 3
    quiet = it.said()
    assert (quiet.version, quiet.phase) == (3, m.Phase.IDLE)


def test_one_that_stands_before_an_update_with_its_gradient_says_so_and_makes_it_by_order(
    rig: Callable[[int], Rig],
) -> None:
    """The training thread is not at the gate, but the update is queued on the device."""
    it = rig(2)
    it.source.held = 3
    it.looker.freeze(hurry=True)
    quiet = it.said()
    assert (quiet.version, quiet.has_gradient, quiet.parked) == (2, True, False)
    it.processor._inspector.redo(Version(3))
    quiet = it.said()
    assert (quiet.version, quiet.has_gradient) == (3, False)


def test_one_that_cannot_be_let_go_is_no_reason_to_let_its_host_go(rig: Callable[[int], Rig]) -> None:
    """The host waits at the gate of a later update, which it may not begin."""
    it = rig(2)
    it.processor.gate.close()
    training = threading.Thread(target=it.processor.begin_update, daemon=True)
    training.start()
    while not it.processor.gate.state().parked:
        assert training.is_alive()
    it.processor._inspector.redo(Version(3))
    while not isinstance(it.said(), NotRedone):
        pass  # what it says of standing there
    assert it.processor.gate.state().parked
    it.processor.gate.open()
    training.join(PATIENCE_S)


def test_nobody_is_told_of_a_device_under_an_open_gate(rig: Callable[[int], Rig]) -> None:
    it = rig(2)
    it.looker.freeze(hurry=True)
    assert it.said().version == 2
    it.looker.thaw()
    it.source.done = 3
    assert it.silent()


def test_a_save_that_the_device_has_left_fails_when_it_is_known_where_it_is(
    rig: Callable[[int], Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the failure came first, the rank would be excluded although it could save the newer version."""
    it = rig(2)
    monkeypatch.setattr(state_inspector, "FOLLOW_S", PATIENCE_S)  # the save notices first
    it.looker.freeze(hurry=True)
    assert it.said().version == 2

    def moved(**_: Any) -> list[Piece]:
        it.source.done = 3
        raise MovedError("the device has finished version 3")

    monkeypatch.setattr(it.source, "write_pieces", moved)
    it.save(2)
    quiet, failed = it.said(), it.said()
    assert quiet.version == 3
    assert isinstance(failed.result, m.SaveFailed) and failed.result.may_pass
    assert "finished version 3" in failed.result.text


def test_a_save_of_what_the_device_holds_succeeds(rig: Callable[[int], Rig]) -> None:
    it = rig(2)
    it.looker.freeze(hurry=True)
    assert it.said().version == 2
    it.save(2)
    assert isinstance(it.said().result, m.Saved)


def test_other_weights_in_the_model_count_as_torn_until_they_are_gone(rig: Callable[[int], Rig]) -> None:
    """An average that the program evaluates, without a copy of the version before."""
    it = rig(3)
    source: Any = it.source
    source.other_weights = lambda: True
    it.looker.freeze(hurry=True)
    first: Quiet = it.said()
    assert (first.version, first.phase, first.has_preimage, first.digests) == (3, m.Phase.TORN, False, ())
    assert it.silent(), "said once"
    source.other_weights = lambda: False
    then: Quiet = it.said()
    assert (then.version, then.phase) == (3, m.Phase.IDLE)


@pytest.mark.parametrize("on_device", [True, False])
def test_an_adapter_that_cannot_look_is_asked_again_less_and_less_often(
    rig: Callable[[int], Rig], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, on_device: bool
) -> None:
    """Each time an error is logged."""
    it = rig(2)
    source: Any = it.source
    if not on_device:
        source.on_device, source.other_weights = False, lambda: True
    it.looker.freeze(hurry=True)
    assert it.said().version == (2 if on_device else 3)
    until(lambda: any(thread.name == "ttp-follower" for thread in threading.enumerate()))
    answers = iter([RuntimeError("cannot look")] * 3)

    def look(*_: object) -> Any:
        for problem in answers:
            raise problem
        return Version(3) if on_device else False

    pauses: list[float] = []
    monkeypatch.setattr(it.looker._enough, "wait", pauses.append)
    setattr(source, "device_version" if on_device else "other_weights", look)
    then: Quiet = it.said()
    assert (then.version, then.phase) == (3, m.Phase.IDLE)
    errors = [record for record in caplog.records if record.exc_info]
    assert len(errors) == 3 and pauses[-3:] == [state_inspector.FOLLOW_S * 2**n for n in (1, 2, 3)]


@pytest.mark.parametrize("thread", ["evaluates", "left", "returned"])
def test_other_weights_that_stay_leave_the_version_before(
    rig: Callable[[int], Rig], thread: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy that was made before the last update. If the weights come back after all, the rank is whole.

    A thread that has left the loop is not waited for, so such a rank never answers that it has nothing to save.
    """
    it = rig(3)
    source: Any = it.source
    source.other_weights, source.copies, it.looker.left = lambda: True, True, thread == "left"
    if thread == "returned":
        it.processor.gate.mark_done()
    monkeypatch.setattr(state_inspector, "WEIGHTS_S", 0.0 if thread == "evaluates" else 3600.0)
    it.looker.freeze(hurry=True)
    if thread == "evaluates":
        assert not it.said().has_preimage
    else:
        it.source.on_device = False
        event = it.processor._inbox.get(timeout=PATIENCE_S)
        assert isinstance(event, Inspection)
        said = event.quiet
        assert (said.version, said.phase) == (3, m.Phase.UPDATING), "it tells which version is lost"
    first: Quiet = it.said()
    assert (first.version, first.phase, first.has_preimage) == (2, m.Phase.TORN, True)
    assert first.parked is (thread == "left"), "else it may still come to the gate"
    assert it.silent(), "said once"
    source.other_weights = lambda: False
    last: Quiet = it.said()
    assert (last.version, last.phase) == (3, m.Phase.DONE if thread == "returned" else m.Phase.IDLE)


def test_weights_that_come_back_in_a_moment_cost_no_step(
    rig: Callable[[int], Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then the rank has no version, and says so: a save of ranks that have one does not wait for it."""
    monkeypatch.setattr(state_inspector, "WEIGHTS_S", 3600.0)
    it = rig(3)
    source: Any = it.source
    source.other_weights, source.copies = lambda: True, True
    it.looker.freeze(hurry=True)
    first: Quiet = it.said()
    assert (first.version, first.phase, first.has_preimage) == (3, m.Phase.TORN, False)

    def late() -> bool:
        raise TimeoutError("a device did not answer")

    source.other_weights = late
    assert it.silent(), "they may still be there"
    source.other_weights = lambda: False
    found: Quiet = it.said()
    assert (found.version, found.phase, found.has_preimage) == (3, m.Phase.IDLE, True)


@pytest.mark.parametrize(("version", "warnings"), [(3, 1), (0, 0)])
def test_a_rank_that_still_loads_its_weights_is_not_told_to_evaluate_a_copy(
    rig: Callable[[int], Rig], caplog: pytest.LogCaptureFixture, version: int, warnings: int
) -> None:
    """Version 0 is held while ``restore()`` puts the weights of a checkpoint into the model."""
    it = rig(version)
    it.processor.gate.set_version(Version(version))
    source: Any = it.source
    source.other_weights = lambda: True
    it.looker.freeze(hurry=True)
    assert it.said().phase is m.Phase.TORN
    source.other_weights = lambda: False
    assert it.said().phase is m.Phase.IDLE
    said = [record for record in caplog.records if record.levelname == "WARNING"]
    assert ["Evaluate a copy" in record.getMessage() for record in said] == [True] * warnings


def test_between_the_steps_of_a_version_weights_differ_and_the_copies_are_still_good(rig: Callable[[int], Rig]) -> None:
    """What is in the model then is not read: the rank is saved from the copies."""
    it = rig(3)
    source: Any = it.source
    source.other_weights, source.copies = lambda: True, True
    gate = it.processor.gate
    gate.begin_update()
    gate.stand_between()
    it.looker.freeze(hurry=True)
    found: Quiet = it.said()
    assert (found.version, found.phase, found.has_preimage) == (3, m.Phase.TORN, True)
