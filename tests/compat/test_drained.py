"""A host is drained while another one stands by: its ranks move there, and the others keep their processes.

Real launchers and real processes over gloo, whose groups the program makes anew; the bits of the unbroken run.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed

from tests.compat import sharded_program
from tests.compat.test_recover import PROGRAM, notes, pids, story
from tests.e2e.harness import Job
from tests.waiting import until
from ttp.compat.mindio.placing import tell_children

MakeJob = Callable[..., Job]
TCPStore: Any = torch.distributed.TCPStore  # type: ignore[attr-defined,unused-ignore] # not in its stubs
TIMEOUT_S = 240
HOSTS = ("spare", "one", "two")
HELD = {"rank": 0, "step": 10, "at": "data", "what": "nothing", "after": "go", "warm": False}
"""The others wait for it, however long newcomers take."""

pytestmark = [pytest.mark.timeout(TIMEOUT_S), pytest.mark.xdist_group("ttp")]


def started(make_job: MakeJob, faults: list[dict[str, Any]], **env: str) -> Job:
    """Start a job of two hosts with two ranks each, and a standby host."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = ["--nnodes", "2", "--mindio", "--rdzv-backend", "c10d", "--rdzv-id", "job"]
    common += ["--rdzv-endpoint", f"127.0.0.1:{store.port}"]
    nodes = [[*common, *(["--stand-by"] if host == "spare" else [])] for host in HOSTS]
    settings: dict[str, Any] = {"script": PROGRAM, "ranks": 4, "local": 2, "steps": 40, "max_restarts": 3}
    job = make_job(nodes=nodes, hosts=list(HOSTS), faults=faults, **settings)
    saves = {"TTP_SAVE_DIR": str(job.directory / "checkpoints"), "TTP_TOKEN": "secret", "TTP_MIRROR": "1"}
    job.env = {"PYTHONPATH": str(job.directory), **saves, **env}
    tell_children(job.env)
    job.store = store  # type: ignore[attr-defined] # it lives as long as the job
    return job.start()


def told(job: Job) -> str:
    """Return what the controllers have logged. The controller may be on either host, as they share an address."""
    logs = [job.directory / "run" / host / "controller.log" for host in HOSTS[1:]]
    return "\n".join(sorted(line for log in logs if log.exists() for line in log.read_text().splitlines()))


def drained(job: Job) -> str:
    """Return the first host of rank 2. It is not known beforehand, because launchers start at the same time.

    Waits until the standby host has offered itself.
    """
    until(lambda: " offered " in told(job), 90, lambda: story(job))
    first = re.search(r' joined {"rank": 2, "host": "(\w+)"', told(job))
    assert first is not None, told(job)
    return first[1]


def move(job: Job) -> None:
    """Drain the host of ranks 2 and 3 when another host offers itself. Rank 0 continues when all are asked to stand.

    If it continued as soon as the new processes exist, the job could be at its last step before they are ready.
    """
    until(lambda: any(note["what"] == "train" for note in notes(job, 3)), 90, lambda: story(job))
    said = job.ttp("report-fault", "--host", drained(job), "--drain", "--token", "secret")
    assert (said.returncode, "are moved to a host that stands by" in said.stdout) == (0, True), said.stderr + story(job)
    until(lambda: ' round {"round": "hold"' in told(job), 90, lambda: story(job))
    (job.directory / "go").touch()


def ends(job: Job) -> list[int]:
    """Return the launchers' exit codes, the drained host's last, which is the job's if the job fails before."""
    codes = [process.wait(TIMEOUT_S - 60) for process in job.processes]
    return codes if drained(job) == HOSTS[2] else [codes[0], codes[2], codes[1]]


def check_moved(job: Job) -> None:
    """Check that the other ranks kept their processes, and that the moved ones got their state from them."""
    assert [len(pids(job, rank)) for rank in (0, 1)] == [1, 1], story(job)
    for rank in (2, 3):
        first, *rest = [note for note in notes(job, rank) if note["pid"] == pids(job, rank)[1]]
        assert (first["what"], first["reboot"], first["type"]) == ("begin", True, "hot switch"), story(job)
        assert [note["what"] for note in rest][:4] == ["rebuild", "repair", "rollback", "train"], story(job)


def check_bits(job: Job) -> None:
    digests = [notes(job, rank)[-1].get("digest") for rank in range(4)]
    assert digests == sharded_program.unbroken((job.steps, 4)), story(job)


def test_the_ranks_of_a_drained_host_are_moved_while_the_others_keep_their_processes(
    make_job: MakeJob,
) -> None:
    job = started(make_job, [HELD])
    move(job)
    assert ends(job) == [0, 0, 0], story(job)
    check_moved(job)
    saved = int((job.directory / "checkpoint").read_text())
    assert {note["step"] for rank in range(4) for note in notes(job, rank) if note["what"] == "rollback"} == {saved}
    check_bits(job)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [1, 3], ids=["that has stayed", "that was moved"])
def test_a_rank_dies_later(make_job: MakeJob, rank: int) -> None:
    """All ranks restart, on the host that stayed and the former standby host."""
    job = started(make_job, [HELD, {"rank": rank, "step": 30, "at": "data", "warm": False}])
    move(job)
    until((job.directory / "fired1").exists, 120, lambda: story(job))
    check_moved(job)
    assert ends(job)[:2] == [0, 0], story(job)
    saved = int((job.directory / "checkpoint").read_text())
    assert saved >= 29 and {notes(job, r)[-2]["step"] for r in range(4)} == {saved}, story(job)
    check_bits(job)


@pytest.mark.slow
@pytest.mark.parametrize("at", ["rebuild", "repair"])
def test_a_rank_that_is_moved_dies_meanwhile(make_job: MakeJob, at: str) -> None:
    """All ranks restart from the first checkpoint, without the drained host."""
    job = started(make_job, [HELD, {"rank": 3, "at": at}])
    move(job)
    assert ends(job)[:2] == [0, 0], story(job)
    saved = int((job.directory / "checkpoint").read_text())
    assert {notes(job, r)[-2]["step"] for r in range(4)} == {saved}, story(job)
    check_bits(job)
