"""Makes a CUDA stream wait for a word in host memory, with ``cuStreamWaitValue32`` of the CUDA driver API.

torch has no such function, so it is called in ``libcuda`` directly, which every process with a CUDA device has loaded.
"""

from __future__ import annotations

import contextlib
import ctypes
import warnings
from collections.abc import Iterator
from typing import Any

import torch

_cuda: Any = torch.cuda
_GREATER_OR_EQUAL = 0
"""``CU_STREAM_WAIT_VALUE_GEQ``: the stream goes on when the signed difference of word and number is not negative, so
numbers may exceed 32 bits."""
_REFUSED = "the CUDA driver does not let a stream wait for a word in host memory"
_SYNCHRONISES = "synchronizing CUDA operation"


class StreamHold:
    """The ``Hold`` of a CUDA device; see ``ttp.adapters.torch.device.accelerator.Hold``.

    Args:
        device: the device whose streams wait.

    Raises:
        OSError: there is no CUDA driver.
        AttributeError: the driver is too old to have the function.
        RuntimeError: the driver refuses the memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._driver = device, driver()
        self._wait = self._driver.cuStreamWaitValue32_v2
        self._wait.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint]
        self._memory = torch.zeros(16, dtype=torch.int32, device="cpu", pin_memory=True)
        self._word = ctypes.c_uint32.from_address(self._memory.data_ptr())
        there = ctypes.c_uint64()
        with torch.cuda.device(device):
            torch.cuda.current_stream(device)  # makes sure that the device has a context
            locate = self._driver.cuMemHostGetDevicePointer_v2
            check(locate(ctypes.byref(there), ctypes.c_void_p(self._memory.data_ptr()), ctypes.c_uint(0)), _REFUSED)
        self._address = there.value

    def queue(self, number: int) -> None:
        """See ``Hold``."""
        stream: Any = torch.cuda.current_stream(self._device)
        with torch.cuda.device(self._device):  # the default stream has the same handle, 0, on every device
            check(self._wait(stream.cuda_stream, self._address, number & 0xFFFFFFFF, _GREATER_OR_EQUAL), _REFUSED)

    def release(self, number: int) -> None:
        """See ``Hold``."""
        self._word.value = number & 0xFFFFFFFF


def driver() -> ctypes.CDLL:
    """Return the CUDA driver. Raises OSError if there is none."""
    return ctypes.CDLL("libcuda.so.1")


def check(code: int, refused: str) -> None:
    """Raise RuntimeError, with the text ``refused``, if ``code`` is an error of the CUDA driver."""
    if code:
        raise RuntimeError(f"{refused}: error {code}")


@contextlib.contextmanager
def noticing(found: list[str]) -> Iterator[None]:
    """See ``Runtime.noticing``. Uses torch's debug mode that warns of implicit synchronisations."""
    before = _cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        _cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            _cuda.set_sync_debug_mode(before)
    for each in warned:
        if _SYNCHRONISES in str(each.message):
            found.append(f"{each.filename}:{each.lineno}")
        else:
            warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
