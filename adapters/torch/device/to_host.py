"""Copies large tensors from devices to the host for a save, on a side stream: the training's stream may hang.

Only copies of dense memory are queued, which the device's copy engines carry out. No kernel is: if enough streams hang,
a device starts no kernel on any other stream. Memory is allocated at the start. See decision 31.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ttp.adapters.torch.device.accelerator import Event, Runtime, holder, poll
from ttp.adapters.torch.tensor_memory import as_viewed, flat_bytes, memory_order

RING_BYTES = 64 << 20
"""Size in bytes of each pinned buffer."""
_COPY_BYTES = 128 << 10
"""Bytes that a device moves in the time that another copy costs: gaps up to that size are copied, too."""
_START_S = 60.0
"""Seconds that a device may take for its first copy."""


@dataclass(slots=True)
class _Flight:
    """A chunk that is being copied to the host.

    Args:
        event: the event behind the copy; None: the chunk is on the host already.
        staged: the pinned memory to which it is copied first.
        target: the memory to which it is copied from there.
        completes: returns the tensor on the host whose last chunk this is; None: more chunks follow.
    """

    event: Event | None
    staged: Tensor
    target: Tensor
    completes: Callable[[], Tensor] | None


class HostCopier:
    """Copies tensors from devices to the host. For one thread at a time.

    Args:
        runtimes: the devices; empty: all tensors are on the host, and are returned themselves.
        ring: number of pinned buffers, allocated in the constructor.
        buffer_bytes: size of each of these buffers.
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
        timeout_s: float = 60.0,
    ) -> None:
        self._runtimes = runtimes
        self._timeout_s = timeout_s
        self._ring = [runtimes[0].pinned(buffer_bytes) for _ in range(ring)] if runtimes else []
        self._turn = 0
        for runtime in runtimes:
            _copy_once(runtime, self._ring[0])

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
                yield _Flight(None, tensor, tensor, tensor.detach)
                continue
            source = tensor.permute(memory_order(tensor))
            run, span = _run(source), _span(source)
            with_gaps = span <= source.numel() // run * (run + _COPY_BYTES // source.element_size())
            runs = iter([source.as_strided((span,), (1,))]) if with_gaps else _runs(source, run)
            target = torch.empty(span if with_gaps else source.numel(), dtype=tensor.dtype, device="cpu")
            whole = partial(_shaped, target, tensor, with_gaps)
            yield from self._fly(runtime, self._slabs(runs), flat_bytes(target), whole)

    def _fly(
        self, runtime: Runtime, slabs: Iterator[Tensor], target: Tensor, whole: Callable[[], Tensor]
    ) -> Iterator[_Flight]:
        """Begin to copy a tensor slab by slab, whenever the caller asks for a flight; the last one completes it."""
        at, size = 0, target.numel()
        for slab in slabs:
            end = at + slab.numel()
            staged = self._ring[self._turn % len(self._ring)][: slab.numel()]
            self._turn += 1
            with runtime.on_side():
                staged.copy_(slab, non_blocking=True)
            yield _Flight(runtime.event(side=True), staged, target[at:end], whole if end == size else None)
            at = end

    def _slabs(self, runs: Iterator[Tensor]) -> Iterator[Tensor]:
        """Yield the bytes of dense tensors in slabs that fit a pinned buffer; of an empty tensor one empty slab."""
        step = self._ring[0].numel()
        for run in runs:
            data = flat_bytes(run)
            for start in range(0, max(1, data.numel()), step):
                yield data[start : start + step]

    def _land(self, flight: _Flight) -> Iterator[Tensor]:
        if flight.event is not None:
            if not poll(flight.event.query, self._timeout_s):
                raise TimeoutError(f"{flight.target.numel()} bytes did not leave the device in {self._timeout_s:g} s")
            flight.target.copy_(flight.staged)
        if flight.completes is not None:
            yield flight.completes()


def _copy_once(runtime: Runtime, pinned: Tensor) -> None:
    """Copy some bytes, while nothing hangs: the first copy on a stream may have to wait for others.

    Raises:
        TimeoutError: the device does not respond.
    """
    memory = runtime.on_device(min(256, pinned.numel()))
    with runtime.on_side():
        pinned[: memory.numel()].copy_(memory, non_blocking=True)
    if not poll(runtime.event(side=True).query, _START_S):
        raise TimeoutError(f"the device did not finish its first copy within {_START_S:g} s")


def _run(source: Tensor) -> int:
    """Return the number of elements that lie together in memory, at least 1; ``source`` is in the order of memory."""
    run = 1
    for size, stride in zip(reversed(source.shape), reversed(source.stride()), strict=True):
        if size != 1 and stride != run:
            break
        run *= size
    return max(1, run)


def _span(source: Tensor) -> int:
    """Return the number of elements from the first to the last one in memory, gaps included."""
    if not source.numel():
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(source.shape, source.stride(), strict=True))


def _runs(source: Tensor, run: int) -> Iterator[Tensor]:
    """Yield the parts of a tensor that are dense, each of ``run`` elements, in the order of its elements."""
    if source.numel() == run:
        yield source
    else:
        for part in source.unbind(0):
            yield from _runs(part, run)


def _shaped(copied: Tensor, tensor: Tensor, with_gaps: bool) -> Tensor:
    """Return copied elements in the shape and memory format of ``tensor``.

    Args:
        copied: the memory of the elements in its order.
        tensor: the original.
        with_gaps: ``copied`` also has what lies between the elements.
    """
    order = memory_order(tensor)
    source = tensor.permute(order)
    whole = copied.as_strided(source.shape, source.stride()).contiguous() if with_gaps else copied.view(source.shape)
    return as_viewed(whole.permute(sorted(range(tensor.dim()), key=order.__getitem__)), tensor)
