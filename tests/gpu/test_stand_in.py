"""The cases themselves, on the host, where nothing hangs: a case that is wrong is found without a GPU."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.gpu import needs
from tests.gpu.conftest import ROOT, RunCase, environment

CASES = [
    "leaving:forked_workers",  # first: while the process has had one job only
    "ahead:host_ahead",
    'ahead:host_ahead{"optimizer": "adam-fused", "scaled": true, "lead": 1}',
    "watchdog:hung_collective",
    "watchdog:saved_after_the_time_out",
    "copies:every_form",
    "copies:first_look",
    'steady:no_synchronisation{"kind": "accumulation"}',
    'steady:no_synchronisation{"kind": "hsdp"}',
    "steady:pages",
    "memory:full",
    "graphs:forward_and_backward",
    "graphs:whole_step",
]


def test_every_case_on_the_host(run_case: RunCase) -> None:
    done = run_case(*CASES, device="cpu")
    assert done.out.count('{"case"') == len(CASES)


def test_what_is_missing_is_said_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    found = needs._found
    monkeypatch.setattr(needs, "_found", lambda module: module not in ("grpc_health", "xxhash") and found(module))
    said = needs.missing()
    assert "lacks grpcio-health-checking, xxhash" in said and "PYTHONPATH" in said and "\n" not in said


def test_without_a_device_the_suite_says_so_and_fails() -> None:
    """As ``make test-gpu`` calls it."""
    command = [sys.executable, "-m", "tests.gpu.needs"]
    env = environment() | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("make test-gpu: ") and done.stderr.count("\n") == 1
    assert any(word in done.stderr for word in ("not built for CUDA", "no CUDA device"))
