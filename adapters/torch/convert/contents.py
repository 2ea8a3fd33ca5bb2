"""Represents a state between the reading and the writing side of a conversion. Tensors are read one at a time."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
import xxhash
from torch import Tensor

from ttp.adapters.torch.saving.checkpoint import objection
from ttp.adapters.torch.saving.flatten_state import StateValue, leaves, put, whole
from ttp.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class LazyTensor:
    """One whole tensor that has not been read yet.

    Args:
        dtype: element type; a conversion does not change it.
        shape: shape of the whole tensor.
        identity: equal for entries that are the same tensor under several names (tied weights).
        read: returns the whole tensor on the CPU. The caller drops the result as soon as it has been written.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    identity: Hashable
    read: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        """Size of all elements in bytes."""
        return prod(self.shape) * self.dtype.itemsize

    @classmethod
    def of(cls, tensor: Tensor) -> LazyTensor:
        """Wrap a tensor that is in memory or mapped from a file."""
        tensor = tensor.detach()
        layout = (tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.is_conj(), tensor.is_neg())
        identity = (tensor.data_ptr(), *layout) if tensor.numel() else object()
        return cls(tensor.dtype, tuple(tensor.shape), identity, lambda: tensor)


@dataclass(frozen=True, slots=True)
class WholeState:
    """The whole training state, as the reading side of a conversion hands it to the writing side.

    It has up to three top-level names. ``model`` is what ``model.state_dict()`` returns. ``optim`` is what torch's
    ``get_optimizer_state_dict`` returns: state and param groups, with the names of parameters. ``extra`` has the
    modules that the program gave as ``extra_state``.

    Args:
        source: name of the source, for messages.
        version: finished updates; None: the source does not tell.
        leaves: the values of the nested state, in the order of the source; tensors as ``LazyTensor``.
        optimizer: class of the optimizer; empty: unknown.
        job: job-wide scalars, by the names of the fields of ``JobState``; None: there are none.
        notes: differences from the saved state, in words.
    """

    source: str
    version: int | None
    leaves: tuple[StateValue, ...]
    optimizer: str = ""
    job: Mapping[str, Any] | None = None
    notes: tuple[str, ...] = ()

    def below(self, *heads: str) -> Iterator[StateValue]:
        """Yield the values under these top-level names."""
        return (leaf for leaf in self.leaves if leaf.path[0] in heads)

    @property
    def has_optimizer(self) -> bool:
        """Whether the state has param groups. Optimizer state without them cannot be used."""
        return any(leaf.path[:2] == ("optim", "param_groups") for leaf in self.leaves)

    def without_optimizer(self) -> WholeState:
        """Return the weights alone, without the optimizer's state and the job-wide scalars."""
        return replace(self, leaves=tuple(self.below("model", "extra")), optimizer="", job=None)

    @property
    def tensors(self) -> list[LazyTensor]:
        """All tensors; tied ones once."""
        found = (leaf.value for leaf in self.leaves if isinstance(leaf.value, LazyTensor))
        return list({tensor.identity: tensor for tensor in found}.values())


def leaves_of(state: Mapping[str, Any]) -> tuple[StateValue, ...]:
    """Return the values of a nested state that is in memory or mapped from a file.

    Raises:
        CheckpointError: a tensor is sparse, quantised or of a subclass of ``Tensor``.
    """
    found: list[StateValue] = []
    for leaf in leaves(state):
        is_tensor = isinstance(leaf.value, Tensor)
        if is_tensor and (why := objection(leaf.key, leaf.value.detach())):
            raise CheckpointError(why)
        found.append(leaf._replace(value=LazyTensor.of(leaf.value)) if is_tensor else leaf)
    return tuple(found)


def tree(found: Iterable[StateValue], make: Callable[[LazyTensor], Any]) -> dict[str, Any]:
    """Build the nested state from its values. ``make`` converts each tensor; it is called once for tied weights."""
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
    """Return the bytes of a CPU tensor's elements, in the order of their indices, without a copy if possible."""
    flat = whole(tensor.detach()).contiguous().reshape(-1)
    data: Any = flat.view(torch.uint8).numpy() if flat.numel() else b""
    return memoryview(data)


def digest_of(tensor: Tensor) -> str:
    """Return a digest of a tensor's bytes, dtype and shape."""
    described = f"{tensor.dtype}{tuple(tensor.shape)}"
    return f"{described} {xxhash.xxh3_128(bytes_of(tensor)).hexdigest()}"
