"""Tells which version a rank's state is of, on the host and on its devices, and whether redo or undo is possible."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ttp.adapters.torch.device.accelerator import AllEvents, Fence, Runtime, holder, poll
from ttp.adapters.torch.device.cuda import runtimes_on
from ttp.adapters.torch.local_state.capture import LocalCapture
from ttp.adapters.torch.loop.between import BetweenSteps
from ttp.adapters.torch.loop.hooks import Attachment
from ttp.adapters.torch.loop.stream_barrier import StreamBarrier
from ttp.adapters.torch.loop.swapped import Swapped
from ttp.adapters.torch.loop.unwrap_optimizer import unwrap_optimizer
from ttp.adapters.torch.saving.preimage import PreImage
from ttp.adapters.torch.sharding.names import parameters_of
from ttp.core.layout import Version
from ttp.core.messages import Phase
from ttp.core.rank import letting_go
from ttp.processor.faults import describe
from ttp.processor.paged_source import PagedSource

INSIDE_S = 5.0
"""Seconds that a device may stand still in the middle of an update before the update counts as half done. An update
does not hang unless the optimizer communicates."""
_LOOK_S = 0.0005
COPIES_S = 1.0
"""Seconds to wait for a device to finish the copies for undo. If they take longer, they are queued behind a hang."""


class Standing(PagedSource):
    """The part of ``TorchSource`` that reads fences, copies and the gate; see ``StateSource``.

    Args:
        optimizer: the registered optimizer.
        capture: captures the rank-local state.
        devices: the devices that hold the state; empty: the host holds it.
    """

    def __init__(self, optimizer: Optimizer, capture: LocalCapture, devices: Sequence[torch.device]) -> None:
        super().__init__(capture)
        self._optimizer, self._capture = optimizer, capture
        self._devices = devices
        self.runtimes: Sequence[Runtime] = runtimes_on(devices, rescue=True)
        """The runtimes of the devices, for work that must not wait for the training's queue."""
        self.begun = Fence(self.runtimes, newest=True)
        self.finished = Fence(self.runtimes)
        self.reduced = Fence(self.runtimes)  # has finished version n when the gradient for n is reduced
        self.preimage: PreImage | None = None
        self.between: BetweenSteps | None = None
        self.swapped: Swapped | None = None
        self.may_follow: Callable[[], bool] = lambda: False
        """Returns True while ``Followers`` watches large parameters: copies may lack some that follow the weights."""
        self.base = Version(0)
        """The version from which this rank has started."""
        self.stream_barrier: StreamBarrier | None = None
        self._mixed = (-1, False)  # a version of the gate, and the result of has_state_on_host() at that version
        self._attachment: Attachment | None = None

    @property
    def on_device(self) -> bool:
        """See ``StateSource``."""
        return bool(self.runtimes)

    def device_version(self, version: Version, patience_s: float) -> Version | None:
        """See ``StateSource``.

        The host may be ahead of the device, if the kernels of an update wait behind a collective that hangs. Then the
        device stands at the version before, and stays there until the communicator is aborted. A device inside of an
        update gets more time, because the work of an update waits for no other rank. So does a device whose state is
        partly on the host: that part is of the newer version already.
        """
        marks, since = None, time.monotonic()
        while (done := self.finished.finished_version()) < version:
            inside = self.begun.finished_version() > done or self._host_holds_state()
            now, passed = time.monotonic(), self._marks()
            if passed != marks:
                marks, since = passed, now
            if now >= since + (max(patience_s, INSIDE_S) if inside and patience_s else patience_s):
                return None if inside else Version(done)
            time.sleep(_LOOK_S)
        return version

    def on_host(self, tensor: Tensor) -> bool:
        """Return whether a tensor is on none of the devices."""
        return holder(self.runtimes, tensor) is None

    def _marks(self) -> tuple[int, ...]:
        """Return a value that changes while the device is working: how far it has come in its queue."""
        fences = (self.reduced, self.begun, self.finished)
        return (*(fence.finished_version() for fence in fences), self._capture.arrived)

    def _host_holds_state(self) -> bool:
        """Return whether the host holds state other than scalars, of which ``HostValues`` keeps older versions."""
        version = self.processor.gate.version
        if self._mixed[0] != version:  # computed once per version, because ``device_version`` polls it
            self._mixed = version, self.has_state_on_host()
        return self._mixed[1]

    def has_state_on_host(self) -> bool:
        """Return whether any parameter, or any non-scalar tensor of the optimizer's state, is on the host."""
        kept = _tensors_in(unwrap_optimizer(self._optimizer).state)
        return any(map(self.on_host, (*parameters_of(self._optimizer), *(each for each in kept if each.dim()))))

    def why_not_abort(self, within_s: float) -> str:
        """Return why this rank's collectives must not be aborted now; an empty string if they may be.

        They may be if nothing that is queued behind them writes to the state. Not for the training thread.

        Args:
            within_s: seconds to wait for the end of a running update.
        """
        gate, deadline = self.processor.gate, time.monotonic() + within_s
        if never := letting_go.why_never(gate.version, self.base):
            return never
        while True:
            state = gate.state()
            marks = self.finished.finished_version(), self.begun.finished_version()
            reason = letting_go.why_not_yet(gate.closed, state.phase, *map(Version, marks))
            if not reason or time.monotonic() > deadline:
                return reason
            time.sleep(_LOOK_S)

    def why_not_at_rest(self, within_s: float) -> str:
        """Return why the devices have not finished the training thread's work; an empty string if they have.

        For the training thread.

        Args:
            within_s: seconds to wait for the devices.
        """
        try:
            events = AllEvents([runtime.event(side=False) for runtime in self.runtimes])
            return "" if poll(events.query, within_s) else "its device does not finish its queued work"
        except RuntimeError as problem:
            return f"its device is broken: {describe(problem)}"

    def gradient_ready(self) -> bool:
        """See ``StateSource``."""
        processor, attachment = self._processor, self._attachment
        if processor is None or attachment is None or not attachment.redoable:
            return False
        state = processor.gate.state()
        done = self.finished.finished_version() if self.on_device else state.version
        if done < state.version:  # the device is behind: its next update is queued
            return self.stream_barrier is not None and self.stream_barrier.held(done + 1)
        return state.parked and (not self.on_device or self.reduced.finished_version() > state.version)

    def redo(self, version: Version) -> bool:
        """See ``StateSource``."""
        return self.stream_barrier is not None and self.stream_barrier.admit(version)

    def runtime_for_barrier(self) -> Runtime:
        """Return another runtime of the first device, with a side stream of its own."""
        (runtime,) = runtimes_on(self._devices[:1])
        return runtime

    @property
    def has_preimage(self) -> bool:
        """See ``StateSource``."""
        preimage = self._preimage_now
        if self._processor is None or preimage is None:
            return False
        state = self._processor.gate.state()
        if state.phase is Phase.UPDATING:
            return False
        if state.phase is Phase.TORN:
            preimage.wait(COPIES_S)
            if self.between is not None and not self.between.turns.simple and self.may_follow():
                return False  # parameters may have followed a step inside of the version
            return preimage.version == state.version
        finished = self.finished.finished_version()  # the device's version; the host may be ahead of it
        whole = not self.on_device or self.begun.finished_version() <= finished
        if not whole or not preimage.whole or preimage.version != finished - 1 or self.may_follow():
            return False
        # while other weights are in the model, no live parameter may be read
        return not self.other_weights() or (self.swapped is not None and preimage.holds(self.swapped.parameters))

    def other_weights(self) -> bool:
        """See ``StateSource``."""
        return self.swapped is not None and self.swapped.holds_others()

    def forget(self) -> None:
        """Drop all copies, and what was noted of the weights. Call this when a restore has replaced the state."""
        for preimage in (self.preimage, self.between.preimage if self.between is not None else None):
            if preimage is not None:
                preimage.forget()
        if self.swapped is not None:
            self.swapped.updated()

    @property
    def _preimage_now(self) -> PreImage | None:
        """The copies of ``undo="preimage"``, or else those that ``BetweenSteps`` makes."""
        if self.preimage is None and self.between is not None:
            return self.between.preimage
        return self.preimage


def _tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in containers of any class; torch's pytree knows only classes that were registered."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in list(value.values()):
            yield from _tensors_in(item)
    elif isinstance(value, (list, tuple, deque)):
        for item in list(value):
            yield from _tensors_in(item)
