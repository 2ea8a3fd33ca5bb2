"""Programs for the original over real processes: one test per row of the table in docs/mindio.md."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.compat.jobs import Job, after
from tests.wire.certificates import Authority
from ttp.compat.mindio.values import RepairType

Make = Callable[..., Job]

ARGS, CTX = ["State"], "ctx"
SAVED, NOT_SAVED, KILLED = 75, 70, -9
HANDLERS = ("save", "rename", "repair", "rollback", "exit")
"""Beside those that are called before each of them where the program wants it."""


def fault(rank: int, step: int, what: str, **how: Any) -> dict[str, Any]:
    return {"rank": rank, "step": step, "what": what, **how}


def chosen(ranks: int, copies: int, dead: int) -> list[int]:
    """Return the original's choice: for each shard, in order, the first live rank."""
    shards = 1 if copies == ranks else ranks // copies
    return [next(r for r in range(shard, ranks, shards) if r != dead) for shard in range(shards)]


def check_dumped(job: Job, step: int, savers: list[int], codes: list[int]) -> None:
    """Check which ranks saved, their handlers' arguments, and which rank renamed."""
    saves = job.of("save")
    assert sorted(saves) == sorted(savers), job.story()
    for note in (notes[-1] for notes in saves.values()):
        assert note["step"] == step and note["info"] == [{"type": 0, "ranks": savers}]
        assert (note["args"], note["ctx"], note["type"]) == (ARGS, CTX, "unknow") or "clean" in job.order(savers[0])
    assert {job.part(step, rank)["value"] for rank in savers} == {after(step)}
    (renamer,) = job.of("rename")
    assert renamer == next((rank for rank in savers if rank), 0)
    assert job.of("rename")[renamer] == [{"what": "rename", "step": step, "given": ARGS}]
    for rank in range(job.ranks):
        wanted = [*(["save"] if rank in savers else []), *(["rename"] if rank == renamer else [])]
        assert [call for call in job.order(rank) if call in HANDLERS] == wanted, job.story()
    assert codes == [SAVED if code != KILLED else KILLED for code in codes], (codes, job.story())


# ------------------------------------------------------------------------------------------------------------ the dump


def test_a_rank_is_killed(job: Make) -> None:
    this = job(faults=[fault(1, 4, "kill")])
    codes = this.run()
    assert codes.count(-9) == 1 and codes[1] == -9
    check_dumped(this, 3, [0, 3], codes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "copies", "dead"),
    [(2, 2, 0), (2, 2, 1), (3, 3, 0), (4, 2, 0), (4, 4, 2), (5, 5, 1), (6, 2, 4), (6, 3, 0), (7, 7, 6), (8, 2, 1)],
)
def test_of_worlds_of_all_sizes(job: Make, ranks: int, copies: int, dead: int) -> None:
    this = job(ranks=ranks, copies=copies, faults=[fault(dead, 4, "kill")])
    codes = this.run()
    assert codes[dead] == -9
    check_dumped(this, 3, chosen(ranks, copies, dead), codes)
    if (ranks, copies, dead) == (8, 2, 1):
        assert chosen(ranks, copies, dead) == [0, 5, 2, 3]  # as the original was seen to


def test_any_other_exception(job: Make) -> None:
    """The program names a port of its own, but the launcher's is used."""
    this = job(ranks=2, faults=[fault(1, 4, "raise", text="out of luck")], options={"port": 8000})
    codes = this.run()
    check_dumped(this, 3, [0], codes)
    assert "ValueError: out of luck" in this.story()


