"""Copies large tensors from devices to the host for a save, on a side stream: the training's stream may hang.

Kernels and memory are prepared at the start, because a device may refuse both while it hangs. See decision 31.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ttp.adapters.torch.device.accelerator import Event, Runtime, flat_bytes, holder, poll

RING_BYTES = 64 << 20
"""Size in bytes of each pinned buffer."""
PACK_BYTES = 8 << 20
"""Bytes of memory on each device in which tensors with gaps are packed, slab by slab."""
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
ONCE_BYTES = 256
"""Bytes of device memory that ``launch_once`` needs."""
_START_S = 60.0
"""Seconds that a device may take to load the kernels."""


@dataclass(slots=True)
class _Flight:
    """A chunk that is being copied to the host.

    Args:
        event: the mark behind the copy; None: the chunk is on the host already.
        staged: the pinned memory to which it is copied first.
        target: the memory to which it is copied from there.
        completes: the tensor on the host whose last chunk this is; None: more chunks follow.
    """

    event: Event | None
    staged: Tensor
    target: Tensor
    completes: Tensor | None


class HostCopier:
    """Copies tensors from devices to the host. For one thread at a time.

    Args:
        runtimes: the devices; empty: all tensors are on the host, and are returned themselves.
        ring: number of pinned buffers, allocated in the constructor.
        buffer_bytes: size of each of these buffers.
        pack_bytes: bytes of memory for packing tensors with gaps, allocated on each device in the constructor.
        timeout_s: seconds that one chunk may take before the device counts as hanging.

    Raises:
        TimeoutError: a device does not respond.
    """

    def __init__(
        self,
        runtimes: Sequence[Runtime] = (),
        *,
        ring: int = 2,
        buffer_bytes: int = RING_BYTES,
        pack_bytes: int = PACK_BYTES,
        timeout_s: float = 60.0,
    ) -> None:
        self._runtimes = runtimes
        self._timeout_s = timeout_s
        self._ring = [runtimes[0].pinned(buffer_bytes) for _ in range(ring)] if runtimes else []
        self._packs = {id(runtime): runtime.on_device(max(pack_bytes, ONCE_BYTES)) for runtime in runtimes}
        self._turn = 0
        for runtime in runtimes:
            launch_once(runtime, self._packs[id(runtime)], self._ring[0])

    def copy_to_host(self, tensors: Iterable[Tensor]) -> Iterator[Tensor]:
        """Yield the tensors in order, each as an ordinary CPU tensor of the same shape, dtype and memory format.

        A tensor on the host is yielded itself. The caller has to wait for the fence before. While one chunk is copied
        to a pinned buffer, the chunk before is moved out of its buffer.

        Raises:
            TimeoutError: a chunk did not arrive within ``timeout_s``.
            CheckpointError: a tensor is on a device that is none of ``runtimes``.
        """
        flights: deque[_Flight] = deque()
        for flight in self._flights(tensors):
            flights.append(flight)
            if len(flights) >= max(1, len(self._ring)):  # the next chunk needs the buffer of the oldest
                yield from self._land(flights.popleft())
        while flights:
            yield from self._land(flights.popleft())

    def _flights(self, tensors: Iterable[Tensor]) -> Iterator[_Flight]:
        for tensor in map(Tensor.detach, tensors):
            runtime = holder(self._runtimes, tensor)
            if runtime is None:
                yield _Flight(None, tensor, tensor, tensor)
                continue
            source = _by_stride(tensor)
            target = torch.empty(source.shape, dtype=tensor.dtype)
            slabs = self._dense(source) if source.is_contiguous() else self._packed(runtime, source)
            yield from self._fly(runtime, slabs, flat_bytes(target), _back(tensor, target))

    def _fly(self, runtime: Runtime, slabs: Iterator[Tensor], target: Tensor, whole: Tensor) -> Iterator[_Flight]:
        at, size = 0, target.numel()
        for slab in slabs:
            end = at + slab.numel()
            staged = self._ring[self._turn % len(self._ring)][: slab.numel()]
            self._turn += 1
            with runtime.on_side():
                staged.copy_(slab, non_blocking=True)
            yield _Flight(runtime.mark(side=True), staged, target[at:end], whole if end == size else None)
            at = end

    def _dense(self, source: Tensor) -> Iterator[Tensor]:
        """Yield the bytes of a dense tensor in slabs that fit a pinned buffer; of an empty tensor one empty slab."""
        data, step = flat_bytes(source), self._ring[0].numel()
        for start in range(0, max(1, data.numel()), step):
            yield data[start : start + step]

    def _packed(self, runtime: Runtime, source: Tensor) -> Iterator[Tensor]:
        """Yield the elements of a tensor with gaps in order, packed slab by slab into one piece of device memory.

        One piece is enough: the copy out of it is queued before the next slab, on the same stream.
        """
        memory = self._packs[id(runtime)]
        room = min(memory.numel(), self._ring[0].numel())
        for slab in _slabs(words(source), room // source.element_size()):
            packed = memory[: slab.nbytes]
            with runtime.on_side():
                packed.view(slab.dtype).view(slab.shape).copy_(slab)
            yield packed

    def _land(self, flight: _Flight) -> Iterator[Tensor]:
        if flight.event is not None:
            if not poll(flight.event.query, self._timeout_s):
                raise TimeoutError(f"{flight.target.numel()} bytes did not leave the device in {self._timeout_s:g} s")
            flight.target.copy_(flight.staged)
        if flight.completes is not None:
            yield flight.completes


def words(tensor: Tensor) -> Tensor:
    """Return a view of the elements as plain integers of the same size, so that few kernels copy any kind of tensor."""
    return tensor.detach().view(_WORDS[tensor.element_size()])


def launch_once(runtime: Runtime, memory: Tensor, pinned: Tensor) -> None:
    """Load every kernel that copies tensors with gaps, by running it once, while nothing hangs.

    Args:
        runtime: the device.
        memory: at least ``ONCE_BYTES`` bytes on the device, which are overwritten.
        pinned: pinned memory, which is overwritten.

    Raises:
        TimeoutError: the device does not respond.
    """
    with runtime.on_side():
        for word in _WORDS.values():
            there, here = (half.view(word) for half in memory[:ONCE_BYTES].chunk(2))
            side = 8 if there.numel() >= 64 else 4 if there.numel() >= 16 else 2
            square = there[: side * side].view(side, side)
            here[: side * side].view(side, side).copy_(square.t())
            cube = there[:8].view(2, 2, 2)
            here[:8].view(2, 2, 2).copy_(cube.permute(2, 1, 0))
            here[: side * (side // 2)].view(side, side // 2).copy_(square[:, : side // 2])
            here[:4].copy_(there[:1].expand(4))
        count = min(ONCE_BYTES, pinned.numel())
        pinned[:count].copy_(memory[:count], non_blocking=True)
    if not poll(runtime.mark(side=True).query, _START_S):
        raise TimeoutError(f"the device did not finish its first copies within {_START_S:g} s")


def _by_stride(tensor: Tensor) -> Tensor:
    """Return a view with the dimensions in the order of memory: dense tensors, channels last too, are contiguous."""
    return tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))


def _back(tensor: Tensor, target: Tensor) -> Tensor:
    """Return a view of ``target``, whose shape is that of ``_by_stride(tensor)``, in the dimensions of ``tensor``."""
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return target.permute(sorted(range(tensor.dim()), key=order.__getitem__))


def _slabs(tensor: Tensor, limit: int) -> Iterator[Tensor]:
    """Yield the tensor in slabs of at most ``limit`` elements, in the order of its elements."""
    if tensor.numel() <= limit:
        yield tensor
    elif (row := tensor.numel() // tensor.shape[0]) <= limit:
        yield from torch.split(tensor, limit // row)
    else:
        for part in tensor.unbind(0):
            yield from _slabs(part, limit)
