"""Inspects a rank's state before a save: a digest to compare with other replicas, and the tensors with NaN or Inf.

The digest covers parameters and the optimizer's tensors. It leaves out what may differ between healthy replicas:
buffers (BatchNorm statistics, until the next forward pass broadcasts them), plain numbers and param groups (a schedule
may have been stepped on one rank and not yet on another), and, where the state is on a device, tensors on the host
(they may be an update ahead of the device).

Of a large state a sample is read; see ``ttp.processor.sampling``. Host memory is read in place. From a device, samples
are copied on the side stream into pinned memory that was allocated at the start, because the training's stream may hang
and an allocation would queue behind it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

import torch
import xxhash
from torch import Tensor
from torch.optim import Optimizer

from ttp.adapters.torch.device.accelerator import Runtime, holder, poll
from ttp.adapters.torch.saving.checkpoint import chunks_of
from ttp.adapters.torch.saving.flatten_state import leaves
from ttp.adapters.torch.saving.piece_index import StatePath
from ttp.adapters.torch.saving.state import optimizer_state
from ttp.adapters.torch.sharding.names import ModelNames
from ttp.adapters.torch.sharding.sharding import Sharding
from ttp.adapters.torch.tensor_memory import flat_bytes, is_plain, memory_order, packs
from ttp.core.layout import Shard
from ttp.processor.sampling import BAD_MAX, Blocks, blocks_of

_PACK_HOST = 1 << 20  # small enough to be in the CPU's cache when it is read again to find NaN and Inf
_PACK_DEVICE = 8 << 20
_PATIENCE_S = 1.0
"""Seconds that a device may take to copy one pack. The side stream works even when a collective hangs."""


@dataclass(frozen=True, slots=True)
class ComparedTensor:
    """One tensor that must be equal on all replicas.

    Args:
        name: its name in the checkpoint.
        tensor: the live tensor.
        trained: whether NaN and Inf in it are reported; a frozen mask may hold them on purpose.
        owner: name of the parameter that ``tensor`` is, or for which the optimizer keeps it.
    """

    name: str
    tensor: Tensor
    trained: bool
    owner: str = ""


@dataclass(frozen=True, slots=True)
class Findings:
    """The result of an inspection.

    Args:
        digest: the same on replicas whose states are equal, at one version and in one mode.
        bad: names of trained tensors that hold NaN or Inf, at most eight.
    """

    digest: str
    bad: tuple[str, ...]


def replicated(names: ModelNames, optimizer: Optimizer) -> list[ComparedTensor]:
    """Return the tensors to compare, each once. The module's docstring says which tensors are left out."""
    trained = names.updated_by(optimizer)
    state = optimizer_state(names, optimizer)["state"]
    found: dict[int, ComparedTensor] = {}
    for name, parameter in sorted(names.parameters.items()):
        checked = name in trained and parameter.requires_grad
        found.setdefault(id(parameter), ComparedTensor(f"model.{name}", parameter, checked, name))
    for leaf in leaves({"optim": {"state": state}}):
        if isinstance(leaf.value, Tensor):
            found.setdefault(id(leaf.value), ComparedTensor(leaf.key, leaf.value, True, str(leaf.path[2])))
    return list(found.values())


def of_shard(
    sharding: Sharding, shard: Shard, everything: Iterable[ComparedTensor], names: ModelNames
) -> list[ComparedTensor]:
    """Return the tensors of ``everything`` that belong to ``shard``, as the plain tensors that this rank holds."""
    wanted, parameters = set(sharding.parameters_of(shard)), names.parameters.keys()
    return [
        replace(leaf, tensor=chunk.tensor)
        for leaf in everything
        if leaf.owner in wanted or leaf.owner not in parameters
        for chunk in chunks_of(sharding.stored(leaf.owner, leaf.tensor)) or ()
    ]


def agreed_on(names: ModelNames) -> Callable[[StatePath], bool]:
    """Return a function that tells for a path in the state whether replicas are compared on the value there.

    Only such values can be divided among replicas, because only then parts of several replicas fit together.
    """
    known = set(names.parameters)

    def agreed(path: StatePath) -> bool:
        if path[0] == "model":
            return len(path) == 2 and path[1] in known
        return len(path) > 2 and path[:2] == ("optim", "state") and path[2] in known

    return agreed


