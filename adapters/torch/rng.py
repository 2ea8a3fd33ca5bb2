"""The random streams of one process: python, numpy's global one, torch, the device.

Taking them costs a few microseconds: see ``ttp.processor.host_rng``.
"""

from __future__ import annotations

import ctypes
import logging
import struct
from typing import Any

import torch

from ttp.errors import CheckpointError
from ttp.processor.host_rng import HostStreams, numpy_tuple, python_state
from ttp.processor.pages import Buffer
from ttp.store.encoding import EncodingError

log = logging.getLogger("ttp.adapters.torch")

_HEADER = struct.Struct("<4s6I")  # magic; bytes of: python, its gauss, numpy, its gauss, torch, device
_MAGIC = b"RNG\x01"
_cuda: Any = torch.cuda


class RngState:
    """Captures and restores all global random streams of this process."""

    def __init__(self) -> None:
        self._host = HostStreams()
        self._torch: torch.Generator = torch.default_generator

    def capture(self) -> list[Buffer]:
        """The state of every stream now. Some parts are live memory: copy them before the next random number."""
        python, python_gauss, numpy, numpy_gauss = self._host.capture()
        host = _tensor_bytes(self._torch.get_state())
        device = _capture_device()
        sizes = (len(python), len(python_gauss), len(numpy), len(numpy_gauss), len(host), len(device))
        return [_HEADER.pack(_MAGIC, *sizes), python, python_gauss, numpy, numpy_gauss, host, device]

    def restore(self, data: bytes) -> list[str]:
        """Put back what ``capture`` gave, joined. Returns notes on streams that this process does not have.

        Raises:
            CheckpointError: these are not captured streams.
        """
        python, python_gauss, numpy, numpy_gauss, host, device = _split(data)
        notes: list[str] = []
        try:
            notes += self._host.restore(python, python_gauss, numpy, numpy_gauss)
            self._torch.set_state(torch.frombuffer(bytearray(host), dtype=torch.uint8))
            if device:
                notes += _restore_device(device)
        except (ValueError, TypeError, RuntimeError, struct.error, EncodingError) as problem:
            raise CheckpointError(f"the saved random streams cannot be put back: {problem}") from problem
        return notes


def streams_of(data: bytes) -> dict[str, Any]:
    """What ``capture`` gave, joined, as the libraries' own functions for the old global generators give and take it.

    Returns:
        ``python``: for ``random.setstate``; ``numpy``: for ``numpy.random.set_state``, None if there was no Mersenne
        Twister; ``torch``: for ``torch.set_rng_state``; ``device``: for ``torch.cuda.set_rng_state``, None without one.

    Raises:
        CheckpointError: these are not captured streams.
    """
    python, python_gauss, numpy, numpy_gauss, host, device = _split(data)
    try:
        return {
            "python": python_state(python, python_gauss),
            "numpy": numpy_tuple(numpy, numpy_gauss) if numpy else None,
            "torch": torch.frombuffer(bytearray(host), dtype=torch.uint8),
            "device": torch.frombuffer(bytearray(device), dtype=torch.uint8) if device else None,
        }
    except (ValueError, TypeError, LookupError, struct.error, EncodingError) as problem:
        raise CheckpointError(f"the saved random streams cannot be read: {problem}") from problem


def _split(data: bytes) -> list[bytes]:
    if len(data) < _HEADER.size or not data.startswith(_MAGIC):
        raise CheckpointError(f"{len(data)} bytes do not begin like saved random streams: {data[:8]!r}")
    sizes = _HEADER.unpack_from(data)[1:]
    if _HEADER.size + sum(sizes) != len(data):
        raise CheckpointError(f"saved random streams have {len(data)} bytes where their header promises others")
    sections: list[bytes] = []
    at = _HEADER.size
    for size in sizes:
        sections.append(data[at : at + size])
        at += size
    return sections


def _tensor_bytes(tensor: torch.Tensor) -> bytes:
    return ctypes.string_at(tensor.data_ptr(), tensor.numel())


# --------------------------------------------------------------------------------------------------------------- device


def _capture_device() -> bytes:
    """Seed and offset of the current CUDA device's generator. They live on the host: nothing waits for the device."""
    if not _cuda.is_initialized():
        return b""
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    return _tensor_bytes(generator.get_state())


def _restore_device(data: bytes) -> list[str]:
    if not torch.cuda.is_available():
        return ["there is no CUDA device: its random stream was not put back"]
    _cuda.init()
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    generator.set_state(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    return []
