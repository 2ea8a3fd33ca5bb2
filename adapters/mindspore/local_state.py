"""Writes the rank-local state of a version to a page: position in the data, random streams, state beside the optimizer.

*State beside the optimizer* means the parameters of the training network that the optimizer neither trains nor owns:
BatchNorm's moving averages, the loss scale and its counters, accumulated gradients. They change in the forward pass,
before the gate, so the live values are ahead of the version while the rank waits there. BatchNorm's averages also
differ between ranks. So these parameters are copied into the page when the version is finished, and the checkpoint is
written from the page.

Large ones that have not changed since training began (frozen weights) are not copied: the page has only their digest,
and they are written once, with the slice. They may be nearly the whole network. What a restore took from a page is
copied, because no program begins with it. Zeros are copied, too: they may be gradients that the first step adds up
before the gate, when the version before may still have to be saved.

The image in the page consists of a header, a description (msgpack), and the sections. It holds no pickle.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import mindspore as ms
import msgpack
import numpy as np
import xxhash

from ttp.adapters.mindspore.memory import Memory
from ttp.errors import GARBLED, CheckpointError, OtherModelError, ToldAs
from ttp.processor.local_state.host_rng import HostStreams
from ttp.processor.local_state.pages import Buffer, Kept, PageWriter
from ttp.processor.local_state.sections import Sections
from ttp.processor.sampling import blocks_of

_MAGIC = b"TTPM\x01"
_HEADER = struct.Struct("<5sBI5I3q")
"""Magic; whether the forward pass of the version's step is over; sizes in bytes of the description, Python's stream,
its spare Gaussian number, numpy's stream, its spare Gaussian number, and MindSpore's stream; epoch, step, and batches
of an epoch."""

STREAMS = "its random streams"
"""Name of all random streams together, beside the names of parameters."""

BEGAN = "as its step began: "
"""Prefix of a parameter's name in ``digests``, for its state when the step of the version began."""

_LARGE = 64 << 10
"""Bytes from which on a parameter is copied only if its digest has changed."""

_WHOLE_VERSIONS = 4
"""Number of versions for which unchanged parameters are read whole; after that a sample of them is read."""


@dataclass(frozen=True, slots=True)
class Position:
    """The position in the data at which a version was finished.

    Args:
        epoch: the epoch of the version's step, from 1; 0: not known.
        step: steps made since the beginning of the first epoch, including steps whose update was skipped.
        batch_num: number of steps of an epoch; 0: not known.
    """

    epoch: int = 0
    step: int = 0
    batch_num: int = 0

    @property
    def step_in_epoch(self) -> int:
        """The number of the step in its epoch, from 1, as in the name of the checkpoint's file."""
        return (self.step - 1) % self.batch_num + 1 if self.batch_num and self.step else self.step


@dataclass(frozen=True, slots=True)
class LocalState:
    """The decoded contents of a page.

    Args:
        position: the position in the data.
        passed: whether the forward pass of the version's step was over.
        host: Python's and numpy's streams, see ``HostStreams``.
        stream: MindSpore's stream.
        beside: the state beside the optimizer: name -> (type, shape, bytes).
        unchanged: parameters beside the optimizer that are as they were when training began: name -> digest.
    """

    position: Position
    passed: bool
    host: tuple[bytes, bytes, bytes, bytes]
    stream: bytes
    beside: Mapping[str, tuple[str, tuple[int, ...], bytes]]
    unchanged: Mapping[str, str] = field(default_factory=dict)


