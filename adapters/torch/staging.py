"""Buffers that live on a device: packed there, brought to the host beside the training, written when they arrive.

Nothing here waits for the device in the steady state: packing is one small kernel per dtype on the stream of the
training, the copy runs on the side stream, and a thread of ours writes the page when the copy's event is done. So the
page of a version appears some tens of microseconds after the device got there; a process killed within them leaves
the page before it. Only a host that is two updates ahead of its device waits for memory.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ttp.adapters.torch.buffers import BufferTable, Entry
from ttp.adapters.torch.device import Event, Runtime, flat_bytes
from ttp.processor.pages import Buffer, Kept

log = logging.getLogger("ttp.adapters.torch")

_POOL = 4
"""Captures on their way at once: two per update, and the host may be an update ahead of the device."""
_PATIENCE_S = 5.0
_ALIGNMENT = 16
_POLL_S = 0.00005


@dataclass(slots=True, eq=False)
class Staged:
    """A capture on its way to the host.

    Args:
        parts: of the small buffers, valid when ``ready`` is done.
        kept: of the large ones; the same.
        ready: behind the last copy.
    """

    parts: list[Buffer] = field(default_factory=list)
    kept: list[Kept] = field(default_factory=list)
    ready: Event | None = None
    lane: _Lane | None = None


@dataclass(slots=True, eq=False)
class _Lane:
    """Memory for one capture of all small buffers, on both sides."""

    packed: Tensor
    host: Tensor
    slots: list[Tensor]  # views of ``packed``, one per buffer, in its dtype and shape
    parts: list[Buffer]  # the same in ``host``


class DeviceBuffers:
    """All buffers of a module that lives on a device. Its memory is set aside at start.

    Args:
        module: whose buffers.
        runtime: the device.
    """

    def __init__(self, module: nn.Module, runtime: Runtime) -> None:
        self.table = BufferTable(module)
        self._runtime = runtime
        self._built = 0
        self._lanes: queue.SimpleQueue[_Lane] = queue.SimpleQueue()
        self._large: dict[int, tuple[Hashable, Tensor]] = {}  # serial -> stamp and its bytes on the host
        self._build()

    def capture(self) -> Staged | None:
        """Start to bring the buffers' bytes, as they are after the work queued so far.

        A host that is two updates ahead of its device waits here for a lane: a version without a page would be worse,
        and the device has work. None: no lane came free, the device does not move.
        """
        self.table.refresh()
        if self._built != self.table.layout:
            self._build()
        try:
            lane = self._lanes.get(timeout=_PATIENCE_S)
        except queue.Empty:
            return None
        staged = Staged(parts=lane.parts, lane=lane)
        if self.table.small:
            torch._foreach_copy_(lane.slots, [entry.tensor.detach() for entry in self.table.small])
        self._runtime.side_waits_for(self._runtime.mark(side=False))
        with self._runtime.on_side(), torch.no_grad():
            lane.host.copy_(lane.packed, non_blocking=True)
            staged.kept = [self._large_part(entry) for entry in self.table.large]
        staged.ready = self._runtime.mark(side=True)
        return staged

    def release(self, staged: Staged) -> None:
        """The capture has been written: its memory may be used again."""
        lane = staged.lane
        if lane is not None and len(lane.slots) == len(self.table.small) and self._built == self.table.layout:
            self._lanes.put(lane)

    def _large_part(self, entry: Entry) -> Kept:
        stamp = entry.stamp()
        known = self._large.get(entry.serial)
        if known is None or stamp is None or known[0] != stamp:
            host = self._runtime.pinned(entry.size)  # seldom: a fresh one, the last may still be read
            host.copy_(flat_bytes(entry.tensor), non_blocking=True)
            known = self._large[entry.serial] = (stamp, host)
        return stamp, _view(known[1])

    def _build(self) -> None:
        small = self.table.small
        offsets, total = [], 0
        for entry in small:
            offsets.append(total)
            total += -(-entry.size // _ALIGNMENT) * _ALIGNMENT
        self._lanes = queue.SimpleQueue()
        for _ in range(_POOL):
            packed, host = self._runtime.on_device(total), self._runtime.pinned(total)
            spans = [slice(at, at + entry.size) for at, entry in zip(offsets, small, strict=True)]
            slots = [
                packed[span].view(entry.tensor.dtype).view(entry.tensor.shape)
                for span, entry in zip(spans, small, strict=True)
            ]
            self._lanes.put(_Lane(packed, host, slots, [_view(host)[span] for span in spans]))
        self._large = {
            entry.serial: self._large[entry.serial] for entry in self.table.large if entry.serial in self._large
        }
        self._built = self.table.layout


def _view(host: Tensor) -> memoryview:
    array: Any = host.numpy()
    return memoryview(array) if host.numel() else memoryview(b"")


class ArrivalWriter:
    """A thread that writes each capture when it has arrived, in order.

    Args:
        write: writes a page; given version, final, what comes before the buffers, and what arrived.
        release: takes the memory back.
    """

    def __init__(self, write: Callable[[int, bool, bytes, Staged], None], release: Callable[[Staged], None]) -> None:
        self._write = write
        self._release = release
        self._inbox: queue.SimpleQueue[tuple[int, bool, bytes, Staged] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="ttp-pages", daemon=True)
        self._thread.start()

    def put(self, version: int, final: bool, head: bytes, staged: Staged) -> None:
        """Training thread: hand over a capture."""
        self._inbox.put((version, final, head, staged))

    def close(self) -> None:
        """End the thread after what is in its inbox; does not wait for a stuck device."""
        self._inbox.put(None)
        self._thread.join(timeout=1.0)

    def _run(self) -> None:
        while (item := self._inbox.get()) is not None:
            staged = item[3]
            try:
                while staged.ready is not None and not staged.ready.query():
                    time.sleep(_POLL_S)
                self._write(*item)
            except Exception as problem:  # the device is gone: so is this capture
                log.debug("a capture of device buffers did not arrive: %s", problem)
            self._release(staged)
