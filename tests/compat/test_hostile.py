"""Programs, handlers and managers that misbehave, and faults during a repair: nothing hangs, and no checkpoint that
could be made is lost.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import pytest

from tests.compat.jobs import Job, after
from tests.compat.test_scenarios import KILLED, NOT_SAVED, SAVED, check_repaired, fault
from ttp.compat.mindio.values import RepairType

Make = Callable[..., Job]

KILL = fault(1, 4, "kill")
MEMORY = fault(1, 4, "memory")


def hostile(kind: str, **what: str) -> dict[str, Any]:
    """Return options with the wrong action of a handler, by rank: ``r0="raise"``."""
    return {"hostile": {kind: {rank.removeprefix("r"): wrong for rank, wrong in what.items()}}}


def savers(job: Job) -> dict[int, list[int]]:
    """Return the ranks that saved by the last list, each with that list."""
    last = [notes[-1] for notes in job.of("save").values() if "info" in notes[-1]]
    newest = last[-1]["info"][0]["ranks"] if last else []
    return {rank: newest for rank in newest if job.part(3, rank)["value"] == after(3)}


# -------------------------------------------------------------------------------------------------------- the handlers


def test_a_save_handler_that_calls_what_waits_for_itself_fails_and_another_rank_saves(job: Make) -> None:
    this = job(faults=[KILL], options=hostile("save", r0="update"))
    assert this.run() == [SAVED, KILLED, SAVED, SAVED], this.story()
    assert savers(this) == {2: [2, 3], 3: [2, 3]}
    assert "was reported in a handler, but only the training thread may" in this.story()


@pytest.mark.slow
@pytest.mark.parametrize("wrong", ["raise", "hang", "arguments", "step", "report", "await", "leave", "kill"])
def test_a_save_handler_that_does_wrong(job: Make, wrong: str) -> None:
    this = job(faults=[KILL], options=hostile("save", r0=wrong), env={"TTP_OT": "20"} if wrong == "hang" else {})
    assert this.run() == [KILLED if wrong == "kill" else SAVED, KILLED, SAVED, SAVED], this.story()
    assert savers(this) == {2: [2, 3], 3: [2, 3]}


@pytest.mark.slow
def test_a_save_handler_that_asks_for_a_dump_is_refused_and_saves(job: Make) -> None:
    this = job(faults=[KILL], options=hostile("save", r0="dump"))
    assert this.run() == [SAVED, KILLED, SAVED, SAVED], this.story()
    assert this.of("dumped")[0][0]["result"] == 1 and set(savers(this)) == {0, 3}


@pytest.mark.slow
@pytest.mark.parametrize("wrong", ["raise", "arguments"])
def test_save_handlers_that_all_do_wrong_end_the_job_without_a_checkpoint(job: Make, wrong: str) -> None:
    this = job(ranks=3, copies=3, faults=[KILL], options=hostile("save", r0=wrong, r2=wrong))
    assert this.run() == [NOT_SAVED, KILLED, NOT_SAVED], this.story()


@pytest.mark.slow
@pytest.mark.parametrize("wrong", ["raise", "kill"])
def test_a_rename_handler_that_does_wrong(job: Make, wrong: str) -> None:
    """A rank that dies in it is replaced. A refusal holds for all ranks."""
    this = job(faults=[KILL], options=hostile("rename", r3=wrong))
    codes = this.run()
    assert codes == ([SAVED, KILLED, SAVED, KILLED] if wrong == "kill" else [NOT_SAVED, KILLED, *[NOT_SAVED] * 2])
    assert (this.directory / "checkpoint-3").exists() is (wrong == "kill")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        ("stop", "raise"), ("stop", "arguments"), ("stop", "await"), ("stop", "hang"), ("stop", "kill"),
        ("clean", "raise"), ("clean", "nonsense"), ("clean", "kill"),
        ("repair", "raise"), ("repair", "memory"), ("repair", "step"),
        ("rollback", "raise"), ("rollback", "kill"),
    ],
)  # fmt: skip
def test_a_repair_in_which_a_handler_does_wrong_is_a_dump_of_what_is_whole(job: Make, kind: str, wrong: str) -> None:
    """The handler of rank 2, which sends in a repair."""
    env = {"TTP_OT": "20"} if wrong == "hang" else {}
    this = job(ranks=3, copies=3, faults=[MEMORY], options=hostile(kind, r2=wrong), env=env)
    codes = this.run()
    assert codes == [SAVED, SAVED, KILLED if wrong == "kill" else SAVED], this.story()
    (healthy,) = savers(this)
    assert healthy != 1
    assert (this.directory / "checkpoint-3").exists()


@pytest.mark.slow
@pytest.mark.parametrize("wrong", ["hang", "raise", "leave"])
def test_an_exit_handler_that_does_wrong_keeps_nobody(job: Make, wrong: str) -> None:
    this = job(ranks=2, faults=[KILL], options=hostile("exit", r0=wrong), env={"MINDIO_FOR_MINDSPORE": "1"})
    assert this.run() == [SAVED, KILLED], this.story()
    assert set(savers(this)) == {0}


# ----------------------------------------------------------------------------------------- a fault in the midst of one


@pytest.mark.parametrize(("dead", "saved"), [(1, True), pytest.param(3, False, marks=pytest.mark.slow)])
def test_a_kill_in_the_transfer_of_a_repair(job: Make, dead: int, saved: bool) -> None:
    """The receiver has nothing to lose; the sender was the last holder of its piece."""
    this = job(faults=[MEMORY], options=hostile("repair", **{f"r{dead}": "kill"}))
    code = SAVED if saved else NOT_SAVED
    assert this.run() == [KILLED if rank == dead else code for rank in range(4)], this.story()
    assert set(savers(this)) == ({0, 3} if saved else set())


@pytest.mark.slow
def test_memory_is_lost_again_right_after_a_repair_and_by_the_sender_of_it(job: Make) -> None:
    faults = [MEMORY, fault(1, 4, "memory", at="late"), fault(3, 6, "memory")]
    this = job(faults=faults, steps=8)
    check_repaired(this, this.run())
    assert [note["info"]["dst"] for note in this.of("repair")[1]] == [[1], [1], [3]]


@pytest.mark.slow
def test_memory_is_lost_on_every_holder_of_a_piece(job: Make) -> None:
    """No copy is left, so all ranks load a checkpoint."""
    this = job(faults=[MEMORY, fault(3, 4, "memory")])
    check_repaired(this, this.run())
    kinds = {rank: notes[-1]["info"]["repair_type"] for rank, notes in this.of("repair").items()}
    load, rebuild = RepairType.RT_LOAD_CKPT.value, RepairType.RT_LOAD_REBUILD.value
    assert kinds == {0: load, 1: rebuild, 2: load, 3: rebuild}, this.story()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["stop", "repair", "rollback"])
def test_the_controller_dies_in_a_repair(job: Make, kind: str) -> None:
    """The next controller does not trust a copy that was being written, and repeats the repair."""
    this = job(faults=[MEMORY], steps=8, options=hostile(kind, r3="wait")).start()
    this.until(lambda: any("hostile" in note for notes in this.of(kind).values() for note in notes))
    for controller in this.controllers():
        controller.kill()
    (this.directory / "go").touch()
    check_repaired(this, this.wait())


@pytest.mark.slow
def test_a_replica_dies_while_its_partner_waits_to_be_repaired(job: Make) -> None:
    """Of three copies of each piece the last one is enough to save."""
    this = job(ranks=6, copies=3, faults=[MEMORY], options=hostile("stop", r3="kill"))
    assert this.run() == [SAVED, SAVED, SAVED, KILLED, SAVED, SAVED], this.story()
    assert set(savers(this)) == {0, 5}


@pytest.mark.slow
def test_a_kill_in_a_pause(job: Make) -> None:
    options = {"manage": "dump", "step_s": 0.05, "stand": True}
    this = job(ranks=2, steps=4000, faults=[fault(0, 3, "pause")], options=options).start()
    this.until(lambda: bool(this.of("report_stop_complete")))
    this.processes[1].kill()
    assert this.wait() == [SAVED, KILLED], this.story()
    (note,) = this.of("save")[0]
    assert this.part(note["step"], 0)["value"] == after(note["step"])


# ----------------------------------------------------------------------------------------------- managers, controllers


@pytest.mark.slow
def test_two_dumps_in_a_row_are_one_checkpoint(job: Make) -> None:
    this = job(ranks=2, faults=[fault(0, 4, "dump", times=2)])
    check_repaired(this, this.run())
    assert [note["result"] for note in this.of("dumped")[0]] == [0, 0]
    assert len(this.of("save")) == 1


@pytest.mark.slow
def test_processors_that_come_long_before_their_controller(job: Make) -> None:
    this = job(ranks=3, copies=3, faults=[KILL], options={"delay_s": {"0": 6}})
    assert this.run() == [SAVED, KILLED, SAVED], this.story()


@pytest.mark.slow
def test_a_controller_that_is_destroyed_and_started_again(job: Make) -> None:
    """taskd does so after a lost connection: the manager attaches again, and nothing else happens."""
    options = {"starts": 3, "manage": "retry", "step_s": 0.1}
    this = job(ranks=2, steps=40, faults=[fault(1, 30, "memory")], options=options)
    check_repaired(this, this.run())
    assert [note["strategy"] for note in this.of("report_result")[0]] == ["retry"]


@pytest.mark.slow
@pytest.mark.parametrize("lives", [True, False])
def test_a_manager_that_is_no_rank(job: Make, lives: bool) -> None:
    """The manager decides as long as it lives. Without it the job is repaired all the same."""
    options = {"manage": "retry", "step_s": 0.1}
    faults = [fault(1, 30, "memory", after="go")]
    this = job(ranks=2, steps=40, faults=faults, options=options, manager=True).start()
    this.until(lambda: this.live_ranks() == 2)
    if not lives:
        this.processes[-1].kill()
        this.processes[-1].wait()
    (this.directory / "go").touch()
    check_repaired(this, this.wait())
    told = [note["what"] for note in this.notes(-1) if note["what"].startswith("report_")]
    assert bool(told) is lives, this.story()


@pytest.mark.slow
def test_a_port_that_somebody_else_has(job: Make) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        this = job(ranks=2, port=other.getsockname()[1])
        assert this.run() == [2, 2], this.story()
        assert "is in use by a program that does not answer as a ttp controller" in this.story()