class LocalCapture:
    """Writes the page of this rank. Training thread only; never raises.

    Args:
        memory: the parameters of the training network.
        beside: names of the parameters that the optimizer neither trains nor owns.
    """

    def __init__(self, memory: Memory, beside: Sequence[str]) -> None:
        self._memory, self._beside = memory, tuple(beside)
        self._host = HostStreams()
        self._stream = b""
        self._page: PageWriter | None = None
        self._last: tuple[Hashable, ...] = ()
        """The version that was captured last, whether after its step, and digests of its state."""
        self._sizes = {name: int(memory.of(name).memory.nbytes) for name in self._beside}
        self._total = sum(self._sizes.values())
        self._unchanged: dict[str, tuple[str, str]] | None = None
        """Digests of what has not changed since training began, of all bytes and of a sample; None: begin anew."""
        self._finished = 0
        self._own: Collection[str] = ()
        """Parameters with values from the page of this rank, which a program that begins anew would not have."""
        self._description = b""
        self.on_written: Callable[[int, bool], None] | None = None
        self.restored: LocalState | None = None
        """The state that was restored, without that beside the optimizer, until training begins."""

    def open_page(self, page: PageWriter) -> None:
        """Write to this page from now on."""
        self._page, self._last = page, ()

    def read_stream(self) -> None:
        """Read MindSpore's random stream, for later captures. Do not call it while a graph runs."""
        self._stream = ms.get_rng_state().asnumpy().tobytes()

    def capture(self, version: int, position: Position, *, final: bool, passed: bool = True) -> None:
        """Write the present state to the page as that of ``version``.

        Args:
            version: the version to which the state belongs.
            position: the position in the data at which the version ends.
            final: whether the step that makes the version is over.
            passed: whether its forward pass is over.
        """
        if self._page is None:
            return
        self._look_for_changes()
        host = self._host.capture()
        sizes = map(len, (self._description, *host, self._stream))
        header = _HEADER.pack(_MAGIC, passed, *sizes, position.epoch, position.step, position.batch_num)
        small: list[Buffer] = []
        large: list[Kept] = []
        for name in self._beside:
            if name in (self._unchanged or {}):
                continue
            view = self._memory.of(name).memory
            if len(view) < _LARGE:
                small.append(view)
            else:
                large.append((xxhash.xxh3_128_intdigest(view), view))
        image = b"".join((header, self._description, *host, self._stream, *small))
        # What is there already is not written again: the few slots of a version keep what its step began with, too.
        said = version, final, xxhash.xxh3_128_intdigest(image), *(digest for digest, _ in large)
        if said == self._last:
            return
        self._last = said
        self._finished += final
        written = self._page.write(version, final, (image,), large)
        if written and self.on_written is not None:
            self.on_written(version, final)

    def begin_anew(self) -> None:
        """Note that a load has replaced the state: what it has loaded counts as unchanged."""
        self._unchanged, self._finished = None, 0

    def _look_for_changes(self) -> None:
        """Find the large parameters that are still as they were when training began, and describe the page."""
        if self._unchanged is None:
            large = [name for name, size in self._sizes.items() if size >= _LARGE and name not in self._own]
            large = [name for name in large if np.asarray(self._memory.of(name).memory).any()]
            self._unchanged = {name: (self._whole(name), self._sample(name)) for name in large}
        else:
            sampled = self._finished >= _WHOLE_VERSIONS
            look = self._sample if sampled else self._whole
            changed = [name for name, digests in self._unchanged.items() if look(name) != digests[sampled]]
            if not changed:
                return
            for name in changed:
                del self._unchanged[name]
        self._description = msgpack.packb([self._row(name) for name in self._beside])

    def _row(self, name: str) -> list[object]:
        """Return the entry of the parameter ``name`` in the description; with its digest if the page has only that."""
        held, (digest, _) = self._memory.held[name], (self._unchanged or {}).get(name, ("", ""))
        return [name, held.dtype, list(held.shape), self._sizes[name], *([digest] if digest else [])]

    def _whole(self, name: str) -> str:
        return digest_of(self._memory.of(name).memory)

    def _sample(self, name: str) -> str:
        """Return a digest of a sample of the parameter ``name``, always from the same places."""
        blocks = blocks_of(self._sizes[name], 1, total=self._total, mode="sample", version=0)
        if blocks is None:
            return self._whole(name)
        view = self._memory.of(name).memory
        starts = range(blocks.start, blocks.start + blocks.number * blocks.pitch, blocks.pitch)
        return digest_of(b"".join(view[at : at + blocks.size] for at in starts))

    def restore(self, state: LocalState) -> list[str]:
        """Restore the state of a page. Returns notes on missing random streams.

        Raises:
            OtherModelError: the state does not fit this network.
            CheckpointError: see ``restore_streams``.
        """
        if absent := [name for name in state.unchanged if name not in self._memory.held]:
            raise OtherModelError(f"the checkpoint has parameters that this network does not have: {absent[:5]}")
        for name, (dtype, shape, data) in state.beside.items():
            held = self._memory.held.get(name)
            if held is None or (held.dtype, held.shape) != (dtype, shape):
                raise OtherModelError(
                    f"the checkpoint has a parameter {name}, {dtype}{list(shape)}, that this network does not have"
                )
            put(self._memory, name, data)
        self._own = frozenset(state.beside)
        self.restored = replace(state, beside={})  # a loop of its own never says that training begins
        return self.restore_streams(state)

    def restore_streams(self, state: LocalState) -> list[str]:
        """Restore the random streams of a page. Returns notes on missing ones.

        Raises:
            CheckpointError: they cannot be restored.
        """
        with ToldAs(CheckpointError, "the saved random streams cannot be restored", *GARBLED, struct.error):
            notes = self._host.restore(*state.host)
        if state.stream:
            ms.set_rng_state(ms.Tensor(np.frombuffer(state.stream, np.uint8).copy()))
        return notes

    def close(self) -> None:
        """Stop capturing."""
        page, self._page = self._page, None
        if page is not None:
            page.close()


