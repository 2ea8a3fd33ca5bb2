"""Tells which version an accelerator has finished, and copies numbers from it to the host without stopping it.

``Runtime`` lists the operations of a device that ttp needs, with streams and events as CUDA has them; see the
module ``cuda``. Tests use one that is made up. ``Fence`` tells the version of the state in the device's memory, which
may be behind the host's.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from ttp import polling
from ttp.errors import CheckpointError

log = logging.getLogger("ttp.adapters.torch")

poll = partial(polling.poll, every_s=0.0002)
"""``ttp.polling.poll`` for events of a device: the driver's own waits have no time limit."""

AHEAD_MAX = 12
"""Number of updates that a host may be ahead of its device before copies of the oldest version are dropped."""


_NUMBERS, _NUMBER_BYTES = 512, 16
"""Number of single numbers for which there is pinned memory, and bytes for each. A job with several scaled optimizers
sends some dozens per update."""
NUMBER_S = 5.0
"""Seconds to wait for a single number from a device."""


class Event(Protocol):
    """A point in a stream of work, of which can be said whether the device has come to it."""

    def query(self) -> bool:
        """Return whether everything queued before the event is done. Does not wait.

        Raises:
            RuntimeError: the device is broken.
        """

    def synchronize(self) -> None:
        """Block until everything queued before the event is done, without using the CPU. There is no time limit.

        Raises:
            RuntimeError: the device is broken.
        """


class Hold(Protocol):
    """A word in host memory for which streams of a device can wait."""

    def queue(self, number: int) -> None:
        """Make work that this thread queues later on its current stream wait until the word has reached ``number``."""

    def release(self, number: int) -> None:
        """Set the word to ``number``. May be called on any thread; does not wait."""


