"""Captures the random streams of any Python program: Python's own and numpy's global one.

A capture happens twice per update and takes a few microseconds, because the 625 numbers of a Mersenne Twister are not
converted one by one: the memory that holds them is returned. At the start, the position of that memory is found on a
private generator and checked against the official functions. If the check fails, the official functions are used.
"""

from __future__ import annotations

import ctypes
import random
import struct
import sys
from collections.abc import Callable
from typing import Any

from ttp.processor.local_state.pages import Buffer
from ttp.store.encoding import decode, encode

_WORDS = 624
_TWISTER_BYTES = 4 * (_WORDS + 1)
_GAUSS = struct.Struct("<Bd")  # whether there is a spare normal number, and which
_LIVE_GAUSS = struct.Struct("<i4xd")  # the same fields, as they lie in numpy's object
_NATIVE_ORDER = sys.byteorder == "little"

HostState = tuple[Buffer, Buffer, Buffer, Buffer]
"""Python's stream, its spare normal number, numpy's stream, its spare normal number. The last two may be empty."""


class HostStreams:
    """Captures and restores the global streams of this process that need no framework."""

    def __init__(self) -> None:
        self._python = _PythonStream()
        self._numpy: _NumpyStream | None = None

    def capture(self) -> HostState:
        """Return the state of every random stream. Some parts are live memory: copy them before a number is drawn."""
        if self._numpy is None:
            if "numpy.random" not in sys.modules:
                return (*self._python.capture(), b"", b"")
            self._numpy = _NumpyStream()
        return (*self._python.capture(), *self._numpy.capture())

    def standing(self) -> Callable[[], bool] | None:
        """Return a function that tells whether the parts of the last ``capture`` still describe all streams.

        Parts in live memory follow their streams. The function returns False when a stream was replaced, or Python's
        spare normal number has changed, which is not live memory.

        Returns:
            The function; None if the words of a stream are not live memory.
        """
        numpy, python = self._numpy, self._python.source
        spare = self._python.spare
        if not self._python.is_live or (numpy is not None and not numpy.is_live):
            return None
        if numpy is None:
            return lambda: python.gauss_next is spare and "numpy.random" not in sys.modules
        owner, generator = numpy.owner, numpy.generator
        return lambda: python.gauss_next is spare and owner._bit_generator is generator

    def restore(self, python: bytes, python_gauss: bytes, numpy: bytes, numpy_gauss: bytes) -> list[str]:
        """Restore the streams from what ``capture`` returned. Returns notes on streams that this process does not have.

        Raises:
            ValueError, TypeError, struct.error, EncodingError: these are not captured streams.
        """
        self._python.restore(python, python_gauss)
        return _restore_numpy(numpy, numpy_gauss) if numpy else []


# --------------------------------------------------------------------------------------------------------------- memory


def memory_at(address: int, size: int, owner: object = None) -> memoryview:
    """Return a view of memory by its address. It keeps ``owner`` alive; without one, the caller keeps the memory."""
    if size == 0:
        return memoryview(b"")
    memory: Any = (ctypes.c_char * size).from_address(address)
    memory._owner = owner
    return memoryview(memory).cast("B")


# --------------------------------------------------------------------------------------------------------------- python


class _PythonStream:
    """The state of module ``random``: position, then 624 words; the spare normal number apart."""

    def __init__(self) -> None:
        self.source: Any = random.getstate.__self__  # type: ignore[attr-defined]
        self._live = _python_memory(self.source) if _NATIVE_ORDER and _python_layout_holds() else None
        self.spare: float | None = None
        """The spare normal number at the last capture."""

    @property
    def is_live(self) -> bool:
        """True if ``capture`` returns the live memory of the words."""
        return self._live is not None

    def capture(self) -> tuple[Buffer, bytes]:
        if self._live is not None:
            self.spare = self.source.gauss_next
            return self._live, _pack_gauss(self.spare)
        _, words, gauss = random.getstate()
        return _pack_words(words), _pack_gauss(gauss)

    def restore(self, data: bytes, gauss: bytes) -> None:
        random.setstate(python_state(data, gauss))


def python_state(data: bytes, gauss: bytes) -> tuple[Any, ...]:
    """Return a captured state in the form of ``random.setstate``.

    Raises:
        struct.error: ``data`` or ``gauss`` is no captured state.
    """
    position, *words = struct.unpack(f"<{_WORDS + 1}I", data)
    return 3, (*words, position), _unpack_gauss(gauss)


_NO_GAUSS = _GAUSS.pack(0, 0.0)


def _pack_words(words: tuple[int, ...]) -> bytes:
    return struct.pack(f"<{_WORDS + 1}I", words[-1], *words[:-1])


def _pack_gauss(value: float | None) -> bytes:
    return _NO_GAUSS if value is None else _GAUSS.pack(1, value)


def _unpack_gauss(data: Buffer) -> float | None:
    there, value = (_GAUSS if len(data) == _GAUSS.size else _LIVE_GAUSS).unpack(data)
    return value if there else None