def digests(data: bytes, finished: bool) -> dict[str, str]:
    """Return a digest of each parameter in an image, and of its random streams; see ``Digests``.

    Of a rank that finished the step, the state with which the step began has names of its own: what the forward pass
    has made of it may depend on the rank's data. None, if the bytes are no image.
    """
    try:
        state = decode(data)
    except CheckpointError:
        return {}
    parts = {name: kept for name, (_, _, kept) in state.beside.items()}
    began = {BEGAN + name: digest_of(part) for name, part in parts.items()}
    if finished and not state.passed:
        return began
    parts[STREAMS] = b"".join((*state.host, state.stream))
    found = {**state.unchanged, **{name: digest_of(part) for name, part in parts.items()}}
    return found if finished else found | began


def digest_of(data: Buffer) -> str:
    """Return the digest of a parameter's bytes."""
    return xxhash.xxh3_128_hexdigest(data)


def put(memory: Memory, name: str, data: bytes) -> None:
    """Set the parameter ``name`` to the elements in ``data``."""
    parameter = memory.parameter(name)
    array = np.frombuffer(data, parameter.asnumpy().dtype).reshape(tuple(parameter.shape))
    parameter.set_data(ms.Tensor(array.copy(), parameter.dtype))


def decode(data: bytes) -> LocalState:
    """Decode the contents of a page that ``LocalCapture`` has written.

    Raises:
        CheckpointError: ``LocalCapture`` did not write these bytes.
    """
    unreadable = (*GARBLED, struct.error, msgpack.UnpackException)
    with ToldAs(CheckpointError, f"{len(data)} bytes of rank-local state cannot be read", *unreadable):
        return _decode(data)


def _decode(data: bytes) -> LocalState:
    magic, passed, described, *rest = _HEADER.unpack_from(data)
    if magic != _MAGIC:
        raise ValueError(f"unknown format: they begin with {magic!r}")
    streams, (epoch, step, batch_num) = rest[:5], rest[5:]
    sections = Sections(data, _HEADER.size)
    table = msgpack.unpackb(sections.take(described))
    python, python_gauss, numpy, numpy_gauss, stream = map(sections.take, streams)
    beside: dict[str, tuple[str, tuple[int, ...], bytes]] = {}
    unchanged = {str(name): str(digest[0]) for name, _, _, _, *digest in table if digest}
    for large in (False, True):
        for name, dtype, shape, size, *_ in table:
            if (size >= _LARGE) is large and name not in unchanged:
                beside[str(name)] = str(dtype), tuple(int(extent) for extent in shape), sections.take(size)
    sections.end()
    host = python, python_gauss, numpy, numpy_gauss
    return LocalState(Position(epoch, step, batch_num), bool(passed), host, stream, beside, unchanged)