class Runtime(Protocol):
    """The operations of one device that ttp needs."""

    def holds(self, tensor: Tensor) -> bool:
        """Return whether the memory of the tensor is on this device."""

    def capturing(self) -> bool:
        """Return whether this thread captures a CUDA graph: then ttp must queue nothing, not even an event."""

    def event(self, *, side: bool) -> Event:
        """Queue and return an event: on the side stream, or else on the current stream of this thread."""

    def side_waits_for(self, event: Event) -> None:
        """Make work queued later on the side stream run after the event."""

    def training_waits_for(self, event: Event) -> None:
        """Make work queued later on the current stream of this thread run after the event."""

    def on_side(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context manager in whose block this thread queues its work on the side stream."""

    def hold(self) -> Hold:
        """Make a new word with the value 0. Call it at the start only, because it allocates memory.

        Raises:
            OSError: there is no driver that can make a stream wait for a word.
            AttributeError: the driver is too old for that.
            RuntimeError: the driver refuses the word.
        """

    def noticing(self, found: list[str]) -> contextlib.AbstractContextManager[None]:
        """Return a context manager that adds to ``found`` the source lines at which its block waits for the device."""

    def pinned(self, size: int) -> Tensor:
        """Allocate ``size`` bytes of page-locked host memory. Call it at the start only."""

    def on_device(self, size: int) -> Tensor:
        """Allocate ``size`` bytes of device memory. Call it at the start only."""


def holder(runtimes: Sequence[Runtime], tensor: Tensor) -> Runtime | None:
    """Return the runtime of the device that holds the tensor; None: the tensor is on the host.

    Raises:
        CheckpointError: the tensor is on a device that is none of ``runtimes``.
    """
    for runtime in runtimes:
        if runtime.holds(tensor):
            return runtime
    if tensor.device.type not in ("cpu", "meta"):
        raise CheckpointError(
            f"a tensor of the state is on {tensor.device}, where none was when wrap_optimizer() was called: ttp can "
            "save only state on the host, and on CUDA devices that held parameters or buffers at that time"
        )
    return None


@dataclass(frozen=True, slots=True)
class AllEvents:
    """Events on several devices, used as one event."""

    events: Sequence[Event]

    def query(self) -> bool:
        """See ``Event``."""
        return all(event.query() for event in self.events)

    def synchronize(self) -> None:
        """See ``Event``."""
        for event in self.events:
            event.synchronize()


class Number:
    """A single number on its way from a device to the host; made by ``Numbers``."""

    def __init__(self, numbers: Numbers, turn: int, slot: Tensor, event: Event) -> None:
        self._numbers, self._turn, self._slot, self._event = numbers, turn, slot, event

    def value(self) -> float | int:
        """Return the number as it was at the point of the training's stream at which it was queued.

        May wait for ``NUMBER_S`` seconds, so not for the training thread.

        Raises:
            CheckpointError: the number did not arrive in time, or its memory was used again.
        """
        if not poll(self._event.query, NUMBER_S):
            raise CheckpointError(f"a number such as the loss scale did not leave the device within {NUMBER_S:g} s")
        found = self._slot.item()
        if self._numbers.turn - self._turn >= _NUMBERS:
            raise CheckpointError("a number from the device was overwritten: the host is too far ahead of the device")
        return found


class Numbers:
    """Copies single numbers, such as a loss scale, from devices to the host, in the order of the training's stream.

    ``item()`` would wait for the device, and forever if the device hangs.

    Args:
        runtimes: the devices; the constructor allocates a little pinned memory.
    """

    def __init__(self, runtimes: Sequence[Runtime] = ()) -> None:
        self._runtimes = runtimes
        self._pinned = runtimes[0].pinned(_NUMBERS * _NUMBER_BYTES) if runtimes else torch.empty(0, device="cpu")
        self.turn = 0

    def bring(self, value: Any) -> Any:
        """Begin to copy a number to the host. For the training thread; does not wait.

        Returns:
            A ``Number`` for a one-element tensor on a device, the item of one on the host, other values unchanged.

        Raises:
            CheckpointError: a CUDA graph is being captured.
        """
        if not isinstance(value, Tensor):
            return value
        runtime = holder(self._runtimes, value)
        if runtime is None:
            return value.item()
        if runtime.capturing():
            raise CheckpointError("a number cannot be copied from a device while a CUDA graph is captured")
        start = self.turn % _NUMBERS * _NUMBER_BYTES
        slot = self._pinned[start : start + value.element_size()].view(value.dtype)
        slot.copy_(value.detach().view(-1), non_blocking=True)
        self.turn += 1
        return Number(self, self.turn - 1, slot, runtime.event(side=False))

    def elsewhere(self, value: Any) -> bool:
        """Return whether ``value`` is a number on a device."""
        return isinstance(value, Tensor) and holder(self._runtimes, value) is not None


def number(value: Any) -> Any:
    """Return the value of a result of ``Numbers.bring``, waiting for it for a limited time.

    Raises:
        CheckpointError: see ``Number.value``.
    """
    return value.value() if isinstance(value, Number) else value


# ---------------------------------------------------------------------------------------------------------------- fence


class Fence:
    """Tells how far the devices have come in the training's work, by version; they may be behind their host.

    Args:
        runtimes: the devices of the state; empty: it is on the host, where a version is finished when it is recorded.
        base: the present version of the state.
        newest: True: a version counts as reached when one device has reached it, as for the beginning of an update;
            False: when all devices have.
    """

    def __init__(self, runtimes: Sequence[Runtime], base: int = 0, *, newest: bool = False) -> None:
        self._recorded = base
        self._devices = [_DeviceEvents(runtime, base) for runtime in runtimes]
        self._pick = max if newest else min

    def record(self, version: int) -> None:
        """Queue the event of ``version`` behind the work queued so far. For the training thread; does not wait."""
        self._recorded = version
        for device in self._devices:
            device.record(version)

    def finished_version(self) -> int:
        """Return the newest version whose event the devices have reached. For any thread; does not wait."""
        return self._pick(device.finished() for device in self._devices) if self._devices else self._recorded

    def passed(self, version: int) -> bool:
        """Return whether the devices have reached the event of ``version``, or none was queued. For any thread."""
        return version > self._recorded or self.finished_version() >= version

    def wait(self, version: int, timeout_s: float) -> bool:
        """Wait up to ``timeout_s`` seconds for ``version``; return whether it came. Not for the training thread."""
        return poll(lambda: self.finished_version() >= version, timeout_s if self._devices else 0.0)


class _DeviceEvents:
    """The events of versions in the queue of one device."""

    def __init__(self, runtime: Runtime, base: int) -> None:
        self._runtime = runtime
        self._finished = base
        self._pending: deque[tuple[int, Event]] = deque()
        self._collecting = threading.Lock()

    def record(self, version: int) -> None:
        """Queue an event. Does not raise on a broken device, which finishes no more versions: the program raises."""
        try:
            self._pending.append((version, self._runtime.event(side=False)))
        except RuntimeError as problem:
            log.debug("no event can be queued on the device: %s", problem)
        if len(self._pending) > AHEAD_MAX:  # events that are reached would pile up; to ask for each at once costs more
            self.finished()

    def finished(self) -> int:
        """Return the newest version whose event the device has reached."""
        with self._collecting:
            try:
                while self._pending and self._pending[0][1].query():
                    self._finished = self._pending.popleft()[0]
            except RuntimeError as problem:  # the device is broken, and finishes nothing more
                log.debug("the events of the device cannot be queried: %s", problem)
            return self._finished
