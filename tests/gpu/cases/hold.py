"""A stream of the training waits for a word of the host, as in the barrier before an update."""

from __future__ import annotations

import time
from typing import Any

import torch

from tests.gpu.stand import Stand
from ttp.adapters.torch import adapter
from ttp.adapters.torch.device.accelerator import poll
from ttp.adapters.torch.saving import standing

_HELD_S = 0.5


def stream_waits(stand: Stand) -> None:
    """A hold delays the work queued behind it, one number at a time, but no other stream and not the host."""
    memory = torch.zeros(1, device=stand.device)
    if stand.made_up is not None:
        stand.made_up.device.put(memory)
    seams: Any = (adapter, standing)  # as they are under a device that is made up
    devices = seams[0].devices_of([memory])
    (runtime,), (rescue,) = seams[1].runtimes_on(devices), seams[1].runtimes_on(devices, rescue=True)
    hold = runtime.hold()
    memory.add_(1)
    stand.synchronize()
    began = time.monotonic()
    events = []
    for number in (1, 2, 3):
        hold.queue(number)
        memory.add_(1)
        events.append(runtime.event(side=False))
    stand.numbers["queued_s"] = round(time.monotonic() - began, 4)
    with rescue.on_side():
        beside = rescue.event(side=True)
    assert poll(beside.query, 5.0), "another stream waits as well"
    for number, event in enumerate(events, 1):
        assert not poll(event.query, _HELD_S), f"nothing holds the update {number}"
        hold.release(number)
        assert poll(event.query, 5.0), f"the update {number} is not let go"
    found: list[str] = []
    with runtime.noticing(found):
        memory.add_(1)
    assert not found, found
    with runtime.noticing(found):
        value = memory.item()
    assert found and value == 5.0
