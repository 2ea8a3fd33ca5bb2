"""The storage refuses: the save is made in another directory, or once more after a while."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.core.talk import Talk, Wide, line
from ttp.core import messages as m
from ttp.testing.scenario import grid


def saving(fallback_dir: str = "", *, from_rank: int = 0, **patience: Any) -> Wide:
    """Return a job that saves after a fault. Ranks below ``from_rank`` were started without a fallback directory."""
    talk = Wide(**patience)
    for rank, member in talk.machine.job.members.items():
        member.hello = replace(member.hello, fallback_dir=fallback_dir if rank >= from_rank else "")
    talk.fault(5)
    talk.frozen_all()
    return talk


def nobody_can_write(talk: Wide) -> tuple[list[m.Save], str]:
    """Let every save fail. Returns the orders before the last answer, and the actions after it."""
    ordered: list[m.Save] = []
    for _ in range(6):
        pending = talk.incident.draft.pending
        rank = min(pending)
        said = talk.save_failed(rank, pending[rank].generation)
        if "fallback" in said or "Release" in said:
            return ordered, said
        ordered += talk.orders(m.Save)
    raise AssertionError("six ranks have failed, and it goes on")


@pytest.mark.parametrize("from_rank", [0, 1])
def test_when_nobody_can_write_everything_goes_to_the_fallback(from_rank: int) -> None:
    talk = saving("/spare", from_rank=from_rank)
    before, said = nobody_can_write(talk)
    assert before
    assert {order.directory for order in before} == {""}
    assert "[fallback] [plan] Save" in said
    orders = talk.orders(m.Save)
    assert orders[0].directory == "/spare"
    for order in orders:
        talk.saved(order.rank, order.generation)
    (commit,) = talk.orders(m.Commit)
    assert commit.directory == "/spare"
    assert talk.committed(commit.rank, commit.generation).startswith("[committed] [released] Release(75)")


def test_the_fallback_is_tried_once() -> None:
    talk = saving("/spare")
    nobody_can_write(talk)
    _, said = nobody_can_write(talk)
    assert "Release(70)" in said
    assert "disk full" in talk.orders(m.Release)[0].text


def test_without_a_fallback_it_is_said() -> None:
    talk = saving()
    _, said = nobody_can_write(talk)
    assert "Release(70)" in said


def everybody_fails(talk: Talk) -> str:
    """Let saves fail until no rank is asked any more."""
    said = ""
    while (incident := talk.machine.incident) is not None and incident.draft.pending:
        rank = min(incident.draft.pending)
        said = talk.save_failed(rank, incident.draft.pending[rank].generation, may_pass=True)
    return said


def test_storage_that_refuses_everybody_is_asked_again_later() -> None:
    talk = saving(rescue_s=60.0)
    waited = []
    for _ in range(9):
        assert everybody_fails(talk).endswith("[retry]")
        waited.append(talk.facts("retry")["after_s"])
        talk.lost(5)
        talk.back(5, incident=talk.id)
        talk.frozen(5, 7)
        assert not talk.incident.waits_for, "a status tells that the storage has refused"
        assert talk.after(waited[-1] - 0.01) == "", "not before"
        assert "[plan] Save" in talk.after(0.02)
    assert waited == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0]
    assert talk.write().startswith("[committed] [released] Release(75)")


@pytest.mark.parametrize("retried", [False, True])
def test_who_failed_of_something_else_is_not_asked_again(retried: bool) -> None:
    talk = saving(rescue_s=60.0)
    if retried:
        everybody_fails(talk)
        talk.after(0.2)
    first = min(talk.incident.draft.pending)
    talk.save_failed(first, talk.incident.draft.pending[first].generation)
    assert everybody_fails(talk).endswith("[retry]")
    assert "storage refused rank" in talk.incident.why and f"rank {first}" not in talk.incident.why
    while (incident := talk.machine.incident) is not None and incident.retries < 3:
        talk.after(11)
        assert first not in {order.rank for order in talk.orders(m.Save) if order.order.shards}
        everybody_fails(talk)
    assert talk.machine.incident is not None


def test_when_time_is_up_what_refused_is_said() -> None:
    talk = saving(rescue_s=60.0)
    everybody_fails(talk)
    assert "Release(70)" in talk.after(61)
    text = talk.orders(m.Release)[0].text
    assert "rank 0: disk full" in text and "TTP_OT" in text


def test_both_places_are_asked_again_and_what_is_durable_there_counts() -> None:
    talk = saving("/spare", rescue_s=60.0)
    for order in talk.orders(m.Save):
        talk.saved(order.rank, order.generation)  # all is durable in save_dir, and nobody can rename it
    refused: list[str] = []
    for _ in range(40):
        incident = talk.machine.incident
        assert incident is not None
        if incident.draft.pending:
            refused.append(incident.draft.directory)
            everybody_fails(talk)
        elif incident.draft.committer is not None and not incident.retries:
            talk.commit_failed(incident.draft.committer, incident.draft.generation, may_pass=True)
        elif incident.draft.committer is not None:
            break
        else:
            talk.after(0.05)
    assert refused == ["/spare"], "the pieces in save_dir were not written a second time"
    assert incident is not None and incident.draft.committer is not None and incident.draft.directory == ""
    assert "Release(75)" in talk.committed(incident.draft.committer, incident.draft.generation)


def test_a_checkpoint_on_request_is_not_tried_again() -> None:
    """The job is healthy, and would stand still during further attempts."""
    talk = Wide()
    talk.ask()
    talk.frozen_all()
    said = everybody_fails(talk)
    assert "Thaw" in said and "[retry]" not in said


def test_storage_that_takes_nothing_has_failed() -> None:
    talk = saving(stall_s=60.0)
    (first,) = {order.rank for order in talk.orders(m.Save) if order.order.shards}
    talk.now += 59
    for rank in range(6):
        talk.beat(rank, written=5)
    assert talk.after(59) == "", "bytes were written: it is slow, it does not hang"
    said = talk.after(1)
    assert "[save_failed]" in said
    assert "[replan] [plan] Save" in said
    assert "took no byte for 60 s (TTP_STALL_S)" in talk.facts("save_failed")["text"]
    assert first in talk.incident.ranks.failures


@pytest.mark.parametrize("stage", ["saving", "committing"])
def test_storage_has_its_time_again_after_the_controller_was_stopped(stage: str) -> None:
    """What ranks have reported meanwhile waits unread."""
    talk = saving(stall_s=60.0)
    for order in talk.orders(m.Save) if stage == "committing" else ():
        talk.saved(order.rank)
    assert talk.machine.stage == stage and talk.after(100) == ""
    assert talk.after(59) == "" and "_failed]" in talk.after(1)


@pytest.mark.parametrize("stage", ["saving", "committing"])
def test_storage_that_hangs_is_not_tried_by_one_rank_after_the_other(stage: str) -> None:
    """If there is another directory, it is used at once."""
    talk = saving("/spare", stall_s=60.0)
    for order in talk.orders(m.Save) if stage == "committing" else ():
        talk.saved(order.rank)
    assert talk.machine.stage == stage
    said = talk.after(60)
    assert "[fallback] [plan] Save" in said and "[replan]" not in said
    assert {order.directory for order in talk.orders(m.Save)} == {"/spare"}
    talk.after(60)
    assert "[fallback]" not in line(talk.said), "there is no third place"
    assert {order.directory for order in talk.orders(m.Save)} == {"/spare"}


def test_a_commit_that_hangs_is_given_to_another() -> None:
    talk = saving(stall_s=60.0)
    for order in talk.orders(m.Save):
        said = talk.saved(order.rank)
    assert "Commit:0" in said
    assert "[commit_failed]" in talk.after(60)
    assert talk.orders(m.Commit)[0].rank != 0


def test_a_commit_that_many_ranks_are_refused_is_made_in_the_fallback() -> None:
    """A thousand commits one after the other may take longer than TTP_OT."""
    talk = Talk(grid(1, 100))
    for member in talk.machine.job.members.values():
        member.hello = replace(member.hello, fallback_dir="/spare")
    talk.fault(99)
    talk.frozen_all(7, *range(100))
    talk.saved(talk.orders(m.Save)[0].rank)
    said, refusals = "", 0
    while "[fallback]" not in said:
        (commit,) = talk.orders(m.Commit)
        said, refusals = talk.commit_failed(commit.rank, commit.generation, may_pass=True), refusals + 1
    assert refusals == 16
    assert {order.directory for order in talk.orders(m.Save)} == {"/spare"}
    assert "Release(75)" in talk.write()
