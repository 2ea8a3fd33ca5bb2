"""Copies a module's buffers from devices to the host while training goes on, and has them written to the rank's page.

The training's stream copies small buffers, packed, and large ones in chunks into memory on the device (a *twin*); the
side stream copies that to pinned memory on the host. See decision 31.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ttp.adapters.torch.device.accelerator import AHEAD_MAX, AllEvents, Event, Runtime, holder
from ttp.adapters.torch.local_state.buffers import BufferEntry, BufferTable
from ttp.adapters.torch.tensor_memory import flat_bytes
from ttp.inbox import Inbox
from ttp.processor.local_state.pages import Buffer, Kept

_POOL = AHEAD_MAX
"""Number of captures that may be on their way: one per update, and three in the first updates."""
_COPIES_MAX = 4
"""Number of copies of one large buffer, in different states, that may be on their way."""
_TWIN_BYTES = 8 << 20
"""Size in bytes of a twin for large buffers, which are copied in chunks of this size."""
_PATIENCE_S = 5.0
"""Seconds to wait for memory to come free before the device counts as hanging."""
_ALIGNMENT = 16
"""Alignment in bytes of small buffers that are packed together."""


@dataclass(slots=True, eq=False)
class Staged:
    """A capture that is being copied to the host.

    Args:
        parts: the memory of the small buffers, valid when ``ready`` is done.
        kept: the stamps and the memory of the large buffers, valid when ``ready`` is done.
        ready: the event behind the last copy; None: everything has arrived.
        staging: the host memory of the small buffers.
        large: the copies of the large buffers.
        unwritten: torch has counted no write to a buffer since the capture before, of the same version.
        learning: the capture is to show whether ``unwritten`` may be believed.
        in_page: the page holds the capture already.
    """

    parts: list[Buffer] = field(default_factory=list)
    kept: list[Kept] = field(default_factory=list)
    ready: Event | None = None
    staging: _StagingBuffer | None = None
    large: list[_LargeCopy] = field(default_factory=list)
    unwritten: bool = False
    learning: bool = False
    in_page: bool = False


@dataclass(slots=True)
class _Twin:
    """Memory on the device to which buffers are copied first, and the event behind the last copy out of it."""

    runtime: Runtime
    memory: Tensor
    copied_out: Event | None = None

    @classmethod
    def pair(cls, runtime: Runtime, size: int) -> list[_Twin]:
        """Return two twins, which captures use in turn."""
        return [cls(runtime, runtime.on_device(size)) for _ in range(2)]

    def wait(self) -> None:
        """Make the training's stream (not the host) wait until the old content has been copied out."""
        if self.copied_out is not None:
            self.runtime.training_waits_for(self.copied_out)

    def copy_out(self, target: Tensor, source: Tensor) -> Event:
        """Queue a copy of ``source``, in this memory, on the side stream, behind the training's work so far."""
        self.runtime.side_waits_for(self.runtime.event(side=False))
        with self.runtime.on_side():
            target.copy_(source, non_blocking=True)
        self.copied_out = self.runtime.event(side=True)
        return self.copied_out


@dataclass(slots=True, eq=False)
class _Small:
    """The small buffers of one device, packed together."""

    runtime: Runtime
    places: list[int]  # positions of the buffers in ``BufferTable.small``
    spans: list[slice]  # where each of them is in the packed memory
    twins: list[_Twin]
    pairs: list[list[_Pairs]] = field(default_factory=list)  # for each twin: what to copy where


_Pairs = tuple[list[Tensor], list[Tensor]]
"""Targets and sources of one ``_foreach_copy_``. One kernel copies all of them if they have the same dtype."""


@dataclass(slots=True, eq=False)
class _StagingBuffer:
    """Host memory for one capture of all small buffers."""

    layout: Hashable
    pinned: list[Tensor]  # one for each device
    parts: list[Buffer]  # views of ``pinned`` in the order of the table; empty for a buffer on the host


@dataclass(slots=True, eq=False)
class _LargeCopy:
    """A copy of a large buffer in one state. ``users`` counts captures on their way, plus one for the newest copy."""

    entry: BufferEntry
    stamp: Hashable
    pinned: Tensor
    home: list[Tensor]  # the list to which the memory returns when ``users`` is 0
    users: int = 1

    def let_go(self) -> None:
        """Note that one user less needs the copy."""
        self.users -= 1
        if not self.users:
            self.home.append(self.pinned)


@dataclass(slots=True, eq=False)
class _Large:
    """Host memory for one large buffer."""

    size: int
    free: list[Tensor]
    made: int = 0
    newest: _LargeCopy | None = None


