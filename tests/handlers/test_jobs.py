"""Handlers in real processes with a real controller: their arguments, their order, and the end of the job."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from tests.handlers.jobs import Job, after
from ttp.errors import EXIT_NOT_SAVED, EXIT_SAVED

KILLED = -signal.SIGKILL


def test_a_kill_is_a_dump_by_one_rank_for_each_piece(job: Any) -> None:
    done: Job = job(faults=[{"rank": 1, "step": 4, "what": "kill"}])
    assert done.run() == [EXIT_SAVED, KILLED, EXIT_SAVED, EXIT_SAVED]
    info = [{"type": 0, "ranks": [0, 3]}]
    assert {rank: [n["info"] for n in notes] for rank, notes in done.of("save").items()} == {0: [info], 3: [info]}
    assert done.order(3) == ["save", "rename", "exit"]
    assert done.order(2) == ["exit"]
    assert [done.part(3, rank) for rank in (0, 3)] == [{"value": after(3), "step": 3}] * 2
    assert (done.directory / "checkpoint-3").exists()


@pytest.mark.slow
def test_rank_zero_may_die_and_save_handlers_may_wait_for_each_other(job: Any) -> None:
    """Rank 2 dies while it saves, so the newly chosen ranks save again."""
    faults = [{"rank": 0, "step": 4, "what": "kill"}, {"rank": 2, "step": 3, "what": "kill", "at": "save"}]
    done: Job = job(ranks=6, copies=3, faults=faults, options={"collective_save": True})
    codes = done.run()
    assert [codes[r] for r in (0, 2)] == [KILLED] * 2 and {codes[r] for r in (1, 3, 4, 5)} == {EXIT_SAVED}
    assert [n["info"][0]["ranks"] for n in done.of("save")[1]] == [[2, 1], [4, 1]]
    assert set(done.of("rename")) == {4}


def test_lost_memory_is_repaired_in_the_same_processes(job: Any) -> None:
    done: Job = job(faults=[{"rank": 1, "step": 4, "what": "memory"}])
    assert done.run() == [0] * 4
    assert {notes[0]["value"] for notes in done.of("done").values()} == {after(8)}
    assert done.order(1, "raised", "next") == ["fault", "stop", "clean", "repair", "rollback", "again", "done"]
    part = {"type": [0], "src": [3], "dst": [1], "rank_list": [1, 3]}
    repairs = {rank: notes[0] for rank, notes in done.of("repair").items()}
    assert {rank: n["info"] for rank, n in repairs.items()} == {
        1: {**part, "repair_type": 1},
        3: {**part, "repair_type": 0},
    }
    assert (repairs[1]["rebuild"], repairs[1]["errors"], repairs[1]["step"]) == (True, [1], 3)
    assert [done.of("clean")[rank][0]["memory_error"] for rank in range(4)] == [False, True, False, False]
    assert [done.of("again")[rank][0]["kind"] for rank in range(4)] == ["retry"] * 4


def test_a_broken_link_needs_no_repair_and_a_second_fault_is_mended_too(job: Any) -> None:
    """In the second fault the lost memory held no part of the state."""
    faults = [{"rank": 1, "step": 3, "what": "network"}, {"rank": 0, "step": 6, "what": "memory_low"}]
    done: Job = job(ranks=2, faults=faults)
    assert done.run() == [0] * 2
    assert {notes[0]["value"] for notes in done.of("done").values()} == {after(8)}
    assert {rank: [n["info"]["repair_type"] for n in notes] for rank, notes in done.of("repair").items()} == {0: [2]}
    assert [[n["step"] for n in notes] for notes in done.of("rollback").values()] == [[2, 5]] * 2


def test_a_death_while_a_job_is_mended_is_a_dump_of_what_is_whole(job: Any) -> None:
    """Rank 1 waits for the state that rank 2 was to send."""
    faults = [{"rank": 1, "step": 4, "what": "memory"}, {"rank": 2, "step": 3, "what": "kill", "at": "repair"}]
    done: Job = job(ranks=3, copies=3, faults=faults)
    assert done.run() == [EXIT_SAVED, EXIT_SAVED, KILLED]
    assert {rank: notes[0]["info"] for rank, notes in done.of("save").items()} == {0: [{"type": 0, "ranks": [0]}]}
    assert done.part(3, 0) == {"value": after(3), "step": 3}


@pytest.mark.slow
def test_wrong_numbers_are_not_saved(job: Any) -> None:
    done: Job = job(ranks=2, faults=[{"rank": 1, "step": 4, "what": "precision"}])
    assert done.run() == [EXIT_NOT_SAVED] * 2
    assert not done.of("save")


@pytest.mark.slow
def test_wrong_numbers_are_replaced_by_a_checkpoint(job: Any) -> None:
    options = {"participant": {"load_repair": True}}
    done: Job = job(ranks=2, faults=[{"rank": 1, "step": 4, "what": "precision"}], options=options)
    assert done.run() == [0] * 2
    assert {notes[0]["value"] for notes in done.of("done").values()} == {after(8)}
    assert [n["step"] for n in done.of("again")[0]] == [1]


def test_a_checkpoint_on_demand_and_training_goes_on(job: Any) -> None:
    running: Job = job(ranks=2, copies=1, steps=40, options={"step_s": 0.03}).start()
    running.until(lambda: len(running.of("step").get(0, [])) >= 3)
    answer = running.save()
    assert answer.saved and answer.version >= 3, answer.text
    assert running.wait() == [0, 0]
    infos = {rank: notes[0]["info"] for rank, notes in running.of("save").items()}
    assert infos == {rank: [{"type": 0, "ranks": [0, 1]}] for rank in (0, 1)}
    assert [running.part(answer.version, r)["value"] for r in (0, 1)] == [after(answer.version)] * 2
    assert set(running.of("rename")) == {1}


def test_survivors_obey_sigterm(job: Any) -> None:
    running: Job = job(ranks=2, steps=10_000, options={"step_s": 0.02}).start()
    running.until(lambda: all(len(running.of("step").get(r, [])) >= 2 for r in (0, 1)))
    running.workers[0].terminate()
    assert running.wait() == [75, 75]
    made = {rank: notes[-1]["step"] for rank, notes in running.of("step").items()}
    only_there = made[0] > made[1]  # who was asked to end is only asked to save where nobody else can
    assert set(running.of("save")) == {0 if only_there else 1}, running.story()
