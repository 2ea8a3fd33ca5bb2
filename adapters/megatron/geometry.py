"""Finds where each tensor of the model lies in the tensors of a Megatron checkpoint.

Megatron's modules tell this themselves: ``sharded_state_dict()`` names, for every tensor of this rank, the checkpoint's
tensor that it is a part of, and its place there. Layers of a pipeline, tensor parallel slices, experts and the two
halves of a gated layer all become boxes of larger tensors, so a checkpoint does not depend on the layout of the job.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from ttp.adapters.megatron.local_chunks import LocalChunk, boxes
from ttp.adapters.torch.saving.checkpoint import Chunk
from ttp.errors import ConfigError

_EXTRA_STATE = "_extra_state"
"""Torch's name for a module's own state in a state dict."""


@dataclass(frozen=True, slots=True)
class CheckpointBox:
    """A box of a checkpoint's tensor that lies in the memory of one tensor of this rank.

    Args:
        key: name of the checkpoint's tensor.
        shape: shape of the checkpoint's tensor.
        offsets: where the box begins in the checkpoint's tensor.
        sizes: sizes of the box.
        box: the same box in the memory of the rank's tensor, without the dimensions that the checkpoint puts in front.
        flexible: whether the checkpoint's tensor may be larger or smaller, because it is padded.
    """

    key: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    box: LocalChunk
    flexible: bool

    def view(self, memory: Tensor, begin: int) -> Tensor:
        """Return the elements in shape ``sizes``; ``memory`` is a vector with the tensor's memory from ``begin`` on."""
        found = self.box.of(memory, begin)
        while found.dim() < len(self.sizes):
            found = found.unsqueeze(0)
        return found

    def chunk(self, memory: Tensor, begin: int) -> Chunk:
        """Return the elements as a chunk to be written; see ``view`` for the arguments."""
        return Chunk(self.view(memory, begin), self.shape, self.offsets)


@dataclass(frozen=True, slots=True)
class TensorView:
    """A checkpoint's tensor, or a box of it, that is a view of one tensor of this rank; see ``CheckpointBox``."""

    key: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    first: int
    flexible: bool

    def parts(self, begin: int, end: int) -> Iterator[CheckpointBox]:
        """Yield the boxes of the view that lie in the elements ``begin .. end`` of the rank's tensor's memory."""
        front = len(self.shape) - len(self.sizes)
        for box in boxes(self.sizes, self.strides, self.first, begin, end):
            inner = tuple(a + b for a, b in zip(self.offsets[front:], box.offsets, strict=True))
            offsets, sizes = (*self.offsets[:front], *inner), (*(1,) * front, *box.sizes)
            yield CheckpointBox(self.key, self.shape, offsets, sizes, box, self.flexible)


@dataclass(frozen=True, slots=True)
class Described:
    """The description of one tensor of this rank.

    Args:
        name: its name, for messages.
        tensor: the live parameter or buffer.
        views: its parts in the checkpoint.
        first: whether this rank writes the tensor. Ranks with other parts of the model (tensor or pipeline parallel)
            may hold a copy that is kept equal; one of them writes it.
    """

    name: str
    tensor: Tensor
    views: tuple[TensorView, ...]
    first: bool

    def parts(self, begin: int, end: int) -> tuple[CheckpointBox, ...]:
        """Return the boxes of the elements ``begin .. end`` of its memory."""
        return tuple(part for view in self.views for part in view.parts(begin, end))

    @property
    def whole(self) -> tuple[CheckpointBox, ...]:
        """The boxes of the whole tensor."""
        return self.parts(0, self.tensor.numel())


@dataclass
class Geometry:
    """The description of a rank's whole model.

    Args:
        tensors: the descriptions of its tensors, by the identity of the live tensor.
        owners: the modules of this rank with an extra state, by the name of that state in the checkpoint.
        written: those of these names that this rank writes; see ``Described.first``.
    """

    tensors: dict[int, Described] = field(default_factory=dict)
    owners: dict[str, nn.Module] = field(default_factory=dict)
    written: set[str] = field(default_factory=set)


def describe(chunks: Sequence[nn.Module]) -> Geometry:
    """Describe the model by its ``sharded_state_dict()``. All ranks call it at the same point of their programs.

    Args:
        chunks: the model chunks of this rank, unwrapped.

    Raises:
        ConfigError: a module describes its tensors in a way that ttp does not support.
    """
    from megatron.core.dist_checkpointing.dict_utils import nested_items_iter
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    found = Geometry()
    for chunk in chunks:
        module: Any = chunk
        for _, name, entry in nested_items_iter(module.sharded_state_dict()):
            if isinstance(entry, ShardedObject):
                found.owners[entry.unique_key] = _owner(module, str(name))
                if _is_first(entry.replica_id):
                    found.written.add(entry.unique_key)
            elif id(entry.data) not in found.tensors or _is_first(entry.replica_id):
                found.tensors[id(entry.data)] = _described(str(name), entry)
        _check_complete(chunk, found)
    return found


def _owner(chunk: nn.Module, name: str) -> nn.Module:
    """Return the module whose extra state ``name`` is in the state dict of the chunk."""
    path, _, last = name.rpartition(".")
    try:
        if last == _EXTRA_STATE:
            return chunk.get_submodule(path)
    except AttributeError:
        pass
    raise ConfigError(
        f"sharded_state_dict() of the model has {name}, which is the extra state of none of its modules: "
        "ttp cannot tell when it changes. Leave it out, or keep it in a module's get_extra_state()"
    )


def _described(name: str, entry: Any) -> Described:
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

    tensor = entry.data
    if isinstance(entry, ShardedTensorFactory):
        # Build the entries from a tensor without memory, only to see which part becomes which entry.
        outline = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        built = list(nested_values({"": entry.build_fn(entry.key, outline, entry.replica_id, None)}))
    else:
        built = [entry]
    views = tuple(_tensor_view(name, tensor, one, is_view=one is not entry) for one in built)
    if sum(prod(view.sizes) for view in views) != tensor.numel():
        raise ConfigError(f"{name}: its parts in a checkpoint do not make up the whole of it; ttp cannot save it")
    return Described(name, tensor, views, _is_first(entry.replica_id))


def _tensor_view(name: str, tensor: Tensor, entry: Any, *, is_view: bool) -> TensorView:
    if not tensor.is_contiguous() or (is_view and entry.data.untyped_storage().nbytes() != tensor.nbytes):
        raise ConfigError(f"{name} is stored in a form that is no part of its memory; ttp cannot save it")
    strides = entry.data.stride() if is_view else tensor.stride()
    first = entry.data.storage_offset() if is_view else 0
    view = TensorView(
        entry.key, tuple(entry.global_shape), tuple(entry.global_offset), tuple(entry.local_shape), tuple(strides),
        first, bool(entry.allow_shape_mismatch),
    )  # fmt: skip
    try:
        list(view.parts(0, tensor.numel()))
    except ValueError as problem:
        raise ConfigError(f"{name}: {problem}; ttp cannot save it") from problem
    return view


def _is_first(replica_id: Any) -> bool:
    """Return whether this rank writes the entry: all numbers but the last (the data-parallel replica) are 0."""
    return not isinstance(replica_id, tuple | list) or all(number == 0 for number in replica_id[:-1])


def _check_complete(chunk: nn.Module, found: Geometry) -> None:
    lost = [name for name, parameter in chunk.named_parameters() if id(parameter) not in found.tensors]
    if lost:
        raise ConfigError(f"sharded_state_dict() of the model does not name its parameters {', '.join(lost[:5])}")