class DeviceBuffers:
    """Captures all buffers of a module that is on devices, at least partly. Allocates its memory at the start.

    Args:
        module: the module with the buffers.
        runtimes: all devices of the training, also those without buffers.
    """

    def __init__(self, module: nn.Module, runtimes: Sequence[Runtime]) -> None:
        self.table = BufferTable(module)
        self._runtimes = runtimes
        self._built = 0
        self._layout: Hashable = None
        self._small: list[_Small] = []
        self._staging: list[_StagingBuffer] = []
        self._large: dict[tuple[str, int], _Large] = {}  # by name and size
        self._twins: dict[int, list[_Twin]] = {}
        self._turn = 0
        self._returned: Inbox[Staged] = Inbox()
        self._stuck = False
        self._versions: list[int | None] = []
        self._graphs = False  # a CUDA graph was captured; torch counts no writes of its replays
        self._trusted: bool | None = None  # whether torch counts all writes to small buffers; None: not known yet
        self._before: bytes | None = None  # the small buffers of the last capture that arrived, while learning
        self._build()

    def capture(self, *, learning: bool) -> Staged | None:
        """Begin to copy the buffers, as they are after the work queued so far. For the training thread.

        A host that is several updates ahead of its device waits here for memory to come free, up to ``_PATIENCE_S``
        seconds. That costs no time, because the device has work meanwhile, and no version is left without a page.

        Args:
            learning: copy large buffers even if no write to them was counted, to see whether all writes are counted.

        Returns:
            The capture; None: the device hangs, so no memory came free.
        """
        unwritten = learning and self._unwritten()
        self.table.refresh()
        if self._built != self.table.layout:
            self._build()
        while not self._returned.empty():
            self._take_back(self._returned.get())
        if not self._until(lambda: self._staging):
            return None
        staging = self._staging.pop()
        staged = Staged(parts=list(staging.parts), staging=staging, unwritten=unwritten, learning=learning)
        self._versions = self._counted()
        with torch.no_grad():
            events = [
                self._bring_small(small, pinned) for small, pinned in zip(self._small, staging.pinned, strict=True)
            ]
            for entry in self.table.large:
                held = self._bring_large(entry, events, learning)
                if held is None:
                    self.release(staged)
                    return None
                staged.large.append(held)
                staged.kept.append((None if learning else held.stamp, _view(held.pinned)))
            for place, entry in enumerate(self.table.small):
                if holder(self._runtimes, entry.tensor) is None:
                    staged.parts[place] = entry.copied()
        staged.ready = AllEvents(events)
        return staged

    def graphed(self) -> bool:
        """Return whether a CUDA graph is being captured now: nothing may be queued, and buffers count as written to."""
        now = any(runtime.capturing() for runtime in self._runtimes)
        self._graphs = self._graphs or now
        return now

    @property
    def bare(self) -> bool:
        """Whether the module has no buffers, so that a capture waits for the devices but brings nothing from them."""
        return not (self.table.small or self.table.large)

    def known_unchanged(self) -> bool:
        """Return whether it is known that no buffer has changed since the last capture.

        Torch counts writes to a tensor, except some. Those of BatchNorm's kernels go with a write to
        ``num_batches_tracked``, which it counts. Of inference tensors it counts none.
        """
        return bool(self._trusted) and not self._graphs and self._unwritten()

    def _unwritten(self) -> bool:
        """Return whether torch counts the writes to all buffers, and has counted none since the last capture."""
        counted = self._counted()
        return self.table.is_current() and None not in counted and counted == self._versions

    def _counted(self) -> list[int | None]:
        entries = (*self.table.small, *self.table.large)
        return [entry.tensor._version if entry.counted else None for entry in entries]

    def learn(self, staged: Staged) -> None:
        """Compare a capture that has arrived with the one before, if it was made for that.

        If small buffers have changed without a counted write, all of them are copied at every capture from then on.
        """
        if not staged.learning:
            self._trusted, self._before = self._trusted is not False, None
            return
        buffers = b"".join(staged.parts)
        if staged.unwritten and buffers != self._before:
            self._trusted = False
        self._before = buffers
        for held in staged.large:
            self.table.compare(held.entry, held.stamp, _view(held.pinned))

    def event(self) -> Event:
        """Return an event behind the work that is queued on all devices so far."""
        return AllEvents([runtime.event(side=False) for runtime in self._runtimes])

    def release(self, staged: Staged) -> None:
        """Return the memory of a capture that was written or given up. May be called on any thread."""
        self._returned.put(staged)

    # ------------------------------------------------------------------------------------------------------- memory

    def _until(self, there: Callable[[], object]) -> bool:
        """Take back memory until ``there()`` is true; returns whether it is. Waits for a hung device only once."""
        deadline = time.monotonic() + (0.0 if self._stuck else _PATIENCE_S)
        while not there():
            try:
                self._take_back(self._returned.get(timeout=deadline - time.monotonic()))
            except queue.Empty:
                self._stuck = True
                return False
        self._stuck = False
        return True

    def _take_back(self, staged: Staged) -> None:
        staging = staged.staging
        if staging is not None and staging.layout is self._layout:
            self._staging.append(staging)
        for held in staged.large:
            held.let_go()

    # ----------------------------------------------------------------------------------------------------- bringing

    def _bring_small(self, small: _Small, pinned: Tensor) -> Event:
        """Copy the small buffers of one device. Returns an event behind the copy; without buffers, behind the work."""
        if not small.places:
            return small.runtime.event(side=False)
        twin, pairs = small.twins[self._turn % 2], small.pairs[self._turn % 2]
        self._turn += 1
        twin.wait()
        for targets, sources in pairs:
            torch._foreach_copy_(targets, sources)
        return twin.copy_out(pinned, twin.memory)

    def _bring_large(self, entry: BufferEntry, events: list[Event], learning: bool) -> _LargeCopy | None:
        """Return a copy of a large buffer: the last one if the buffer is unchanged, else a new one.

        Args:
            entry: the buffer.
            events: the events behind new copies are added to it.
            learning: make a new one in any case.

        Returns:
            The copy; None: no memory came free.
        """
        large, stamp = self._large[entry.info.name, entry.size], None if self._graphs else entry.stamp()
        newest = large.newest
        if newest is not None and stamp is not None and newest.stamp == stamp and not learning:
            newest.users += 1
            return newest
        pinned = self._memory_for(large)
        if pinned is None:
            return None
        if newest is not None:
            newest.let_go()
        large.newest = held = _LargeCopy(entry, stamp, pinned, large.free, users=2)
        runtime = holder(self._runtimes, entry.tensor)
        if runtime is None:
            pinned.copy_(flat_bytes(entry.tensor))
            return held
        for source, target in _chunks(flat_bytes(entry.tensor), pinned):
            twin = self._twins[id(runtime)][self._turn % 2]
            self._turn += 1
            twin.wait()
            there = twin.memory[: source.numel()]
            there.copy_(source)
            events.append(twin.copy_out(target, there))
        return held

    def _memory_for(self, large: _Large) -> Tensor | None:
        if not large.free and large.made < _COPIES_MAX:
            large.made += 1
            return self._runtimes[0].pinned(large.size)
        return large.free.pop() if self._until(lambda: large.free) else None

    # ------------------------------------------------------------------------------------------------------ building

    def _build(self) -> None:
        """Allocate memory for the module's present buffers, using that of earlier buffers of the same form again."""
        places = [(holder(self._runtimes, entry.tensor), entry) for entry in self.table.small]
        layout = tuple((id(runtime), entry.info.dtype, entry.info.shape) for runtime, entry in places)
        if layout != self._layout or not self._built:
            self._layout = layout
            for small in self._small:  # their memory may be used again when the last copies out of it have run
                for twin in small.twins:
                    twin.wait()
            self._small = [
                self._pack(runtime, [n for n, (held_by, _) in enumerate(places) if held_by is runtime])
                for runtime in self._runtimes
            ]
            self._staging = [self._make_staging() for _ in range(_POOL)]
        for small in self._small:
            small.pairs = [self._pairs(small, twin) for twin in small.twins]
        known = self._large
        names = [(entry.info.name, entry.size) for entry in self.table.large]
        self._large = {name: known.get(name) or _Large(name[1], []) for name in names}
        for entry in self.table.large:
            runtime = holder(self._runtimes, entry.tensor)
            if runtime is not None and id(runtime) not in self._twins:
                self._twins[id(runtime)] = _Twin.pair(runtime, _TWIN_BYTES)
        self._built = self.table.layout

    def _pack(self, runtime: Runtime, places: list[int]) -> _Small:
        entries = [self.table.small[place] for place in places]
        spans, total = [], 0
        for entry in entries:
            spans.append(slice(total, total + entry.size))
            total += -(-entry.size // _ALIGNMENT) * _ALIGNMENT
        return _Small(runtime, places, spans, _Twin.pair(runtime, total))

    def _pairs(self, small: _Small, twin: _Twin) -> list[_Pairs]:
        """Return what to copy to a twin: dense buffers as plain bytes, those with gaps one by one."""
        dense: _Pairs = ([], [])
        found = [dense]
        for place, span in zip(small.places, small.spans, strict=True):
            entry, target = self.table.small[place], twin.memory[span]
            source = entry.tensor.detach()
            if entry.is_dense:
                dense[0].append(target)
                dense[1].append(flat_bytes(source))
            else:
                found.append(([target.view(source.dtype).view(source.shape)], [source]))
        return [pairs for pairs in found if pairs[0]]

    def _make_staging(self) -> _StagingBuffer:
        parts: list[Buffer] = [b""] * len(self.table.small)
        pinned = []
        for small in self._small:
            memory = small.runtime.pinned(small.twins[0].memory.numel())
            view = _view(memory)
            for place, span in zip(small.places, small.spans, strict=True):
                parts[place] = view[span]
            pinned.append(memory)
        return _StagingBuffer(self._layout, pinned, parts)


def _chunks(source: Tensor, target: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(torch.split(source, _TWIN_BYTES), torch.split(target, _TWIN_BYTES), strict=True)


def _view(host: Tensor) -> memoryview:
    array: Any = host.numpy()
    return memoryview(array) if host.numel() else memoryview(b"")
