"""Finds where each tensor of the model lies in the tensors of a Megatron checkpoint.

Megatron's modules describe this themselves: ``sharded_state_dict()`` names, for every tensor of this rank, the tensor
of the checkpoint that contains it, and its offsets there. Layers of a pipeline, tensor parallel slices, experts and the
two halves of a gated layer all become boxes of larger tensors, so a checkpoint does not depend on the layout of the
job.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from ttp.adapters.torch.saving.checkpoint import Chunk
from ttp.adapters.torch.sharding.dtensor_chunks import is_distributed
from ttp.adapters.torch.sharding.local_chunks import LocalChunk, boxes
from ttp.errors import ConfigError

_EXTRA_STATE = "_extra_state"
"""Last part of the name under which torch stores a module's extra state in a state dict."""


@dataclass(frozen=True, slots=True)
class CheckpointBox:
    """A box of a checkpoint's tensor that lies in the memory of one tensor of this rank.

    Args:
        key: name of the checkpoint's tensor.
        shape: shape of the checkpoint's tensor.
        offsets: where the box begins in the checkpoint's tensor.
        sizes: sizes of the box.
        box: the same box in the memory of the rank's tensor, without the leading dimensions (layer, expert) that only
            the checkpoint's tensor has.
        flexible: whether the saved tensor may have another shape than ``shape``, because it is padded.
    """

    key: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    box: LocalChunk
    flexible: bool

    def chunk(self, memory: Tensor, begin: int) -> Chunk:
        """Return the box as a chunk to be written or read.

        Args:
            memory: a vector over the memory of the rank's tensor.
            begin: position of the vector's first element in that memory, in elements.
        """
        found = self.box.of(memory, begin)
        return Chunk(found[(None,) * (len(self.sizes) - found.dim())], self.shape, self.offsets)


@dataclass(frozen=True, slots=True)
class TensorView:
    """A box of a checkpoint's tensor whose elements are a strided view of the memory of one tensor of this rank.

    Args:
        key: name of the checkpoint's tensor.
        shape: shape of the checkpoint's tensor.
        offsets: where the box begins in the checkpoint's tensor.
        sizes: sizes of the box, without leading dimensions that only the checkpoint's tensor has.
        strides: strides of the view, in elements.
        first: position of the view's first element in the memory of the rank's tensor, in elements.
        flexible: see ``CheckpointBox``.
    """

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
    """One tensor of this rank, and where its elements lie in the checkpoint.

    Args:
        name: the tensor's name, for messages.
        tensor: the live parameter or buffer.
        views: the boxes of the checkpoint's tensors that make up the tensor.
        first: whether this rank writes the tensor. Ranks with other parts of the model (tensor or pipeline parallel)
            may hold a copy that is kept equal; one of them writes it.
    """

    name: str
    tensor: Tensor
    views: tuple[TensorView, ...]
    first: bool

    def parts(self, begin: int, end: int) -> tuple[CheckpointBox, ...]:
        """Return the boxes that hold the elements ``begin .. end`` of the tensor's memory."""
        return tuple(part for view in self.views for part in view.parts(begin, end))

    @property
    def whole(self) -> tuple[CheckpointBox, ...]:
        """The boxes that hold the whole tensor."""
        return self.parts(0, self.tensor.numel())


@dataclass
class Geometry:
    """Where the whole model of a rank lies in the checkpoint.

    Args:
        tensors: the descriptions of the model's tensors, by ``id()`` of the live tensor.
        owners: the modules of this rank with an extra state, by the name of that state in the checkpoint.
        written: the names in ``owners`` whose state this rank writes; see ``Described.first``.
    """

    tensors: dict[int, Described] = field(default_factory=dict)
    owners: dict[str, nn.Module] = field(default_factory=dict)
    written: set[str] = field(default_factory=set)


def describe(chunks: Sequence[nn.Module]) -> Geometry:
    """Describe the model by its ``sharded_state_dict()``.

    A collective call: all ranks make it at the same point of their programs.

    Args:
        chunks: the model chunks of this rank, unwrapped.

    Raises:
        ConfigError: a module describes its tensors in a way that ttp does not support.
    """
    from megatron.core.dist_checkpointing.dict_utils import nested_items_iter
    from megatron.core.dist_checkpointing.mapping import ShardedObject
    from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group

    found, metadata = Geometry(), ensure_metadata_has_dp_cp_group(None)  # a model with MTP needs it
    for chunk in chunks:
        module: Any = chunk
        if any(map(is_distributed, chunk.parameters())):
            raise ConfigError(
                "ttp cannot protect a model that megatron-core shards with FSDP2 (TorchFullyShardedDataParallel): use "
                "its DistributedDataParallel, with or without the distributed optimizer"
            )
        for _, name, entry in nested_items_iter(module.sharded_state_dict(metadata=metadata)):
            if isinstance(entry, ShardedObject):
                found.owners[entry.unique_key] = _owner(module, str(name))
                if _is_first(entry.replica_id):
                    found.written.add(entry.unique_key)
            elif id(entry.data) not in found.tensors or _is_first(entry.replica_id):
                found.tensors[id(entry.data)] = _described(str(name), entry)
        _check_complete(chunk, found)
    return found


def _owner(chunk: nn.Module, name: str) -> nn.Module:
    """Return the module of ``chunk`` whose extra state is called ``name`` in the chunk's state dict."""
    path, _, last = name.rpartition(".")
    try:
        if last == _EXTRA_STATE:
            return chunk.get_submodule(path)
    except AttributeError:
        pass
    raise ConfigError(
        f"sharded_state_dict() of the model has {name}, which is not the extra state of any of its modules: "
        "ttp cannot tell when it changes. Leave it out, or return it from a module's get_extra_state()"
    )


def _described(name: str, entry: Any) -> Described:
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

    tensor = entry.data
    if isinstance(entry, ShardedTensorFactory):
        # Build the entries from a tensor without memory, only to learn which part of the tensor becomes which entry.
        outline = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        built = list(nested_values({"": entry.build_fn(entry.key, outline, entry.replica_id, None)}))
    else:
        built = [entry]
    views = tuple(_tensor_view(name, tensor, one, is_view=one is not entry) for one in built)
    if sum(prod(view.sizes) for view in views) != tensor.numel():
        raise ConfigError(
            f"{name}: the entries that sharded_state_dict() makes of it do not cover all of it; ttp cannot save it"
        )
    return Described(name, tensor, views, _is_first(entry.replica_id))


def _tensor_view(name: str, tensor: Tensor, entry: Any, *, is_view: bool) -> TensorView:
    if not tensor.is_contiguous() or (is_view and entry.data.untyped_storage().nbytes() != tensor.nbytes):
        raise ConfigError(
            f"{name}: the tensor is not contiguous, or sharded_state_dict() copies it instead of giving a view of it; "
            "ttp cannot save it"
        )
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
    """Return whether this rank writes the entry: all parts of ``replica_id`` but the last (data parallel) are 0."""
    return not isinstance(replica_id, tuple | list) or all(number == 0 for number in replica_id[:-1])


def _check_complete(chunk: nn.Module, found: Geometry) -> None:
    lost = [name for name, parameter in chunk.named_parameters() if id(parameter) not in found.tensors]
    if lost:
        raise ConfigError(f"sharded_state_dict() of the model does not name its parameters {', '.join(lost[:5])}")