def slow_in(rank: int, at: str) -> list[dict[str, Any]]:
    """Return faults: one rank is slow in its update, or before it, and rank 1 dies when the ranks after it made it."""
    made = "made-0-4-0 made-0-4-3" if at == "inside" else "made-0-4-0 made-0-4-2"
    return [fault(rank, 4, "slow", at=at, seconds=2), fault(1, 4, "kill", at="late", after=f"slow {made}")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("faults", "options", "step"),
    [
        pytest.param(slow_in(2, "inside"), {}, 4, id="a slow update is waited for"),
        pytest.param(slow_in(3, "late"), {}, 4, id="a rank that is one step behind catches up"),
        pytest.param([fault(1, 4, "memory")], {"enable_uce": False}, 3, id="lost memory without enable_uce"),
        pytest.param([fault(1, 4, "kill")], {"manage": "fail", "step_s": 0.1}, 3, id="a manager whose callbacks fail"),
        pytest.param([fault(1, 4, "kill")], {"version": "MindSpeed-LLM"}, 3, id="stopped and cleaned before the dump"),
    ],
)
def test_whatever_the_fault_the_job_is_saved(
    job: Make, faults: list[dict[str, Any]], options: dict[str, Any], step: int
) -> None:
    this = job(faults=faults, options=options)
    check_dumped(this, step, [0, 3], this.run())
    assert ("the callback for" in this.story()) is ("manage" in options)
    wanted = ["stop", "clean"] if "version" in options else []
    assert [w for w in this.order(0) if not w.startswith("report_")] == [*wanted, "save"]
    assert this.order(3) == [*wanted, "save", "rename"]


def state_on(copies: int, *ranks: int) -> dict[str, Any]:
    return {"rank_list": list(ranks), "replica_cnt": copies}


DENSE, EVEN, ODD = state_on(2, 0, 1, 2, 3), state_on(2, 0, 2), state_on(2, 1, 3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sets", "infos"),
    [
        pytest.param(
            [*[[state_on(3, 0, 1, 2)]] * 3, *[[state_on(2, 3, 4)]] * 2], {0: {0: [0]}, 3: {0: [3]}}, id="unequal groups"
        ),
        pytest.param(
            [[DENSE, EVEN], [DENSE, ODD]] * 2, {0: {0: [0, 3], 1: [0]}, 3: {0: [0, 3], 1: [3]}}, id="dense and experts"
        ),
    ],
)
def test_each_set_saves_its_own(job: Make, sets: list[list[Any]], infos: dict[int, Any]) -> None:
    this = job(ranks=len(sets), faults=[fault(1, 4, "kill")], options={"sets": sets})
    codes = this.run()
    assert codes == [SAVED, KILLED, *[SAVED] * (len(sets) - 2)], this.story()
    assert {r: {e["type"]: e["ranks"] for e in notes[0]["info"]} for r, notes in this.of("save").items()} == infos


# ----------------------------------------------------------------------------------------------------------- the repair


def check_repaired(job: Job, codes: list[int]) -> None:
    assert codes == [0] * job.ranks, job.story()
    assert {notes[0]["value"] for notes in job.of("done").values()} == {after(job.steps)}


def test_lost_memory_is_repaired_from_a_replica(job: Make) -> None:
    this = job(faults=[fault(1, 4, "memory")])
    codes = this.run()
    check_repaired(this, codes)
    assert this.order(0) == this.order(2) == ["stop", "clean", "rollback"]
    assert this.order(1) == this.order(3) == ["stop", "clean", "repair", "rollback"]
    (sent,), (received,) = this.of("repair")[3], this.of("repair")[1]
    assert sent["info"]["repair_type"] == RepairType.RT_SEND.value
    assert received["info"]["repair_type"] == RepairType.RT_UCE_HIGHLEVEL.value
    for note in (sent, received):
        assert (note["info"]["src"], note["info"]["dst"], note["info"]["type"]) == ([3], [1], [0])
        assert (note["step"], note["errors"], note["args"], note["ctx"]) == (3, [1], ARGS, CTX)
    assert {r: n[0]["uce"] for r, n in this.of("clean").items()} == {0: False, 1: True, 2: False, 3: False}
    notes = [note for what in ("stop", "clean", "rollback") for given in this.of(what).values() for note in given]
    assert len(notes) == 12 and all((note["args"], note["ctx"]) == (ARGS, CTX) for note in notes)
    assert {note["step"] for given in this.of("rollback").values() for note in given} == {3}


