"""The ``Runtime`` of CUDA devices, and the streams that ttp uses on them.

CUDA runs the streams of a process on a few hardware queues (``CUDA_DEVICE_MAX_CONNECTIONS``: 8, and 1 in many Megatron
jobs). Streams that share a queue wait for each other: if a collective hangs, so do all streams that wait for it, and
every other stream on their queues. The stream of a rescue must not be one of them. As far as was measured, copies on a
stream wait for no stream of another priority (docs/gpu.md), so it has a priority that torch gives to none.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from ttp.adapters.torch.device.accelerator import Event, Hold, Runtime
from ttp.adapters.torch.device.stream_hold import StreamHold, check, driver, noticing

log = logging.getLogger("ttp.adapters.torch")

_cuda: Any = torch.cuda
_PRIORITY = -2
"""Priority of streams that follow the training's stream. torch hands out the few dozen streams of a priority in turn,
so two users may share one. Communicators use the lowest and the highest priority that torch has: 0 and -3."""
_OWN_PRIORITY = -4
"""Priority of the stream of a rescue."""
_NON_BLOCKING = 1
"""``CU_STREAM_NON_BLOCKING``: the stream does not wait for the default stream."""

_RELAXED = 2
"""``CU_STREAM_CAPTURE_MODE_RELAXED``: what this thread does leaves the captures of other threads alone."""

_own: dict[int, Any] = {}
"""The rescue's stream of each device. Streams are never destroyed, because copies may still be queued on them."""


@contextlib.contextmanager
def _at(device: int) -> Iterator[None]:
    """Let this thread use a device, whichever device is its current one, and while the program captures a CUDA graph.

    A thread begins with the first device as the current one, and asking would make a context there: several hundred MB
    of the memory of another rank's device, and an error if that device is the one that is broken. While any thread
    captures a graph, a question to an event is an error for all others, and breaks the capture.
    """
    mode, exchange = ctypes.byref(ctypes.c_int(_RELAXED)), _exchange_mode()
    with torch.cuda.device(device):
        exchange(mode)
        try:
            yield
        finally:
            exchange(mode)


@functools.cache
def _exchange_mode() -> Callable[[Any], object]:
    """Return the driver's function that exchanges a word with this thread's mode for captures of other threads."""
    try:
        exchange: Callable[[Any], object] = driver().cuThreadExchangeStreamCaptureMode
    except (OSError, AttributeError):  # no driver of this maker, or an old one
        return lambda _mode: None
    return exchange


class _Recorded:
    """An event of CUDA."""

    __slots__ = ("_device", "event")

    def __init__(self, device: int, stream: Any) -> None:
        self._device, self.event = device, _cuda.Event(blocking=True)
        self.event.record(stream)

    def query(self) -> bool:
        """See ``Event``."""
        with _at(self._device):
            return bool(self.event.query())

    def synchronize(self) -> None:
        """See ``Event``."""
        with _at(self._device):
            self.event.synchronize()


class CudaRuntime:
    """The ``Runtime`` of one CUDA device, with a side stream. Make it at the start: it allocates memory.

    Args:
        device: the device.
        rescue: the side stream is the rescue's, which waits for no other stream; else a stream of torch.
    """

    def __init__(self, device: torch.device, *, rescue: bool = False) -> None:
        self._device = device
        self._index: int = device.index  # torch looks up streams faster by number than by device
        self._side: Any = rescue_stream(device) if rescue else _cuda.Stream(device, priority=_PRIORITY)

    def holds(self, tensor: Tensor) -> bool:
        """See ``Runtime``."""
        return tensor.device == self._device

    def capturing(self) -> bool:
        """See ``Runtime``."""
        return bool(_cuda.is_current_stream_capturing())

    def event(self, *, side: bool) -> Event:
        """See ``Runtime``."""
        if not side:
            return _Recorded(self._index, torch.cuda.current_stream(self._index))
        with _at(self._index):  # another thread may capture a CUDA graph
            return _Recorded(self._index, self._side)

    def side_waits_for(self, event: Any) -> None:
        """See ``Runtime``. The event is one that ``event`` returned."""
        self._side.wait_event(event.event)

    def training_waits_for(self, event: Any) -> None:
        """See ``Runtime``. The event is one that ``event`` returned."""
        stream: Any = torch.cuda.current_stream(self._index)
        stream.wait_event(event.event)

    @contextlib.contextmanager
    def on_side(self) -> Iterator[None]:
        """See ``Runtime``."""
        with _at(self._index), torch.cuda.stream(self._side):
            yield

    def hold(self) -> Hold:
        """See ``Runtime``."""
        return StreamHold(self._device)

    def noticing(self, found: list[str]) -> contextlib.AbstractContextManager[None]:
        """See ``Runtime``."""
        return noticing(found)

    def pinned(self, size: int) -> Tensor:
        """See ``Runtime``."""
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)

    def on_device(self, size: int) -> Tensor:
        """See ``Runtime``."""
        return torch.empty(size, dtype=torch.uint8, device=self._device)


def devices_of(tensors: Iterable[Tensor]) -> tuple[torch.device, ...]:
    """Return the CUDA devices that hold any of these tensors, without repetitions."""
    found = {tensor.device for tensor in tensors if tensor.device.type == "cuda"}
    return tuple(sorted(found, key=lambda device: device.index or 0))


def runtimes_on(devices: Iterable[torch.device], *, rescue: bool = False) -> tuple[Runtime, ...]:
    """Return a new runtime for each CUDA device among these. See ``CudaRuntime`` for ``rescue``."""
    return tuple(CudaRuntime(device, rescue=rescue) for device in devices if device.type == "cuda")


def rescue_stream(device: torch.device) -> Any:
    """Return the stream of a device for rescues, one for the process.

    If the driver makes none, it is a stream of torch, and a warning is logged: a rescue may then hang.
    """
    if device.index not in _own:
        try:
            _own[device.index] = _cuda.ExternalStream(_make_stream(device), device=device)
        except (OSError, AttributeError, RuntimeError) as problem:
            log.warning("ttp has to share a stream of torch on %s, which may hang in a failure: %s", device, problem)
            _own[device.index] = _cuda.Stream(device, priority=_PRIORITY)
    return _own[device.index]


def _make_stream(device: torch.device) -> int:
    """Make a stream by the driver API, because torch makes none of this priority.

    Raises:
        OSError: there is no CUDA driver.
        AttributeError: the driver is too old.
        RuntimeError: the device knows fewer priorities, or the driver refuses.
    """
    cuda, refused = driver(), "the CUDA driver makes no stream"
    lowest, highest, made = ctypes.c_int(), ctypes.c_int(), ctypes.c_void_p()
    with torch.cuda.device(device):
        event: Any = _cuda.Event()
        event.record(torch.cuda.current_stream(device))  # makes sure that this thread has the device's context
        check(cuda.cuCtxGetStreamPriorityRange(ctypes.byref(lowest), ctypes.byref(highest)), refused)
        if highest.value > _OWN_PRIORITY:
            raise RuntimeError(f"its highest priority is {highest.value}")
        check(cuda.cuStreamCreateWithPriority(ctypes.byref(made), _NON_BLOCKING, _OWN_PRIORITY), refused)
    return int(made.value or 0)
