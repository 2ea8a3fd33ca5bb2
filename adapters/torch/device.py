"""What an accelerator needs: when a version is finished there, and how bytes leave it without stopping anything.

``optimizer.step()`` returns when kernels are queued. A version is finished when the event recorded behind it is; the
host may count further. And while a collective hangs, everything queued behind it hangs too: a copy has to go round it,
on a stream of its own, into memory that was set aside at start (an allocation would queue behind the hung work).

All use of ``torch.cuda`` is in ``CudaRuntime``, so that the logic is tested without a device.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

log = logging.getLogger("ttp.adapters.torch")

_cuda: Any = torch.cuda
_POLL_S = 0.0002
RING_BYTES = 64 << 20


class Event(Protocol):
    """A mark in a stream of work."""

    def query(self) -> bool:
        """Whether everything before the mark is done. Does not wait. Raises RuntimeError when the device is broken."""


class Runtime(Protocol):
    """The few things asked of a device."""

    def holds(self, tensor: Tensor) -> bool:
        """Whether the tensor is in its memory."""

    def mark(self, *, side: bool) -> Event:
        """Put a mark behind what is queued now, on the current stream or on the side stream."""

    def side_waits_for(self, event: Event) -> None:
        """Work queued later on the side stream runs after the mark."""

    def on_side(self) -> contextlib.AbstractContextManager[Any]:
        """Work queued inside goes to the side stream."""

    def pinned(self, size: int) -> Tensor:
        """``size`` bytes of host memory that the device can write to by itself."""

    def on_device(self, size: int) -> Tensor:
        """``size`` bytes of device memory."""


class CudaRuntime:
    """``Runtime`` of one CUDA device. To be made at start: it allocates."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side: Any = _cuda.Stream(device)

    def holds(self, tensor: Tensor) -> bool:
        """See ``Runtime``."""
        return tensor.is_cuda

    def mark(self, *, side: bool) -> Event:
        """See ``Runtime``."""
        event: Any = _cuda.Event()
        event.record(self._side if side else torch.cuda.current_stream(self._device))
        return event

    def side_waits_for(self, event: Event) -> None:
        """See ``Runtime``."""
        self._side.wait_event(event)

    def on_side(self) -> contextlib.AbstractContextManager[Any]:
        """See ``Runtime``."""
        return torch.cuda.stream(self._side)

    def pinned(self, size: int) -> Tensor:
        """See ``Runtime``."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def on_device(self, size: int) -> Tensor:
        """See ``Runtime``."""
        return torch.empty(size, dtype=torch.uint8, device=self._device)


# ---------------------------------------------------------------------------------------------------------------- fence


class Fence(Protocol):
    """Knows which version is finished where the state lives."""

    def record(self, version: int) -> None:
        """Training thread, after the last write of ``version`` was queued. Does not wait."""

    def finished_version(self) -> int:
        """The newest version whose writes are all done. Any thread; does not wait."""

    def wait(self, version: int, timeout_s: float) -> bool:
        """Wait until ``version`` is finished. Not for the training thread. False: it was not in ``timeout_s``."""


class HostFence:
    """On the CPU a version is finished when the step returns."""

    def __init__(self, base: int = 0) -> None:
        self._finished = base

    def record(self, version: int) -> None:
        """See ``Fence``."""
        self._finished = version

    def finished_version(self) -> int:
        """See ``Fence``."""
        return self._finished

    def wait(self, version: int, timeout_s: float) -> bool:
        """See ``Fence``."""
        return self._finished >= version


class DeviceFence:
    """On a device a version is finished when its event is."""

    def __init__(self, runtime: Runtime, base: int = 0) -> None:
        self._runtime = runtime
        self._finished = base
        self._pending: deque[tuple[int, Event]] = deque()
        self._collecting = threading.Lock()

    def record(self, version: int) -> None:
        """See ``Fence``."""
        self._pending.append((version, self._runtime.mark(side=False)))
        self.finished_version()  # so that nothing piles up when nobody asks

    def finished_version(self) -> int:
        """See ``Fence``."""
        with self._collecting:
            try:
                while self._pending and self._pending[0][1].query():
                    self._finished = self._pending.popleft()[0]
            except RuntimeError as problem:  # the device is gone: nothing after this is finished
                log.debug("the device does not answer: %s", problem)
            return self._finished

    def wait(self, version: int, timeout_s: float) -> bool:
        """See ``Fence``."""
        return poll(lambda: self.finished_version() >= version, timeout_s)


def make_fence(device: torch.device, runtime: Runtime | None = None, base: int = 0) -> Fence:
    """The fence for state on ``device``; ``base`` is the version that it has now."""
    if runtime is None and device.type != "cuda":
        return HostFence(base)
    return DeviceFence(runtime or CudaRuntime(device), base)


def poll(done: Callable[[], bool], timeout_s: float) -> bool:
    """Ask again and again: a wait inside the driver could not be given up."""
    deadline = time.monotonic() + timeout_s
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


# ------------------------------------------------------------------------------------------- large copies, saver thread


@dataclass(slots=True)
class _Flight:
    """A chunk on its way to the host; without an event it is there already."""

    event: Event | None
    staged: Tensor
    target: Tensor
    completes: Tensor | None


class HostCopier:
    """Brings tensors to the host past whatever hangs on the device. For one thread at a time.

    Args:
        runtime: the device; None: there is none, tensors are handed through.
        ring: number of pinned buffers, allocated here and now.
        buffer_bytes: size of each.
        timeout_s: how long one chunk may take before the device counts as stuck.
    """

    def __init__(
        self, runtime: Runtime | None, *, ring: int = 2, buffer_bytes: int = RING_BYTES, timeout_s: float = 60.0
    ) -> None:
        self._runtime = runtime
        self._timeout_s = timeout_s
        self._ring = [runtime.pinned(buffer_bytes) for _ in range(ring)] if runtime is not None else []
        self._turn = 0

    def copy_to_host(self, tensors: Iterable[Tensor]) -> Iterator[Tensor]:
        """The tensors in order, each an ordinary CPU tensor of the same shape, dtype and strides.

        The caller has waited for the fence. One chunk is on its way while the one before is moved out of its buffer.

        Raises:
            TimeoutError: a chunk did not arrive.
        """
        flights: deque[_Flight] = deque()
        for flight in self._flights(tensors):
            flights.append(flight)
            if len(flights) >= max(1, len(self._ring)):  # the next one needs the buffer of the oldest
                yield from self._land(flights.popleft())
        while flights:
            yield from self._land(flights.popleft())

    def _flights(self, tensors: Iterable[Tensor]) -> Iterator[_Flight]:
        for tensor in map(Tensor.detach, tensors):
            if self._runtime is None or not self._runtime.holds(tensor):
                yield _Flight(None, tensor, tensor, tensor)
                continue
            host, source, target = _twin(tensor)
            step = self._ring[0].numel()
            last = max(0, source.numel() - 1) // step * step
            for start in range(0, last + 1, step):
                span = slice(start, start + step)
                yield self._launch(self._runtime, source[span], target[span], host if start == last else None)

    def _launch(self, runtime: Runtime, source: Tensor, target: Tensor, completes: Tensor | None) -> _Flight:
        staged = self._ring[self._turn % len(self._ring)][: source.numel()]
        self._turn += 1
        with runtime.on_side():
            staged.copy_(source, non_blocking=True)
        return _Flight(runtime.mark(side=True), staged, target, completes)

    def _land(self, flight: _Flight) -> Iterator[Tensor]:
        if flight.event is not None:
            if not poll(flight.event.query, self._timeout_s):
                raise TimeoutError(f"{flight.target.numel()} bytes did not leave the device in {self._timeout_s:g} s")
            flight.target.copy_(flight.staged)
        if flight.completes is not None:
            yield flight.completes


def _twin(tensor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """An empty CPU tensor of the same form, the bytes of ``tensor``, and the bytes of the empty one.

    Bytes are views when the tensor fills its memory in any order of dimensions (channels last does); otherwise a dense
    copy is made on the device first.
    """
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    source = tensor.permute(order)
    if not source.is_contiguous():
        source = source.contiguous()
    target = torch.empty(source.shape, dtype=tensor.dtype)
    back = sorted(range(tensor.dim()), key=order.__getitem__)
    return target.permute(back), flat_bytes(source), flat_bytes(target)


def flat_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor as a vector of bytes: a view."""
    return tensor.detach().reshape(-1).view(torch.uint8)
