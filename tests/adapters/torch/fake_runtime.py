"""``FakeDevice`` with the interface of ``ttp.adapters.torch.device.accelerator.Runtime``."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.adapters.torch.fake_device import TRAINING, FakeDevice, FakeEvent


class FakeHold:
    """See ``accelerator.Hold``. Like a real stream, it does not see a word that is changed back."""

    def __init__(self, device: FakeDevice) -> None:
        self.device, self.word = device, 0

    def queue(self, number: int) -> None:
        self.device.wait(_Reached(self, number), self.device.current)

    def release(self, number: int) -> None:
        self.word = number


@dataclass(frozen=True)
class _Reached:
    hold: FakeHold
    number: int

    @property
    def done(self) -> bool:
        return self.hold.word >= self.number


class FakeRuntime:
    """See ``ttp.adapters.torch.device.accelerator.Runtime``."""

    def __init__(self, device: FakeDevice | None = None, order: str = TRAINING) -> None:
        self.device = device or FakeDevice(order)
        self.side = self.device.stream()
        self.log: list[str] = []

    @property
    def moving(self) -> threading.Event:
        return self.device.moving

    def holds(self, tensor: Tensor) -> bool:
        return not tensor.is_meta and tensor.layout is torch.strided and self.device.has(tensor)

    def capturing(self) -> bool:
        return self.device.capturing

    def event(self, *, side: bool) -> FakeEvent:
        self.log.append("event side" if side else "event")
        return self.device.event(self.side if side else self.device.current)

    def side_waits_for(self, event: Any) -> None:
        self.log.append("wait")
        self.device.wait(event, self.side)

    def training_waits_for(self, event: Any) -> None:
        self.log.append("training waits")
        self.device.wait(event, self.device.current)

    def on_side(self) -> contextlib.AbstractContextManager[None]:
        self.log.append("side")
        return self.device.on(self.side)

    def hold(self) -> FakeHold:
        return FakeHold(self.device)

    @contextlib.contextmanager
    def noticing(self, found: list[str]) -> Iterator[None]:
        before = self.device.waits[threading.get_ident()]
        yield
        found += ["somewhere"] * (self.device.waits[threading.get_ident()] - before)

    def pinned(self, size: int) -> Tensor:
        return self.device.allocate(size, pinned=True)

    def on_device(self, size: int) -> Tensor:
        return self.device.allocate(size)
