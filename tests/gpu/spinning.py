"""A kernel that spins until it is released, which affects a stream like a collective whose peer is gone.

It always ends: by itself after some seconds, by ``release()``, or with its process.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

SPIN_MAX_S = 60.0

_SOURCE = """
extern "C" __global__ void spin(const volatile int* released, int limit_ms) {
    unsigned long long begin, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
    do {
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    } while (*released == 0 && now - begin < limit_ms * 1000000ULL);
}
"""


class Spin(Protocol):
    """One kernel that spins."""

    def release(self) -> None:
        """Let the kernel end, so that the work queued behind it runs."""


class Spinner:
    """Makes kernels spin on the current stream. Make it before anything hangs: it compiles and loads the kernel."""

    def __init__(self) -> None:
        compile_kernel: Any = getattr(torch.cuda, "_compile_kernel", None)
        self._launch: Callable[[torch.Tensor, float], None] = _sleep_in_pieces
        self.how = "torch.cuda._sleep: cannot be released early"
        if compile_kernel is not None:
            try:
                kernel = compile_kernel(_SOURCE, "spin")
            except Exception as problem:  # no NVRTC
                self.how += f" ({problem})"
            else:
                self.how = "a kernel that reads a flag in pinned memory"

                def launch(released: torch.Tensor, limit_s: float) -> None:
                    kernel(grid=(1, 1, 1), block=(1, 1, 1), args=[released, int(limit_s * 1000)])

                self._launch = launch
        self._launch(torch.ones(1, dtype=torch.int32, pin_memory=True), 0.001)
        torch.cuda.synchronize()

    def spin(self, limit_s: float = SPIN_MAX_S) -> Spin:
        """Queue one kernel."""
        assert 0 < limit_s <= SPIN_MAX_S
        released = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self._launch(released, limit_s)
        return _Flag(released)


class _Flag:
    def __init__(self, released: torch.Tensor) -> None:
        self._released = released

    def release(self) -> None:
        self._released[0] = 1


class NoSpin:
    """On the host nothing spins."""

    def release(self) -> None:
        """See ``Spin``."""


_CYCLES_PER_MS: list[float] = []


def _sleep_in_pieces(_released: torch.Tensor, limit_s: float) -> None:
    """Let the device sleep for about this time, by its present clock."""
    sleep: Any = torch.cuda._sleep
    if not _CYCLES_PER_MS:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        sleep(20_000_000)
        torch.cuda.synchronize()
        _CYCLES_PER_MS.append(20_000_000 / (time.perf_counter() - begin) / 1e3)
    sleep(int(limit_s * 1e3 * _CYCLES_PER_MS[0]))
