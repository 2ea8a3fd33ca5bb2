"""A call of ``@ttp.one_step`` in which another rank dies: when it is made again, and when the loop is left."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

import ttp
from ttp import session
from ttp.core.layout import Version
from ttp.processor import continuing
from ttp.processor.gate.gate import Halted

COLLECTIVE = RuntimeError("Connection closed by peer [127.0.0.1]:1")


class Left(BaseException):
    """The process has ended with 75."""


class Job:
    """A rank that can go on: the session, the processor, the adapter and the survivor, as far as a call uses them."""

    def __init__(self) -> None:
        self.enters = 0
        self.released = self.reported = False
        self.stay, self.restored, self.wrong = True, Version(0), None
        self.asked: list[tuple[int, str]] = []
        self.version = Version(0)
        self.gate: Any = SimpleNamespace(version=Version(0))
        self.repeating = self
        self.releasing = False
        self.clock = SimpleNamespace(runs=False)
        self.processor = SimpleNamespace(gate=self.gate, survivor=self)
        self.adapter: Any = self

    # -- the session

    def report(self, problem: BaseException) -> None:
        self.reported, self.releasing = True, self.released

    def end_launch(self) -> None:
        """See ``Session``."""

    def wrap_again(self) -> None:
        self.releasing = False
        if self.wrong is not None:
            raise self.wrong

    def restore(self) -> Version:
        return self.restored

    # -- what a call has begun with

    def begin(self, version: Version, _: object) -> None:
        self.version = version

    def end(self, version: Version) -> None:
        """See ``Repeating``."""

    def refusal(self) -> str:
        return ""

    def reset(self) -> None:
        """See ``Repeating``."""

    def go_on_from(self, start: Any) -> None:
        """See ``Repeating``."""

    def streams(self) -> bytes:
        return b""

    def set_streams(self, _: bytes) -> None:
        """See ``Repeating``."""

    # -- the survivor

    def why_no_loop(self) -> str:
        return ""

    def stays(self, version: Version, why_not: str, *_: object) -> bool:
        self.asked.append((version, why_not))
        return self.stay and not why_not

    def leave(self, why: str) -> None:
        raise Left(why)

    # -- the program

    def update(self) -> None:
        self.gate.version += 1


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    made = Job()
    monkeypatch.setattr(session, "current", lambda: made)
    monkeypatch.setattr(continuing, "current", lambda: made)
    yield made


def program(job: Job, break_at_first: Callable[[], None]) -> Callable[..., list[int]]:
    """Return a decorated function that takes two items of an iterator; its first call breaks after the first item."""

    @ttp.one_step
    def update(batches: Iterator[int]) -> list[int]:
        job.enters += 1
        first = next(batches)
        if job.enters == 1:
            break_at_first()
        job.update()
        return [first, next(batches)]

    return update


def released(job: Job, problem: Exception) -> Callable[[], None]:
    def end() -> None:
        job.releasing = True
        raise problem

    return end


@pytest.mark.parametrize("problem", [Halted(), COLLECTIVE])
def test_a_call_that_a_death_has_broken_is_made_again_with_the_same_items(job: Job, problem: Exception) -> None:
    """Whether the thread stood at the gate, or in a collective whose connection was broken."""
    assert program(job, released(job, problem))(iter(range(9))) == [0, 1]
    assert (job.enters, job.gate.version, job.asked) == (2, 1, [(0, "")])
    assert not job.reported


def test_a_collective_that_fails_before_the_release_is_reported_and_the_release_awaited(job: Job) -> None:
    job.released = True

    def fail() -> None:
        raise COLLECTIVE

    assert program(job, fail)(iter(range(9))) == [0, 1] and job.reported


@pytest.mark.parametrize("case", ["an error of the program", "halted by no death", "no rescue", "on its way"])
def test_any_other_error_passes_through(job: Job, case: str) -> None:
    """Of a rank that is on its way into the next launch no error is reported: it leaves, and all start anew."""
    problem = {"an error of the program": ValueError("mine"), "halted by no death": Halted()}.get(case, COLLECTIVE)
    job.clock.runs = case == "on its way"

    def fail() -> None:
        raise problem

    with pytest.raises(type(problem)) as raised:
        program(job, fail)(iter(range(9)))
    assert raised.value is problem and job.enters == 1
    assert job.reported == (case == "no rescue")


def test_the_loop_is_left_if_the_ranks_decide_so(job: Job) -> None:
    job.stay = False
    with pytest.raises(Halted):
        program(job, released(job, Halted()))(iter(range(9)))
    assert job.enters == 1


def test_a_call_whose_update_was_finished_is_not_made_again(job: Job) -> None:
    """It would make the update twice."""

    def end() -> None:
        job.update()
        released(job, COLLECTIVE)()

    with pytest.raises(RuntimeError, match="Connection closed"):
        program(job, end)(iter(range(9)))
    assert job.asked == [(0, "it has made update 1 in the call that was broken")]


def test_a_death_between_two_calls_begins_none(job: Job) -> None:
    """The next update would be of the old launch."""
    job.releasing = True
    assert program(job, lambda: None)(iter(range(9))) == [0, 1]
    assert job.enters == 1 and job.asked == [(0, "")]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"wrong": OSError("no route to host")}, r"could not stay in its loop: OSError\('no route to host'\)"),
        ({"restored": Version(3)}, "stands before update 1, but the others restore step 3"),
    ],
)
def test_a_rank_that_cannot_stay_with_the_others_ends_and_all_are_restarted(
    job: Job, change: dict[str, Any], why: str
) -> None:
    vars(job).update(change)
    with pytest.raises(Left, match=why):
        program(job, released(job, Halted()))(iter(range(9)))


def test_several_updates_in_one_call_are_told_of_where_calls_may_be_repeated_too(
    job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    @ttp.one_step
    def updates_of_a_round() -> None:
        job.update()
        job.update()

    with caplog.at_level(logging.WARNING, logger="ttp"):
        updates_of_a_round()
    assert "one call of it has finished 2 updates" in caplog.text
