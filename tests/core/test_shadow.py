"""Checkpoints that are held in memory first, as transcripts of the controller's machine."""

from __future__ import annotations

from typing import Any

import pytest

from tests.core.talk import Talk
from ttp.core import messages as m
from ttp.core.controller.continuing import SEAT_READY, SEAT_S
from ttp.core.controller.events import Accused
from ttp.core.layout import Rank, Version

HOLD = "/memory"


class Slow(Talk):
    """Three ranks that can go on, with slow storage. Rank 0 dies, and the others may hold the checkpoint in memory."""

    def hello(self, rank: int, **more: Any) -> str:
        return super().hello(rank, **{"can_continue": True, **more})

    def dies(self, rank: int = 0, seat: str = SEAT_READY) -> str:
        return self.event(Accused((Rank(rank),), m.FaultKind.EXITED, "killed", (100 + rank,), (), seat))

    def answers(self, *ranks: int, hold: str = HOLD, **more: Any) -> m.Save:
        for rank in ranks or (1, 2):
            self.frozen(rank, 7, hold_dir=hold, **more)
        first: m.Save = self.orders(m.Save)[0]
        return first

    def writes(self, save: m.Save) -> m.Commit:
        self.saved(save.rank, save.generation)
        first: m.Commit = self.orders(m.Commit)[0]
        return first

    def held(self, seat: str = SEAT_READY) -> str:
        self.dies(seat=seat)
        save = self.answers()
        commit = self.writes(save)
        assert (save.directory, commit.directory) == (HOLD, HOLD)
        return self.committed(commit.rank, commit.generation)

    def released(self) -> tuple[int, bool]:
        """Return the exit code of the last release, and whether ranks go on."""
        (code,) = {order.exit_code for order in self.orders(m.Release)}
        (again,) = {order.again for order in self.orders(m.Release)}
        return code, again


def test_ranks_go_on_from_what_is_held() -> None:
    talk = Slow()
    assert talk.held() == "[held] [released] Release(75):1,2"
    assert talk.released() == (75, True)
    assert talk.machine.rescue.committing.last is None  # nothing was saved yet
    assert "held in the memory" in talk.incident.outcome


@pytest.mark.parametrize("seat", ["no restart is left", ""])
def test_nobody_leaves_before_it_is_durable(seat: str) -> None:
    talk = Slow()
    said = talk.held(seat)
    if not seat:
        assert said == "[held]"
        said = f"{said} {talk.after(SEAT_S)}"
    assert said == "[held] [awaited] [commit] Commit:1"
    (commit,) = talk.orders(m.Commit)
    assert commit.directory == ""
    assert commit.pieces
    assert talk.committed(commit.rank, commit.generation) == "[committed] [released] Release(75):1,2"
    assert talk.released() == (75, False)
    committing = talk.machine.rescue.committing
    assert (committing.last, committing.held) == ((7, "/save/step"), None)


def test_the_held_checkpoint_is_no_answer_to_who_has_asked_for_one() -> None:
    talk = Slow()
    talk.dies()
    save = talk.answers()
    talk.ask()
    commit = talk.writes(save)
    assert talk.committed(commit.rank, commit.generation) == "[held] [awaited] [commit] Commit:1"


def test_a_fault_that_is_no_death_meanwhile() -> None:
    talk = Slow()
    talk.dies()
    commit = talk.writes(talk.answers())
    talk.fault(2)
    assert talk.committed(commit.rank, commit.generation).startswith("[held] [awaited] [commit] Commit:")


def test_what_cannot_be_held_is_saved_as_ever() -> None:
    talk = Slow()
    talk.dies()
    save = talk.answers()
    said = talk.save_failed(save.rank, save.generation, may_pass=True)
    assert said == "[save_failed] [not_held] [plan] Save:1"
    (again,) = talk.orders(m.Save)
    assert again.directory == ""
    assert again.generation > save.generation
    commit = talk.writes(again)
    assert talk.committed(commit.rank, commit.generation) == "[committed] [released] Release(75):1,2"
    assert talk.released() == (75, True)


def test_what_cannot_be_committed_to_memory_is_saved_as_ever() -> None:
    talk = Slow()
    talk.dies()
    commit = talk.writes(talk.answers())
    assert "[not_held] [plan] Save:1" in talk.commit_failed(commit.rank, commit.generation)
    assert talk.orders(m.Save)[0].directory == ""


