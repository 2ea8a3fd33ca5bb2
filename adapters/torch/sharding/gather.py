"""Exchanges updated parameters among the ranks of a block, for ``ReplicatedOptimizer``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ttp.adapters.torch.sharding.partition import ShardPlacement
from ttp.adapters.torch.tensor_memory import Copies, by_kind, is_plain, memory_order
from ttp.errors import ConfigError

GATHER_BYTES = 64 << 20
"""Bytes of one all-gather, over all ranks of a block. Large enough to make the fixed cost of an all-gather small."""
_ALIGNMENT = 16  # bytes of the widest dtype

_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # before torch 2.13


@dataclass(slots=True)
class _Round:
    """One all-gather, the copies into its buffer before it, and the copies out of it after it."""

    chunk: int  # bytes that each rank sends
    send: list[Copies] = field(default_factory=list)
    receive: list[Copies] = field(default_factory=list)


@dataclass(slots=True)
class _Piece:
    """A range of a parameter's memory, and its offset in the chunk, in bytes."""

    memory: Tensor
    offset: int


class BlockGather:
    """The exchange among the ranks of one block. Each rank constructs it with the same arguments, except for ``me``.

    Args:
        shards: the parameters of each shard.
        holds: the shard of each rank of the block.
        me: position of this rank in the block.
        group: process group of the block's ranks, in this order; None: the block is this rank alone.
    """

    def __init__(self, shards: Sequence[Sequence[Tensor]], holds: Sequence[int], me: int, group: Any) -> None:
        self._shards, self._holds, self._me, self._group = shards, holds, me, group
        self._limit = GATHER_BYTES
        self._key: list[tuple[int, bool]] = []
        self._rounds: list[tuple[Tensor, list[_Round]]] = []  # per device

    @torch.no_grad()
    def run(self) -> None:
        """Exchange the updated parameters. A collective call of the block. On a device the exchange is only queued.

        Raises:
            RuntimeError: a rank of the block died. The parameters of this rank's own shard are whole.
        """
        if self._group is None:
            return
        key = [(p.data_ptr(), p.requires_grad) for shard in self._shards for p in shard]
        if key != self._key:  # memory was moved, or parameters were frozen; the program does so on all ranks
            self._plan()
            self._key = key
        for buffer, rounds in self._rounds:
            for one in rounds:
                self._exchange(buffer, one)

    def _exchange(self, buffer: Tensor, one: _Round) -> None:
        for to, source in one.send:
            torch._foreach_copy_(to, source)
        everything = buffer[: one.chunk * len(self._holds)]
        mine = everything[one.chunk * self._me : one.chunk * (self._me + 1)]
        _all_gather(everything, mine, group=self._group)
        for to, source in one.receive:
            torch._foreach_copy_(to, source)

    # ------------------------------------------------------------------------------------------------------ planning

    def _plan(self) -> None:
        self._rounds = []
        devices = dict.fromkeys(p.device for shard in self._shards for p in shard if p.requires_grad)
        room = max(_ALIGNMENT, self._limit // len(self._holds) // _ALIGNMENT * _ALIGNMENT)
        for device in devices:
            trained = [[p for p in shard if p.requires_grad and p.device == device] for shard in self._shards]
            chunks = [_chunks(parameters, room) for parameters in trained]
            self._rounds.append(self._plan_device(device, chunks))

    def _plan_device(
        self, device: torch.device, chunks: Sequence[Sequence[list[_Piece]]]
    ) -> tuple[Tensor, list[_Round]]:
        count = max(len(of_shard) for of_shard in chunks)
        turns = [[of_shard[turn] if turn < len(of_shard) else [] for of_shard in chunks] for turn in range(count)]
        sizes = [max(_end(pieces) for pieces in turn) for turn in turns]
        buffer = torch.empty(max(sizes) * len(self._holds), dtype=torch.uint8, device=device)
        return buffer, [self._plan_round(buffer, size, turn) for size, turn in zip(sizes, turns, strict=True) if size]

    def _plan_round(self, buffer: Tensor, chunk: int, turn: Sequence[list[_Piece]]) -> _Round:
        one = _Round(chunk)
        mine = self._holds[self._me]
        one.send = by_kind((_slot(buffer, self._me * chunk, piece), piece.memory) for piece in turn[mine])
        sources = {shard: position for position, shard in reversed(list(enumerate(self._holds)))}  # the first of each
        one.receive = by_kind(
            (piece.memory, _slot(buffer, sources[shard] * chunk, piece))
            for shard, pieces in enumerate(turn)
            if shard != mine
            for piece in pieces
        )
        return one


def block_gather(
    placement: ShardPlacement, me: int, ranks: Sequence[int], group: Any, shards: Sequence[Sequence[Tensor]]
) -> BlockGather:
    """Make the exchange for the block of rank ``me``, with a new process group if the block is a part of ``group``.

    Args:
        placement: which rank of the group holds which shard.
        me: position of this rank in the group.
        ranks: the ranks of the group, as the job numbers them.
        group: process group of all these ranks.
        shards: the parameters of each shard.
    """
    block = sorted(placement.block_of(me), key=lambda r: ranks[r])  # as torch sorts the ranks of a group
    if len(block) == 1:
        group = None
    elif len(block) < placement.size:
        group = dist.new_group([ranks[r] for r in block], use_local_synchronization=True)
    return BlockGather(shards, [placement.shard_of(r) for r in block], block.index(me), group)


def dense_memory(parameter: Tensor) -> Tensor:
    """Return a view of a parameter's elements as a vector, in the order of its memory.

    Raises:
        ConfigError: the parameter is not a plain, dense tensor.
    """
    tensor = parameter.detach()
    if is_plain(tensor):
        ordered = tensor.permute(memory_order(tensor))
        if tensor.is_contiguous() or ordered.is_contiguous():
            return (tensor if tensor.is_contiguous() else ordered).view(-1)
    raise ConfigError(
        f"a parameter of shape {tuple(parameter.shape)} is a {type(tensor).__name__} of layout {tensor.layout}, or "
        "has gaps in its memory: ReplicatedOptimizer exchanges plain, dense parameters only; call .contiguous() on the "
        "tensor before you make a Parameter of it"
    )


def _chunks(parameters: Sequence[Tensor], room: int) -> list[list[_Piece]]:
    """Lay the parameters end to end and cut them into chunks of at most ``room`` bytes."""
    chunks: list[list[_Piece]] = [[]]
    used = 0
    for parameter in parameters:
        memory, width = dense_memory(parameter), parameter.element_size()
        while memory.numel():
            count = min(memory.numel(), (room - used) // width)
            if not count:
                chunks.append([])
                used = 0
                continue
            chunks[-1].append(_Piece(memory[:count], used))
            used = _aligned(used + count * width)
            memory = memory[count:]
    return chunks


def _aligned(position: int) -> int:
    return -(-position // _ALIGNMENT) * _ALIGNMENT


def _end(pieces: Sequence[_Piece]) -> int:
    return _aligned(pieces[-1].offset + pieces[-1].memory.nbytes) if pieces else 0


def _slot(buffer: Tensor, start: int, piece: _Piece) -> Tensor:
    begin = start + piece.offset
    return buffer[begin : begin + piece.memory.nbytes].view(piece.memory.dtype)
