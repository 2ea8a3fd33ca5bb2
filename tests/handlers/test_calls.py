"""What a program with handlers may call when: before the job is joined, while it is frozen, and at its end."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ttp.config import Config, RankEnv
from ttp.core.layout import Version
from ttp.core.messages import FaultKind
from ttp.errors import UsageError
from ttp.mindio.handlers import Ailment, ForcedStop, HandlerKind, Participant
from ttp.mindio.protocol.rank_side import Said
from ttp.processor.gate.gate import Gate, Halted

ENV = RankEnv.from_env({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"})


class Joined:
    """The processor of a rank that has joined: its gate, and what was said and done."""

    joins = was_guest = False

    def __init__(self) -> None:
        self.gate, self.told, self.closed = Gate(), list[Any](), False
        self.reports: list[tuple[FaultKind, str]] = []
        self.halts = False
        self.based: list[Version] = []

    def tell(self, said: Said) -> None:
        self.told.append(said.report)

    def begin_update(self) -> None:
        if self.halts:
            raise Halted
        self.gate.begin_update()

    def end_update(self, version: Version) -> None:
        self.gate.end_update(version)

    def set_base_version(self, version: Version) -> None:
        self.based.append(version)

    def report(self, kind: FaultKind, text: str, code: str) -> None:
        self.reports.append((kind, text))

    def wait_released(self) -> None:
        """Return at once: there is no controller."""

    def close(self) -> None:
        self.closed = True


class Seat:
    """The mark of a process that has to begin an update, or is killed."""

    def __init__(self) -> None:
        self.gives_way, self.kept, self.taken = False, 0, 0

    def keep(self) -> None:
        self.gives_way, self.kept = False, self.kept + 1

    def take(self, *_: object) -> None:
        self.taken += 1


def member(tmp_path: Path, **settings: Any) -> Any:
    part: Any = Participant(ENV, Config(port=1, run_dir=str(tmp_path), save_dir=str(tmp_path)), **settings)
    part._processor, part._seat = Joined(), Seat()
    return part


def test_a_program_that_has_not_joined_trains_unprotected(tmp_path: Path) -> None:
    """Also one whose controller did not answer: no call fails, and nothing waits."""
    part: Any = Participant(ENV, Config(port=1, run_dir=str(tmp_path)))
    assert part.begin_update() is True
    part.end_update(1)
    part.report_error(Ailment.FATAL)
    part.report_loaded_step(3)
    part.reset_limit_step()
    part.leave()
    part.close()
    assert (part.step, part.repair_step(), part.repair_type(), part.generation()) == (0, 0, "", 0)
    assert not part.moves and part._gone()


def test_a_rank_joins_once(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"start\(\) was called twice"):
        member(tmp_path).start()


@pytest.mark.parametrize("guest", [False, True])
def test_a_new_process_of_a_lost_rank_takes_its_seat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, guest: bool
) -> None:
    """A guest waits for the seat until the rank's old process leaves it."""
    part = member(tmp_path)
    joined, part._processor = part._processor, None
    joined.joins, joined.was_guest = True, guest
    begun = SimpleNamespace(start_processor=lambda *_: joined)
    monkeypatch.setattr("ttp.mindio.handlers.participant.session.begin", lambda _: begun)
    part.start()
    assert part.rebooted and part._seat.taken == (not guest) and part._session is begun


@pytest.mark.parametrize("raises", [True, False])
def test_a_halted_program_leaves_its_loop_by_the_way_that_it_knows(tmp_path: Path, raises: bool) -> None:
    """PyTorch programs look for an exception, MindSpore's own loop for a value."""
    part = member(tmp_path, raise_when_halted=raises)
    part._processor.halts = True
    if raises:
        with pytest.raises(ForcedStop, match="FORCE STOP"):
            part.begin_update()
    else:
        assert part.begin_update() is False


def test_a_process_that_begins_an_update_is_not_killed_any_more(tmp_path: Path) -> None:
    part = member(tmp_path)
    part._seat.gives_way = True
    assert part.begin_update() and part._seat.kept == 1
    part.end_update(1)
    assert part.begin_update() and part._seat.kept == 1


def test_an_end_without_a_beginning_has_no_effect_and_one_in_a_frozen_job_is_noted(tmp_path: Path) -> None:
    part, noted = member(tmp_path), []
    part._actor = SimpleNamespace(calls_here=False, updated=lambda: noted.append(part.step))
    part.end_update(7)
    assert part.step == 0
    part.begin_update()
    part.end_update(1)
    assert part.step == 1 and not noted
    part.begin_update()
    part._processor.gate.close()
    part.end_update(2)
    assert noted == [2], "the answer to a freeze waits for the end of the update"


@pytest.mark.parametrize(("first", "joins", "based"), [(8, False, [7]), (1, False, []), (8, True, [])])
def test_the_first_update_tells_what_the_program_has_restored(
    tmp_path: Path, first: int, joins: bool, based: list[int]
) -> None:
    """Otherwise a controller that takes over then would think that the job had made as many updates in this launch.

    A process that replaces another one has its state from other ranks: no checkpoint need have it.
    """
    part = member(tmp_path)
    part._processor.joins = joins
    for step in (first, first + 1):
        part.begin_update()
        part.end_update(step)
    assert part._processor.based == based and part.step == first + 1


def test_a_fault_that_no_controller_handles_ends_the_protection_and_not_the_program(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    part = member(tmp_path)
    joined = part._processor
    part.report_error(Ailment.FATAL, text="a device is broken")
    assert joined.reports == [(FaultKind.EXCEPTION, "rank 0: a device is broken")] and joined.closed
    assert part.begin_update() and "no controller has handled the failure of rank 0" in caplog.text


def test_a_step_that_a_handler_has_loaded_is_that_of_the_repair(tmp_path: Path) -> None:
    part = member(tmp_path)
    part._actor = SimpleNamespace(loaded=None)
    part.report_loaded_step(12)
    assert part._actor.loaded == 12


@pytest.mark.parametrize("frozen", [False, True])
def test_threads_that_wait_can_be_made_to_leave_their_loops(tmp_path: Path, frozen: bool) -> None:
    """The gate of a job that trains stays open."""
    part = member(tmp_path)
    if frozen:
        part._processor.gate.close()
    part.reset_limit_step()
    if frozen:
        with pytest.raises(ForcedStop):
            part.begin_update()
    else:
        assert part.begin_update()


def test_what_a_program_learns_after_it_has_joined_is_told(tmp_path: Path) -> None:
    """Its handlers too: without both of them no new process can replace a lost rank."""
    part = member(tmp_path, recover=True)
    part.set_halt_before_dump(True)
    for kind in (HandlerKind.SAVE, HandlerKind.REBUILD, HandlerKind.REPAIR):
        part.register(kind, lambda call: None)
    assert [(said.halt_before_dump, said.recover) for said in part._processor.told] == [
        (True, False), (True, False), (True, True),
    ]  # fmt: skip


@pytest.mark.parametrize("interrupt", [None, KeyboardInterrupt()])
def test_the_end_waits_for_the_others_unless_the_user_has_ended_the_program(
    tmp_path: Path, interrupt: KeyboardInterrupt | None
) -> None:
    part, ends = member(tmp_path), list[object]()
    part._session = SimpleNamespace(left=ends.append, returned=lambda: ends.append("returned"))
    part._seat.gives_way = True
    part.leave(interrupt)
    assert ends == [interrupt or "returned"] and part._seat.kept == 1
    part.leave()
    assert len(ends) == 1, "it has left"
