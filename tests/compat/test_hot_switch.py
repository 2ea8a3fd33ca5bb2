"""A hot switch over real processes: the manager starts another process for a living rank, which takes its seat."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.compat.jobs import Job, after
from ttp.compat.mindio.values import RepairType

Make = Callable[..., Job]
PREPARE, CHOOSE = "tft_notify_controller_prepare_action", "tft_notify_controller_change_strategy"
STEPS = 80


def prepared(job: Make, manage: str = "migration", **what: Any) -> Job:
    """Return a job on hosts a and b that trains, and a separate manager process."""
    options = {"manage": manage, "step_s": 0.05, "enable_arf": True, **what.pop("options", {})}
    waits = {"rank": 3, "step": 10, "what": "wait", "after": "go"}  # however long a newcomer takes to start
    this = job(options=options, manager=True, hosts="aabb", steps=STEPS, faults=[waits], **what).start()
    this.until(lambda: all((this.directory / f"meet-0-3-{rank}").exists() for rank in range(4)))
    return this


def ask(this: Job, function: str, *given: Any) -> Any:
    """Make the manager's process call a function, and return the result."""
    notes = this.notes(-1)
    number = sum(note["what"] == "answered" for note in notes)
    draft = this.directory / "ask"
    draft.write_text(json.dumps([function, given]))
    draft.rename(this.directory / f"ask{number}")

    def answers() -> list[int]:
        return [note["result"] for note in this.notes(-1) if note["what"] == "answered"]

    this.until(lambda: len(answers()) > number)
    return answers()[number]


def come(this: Job, rank: int) -> None:
    """Start a newcomer for the seat of this rank, as the last process. When it has joined, the job goes on."""
    this.processes.append(this.launch(rank, host="c"))
    this.until(lambda: any(note.get("type") == "hot switch" for note in this.of("begin").get(rank, [])))
    (this.directory / "go").touch()


def told(this: Job, what: str) -> list[Any]:
    kept = [note for note in this.notes(-1) if note["what"] == what]
    return [note["offered"] if what == "report_strategies" else (note["strategy"], note["code"]) for note in kept]


def check_moved(this: Job, rank: int, newcomers: int = 1) -> None:
    """Check that all other ranks kept their processes, and that the state is that of an unbroken run."""
    ranks = this.processes[: this.ranks] + this.processes[this.ranks + 1 :]
    assert [process.wait(120) for process in ranks] == [0] * (this.ranks + newcomers), this.story()
    assert {notes[-1]["value"] for notes in this.of("done").values()} == {after(STEPS)}, this.story()
    assert len(this.of("done")) == this.ranks and all(len(notes) == 1 for notes in this.of("done").values())
    others = [r for r in range(this.ranks) if r != rank]
    steps = {this.of("step finish")[r][0]["step"] for r in others}
    assert len(steps) == 1 == len(this.of("save").popitem()[1]), this.story()
    saved = this.of("save").popitem()[1][0]["step"]
    assert {saved} == steps == {note["step"] for notes in this.of("rollback").values() for note in notes}
    assert all(not this.of(what) for what in ("stop", "clean")), "nothing was broken"
    assert set(this.of("rebuild")) == set(range(this.ranks)), this.story()
    kinds = {r: notes[-1]["info"]["repair_type"] for r, notes in this.of("repair").items()}
    assert kinds == {rank: RepairType.RT_RECV_REPAIR.value, (rank + 2) % 4: RepairType.RT_SEND.value}
    assert [note["type"] for note in this.of("begin")[rank] if "type" in note] == ["hot switch"]


@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_a_rank_that_lives_is_moved_to_another_host(job: Make, rank: int) -> None:
    this = prepared(job)
    for faults in ({}, {"9": 1}, {str(rank): 1, str(rank + 2): 1}, {str(rank): 7}):
        assert (
            ask(this, PREPARE, "hot switch", faults) == 1
        )  # no rank, none of this job, all that hold a piece, no kind
    assert ask(this, PREPARE, "cold switch", {str(rank): 1}) == 1 == ask(this, CHOOSE, "migration")
    assert ask(this, PREPARE, "hot switch", {str(rank): 1}) == 0 == ask(this, PREPARE, "hot switch", {str(rank): 1})
    assert ask(this, PREPARE, "hot switch", {"3": 1}) == 1  # one at a time
    come(this, rank)
    check_moved(this, rank)
    this.until(lambda: told(this, "report_result") == [("migration", 0)])
    assert told(this, "report_strategies") == [["migration"]]


