"""Captures and restores the global random streams of one process: Python's, numpy's, torch's, and those of devices.

A capture costs a few microseconds: see ``ttp.processor.local_state.host_rng``. Torch's stream on the CPU is a Mersenne
Twister like the other two, and is captured as live memory, because ``get_state()`` makes a tensor of twice the size.
The position of that memory is found at the start on a private generator, and checked against ``get_state()``.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import struct
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ttp.errors import GARBLED, CheckpointError, ToldAs
from ttp.processor.local_state.host_rng import HostStreams, memory_at
from ttp.processor.local_state.pages import Buffer
from ttp.processor.local_state.sections import Sections
from ttp.store.encoding import EncodingError

log = logging.getLogger("ttp.adapters.torch")

_HEADER = struct.Struct("<4s6I")  # magic; bytes of: python, its gauss, numpy, its gauss, torch, device
_MAGIC = b"RNG\x01"
_cuda: Any = torch.cuda
_backends: Any = torch.backends


class RngState:
    """Captures and restores all global random streams of this process.

    Args:
        devices: CUDA devices whose streams the training uses; empty: the current device, if CUDA is in use.
    """

    def __init__(self, devices: Sequence[torch.device] = ()) -> None:
        self._host = HostStreams()
        self._devices = [device.index for device in devices]
        self._torch: torch.Generator = torch.default_generator
        self._live = live_memory(self._torch)

    def capture(self) -> list[Buffer]:
        """Return the state of every stream, in parts to join. Some are live memory: copy them before the next draw."""
        own = self._live if self._live is not None else _tensor_bytes(self._torch.get_state())
        parts = [*self._host.capture(), own, _capture_device(self._devices)]
        return [_HEADER.pack(_MAGIC, *map(len, parts)), *parts]

    def standing(self) -> Callable[[], bool] | None:
        """Return a function that tells whether the parts of the last ``capture`` still cover all streams.

        Parts in live memory follow their streams, so the function returns False only if a stream was replaced, or CUDA
        has come into use.

        Returns:
            The function; None: some part is a copy, so that each image needs a new capture.
        """
        host = self._host.standing() if self._live is not None else None
        if host is None or not _backends.cuda.is_built():
            return host
        return None if _cuda.is_initialized() else lambda: host() and not _cuda.is_initialized()

    def restore(self, data: bytes) -> list[str]:
        """Restore the streams from the joined parts of a ``capture``.

        Returns:
            Notes for the log on streams that this process lacks.

        Raises:
            CheckpointError: the bytes are not captured streams.
        """
        *host, own, device = _split(data)
        notes: list[str] = []
        unreadable = (*GARBLED, RuntimeError, struct.error, EncodingError)
        with ToldAs(CheckpointError, "the saved random streams cannot be restored", *unreadable):
            notes += self._host.restore(*host)
            self._torch.set_state(_torch_state(own))
            if device:
                notes += _restore_device(device, self._devices)
        return notes


def _split(data: bytes) -> list[bytes]:
    if len(data) < _HEADER.size or not data.startswith(_MAGIC):
        raise CheckpointError(f"{len(data)} bytes do not begin like saved random streams: {data[:8]!r}")
    sizes = _HEADER.unpack_from(data)[1:]
    if _HEADER.size + sum(sizes) != len(data):
        raise CheckpointError(f"saved random streams have {len(data)} bytes, which their header contradicts")
    return [*map(Sections(data, _HEADER.size).take, sizes)]


def _tensor_bytes(tensor: torch.Tensor) -> bytes:
    return ctypes.string_at(tensor.data_ptr(), tensor.numel())


# ---------------------------------------------------------------------------------------------------------------- torch

_WORDS = 624
_LIVE = struct.Struct(f"<Qi?3xI{_WORDS}I4xf?3xd?7x")
"""The layout in memory: seed, numbers left, seeded, next, words; then the spare normal numbers (float and double), each
with whether there is one."""

_OFFICIAL = struct.Struct(f"<QiiQ{_WORDS}QdddI4xf?3x")
"""The layout of ``get_state()``: words of eight bytes; three doubles, the second being the spare normal number."""

_LOOKED_THROUGH = 512
"""Number of bytes at the beginning of a generator in which its stream is looked for; it has more than two thousand."""


def live_memory(generator: torch.Generator) -> memoryview | None:
    """Return the memory of a CPU generator's state; None: in this version of torch its layout is not known."""
    try:
        offset = _offset() if sys.byteorder == "little" else None
        found: Any = generator
        return memory_at(found._cdata + offset, _LIVE.size) if offset is not None else None
    except Exception:
        return None


