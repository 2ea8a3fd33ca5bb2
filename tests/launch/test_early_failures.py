"""A script that ends before its ranks have joined the job is started three times, not for ever."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launch.conftest import OF_MINDSPORE, Start
from ttp.launch.early_failures import EARLY_S, FORMS_S, STARTS_S, WAITED_S, EarlyFailures
from ttp.wire.v1 import controller_pb2 as pb

NOBODY = pb.GetStatusResponse(stage="waiting")
BROKEN = """
import os, sys
from pathlib import Path

import ttp

Path(sys.argv[1], "launches").open("a").write(os.environ["TORCHELASTIC_RESTART_COUNT"])
import no_such_module
"""


def some(incarnation: int) -> pb.GetStatusResponse:
    return pb.GetStatusResponse(stage="forming", world_size=4, incarnation=incarnation)


def formed(incarnation: int) -> pb.GetStatusResponse:
    return pb.GetStatusResponse(stage="waiting", world_size=4, incarnation=incarnation)


@pytest.mark.parametrize(
    ("launches", "in_a_row"),
    [
        ([NOBODY, NOBODY, NOBODY], 3),
        ([NOBODY, some(1), some(1)], 3),
        ([NOBODY, some(1), formed(1)], 0),
        ([formed(1), formed(1), some(2), formed(1)], 3),  # launches after the first one in which nobody has joined
        ([formed(1), formed(2), formed(3)], 0),
        ([NOBODY, None, NOBODY, NOBODY], 3),
    ],
)
def test_launches_in_which_not_all_ranks_have_joined_are_counted(
    launches: list[pb.GetStatusResponse | None], in_a_row: int
) -> None:
    failures = EarlyFailures()
    for number, status in enumerate(launches):
        assert not failures.enough
        failures.begins(1000.0 * number)
        failures.failed(1000.0 * number + 1, status, [1, -15])
    assert failures.in_a_row == in_a_row and failures.enough == (in_a_row == 3)


@pytest.mark.parametrize(("lasts_s", "codes"), [(EARLY_S + 1, [1]), (1, [75, 1]), (1, [70])])
def test_a_launch_that_may_have_trained_does_not_count(lasts_s: float, codes: list[int]) -> None:
    failures = EarlyFailures()
    for _ in range(3):
        failures.begins(100.0)
        failures.failed(100.0 + lasts_s, NOBODY, codes)
    assert failures.in_a_row == 0


@pytest.mark.parametrize("restarts", ["8", "1"])
def test_a_script_that_cannot_be_imported(start: Start, tmp_path: Path, restarts: str) -> None:
    script = tmp_path / "broken_worker.py"
    script.write_text(BROKEN)
    job = start("ttp-run", ["--nproc-per-node", "1", "--max-restarts", restarts], str(script))
    code = job.finish()
    if restarts == "1":
        assert (code, (job.out / "launches").read_text()) == (1, "01")
        return
    assert (code, (job.out / "launches").read_text()) == (70, "012"), job.log
    assert "no progress: launch 3 in a row has failed before all ranks had joined the job" in job.log
    assert "No module named 'no_such_module'" in job.log


def test_a_script_of_mindspore_that_cannot_be_imported(start: Start, tmp_path: Path) -> None:
    script = tmp_path / "broken_worker.py"
    script.write_text("import no_such_module")
    job = start(OF_MINDSPORE, ["--worker_num=1", "--local_worker_num=1", "--max-restarts=8"], str(script))
    assert (job.finish(), job.log.count("the job is started again")) == (70, 2), job.log
    assert "launch 3 in a row has failed before all ranks had joined" in job.log
    assert "No module named 'no_such_module'" in job.log


def test_a_rank_that_leaves_a_restart_early_is_told_once_if_the_job_had_formed() -> None:
    failures = EarlyFailures()
    failures.begins(1)
    told = [failures.keeps_waiting(now, True) for now in (2, 100)]
    assert told == [False, False], "ranks of a first launch may have nothing to do"
    failures.failed(101, formed(1), [75])
    for began in (200, 300):
        failures.begins(began)
        late = began + 5 + WAITED_S
        told = [failures.keeps_waiting(now, left) for now, left in ((began, False), (began + 5, True), (late, False))]
        assert told == [False] * 3
        assert [failures.keeps_waiting(late, True), failures.keeps_waiting(late + 1, True)] == [True, False]


def test_a_launch_is_late_once() -> None:
    counts = EarlyFailures()
    assert not counts.is_late(1000.0), "nothing was started"
    for began in (0.0, 100.0):
        counts.begins(began)
        at = (began + STARTS_S - 1, began + STARTS_S, began + STARTS_S + 1)
        assert [counts.is_late(now) for now in at] == [False, True, False]


def test_who_has_joined_is_not_starting_any_more_though_its_files_are_removed() -> None:
    """Two launchers of a machine may share them, and one removes them when it leaves: the other's job went on anew."""
    counts = EarlyFailures()
    counts.begins(100.0)
    assert counts.forms(101.0, joined=False) and not counts.forms(102.0, joined=True)
    assert not counts.forms(103.0, joined=False)
    counts.begins(200.0)
    assert counts.forms(201.0, joined=False) and not counts.forms(200.0 + FORMS_S, joined=False)
