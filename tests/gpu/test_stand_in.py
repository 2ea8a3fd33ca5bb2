"""The cases themselves without a GPU: on the host, where nothing hangs, and on a made-up device."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.gpu import needs
from tests.gpu.conftest import ROOT, RunCase, environment

ON_THE_HOST = [
    "leaving:forked_workers",  # first: while the process has had one job only
    'ahead:host_ahead{"optimizer": "adam-fused", "scaled": true, "lead": 1}',
    "watchdog:hung_collective",
    "watchdog:saved_after_the_time_out",
    'steady:no_synchronisation{"kind": "accumulation"}',
    'steady:no_synchronisation{"kind": "hsdp"}',
    "steady:default_device",
    "graphs:forward_and_backward",
    "graphs:captured_late",
    "graphs:saved_meanwhile",
    "graphs:whole_step",
    "going_on:self_test",
    "going_on:abort_behind_a_spin",
]
MADE_UP = [
    *("ahead:host_ahead" + json.dumps({"optimizer": kind}) for kind in ("adam-foreach", "nadam", "sgd")),
    'ahead:host_ahead{"scaled": true, "lead": 2}',
    'ahead:host_ahead{"optimizer": "adam-fused", "scaled": true, "lead": 1}',
    "copies:every_form",
    "copies:many_streams",
    "copies:first_look",
    'steady:no_synchronisation{"kind": "statistics"}',
    'steady:no_synchronisation{"kind": "accumulation"}',
    'steady:no_synchronisation{"kind": "scaled"}',
    "steady:default_device",
    "steady:pages",
    "memory:full",
    "hold:stream_waits",
]
"""Those whose streams, events and copies are enough to tell. Collectives, graphs and forks are not made up."""


@pytest.mark.parametrize(
    ("device", "cases"),
    [
        pytest.param("cpu", ON_THE_HOST, id="host"),
        pytest.param("made-up", MADE_UP, id="made-up", marks=pytest.mark.slow),
    ],
)
def test_every_case(run_case: RunCase, device: str, cases: list[str]) -> None:
    done = run_case(*cases, device=device)
    assert done.out.count('{"case"') == len(cases)


def test_what_is_missing_is_said_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    found = needs._found
    monkeypatch.setattr(needs, "_found", lambda module: module not in ("grpc_health", "xxhash") and found(module))
    said = needs.missing()
    assert "lacks grpcio-health-checking, xxhash" in said and "PYTHONPATH" in said and "\n" not in said


def test_without_a_device_the_suite_says_so_and_fails() -> None:
    """With the command of ``make test-gpu``."""
    command = [sys.executable, "-m", "tests.gpu.needs"]
    env = environment() | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("make test-gpu: ") and done.stderr.count("\n") == 1
    assert any(word in done.stderr for word in ("not built for CUDA", "no CUDA device"))
