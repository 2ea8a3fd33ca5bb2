"""Two ranks on one device with NCCL itself: from 2.30 on a communicator may have several ranks on one GPU.

``TTP_GPU_NCCL=/path/to/libnccl.so.2`` preloads a newer NCCL than that of torch.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.gpu.conftest import RunCase
from tests.gpu.ranks import resumed_like_unbroken
from ttp.launch.nccl import HANDLING

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(420)]

PRELOADED = os.environ.get("TTP_GPU_NCCL", "")
SMALL = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "1", "NCCL_NVLS_ENABLE": "0", "JOB_BACKEND": "nccl"}


def too_old() -> str:
    """Return why NCCL cannot have several ranks on one GPU; empty: it can."""
    torch = pytest.importorskip("torch")
    if PRELOADED or torch.cuda.nccl.version() >= (2, 30):
        return ""
    return (
        f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))} takes one rank for each GPU, 2.30 takes several: "
        "name one with TTP_GPU_NCCL=/path/to/libnccl.so.2"
    )


@pytest.fixture(autouse=True)
def nccl_env() -> dict[str, str]:
    """Return the ranks' environment; skips if NCCL is too old."""
    if reason := too_old():
        pytest.skip(reason)
    return SMALL | ({"LD_PRELOAD": PRELOADED} if PRELOADED else {})


@pytest.mark.parametrize(("kind", "fault"), [("ddp", "kill"), ("ddp", "hang"), ("ddp", "assert"), ("hsdp", "kill")])
def test_resumed_like_unbroken(tmp_path: Path, nccl_env: dict[str, str], kind: str, fault: str) -> None:
    ranks = 4 if kind == "hsdp" or fault == "hang" else 2  # it is rank 2 that hangs
    problem = resumed_like_unbroken(tmp_path, "cuda", kind, fault, env=nccl_env, ranks=ranks)
    assert not problem, problem


def test_no_handling_with_a_real_communicator(run_case: RunCase, nccl_env: dict[str, str]) -> None:
    """With the preloaded NCCL and one rank, as in ``test_02_watchdog.py``."""
    run_case("watchdog:saved_after_the_time_out", **{k: v for k, v in nccl_env.items() if k != HANDLING})