def _python_memory(generator: random.Random) -> memoryview:
    return memory_at(id(generator) + object.__basicsize__, _TWISTER_BYTES)


def _python_layout_holds() -> bool:
    """Return whether the memory of a generator equals what ``getstate`` returns, at several positions."""
    try:
        if type(random.getstate.__self__) is not random.Random:  # type: ignore[attr-defined]
            return False
        probe = random.Random(20_11)
        if type(probe).__mro__[1].__basicsize__ < object.__basicsize__ + _TWISTER_BYTES:
            return False
        for draws in (0, 1, 700):
            for _ in range(draws):
                probe.random()
            if bytes(_python_memory(probe)) != _pack_words(probe.getstate()[1]):
                return False
    except Exception:  # another interpreter
        return False
    return True


# ---------------------------------------------------------------------------------------------------------------- numpy


class _NumpyStream:
    """The state of numpy's global generator: 624 words, then the position; the spare normal number apart.

    The words are found by the documented ``ctypes.state_address`` of the bit generator. The spare normal number has no
    such address and ``get_state()`` takes 30 us, so its place in the object is found at the start.
    """

    def __init__(self) -> None:
        import numpy

        streams: Any = numpy.random
        self._get_state: Any = streams.get_state
        self.owner: Any = self._get_state.__self__
        self._gauss_at = _numpy_gauss_offset(type(self.owner)) if _NATIVE_ORDER else None
        self.generator: Any = None
        """The bit generator to which ``_words`` belongs; ``set_bit_generator`` replaces it."""
        self._words: memoryview | None = None
        if self._gauss_at is not None:
            self._gauss = memory_at(id(self.owner) + self._gauss_at - 8, _LIVE_GAUSS.size)

    @property
    def is_live(self) -> bool:
        """True if ``capture`` returns the live memory of the words."""
        return self._words is not None

    def capture(self) -> tuple[Buffer, Buffer]:
        generator = self.owner._bit_generator
        if generator is not self.generator:
            self.generator = generator
            self._words = _numpy_words(generator, self._get_state) if self._gauss_at is not None else None
        if self._words is not None:
            return self._words, self._gauss
        state = self._get_state(legacy=False)
        return encode(state, "numpy's random state"), b""


def _restore_numpy(data: bytes, gauss: bytes) -> list[str]:
    try:
        import numpy.random
    except ImportError:
        return ["numpy is not installed: its random stream was not restored"]
    streams: Any = numpy.random
    state = _numpy_state(data, gauss)
    wanted = state["bit_generator"]
    if type(streams.get_bit_generator()).__name__ != wanted:
        if wanted not in _NUMPY_GENERATORS:
            return [f"numpy's global random stream was a {wanted} and is of another kind now: it was not restored"]
        streams.set_bit_generator(getattr(streams, wanted)())
    streams.set_state(state)
    return []


def _numpy_state(data: bytes, gauss: bytes) -> Any:
    """Return a captured state in the form of ``numpy.random.set_state``."""
    import numpy

    if not gauss:
        return decode(data)
    words = numpy.frombuffer(data, dtype="<u4", count=_WORDS)
    (position,) = struct.unpack_from("<i", data, 4 * _WORDS)
    spare = _unpack_gauss(gauss)
    state = {"bit_generator": "MT19937", "state": {"key": words, "pos": position}}
    return state | {"has_gauss": int(spare is not None), "gauss": spare or 0.0}


_NUMPY_GENERATORS = ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")


def _numpy_words(generator: Any, get_state: Any) -> memoryview | None:
    """Return a view of the live words of a bit generator; None if it is no Mersenne Twister, or the check fails."""
    if type(generator).__name__ != "MT19937":
        return None
    memory = memory_at(generator.ctypes.state_address, _TWISTER_BYTES)
    state = get_state(legacy=False)["state"]
    expected = state["key"].astype("<u4").tobytes() + struct.pack("<i", int(state["pos"]))
    return memory if bytes(memory) == expected else None


def _numpy_gauss_offset(kind: Any) -> int | None:
    """Return the offset of the spare normal number in a ``RandomState``; its flag is 8 bytes before it.

    It is found on a private generator by a number that occurs nowhere else, then checked on numbers really drawn.
    """
    try:
        probe = kind(20_11)
        probe.set_state(probe.get_state(legacy=False) | {"has_gauss": 1, "gauss": 1.2345e-67})
        raw = ctypes.string_at(id(probe), kind.__basicsize__)
        needle = struct.pack("<d", 1.2345e-67)
        at = raw.find(needle)
        if at < 16 or raw.count(needle) != 1:
            return None
        for _ in range(5):
            probe.standard_normal()  # odd calls leave a spare, even ones use it up
            state = probe.get_state(legacy=False)
            raw = ctypes.string_at(id(probe), kind.__basicsize__)
            if struct.unpack_from("<id", raw[at - 8 : at - 4] + raw[at : at + 8]) != (
                state["has_gauss"],
                state["gauss"],
            ):
                return None
    except Exception:  # another numpy
        return None
    return int(at)