@pytest.mark.slow
def test_the_same_in_the_dialect_of_mindspore(job: Make) -> None:
    """Its exit handler, which ends processes with 1, is not called for moved ranks."""
    this = prepared(job, env={"MINDIO_FOR_MINDSPORE": "1"})
    assert ask(this, PREPARE, "hot switch", {"1": 1}) == 0
    come(this, 1)
    check_moved(this, 1)
    this.until(lambda: told(this, "report_result") == [("migration", 0)])


@pytest.mark.slow
def test_a_switch_that_is_stopped_and_one_that_is_chosen_late(job: Make) -> None:
    """The first newcomer is sent away. While the second waits, an unknown strategy is refused."""
    this = prepared(job, "nothing", env={"MINDIO_WAIT_MINDX_TIME": "60"})
    assert ask(this, PREPARE, "hot switch", {"1": 1}) == 0 == ask(this, PREPARE, "stop switch", {"1": 1})
    lone = this.launch(1, host="d")
    assert lone.wait(60) == 2, this.story()  # nobody has asked for it any more
    assert ask(this, PREPARE, "hot switch", {"1": 1}) == 0
    come(this, 1)
    this.until(lambda: told(this, "report_strategies") == [["migration"]])
    assert ask(this, CHOOSE, "nonsense") == 0
    this.until(lambda: told(this, "report_result") == [("nonsense", 406)])
    assert ask(this, CHOOSE, "migration") == 0
    check_moved(this, 1)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["silence", "continue", "stop switch"])
def test_where_it_is_not_chosen_all_train_on_where_they_were(job: Make, how: str) -> None:
    stops_first = {"version": "MindSpeed-LLM"} if how == "stop switch" else {}  # before other saves
    this = prepared(job, "nothing", env={"MINDIO_WAIT_MINDX_TIME": "3"}, options=stops_first)
    assert ask(this, PREPARE, "hot switch", {"1": 1}) == 0
    come(this, 1)
    this.until(lambda: told(this, "report_strategies") == [["migration"]])
    if how != "silence":
        assert (ask(this, CHOOSE, how) if how == "continue" else ask(this, PREPARE, how, {})) == 0
    assert this.processes[-1].wait(60) == 0, this.story()
    assert [process.wait(120) for process in this.processes[:4]] == [0] * 4, this.story()
    assert {notes[-1]["value"] for notes in this.of("done").values()} == {after(STEPS)}
    assert told(this, "report_result") == [("migration", 406)], this.story()
    assert this.of("rename") and not any(this.of(what) for what in ("stop", "step finish", "rollback"))


@pytest.mark.slow
@pytest.mark.parametrize("dead", [1, 3], ids=["that was to go", "that was to stay"])
def test_a_rank_dies_while_all_stand_still(job: Make, dead: int) -> None:
    """ClusterD ends the old process itself. After any other death the job is saved and the guest sent away."""
    this = prepared(job, "nothing", env={"MINDIO_WAIT_MINDX_TIME": "20"})
    assert ask(this, PREPARE, "hot switch", {"1": 1}) == 0
    come(this, 1)
    this.until(lambda: told(this, "report_strategies") == [["migration"]])
    this.processes[dead].kill()
    this.processes[dead].wait()
    if dead == 1:
        assert ask(this, CHOOSE, "migration") == 0
        assert [process.wait(120) for process in this.processes[:4]] == [0, -9, 0, 0], this.story()
        assert this.processes[-1].wait(60) == 0 and len(this.of("done")) == 4
        return
    assert this.processes[-1].wait(60) == 0, this.story()
    assert told(this, "report_result")[0] == ("migration", 406)
    this.until(lambda: len(told(this, "report_strategies")) == 2)  # its callbacks say stop, and later exit
    assert ask(this, CHOOSE, "dump") == 0
    assert [process.wait(120) for process in this.processes[:4]] == [75, 75, 75, -9], this.story()