def test_a_broken_network_and_memory_that_is_not_lost_need_no_transfer(job: Make) -> None:
    """One after the other, in the same processes."""
    texts = ("HCCL OP RETRY FAILED", "SUSPECT REMOTE ERROR", "UB LINK ERROR", "HCCS LINK ERROR")
    broken = [fault(1, 3 + number, "error", text=text) for number, text in enumerate(texts)]
    this = job(ranks=2, steps=9, faults=[*broken, fault(0, 8, "memory_low")])
    check_repaired(this, this.run())
    (note,) = this.of("repair")[0]
    assert note["info"] == {"type": [], "repair_type": RepairType.RT_UCE_LOWLEVEL.value, "src": [], "dst": [],
                            "rank_list": []}  # fmt: skip
    cure = ["stop", "clean", "rollback"]
    assert (this.order(0), this.order(1)) == ([*cure * 4, "stop", "clean", "repair", "rollback"], cure * 5)
    assert [[note["step"] for note in notes] for notes in this.of("rollback").values()] == [[2, 3, 4, 5, 7]] * 2


@pytest.mark.slow
def test_a_wrong_loss_goes_back_to_a_checkpoint(job: Make) -> None:
    this = job(faults=[fault(1, 4, "error", text="PRECISION ERROR load ckpt step=1")])
    check_repaired(this, this.run())
    kinds = {note["info"]["repair_type"] for notes in this.of("repair").values() for note in notes}
    assert kinds == {RepairType.RT_LOAD_CKPT.value}
    assert all(this.order(rank) == ["stop", "clean", "repair", "rollback"] for rank in range(4))
    assert {note["step"] for notes in this.of("rollback").values() for note in notes} == {1}


@pytest.mark.slow
def test_over_tls_with_a_decrypted_password(job: Make, tmp_path: Path) -> None:
    made = Authority(tmp_path).sign(password="open sesame")
    (tmp_path / "cipher").write_text("emases nepo")
    text = f"tlsCert: {made['TTP_TLS_CERT']}; tlsPk: {made['TTP_TLS_KEY']}; tlsCaFile: {made['TTP_TLS_CA']};"
    options = {"tls": f"{text} tlsPkPwd: {tmp_path / 'cipher'}", "decrypt": True}
    this = job(ranks=2, faults=[fault(0, 4, "kill")], options=options)
    codes = this.run()
    check_dumped(this, 3, [1], codes)


# ----------------------------------------------------------------------------------------------------------- MindSpore

MINDSPORE = {"MINDIO_FOR_MINDSPORE": "1"}


def test_the_dialect_of_mindspore(job: Make) -> None:
    this = job(ranks=2, faults=[fault(0, 4, "kill")], env=MINDSPORE)
    assert this.run() == [-9, 1], this.story()  # its exit handler ends the process
    (save,) = this.of("save")[1]
    assert save["info"] == [{"type": 0, "ranks": [1]}] and (save["args"], save["ctx"]) == ("step args", CTX)
    assert this.of("rename")[1] == [{"what": "rename", "step": 3, "given": CTX}]
    assert this.order(1) == ["save", "rename", "exit"]


def test_lost_memory_in_the_dialect_of_mindspore(job: Make) -> None:
    this = job(ranks=2, faults=[fault(1, 4, "memory")], env=MINDSPORE)
    check_repaired(this, this.run())


# ------------------------------------------------------------------------------------------------ the cluster's manager


def test_a_dump_on_demand_ends_nothing(job: Make) -> None:
    this = job(ranks=2, faults=[fault(0, 4, "dump")])
    codes = this.run()
    check_repaired(this, codes)
    assert this.of("dumped")[0][0]["result"] == 0
    assert (this.order(0), this.order(1)) == (["save", "rename", "dumped"], [])


