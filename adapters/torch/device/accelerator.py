"""What an accelerator needs: when a version is finished there, and how bytes leave it without stopping anything.

``optimizer.step()`` returns when kernels are queued. A version is finished when the event recorded behind it is; the
host may count further. And while a collective hangs, everything queued behind it hangs too. So:

* what the rescue does runs on a stream of its own, that waits for nothing, in memory that was set aside at start (an
  allocation may wait for the device), by kernels that were launched once at start (CUDA loads them at their first
  launch, which may wait for the device too);
* what follows the training runs on another one, which waits for marks of the training and hangs with it.

A process may use several devices, and keep some of its state on the host: there is a runtime for each device, and each
tensor is asked where it is. All use of ``torch.cuda`` is in ``CudaRuntime``, so that the logic is tested without one.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ttp.adapters.torch.loop.stream_hold import StreamHold, noticing
from ttp.errors import CheckpointError

log = logging.getLogger("ttp.adapters.torch")

_cuda: Any = torch.cuda
_POLL_S = 0.0002
_PRIORITY = -2
"""Of the streams made here: torch deals out streams of a priority in turn, so that after some dozens two users share
one. Communicators take theirs from the lowest and the highest; one that hangs may not be ours."""

AHEAD_MAX = 8
"""Updates that a host may be ahead of its device before something that was kept of the oldest is gone."""


_NUMBERS, _NUMBER_BYTES = 512, 16
"""As many single numbers are remembered; a job with several scaled optimizers sends some dozens for each update."""
_NUMBER_S = 5.0


class Event(Protocol):
    """A mark in a stream of work."""

    def query(self) -> bool:
        """Whether everything before the mark is done. Does not wait. Raises RuntimeError when the device is broken."""

    def synchronize(self) -> None:
        """Return when it is, without using the processor meanwhile; perhaps never. Raises like ``query``."""


class Hold(Protocol):
    """A word of the host that streams of a device wait for."""

    def queue(self, number: int) -> None:
        """Work queued later on the current stream of this thread runs when the word has reached ``number``."""

    def release(self, number: int) -> None:
        """Write the word. Any thread; does not wait."""


class Runtime(Protocol):
    """The few things asked of one device."""

    def holds(self, tensor: Tensor) -> bool:
        """Whether the tensor is in its memory."""

    def capturing(self) -> bool:
        """Whether what this thread queues becomes part of a CUDA graph: nothing of ours may, marks neither."""

    def mark(self, *, side: bool) -> Event:
        """Put a mark behind what is queued now, on the current stream of this thread or on the side stream."""

    def side_waits_for(self, event: Event) -> None:
        """Work queued later on the side stream runs after the mark."""

    def training_waits_for(self, event: Event) -> None:
        """Work queued later on the current stream of this thread runs after the mark."""

    def on_side(self) -> contextlib.AbstractContextManager[Any]:
        """Work queued inside goes to the side stream."""

    def hold(self) -> Hold:
        """A word of its own, 0 now. At start only. Raises OSError, AttributeError or RuntimeError: there is none."""

    def noticing(self, found: list[str]) -> contextlib.AbstractContextManager[None]:
        """Inside, where this thread waits for the device, as far as torch can tell, is added to ``found``."""

    def pinned(self, size: int) -> Tensor:
        """``size`` bytes of host memory that the device can write to by itself. At start only."""

    def on_device(self, size: int) -> Tensor:
        """``size`` bytes of device memory. At start only."""


class CudaRuntime:
    """``Runtime`` of one CUDA device. To be made at start: it allocates."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side: Any = _cuda.Stream(device, priority=_PRIORITY)

    def holds(self, tensor: Tensor) -> bool:
        """See ``Runtime``."""
        return tensor.device == self._device

    def capturing(self) -> bool:
        """See ``Runtime``."""
        return bool(_cuda.is_current_stream_capturing())

    def mark(self, *, side: bool) -> Event:
        """See ``Runtime``."""
        event: Any = _cuda.Event(blocking=True)
        event.record(self._side if side else torch.cuda.current_stream(self._device))
        return event

    def side_waits_for(self, event: Event) -> None:
        """See ``Runtime``."""
        self._side.wait_event(event)

    def training_waits_for(self, event: Event) -> None:
        """See ``Runtime``."""
        stream: Any = torch.cuda.current_stream(self._device)
        stream.wait_event(event)

    def on_side(self) -> contextlib.AbstractContextManager[Any]:
        """See ``Runtime``."""
        return torch.cuda.stream(self._side)

    def hold(self) -> Hold:
        """See ``Runtime``."""
        return StreamHold(self._device)

    def noticing(self, found: list[str]) -> contextlib.AbstractContextManager[None]:
        """See ``Runtime``."""
        return noticing(found)

    def pinned(self, size: int) -> Tensor:
        """See ``Runtime``."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def on_device(self, size: int) -> Tensor:
        """See ``Runtime``."""
        return torch.empty(size, dtype=torch.uint8, device=self._device)


def devices_of(tensors: Iterable[Tensor]) -> tuple[torch.device, ...]:
    """The CUDA devices that hold any of them, each once."""
    found = {tensor.device for tensor in tensors if tensor.device.type == "cuda"}
    return tuple(sorted(found, key=lambda device: device.index or 0))


def runtimes_on(devices: Iterable[torch.device]) -> tuple[Runtime, ...]:
    """A runtime of its own for each device; none for the host."""
    return tuple(CudaRuntime(device) for device in devices if device.type == "cuda")


def holder(runtimes: Sequence[Runtime], tensor: Tensor) -> Runtime | None:
    """The device that holds the tensor; None: the host does.

    Raises:
        CheckpointError: another kind of device does.
    """
    for runtime in runtimes:
        if runtime.holds(tensor):
            return runtime
    if tensor.device.type not in ("cpu", "meta"):
        raise CheckpointError(
            f"a tensor is on {tensor.device}, where no part of the state was at start: memory of the host and of CUDA "
            "devices that hold parameters or buffers can be saved"
        )
    return None


@dataclass(frozen=True, slots=True)
class AllEvents:
    """Marks of several devices as one."""

    events: Sequence[Event]

    def query(self) -> bool:
        """See ``Event``."""
        return all(event.query() for event in self.events)

    def synchronize(self) -> None:
        """See ``Event``."""
        for event in self.events:
            event.synchronize()


class Number:
    """A single number on its way to the host."""

    def __init__(self, numbers: Numbers, turn: int, slot: Tensor, event: Event) -> None:
        self._numbers, self._turn, self._slot, self._event = numbers, turn, slot, event

    def value(self) -> float | int:
        """What it was where the training's work had come to when it was sent. Any thread but training's.

        Raises:
            CheckpointError: it did not come, or is gone.
        """
        if not poll(self._event.query, _NUMBER_S):
            raise CheckpointError(f"a number did not leave the device in {_NUMBER_S:g} s")
        found = self._slot.item()
        if self._numbers.turn - self._turn >= _NUMBERS:
            raise CheckpointError("a number that the device was asked for is gone: the host is too far ahead of it")
        return found


class Numbers:
    """Brings single numbers, like a loss scale, to the host as they are in the order of the training's work.

    ``item()`` would wait for the device, and behind a hang for ever.

    Args:
        runtimes: the devices; a little pinned memory is set aside here and now.
    """

    def __init__(self, runtimes: Sequence[Runtime] = ()) -> None:
        self._runtimes = runtimes
        self._pinned = runtimes[0].pinned(_NUMBERS * _NUMBER_BYTES) if runtimes else torch.empty(0)
        self.turn = 0

    def bring(self, value: Any) -> Any:
        """A tensor of one element, as a ``Number``, or what is on the host, as it is now. Training thread.

        Raises:
            CheckpointError: a CUDA graph is being captured.
        """
        if not isinstance(value, Tensor):
            return value
        runtime = holder(self._runtimes, value)
        if runtime is None:
            return value.item()
        if runtime.capturing():
            raise CheckpointError("a number of a device cannot be asked for while a CUDA graph is captured")
        start = self.turn % _NUMBERS * _NUMBER_BYTES
        slot = self._pinned[start : start + value.element_size()].view(value.dtype)
        slot.copy_(value.detach().view(-1), non_blocking=True)
        self.turn += 1
        return Number(self, self.turn - 1, slot, runtime.mark(side=False))

    def elsewhere(self, value: Any) -> bool:
        """Whether it is a number on a device."""
        return isinstance(value, Tensor) and holder(self._runtimes, value) is not None


def number(value: Any) -> Any:
    """What ``Numbers.bring`` gave, when it is there.

    Raises:
        CheckpointError: it does not come.
    """
    return value.value() if isinstance(value, Number) else value


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
        """See ``Fence``. Of a device that is broken nothing is finished any more; the program finds out by itself."""
        try:
            self._pending.append((version, self._runtime.mark(side=False)))
        except RuntimeError as problem:
            log.debug("the device takes no mark: %s", problem)
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


class DevicesFence:
    """Of several devices: what all have reached, or, of an update that begins, what any has.

    Args:
        fences: of each.
        newest: whether one is enough.
    """

    def __init__(self, fences: Sequence[Fence], newest: bool) -> None:
        self._fences, self._pick = fences, max if newest else min

    def record(self, version: int) -> None:
        """See ``Fence``."""
        for fence in self._fences:
            fence.record(version)

    def finished_version(self) -> int:
        """See ``Fence``."""
        return self._pick(fence.finished_version() for fence in self._fences)

    def wait(self, version: int, timeout_s: float) -> bool:
        """See ``Fence``."""
        return poll(lambda: self.finished_version() >= version, timeout_s)


def make_fence(runtimes: Sequence[Runtime], base: int = 0, *, newest: bool = False) -> Fence:
    """The fence for state on these devices; none: on the host.

    Args:
        runtimes: of the devices.
        base: the version that the state has now.
        newest: of what begins it is enough that one device has begun it.
    """
    fences = [DeviceFence(runtime, base) for runtime in runtimes]
    if len(fences) > 1:
        return DevicesFence(fences, newest)
    return fences[0] if fences else HostFence(base)


def poll(done: Callable[[], bool], timeout_s: float) -> bool:
    """Ask again and again: a wait inside the driver could not be given up."""
    deadline = time.monotonic() + timeout_s
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


def flat_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor as a vector of bytes: a view."""
    return tensor.detach().reshape(-1).view(torch.uint8)
