"""Survivors whose state is on a device keep their processes: communicators are aborted, and made again.

On one GPU over gloo; with NCCL if it accepts several ranks on one GPU (as in item 12); and with a GPU for each rank if
there are two. Without a GPU: whole jobs on a made-up device with a made-up NCCL.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import Job
from tests.gpu.conftest import RunCase, note
from tests.gpu.ranks import went_on_like_unbroken
from tests.gpu.test_12_two_ranks_nccl import PRELOADED, SMALL, too_old

KILLS = int(os.environ.get("TTP_GPU_KILLS", "3"))
"""In one job, with three updates and more between them."""
PLACES = ("backward", "data", "stepped", "loss")
slow, gpu = pytest.mark.slow, pytest.mark.gpu
WORLDS = [
    pytest.param("made-up", "cpu:nccl", id="made-up"),
    pytest.param("cpu", "cpu:nccl", id="host", marks=slow),
    pytest.param("cuda", "gloo", id="gpu-gloo", marks=gpu),
    pytest.param("cuda", "nccl", id="gpu-nccl", marks=gpu),
    pytest.param("cuda", "each its own", id="gpus-nccl", marks=gpu),
]
ABORTS = [world for world in WORLDS if world.values[1] != "gloo"]
pytestmark = pytest.mark.timeout(420)


def settings(backend: str, **env: str) -> dict[str, Any]:
    """Return the settings of a job of two ranks; skips if it cannot run here."""
    if backend == "each its own":
        import torch

        if torch.cuda.device_count() < 2:
            pytest.skip("two GPUs are needed for a rank on each; there is one")
        return {"ranks": 2, "env": {"JOB_BACKEND": "nccl", "JOB_SPREAD": "1", "NCCL_NVLS_ENABLE": "0", **env}}
    if backend == "nccl":
        if reason := too_old():
            pytest.skip(reason)
        env |= SMALL | ({"LD_PRELOAD": PRELOADED} if PRELOADED else {})
    return {"ranks": 2, "env": {"JOB_BACKEND": backend, **env}}


def kill(step: int, rank: int, phase: str) -> dict[str, Any]:
    return {"id": f"{step}", "rank": rank, "step": step, "phase": phase, "action": "kill"}


def again(job: Job) -> list[bool]:
    return [bool(e.get("again")) for events in job.incidents() for e in events if e["kind"] == "released"]


@pytest.mark.parametrize(("device", "backend"), WORLDS)
def test_the_survivors_of_a_death_keep_process_and_state(
    tmp_path: Path, device: str, backend: str, request: pytest.FixtureRequest
) -> None:
    """Survivors compare digests of their state from before and after the abort, and keep it if they agree."""
    count = 1 if device == "made-up" else KILLS
    faults = [kill(3 * n + 4, (n + 1) % 2, PLACES[n % 4]) for n in range(count)]
    job, problem = went_on_like_unbroken(tmp_path, device, "ddp", faults, **settings(backend))
    assert not problem, problem
    log = job.log.read_text()
    assert again(job) == [True] * count and log.count("its state was kept") == count, job.story()
    assert ("were aborted in" in log) is (backend != "gloo"), job.story()
    took = re.findall(r"were aborted in .* s|out of train.* s|training goes on in.* s", log)
    note(request.node, {"took": "; ".join(took)})


@slow
@pytest.mark.parametrize(("device", "backend"), ABORTS)
@pytest.mark.parametrize("phase", PLACES)
def test_rank_0_dies(tmp_path: Path, device: str, backend: str, phase: str) -> None:
    job, problem = went_on_like_unbroken(tmp_path, device, "ddp", [kill(5, 0, phase)], **settings(backend))
    assert not problem and again(job) == [True], problem or job.story()


@pytest.mark.parametrize(
    ("device", "backend"), [*ABORTS[1:], pytest.param(*ABORTS[0].values, id="made-up", marks=slow)]
)
def test_nothing_is_aborted_in_the_first_steps(tmp_path: Path, device: str, backend: str) -> None:
    """torch may crash in an abort then, so all ranks restart, and the reason is logged."""
    if backend == "nccl" and PRELOADED:  # its ranks name their imports after more updates than are made here
        pytest.skip("a launcher that has not forked from the tests cannot replace a rank before some updates")
    job, problem = went_on_like_unbroken(tmp_path, device, "ddp", [kill(1, 1, "loss")], **settings(backend))
    assert not problem, problem
    log = job.log.read_text()
    assert "communicators are not aborted before 2 updates, and this rank has made 1" in log, job.story()
    assert "training goes on in this process" not in log, job.story()


@pytest.mark.parametrize(
    ("device", "backend"), [pytest.param(*world.values, id=world.id, marks=world.marks or slow) for world in ABORTS]
)
def test_who_is_stopped_is_not_continued(tmp_path: Path, device: str, backend: str) -> None:
    """A stopped rank could stop again. It is killed, which frees its device, and all ranks restart."""
    stop = kill(4, 1, "loss") | {"action": "stop"}
    job, problem = went_on_like_unbroken(tmp_path, device, "ddp", [stop], **settings(backend))
    assert not problem and again(job) == [False], problem or job.story()


@slow
@pytest.mark.parametrize("unkind", ["abort-hangs", "abort-raises"])
def test_an_abort_that_fails_costs_no_step(tmp_path: Path, unkind: str) -> None:
    faults = [kill(4, 1, "backward")]
    job, problem = went_on_like_unbroken(
        tmp_path, "made-up", "ddp", faults, **settings("cpu:nccl", MADE_UP_NCCL=unkind)
    )
    assert not problem, problem
    assert "connections of this rank cannot be broken: RuntimeError: " in job.log.read_text(), job.story()


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["self_test", "abort_behind_a_spin"])
def test_communicators_of_one_rank(run_case: RunCase, case: str) -> None:
    run_case(f"going_on:{case}")