def test_a_rank_that_is_asked_to_end(job: Make) -> None:
    """A rank with the newest step saves its training, and both end. The one that is asked may be a step ahead."""
    this = job(ranks=2, steps=100_000, options={"step_s": 0.02}).start()
    this.until((this.directory / "meet-0-20-1").exists)
    this.processes[0].terminate()
    assert this.wait() == [SAVED, SAVED], this.story()
    ((saver, (note,)),) = this.of("save").items()
    assert this.part(note["step"], saver)["value"] == after(note["step"])
    assert (this.order(saver), this.order(1 - saver)) == (["save", "rename"], [])


def test_pause_and_continue(job: Make) -> None:
    this = job(faults=[fault(0, 3, "pause")], options={"manage": "pause", "step_s": 0.1}, steps=60)
    check_repaired(this, this.run())
    assert this.of("report_stop_complete")[0][0]["code"] == 0 == this.of("report_result")[0][0]["code"]
    assert sorted(this.of("sync")) == [0, 1, 2, 3]
    assert this.of("asked")[0][0]["result"] == this.of("continue")[0][0]["result"] == 0


@pytest.mark.parametrize(("strategy", "what"), [("retry", "memory"), ("recover", "kill")])
def test_the_handshake_with_the_manager(job: Make, strategy: str, what: str) -> None:
    this = job(faults=[fault(1, 4, what)], options={"manage": strategy, "step_s": 0.1}, steps=40)
    codes = this.run()
    told = [word for word in this.order(0) if word.startswith("report_")]
    assert told[:2] == ["report_fault_ranks", "report_stop_complete"], this.story()
    assert told[2:4] == ["report_fault_ranks", "report_strategies"]
    results = [(note["strategy"], note["code"]) for note in this.of("report_result")[0]]
    assert results == {"recover": [("recover", 406), ("dump", 0)]}.get(strategy, [(strategy, 0)]), this.story()
    kind = {"kill": 1, "memory": 0}[what]
    assert this.of("report_fault_ranks")[0][0]["faults"] == [[1, kind]]
    if strategy == "retry":
        check_repaired(this, codes)
    else:
        check_dumped(this, 3, [0, 3], codes)


@pytest.mark.slow
def test_a_manager_has_a_new_process_started_on_another_host(job: Make) -> None:
    options = {"manage": "recover", "step_s": 0.1, "enable_arf": True}
    this = job(faults=[fault(1, 4, "kill")], options=options, steps=40, hosts="aabb").start()
    this.until(lambda: bool(this.of("chosen")))
    this.processes.append(this.launch(1, host="c"))
    codes = this.wait()
    assert codes == [0, -9, 0, 0] and this.processes[-1].wait(60) == 0, this.story()
    assert {notes[-1]["value"] for notes in this.of("done").values()} == {after(40)} and len(this.of("done")) == 4
    told = [(note["strategy"], note["code"]) for note in this.of("report_result")[0]]
    assert told == [("recover", 0)] and this.of("report_strategies")[0][0]["offered"] == ["exit", "dump", "recover"]
    assert this.order(1) == ["rebuild", "repair", "rollback"], this.story()
    assert [w for w in this.order(2) if not w.startswith("re")] == ["stop", "clean", "rollback"], this.story()
    assert {note["ranks"][0] for notes in this.of("rebuild").values() for note in notes} == {1}


# ------------------------------------------------------------------------------------------------------- the controller


@pytest.mark.slow
def test_the_controller_is_lost(job: Make) -> None:
    """Another controller takes over, receives all reports again, and saves after the next fault."""
    this = job(steps=400, options={"step_s": 0.05}, faults=[fault(1, 40, "kill", after="go")]).start()
    this.until(lambda: all((this.directory / f"meet-0-20-{rank}").exists() for rank in range(4)))
    first = this.controllers()
    for process in first:
        process.kill()
    this.until(lambda: this.live_ranks() == 4)
    (this.directory / "go").touch()
    codes = this.wait()
    assert first and codes[1] == -9
    check_dumped(this, 39, [0, 3], codes)
