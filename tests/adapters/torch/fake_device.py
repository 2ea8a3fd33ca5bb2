"""A device made of host memory, on which copies arrive late: until their event is done, the target holds garbage."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

POISON = 0xEE


class FakeEvent:
    def __init__(self, runtime: FakeRuntime, arrivals: list[tuple[Tensor, Tensor]]) -> None:
        self._runtime = runtime
        self._arrivals = arrivals
        self.done = False

    def query(self) -> bool:
        if self._runtime.broken:
            raise RuntimeError("CUDA error: unspecified launch failure")
        if not self.done and self._runtime.moving.is_set():
            self.done = True
            self._runtime.arrive(self._arrivals)
        return self.done


class FakeRuntime:
    """See ``ttp.adapters.torch.device.Runtime``. Nothing finishes while ``moving`` is not set."""

    def __init__(self) -> None:
        self.moving = threading.Event()
        self.moving.set()
        self.broken = False
        self.log: list[str] = []
        self._pinned: list[tuple[Tensor, Tensor]] = []  # memory, and what is known to be in it
        self._lock = threading.Lock()  # the writer's thread asks events while training marks new ones

    def holds(self, tensor: Tensor) -> bool:
        return not hasattr(tensor, "on_host")

    def mark(self, *, side: bool) -> FakeEvent:
        self.log.append("mark side" if side else "mark")
        return FakeEvent(self, self._take_away() if side else [])

    def _take_away(self) -> list[tuple[Tensor, Tensor]]:
        """What was copied since the last mark on the side stream is not there yet."""
        arrivals = []
        with self._lock:
            for memory, known in self._pinned:
                if not torch.equal(memory, known):
                    arrivals.append((memory, memory.clone()))
                    memory.fill_(POISON)
                    known.fill_(POISON)
        return arrivals

    def arrive(self, arrivals: list[tuple[Tensor, Tensor]]) -> None:
        with self._lock:
            for memory, content in arrivals:
                memory.copy_(content)
                next(known for pinned, known in self._pinned if pinned is memory).copy_(content)

    def side_waits_for(self, event: Any) -> None:
        self.log.append("wait")

    @contextlib.contextmanager
    def on_side(self) -> Iterator[None]:
        self.log.append("side")
        yield

    def pinned(self, size: int) -> Tensor:
        memory = torch.full((size,), POISON, dtype=torch.uint8)
        self._pinned.append((memory, memory.clone()))
        return memory

    def on_device(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.uint8)