@functools.cache
def _offset() -> int | None:
    """Return the offset of the state in a generator's memory, found and checked on a private one; None: not found."""
    probe: Any = torch.Generator()
    probe.manual_seed(20_11)
    begin = _OFFICIAL.unpack(_tensor_bytes(probe.get_state()))
    needle = struct.pack("<8I", *begin[4:12])
    found = ctypes.string_at(probe._cdata, _LOOKED_THROUGH).find(needle) - 20
    if found < 0:
        return None
    memory = memory_at(probe._cdata + found, _LIVE.size)
    draws: list[Callable[[], object]] = [
        lambda: torch.rand((), generator=probe, device="cpu"),
        lambda: torch.rand(700, generator=probe, device="cpu"),
        lambda: torch.randn((), generator=probe, device="cpu"),  # leaves a spare normal number
        lambda: torch.randn((), generator=probe, device="cpu"),
        lambda: probe.set_state(_crafted(probe.get_state())),
        lambda: probe.manual_seed(20_12),
    ]
    for draw in draws:
        if bytes(_torch_state(bytes(memory)).numpy()) != _tensor_bytes(probe.get_state()):
            return None
        draw()
    return found


def _crafted(state: torch.Tensor) -> torch.Tensor:
    """Return ``state`` with spare normal numbers of both kinds, float and double."""
    fields = list(_OFFICIAL.unpack(_tensor_bytes(state)))
    fields[-5], fields[-3:] = 2.5, [1, 1.5, True]
    return torch.frombuffer(bytearray(_OFFICIAL.pack(*fields)), dtype=torch.uint8)


def _torch_state(data: bytes) -> torch.Tensor:
    """Convert a captured state of torch's stream, in the layout of memory or of ``get_state``, for ``set_state``.

    Raises:
        struct.error: the state cannot be converted.
    """
    if len(data) == _LIVE.size:
        seed, left, seeded, following, *words, single, has_single, double, has_double = _LIVE.unpack(data)
        spare = (0.0, double if has_double else 0.0, 0.0, int(has_double), single if has_single else 0.0, has_single)
        data = _OFFICIAL.pack(seed, left, int(seeded), following, *words, *spare)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


# --------------------------------------------------------------------------------------------------------------- device


def _generators(devices: Sequence[int]) -> list[torch.Generator]:
    return [torch.cuda.default_generators[index] for index in devices or (torch.cuda.current_device(),)]


def _capture_device(devices: Sequence[int]) -> bytes:
    """Return seeds and offsets of the CUDA generators, concatenated.

    They are on the host, so nothing waits for a device. A CUDA graph has an offset of its own on the device; when the
    graph is launched, the count of numbers that it uses is added to the offset on the host.
    """
    if not _cuda.is_initialized():
        return b""
    return b"".join(_tensor_bytes(generator.get_state()) for generator in _generators(devices))


def _restore_device(data: bytes, devices: Sequence[int]) -> list[str]:
    if not torch.cuda.is_available():
        return ["the random stream of a CUDA device was not restored, because this process has no CUDA device"]
    _cuda.init()
    generators = _generators(devices)
    size = len(data) // len(generators)
    if size * len(generators) != len(data) or size != generators[0].get_state().numel():
        return [f"CUDA random streams were not restored: {len(data)} bytes are not those of {len(generators)} devices"]
    for number, generator in enumerate(generators):
        part = bytearray(data[number * size : (number + 1) * size])
        generator.set_state(torch.frombuffer(part, dtype=torch.uint8))
    return []