class Inspector:
    """Computes digests of tensors, and finds NaN and Inf in them. Not thread-safe.

    Args:
        mode: ``sample`` or ``all``, as in ``TTP_DIGEST``.
        runtimes: the devices of the state; empty: it is on the host. The constructor allocates 8 MiB of pinned memory.
    """

    def __init__(self, mode: str = "sample", runtimes: Sequence[Runtime] = ()) -> None:
        self._mode = mode
        self._runtimes = runtimes
        self._limit = _PACK_DEVICE if runtimes else _PACK_HOST
        self._pinned = runtimes[0].pinned(_PACK_DEVICE) if runtimes else None

    @torch.no_grad()
    def look(self, leaves: Iterable[ComparedTensor], version: int) -> Findings:
        """Compute the digest of the tensors, and find NaN and Inf in them. The tensors must not change meanwhile.

        Args:
            leaves: the tensors, in any order.
            version: version of the state; it decides which blocks are read.

        Raises:
            TimeoutError: the device did not copy the samples in time.
            RuntimeError: the device is broken.
        """
        digest, bad = xxhash.xxh3_128(), dict[str, None]()
        known = sorted(leaves, key=lambda leaf: (str(leaf.tensor.dtype), leaf.name))
        known = [leaf for leaf in known if not self._runtimes or holder(self._runtimes, leaf.tensor) is not None]
        described = [(leaf.name, str(leaf.tensor.dtype), list(leaf.tensor.shape)) for leaf in known]
        digest.update(json.dumps(described).encode())
        for pack in packs(self._pieces(known, version), itemgetter(1), self._limit, self._kind):
            data = self._bring([piece for _, piece in pack])
            for row in _rows(data):
                digest.update(row)
            if not _finite(data):
                bad.update((name, None) for name in _not_finite(data, pack))
        return Findings(digest.hexdigest(), tuple(bad)[:BAD_MAX])

    def _kind(self, piece: tuple[ComparedTensor, Tensor]) -> tuple[torch.dtype, Runtime | None]:
        return piece[1].dtype, holder(self._runtimes, piece[1])

    def _pieces(self, known: Sequence[ComparedTensor], version: int) -> Iterator[tuple[ComparedTensor, Tensor]]:
        flat = [(leaf, memory) for leaf in known if (memory := self._memory(leaf.tensor)) is not None]
        total = sum(memory.nbytes for _, memory in flat)
        for leaf, memory in flat:
            chosen = blocks_of(memory.numel(), memory.itemsize, total=total, mode=self._mode, version=version)
            for piece in self._split(memory if chosen is None else _rows_of(memory, chosen)):
                yield leaf, piece

    def _memory(self, tensor: Tensor) -> Tensor | None:
        """Return the elements of a tensor in the order of its memory, as a vector; None if it cannot be compared."""
        tensor = tensor.detach()
        if not is_plain(tensor) or tensor.device.type == "meta" or tensor.numel() == 0:
            return None
        if tensor.is_contiguous():
            return tensor.view(-1)
        ordered = tensor.permute(memory_order(tensor))
        if not ordered.is_contiguous():
            if holder(self._runtimes, tensor) is not None:
                return None  # a dense copy would have to be allocated on the device
            ordered = ordered.contiguous()
        return ordered.reshape(-1)

    def _split(self, sample: Tensor) -> Sequence[Tensor]:
        if sample.nbytes <= self._limit:
            return (sample,)
        row = sample[0].nbytes if sample.dim() == 2 else sample.element_size()
        return torch.split(sample, max(1, self._limit // row))

    def _bring(self, pieces: list[Tensor]) -> Tensor:
        """Return the pieces on the host, one behind the other in one tensor."""
        runtime = holder(self._runtimes, pieces[0])
        if runtime is not None:
            return self._from_device(runtime, pieces)
        if len(pieces) == 1:
            return pieces[0]
        return torch.cat([piece if piece.dim() == 1 else piece.reshape(-1) for piece in pieces])

    def _from_device(self, runtime: Runtime, pieces: list[Tensor]) -> Tensor:
        assert self._pinned is not None
        size = 0
        with runtime.on_side():
            for piece in pieces:
                for row in piece if piece.dim() == 2 else (piece,):  # each is dense, so no kernel is needed
                    source = flat_bytes(row)
                    self._pinned[size : size + source.numel()].copy_(source, non_blocking=True)
                    size += source.numel()
        event = runtime.event(side=True)
        if not poll(event.query, _PATIENCE_S):
            raise TimeoutError(f"{size} bytes did not leave the device in {_PATIENCE_S:g} s")
        return self._pinned[:size].view(pieces[0].dtype)


def _rows_of(memory: Tensor, blocks: Blocks) -> Tensor:
    """Return blocks of a vector, one per row."""
    at = memory.storage_offset() + blocks.start
    return memory.as_strided((blocks.number, blocks.size), (blocks.pitch, 1), at)


def _rows(data: Tensor) -> Any:
    """Return the bytes of a tensor as a sequence of contiguous arrays, without a copy."""
    rows: Any = data.view(torch.uint8).numpy()
    return rows if data.dim() == 2 else (rows,)


def _not_finite(data: Tensor, pack: Sequence[tuple[ComparedTensor, Tensor]]) -> Iterator[str]:
    parts = torch.split(data.reshape(-1), [piece.numel() for _, piece in pack])
    yield from (leaf.name for (leaf, _), part in zip(pack, parts, strict=True) if leaf.trained and not _finite(part))


def _finite(data: Tensor) -> bool:
    """Return whether the tensor holds neither NaN nor Inf."""
    if not (data.is_floating_point() or data.is_complex()):
        return True
    if data.is_complex():
        data = torch.view_as_real(data)
    elif data.element_size() == 1:
        data = data.float()
    low, high = torch.aminmax(data)
    return math.isfinite(low.item()) and math.isfinite(high.item())
