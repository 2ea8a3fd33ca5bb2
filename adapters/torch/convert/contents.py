"""The nested state that is converted. Its tensors are read one at a time, whatever file they come from."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import xxhash
from torch import Tensor

from ttp.adapters.torch.saving.flatten_state import leaves, put, whole
from ttp.adapters.torch.saving.piece_index import StatePath


@dataclass(frozen=True, slots=True)
class LazyTensor:
    """One whole tensor that has not been read yet.

    Args:
        dtype: element type; it is kept.
        shape: of the whole tensor.
        identity: equal for entries that are one tensor under several names (tied weights).
        read: brings the whole tensor to the CPU. Nobody keeps what it returns for longer than it takes to write it.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    identity: Hashable
    read: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return prod(self.shape) * self.dtype.itemsize

    @classmethod
    def of(cls, tensor: Tensor) -> LazyTensor:
        """Wrap a tensor that is in memory or mapped from a file."""
        tensor = tensor.detach()
        layout = (tensor.dtype, tuple(tensor.shape), tensor.stride())
        identity = (tensor.data_ptr(), *layout) if tensor.numel() else object()
        return cls(tensor.dtype, tuple(tensor.shape), identity, lambda: tensor)


@dataclass(frozen=True, slots=True)
class StateValue:
    """One value of the nested state.

    Args:
        path: where it sits; see ``piece_index.StatePath``.
        int_keys: positions in ``path`` whose mapping key is an ``int``.
        value: an ``LazyTensor``, or a plain value.
    """

    path: StatePath
    int_keys: tuple[int, ...]
    value: Any

    @property
    def key(self) -> str:
        """The flattened name."""
        return ".".join(map(str, self.path))


@dataclass(frozen=True, slots=True)
class WholeState:
    """The whole training state, as the reading side of a conversion hands it to the writing side.

    ``model`` is what ``model.state_dict()`` gives, ``optim`` what ``get_optimizer_state_dict`` of torch does: state and
    param groups, with the names of parameters. ``extra`` are the modules given to ``extra_state``.

    Args:
        source: what it is called in messages.
        version: finished updates; None when the source does not tell.
        leaves: of the nested state, in its own order.
        optimizer: class of the optimizer; empty when unknown.
        job: job-wide scalars by the names that ``JobState`` has for them.
        notes: what is not as it was, in words.
    """

    source: str
    version: int | None
    leaves: tuple[StateValue, ...]
    optimizer: str = ""
    job: Mapping[str, Any] | None = None
    notes: tuple[str, ...] = ()

    def below(self, *heads: str) -> Iterator[StateValue]:
        """The values under these top-level names."""
        return (leaf for leaf in self.leaves if leaf.path[0] in heads)

    @property
    def has_optimizer(self) -> bool:
        """Whether there are param groups; moments without them are of no use."""
        return any(leaf.path[:2] == ("optim", "param_groups") for leaf in self.leaves)


def leaves_of(state: Mapping[str, Any]) -> tuple[StateValue, ...]:
    """The values of a nested state that is in memory or mapped from a file."""
    return tuple(
        StateValue(path, int_keys, LazyTensor.of(value) if isinstance(value, Tensor) else value)
        for path, int_keys, value in leaves(state)
    )


def tree(found: Iterator[StateValue], make: Callable[[LazyTensor], Any]) -> dict[str, Any]:
    """The nested state again; ``make`` says what stands for a tensor. Tied weights are made once."""
    root: dict[str, Any] = {}
    made: dict[Hashable, Any] = {}
    for leaf in found:
        value = leaf.value
        if isinstance(value, LazyTensor):
            if value.identity not in made:
                made[value.identity] = make(value)
            value = made[value.identity]
        put(root, leaf.path, value, leaf.int_keys)
    return root


def bytes_of(tensor: Tensor) -> memoryview:
    """The elements of a tensor of the CPU in their order; the memory of the tensor itself where that is possible."""
    flat = whole(tensor.detach()).contiguous().reshape(-1)
    data: Any = flat.view(torch.uint8).numpy() if flat.numel() else b""
    return memoryview(data)


def digest_of(tensor: Tensor) -> str:
    """A digest of a tensor: of its bytes, its dtype and its shape."""
    described = f"{tensor.dtype}{tuple(tensor.shape)}"
    return f"{described} {xxhash.xxh3_128(bytes_of(tensor)).hexdigest()}"


def parts(optimizer: bool) -> tuple[str, ...]:
    """The top-level names of the state that are converted, with or without the optimizer's."""
    return ("model", "extra", "optim") if optimizer else ("model", "extra")
