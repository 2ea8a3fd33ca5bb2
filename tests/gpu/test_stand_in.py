"""The cases themselves without a GPU: on the host, where nothing hangs, and on a made-up device."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

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
    "graphs:of_the_compiler",
    "graphs:saved_meanwhile",
    "graphs:whole_step",
    "going_on:self_test",
    "going_on:abort_behind_a_spin",
]
MADE_UP = [
    *(
        "ahead:host_ahead" + json.dumps({"optimizer": kind})
        for kind in ("adam-foreach", "adam-rate-there", "nadam", "sgd")
    ),
    'ahead:host_ahead{"scaled": true, "lead": 2}',
    "ahead:average_behind",
    'ahead:host_ahead{"optimizer": "adam-fused", "scaled": true, "lead": 1}',
    "copies:every_form",
    "copies:many_streams",
    "copies:full_queue",
    "copies:first_look",
    'steady:no_synchronisation{"kind": "statistics"}',
    'steady:no_synchronisation{"kind": "accumulation"}',
    'steady:no_synchronisation{"kind": "scaled"}',
    "steady:default_device",
    "steady:pages",
    "memory:full",
    "hold:stream_waits",
    "graphs:captured_late",
    "graphs:saved_meanwhile",
    "graphs:whole_step",
]
"""Those whose streams, events, copies and graphs are enough to tell. Collectives and forks are not made up."""


@pytest.mark.parametrize(
    ("device", "cases"),
    [
        pytest.param("cpu", ON_THE_HOST, id="host"),
        pytest.param("made-up", MADE_UP, id="made-up", marks=pytest.mark.slow),
    ],
)
def test_every_case(run_case: RunCase, device: str, cases: list[str]) -> None:
    done = run_case(*cases, device=device, deadline_s=270.0)
    assert done.out.count('{"case"') == len(cases)


WAITS: dict[str, Callable[[Any], Any]] = {
    "item": lambda t: t.sum().item(),
    "bool": lambda t: bool(t.any()),
    "equal": lambda t: t.equal(t),
    "allclose": lambda t: t.allclose(t),
    "tolist": lambda t: t.tolist(),
    "cpu": lambda t: t.cpu(),
    "to": lambda t: t.to("cpu", non_blocking=True),  # the memory is not pinned
    "nonzero": lambda t: t.nonzero(),
    "unique": lambda t: t.unique(),
    "masked_select": lambda t: t.masked_select(t > 1),
    "index": lambda t: t[t > 1],
    "index_put": lambda t: t.__setitem__(t > 1, 0),
}


@pytest.mark.parametrize("kind", WAITS)
def test_the_made_up_device_notices_who_waits_for_it(kind: str) -> None:
    import torch

    from tests.adapters.torch.fake_device import FakeDevice, Sin, Watching

    device = FakeDevice()
    tensor = device.put(torch.arange(4.0))
    with Watching(device), device.no_waiting(), pytest.raises(Sin, match="waits for the device"):
        WAITS[kind](tensor)


def test_the_made_up_device_is_none_of_the_host() -> None:
    import torch

    from tests.adapters.torch.fake_device import FakeDevice, Watching

    device = FakeDevice()
    tensor = device.put(torch.arange(4.0))
    with Watching(device):
        assert tensor.device == device.name and tensor.is_cuda and device.has(torch.zeros(2, device=tensor.device))
        with pytest.raises(TypeError, match="cuda:0 device type tensor"):
            tensor.numpy()


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