def test_who_cannot_wait_for_it_is_replaced_and_then_all_is_written_anew() -> None:
    talk = Slow()
    talk.held("no restart is left")
    first = talk.orders(m.Commit)[0]
    talk.commit_failed(first.rank, first.generation, may_pass=True)
    second = talk.orders(m.Commit)[0]
    assert second.rank != first.rank
    talk.commit_failed(second.rank, second.generation, may_pass=True)
    talk.after(1.0)
    assert talk.orders(m.Commit), talk.said  # the storage is asked again: what is held is on its way there


@pytest.mark.parametrize("hold", ["", "/elsewhere"])
def test_all_ranks_have_to_say_the_same_place(hold: str) -> None:
    talk = Slow()
    talk.dies()
    talk.frozen(1, 7, hold_dir=HOLD)
    talk.frozen(2, 7, hold_dir=hold)
    assert talk.orders(m.Save)[0].directory == ""


def test_what_is_not_continued_is_not_held() -> None:
    talk = Slow()
    talk.dies()
    assert talk.answers(bad=("weight",)).directory == ""


def test_ranks_of_several_hosts_wait() -> None:
    talk = Slow(joined=0)
    for rank in range(3):
        talk.hello(rank, host=f"host{rank}")
    talk.dies()
    assert talk.answers().directory == ""


def test_what_is_held_only_does_not_count_as_on_disk() -> None:
    """After a second fault before the first update, one rank waits until the held checkpoint is durable."""
    talk = Slow(base_version=Version(7), version=Version(7))
    talk.dies()
    talk.frozen(1, 7, held=Version(7))
    assert talk.frozen(2, 7, held=Version(7)).endswith("[awaited] [commit] Commit:1")
    (commit,) = talk.orders(m.Commit)
    assert (commit.version, commit.directory, commit.pieces) == (7, "", ())
    assert talk.committed(1, commit.generation) == "[committed] [released] Release(75):1,2"
    assert talk.released() == (75, False)
    on_disk = Slow(base_version=Version(7), version=Version(7))
    on_disk.dies()
    on_disk.frozen(1, 7)
    assert "[nothing_new]" in on_disk.frozen(2, 7)


def test_ranks_that_have_restored_nothing_yet_do_not_go_on_again() -> None:
    """They have finished no step since the last start, which a controller may not know yet."""
    talk = Slow()
    talk.dies()
    for rank in (1, 2):
        talk.frozen(rank, 0, held=Version(7))
    (commit,) = talk.orders(m.Commit)
    talk.committed(commit.rank, commit.generation)
    assert talk.released() == (75, False)


def test_a_newer_version_than_the_held_one_is_saved_to_the_storage() -> None:
    talk = Slow()
    talk.held("")  # waits for the launcher
    talk.lost(2)
    talk.back(2, incident=talk.id, version=Version(8))
    talk.frozen(2, 8, hold_dir=HOLD)
    save = talk.orders(m.Save)[0]
    assert (save.version, save.directory) == (8, "")


def test_when_nobody_is_left_the_launcher_waits_for_what_is_held() -> None:
    talk = Slow()
    talk.held("")
    talk.dies(1)
    assert "Commit" not in talk.dies(2)


def test_what_was_said_of_memory_is_no_answer_to_the_next_controller() -> None:
    """The next controller uses larger generations, so an old answer is not taken for a durable save."""
    talk = Slow()
    talk.now, talk.machine.job.term = 10.0, 2
    talk.dies()
    talk.frozen(1, 7, held=Version(7))
    talk.frozen(2, 7, held=Version(7))
    (commit,) = talk.orders(m.Commit)
    assert commit.generation >= 1 << 16
    assert talk.committed(1, 0) == ""


@pytest.mark.parametrize("before", [False, True], ids=["held now", "held from before"])
def test_whoever_waits_for_it_is_replaced_and_nothing_is_added(before: bool) -> None:
    """A page that comes late would not be part of the held checkpoint."""
    talk = Slow()
    if before:
        talk.dies()
        talk.frozen(1, 7, held=Version(7))
        talk.frozen(2, 7, held=Version(7))
    else:
        talk.held("no restart is left")
    (first,) = talk.orders(m.Commit)
    assert "Save" not in talk.dies(first.rank)
    (second,) = talk.orders(m.Commit)
    assert (second.rank, second.pieces, second.directory) == (Rank(3 - first.rank), first.pieces, "")


def test_a_plan_that_is_made_again_goes_where_the_first_one_went() -> None:
    """All pieces of a checkpoint are in one directory."""
    talk = Slow()
    talk.dies()
    talk.frozen(1, 7)
    (save,) = talk.orders(m.Save) or [talk.answers(2)]
    assert save.directory == ""
    talk.save_failed(save.rank, save.generation)
    assert {again.directory for again in talk.orders(m.Save)} == {""}
