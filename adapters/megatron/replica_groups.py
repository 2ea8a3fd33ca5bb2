"""Finds the replica groups: every rank announces which state it holds, and ranks that hold the same are replicas.

The state that a rank holds of an optimizer is a list of boxes of the checkpoint's tensors; a digest of this list is
gathered from every rank. So nothing here depends on how Megatron builds its process groups, on its order of ranks, or
on the kinds of parallelism in use. Several instances of the distributed optimizer hold equal ranges, which makes their
ranks replicas.

Ranks also tell how much they hold of each tensor. If that is not the whole tensor together, no checkpoint could be made
(``saving.metadata.fitting``), and the job is refused at its start.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from math import prod

from ttp.adapters.megatron.geometry import CheckpointBox
from ttp.adapters.megatron.optimizers import Inner
from ttp.adapters.torch.sharding.names import first_of
from ttp.core.layout import Layout, Rank, Shard
from ttp.errors import ConfigError

IDLE = Shard("nothing")
"""An empty shard. If some rank holds only padding, all ranks hold this shard, since each rank must hold some shard."""

_LISTED_MAX = 3

_Amounts = Mapping[str, tuple[int, int, str]]
"""By a tensor's name: its elements, those that a shard has, and a digest of the boxes in which these are."""


def announcement(inners: Sequence[Inner]) -> bytes:
    """Return what this rank tells the others of each optimizer: name, digest and amounts of the state that it holds."""
    return json.dumps([[_name(inner), _digest(inner), _amounts(inner)] for inner in inners if not inner.empty]).encode()


def layout_of(announcements: Sequence[bytes], inners: Sequence[Inner]) -> tuple[Layout, list[Shard]]:
    """Return the layout of the job, and the shard of each optimizer in ``inners``, in the same order.

    Args:
        announcements: those of all ranks, by rank.
        inners: the plain optimizers of this rank.

    Raises:
        ConfigError: all shards together are not the whole model; all ranks raise it alike.
    """
    everyone = [json.loads(data) for data in announcements]
    held: dict[tuple[str, str], list[Rank]] = {}
    amounts: dict[tuple[str, str], _Amounts] = {}
    for rank, announced in enumerate(everyone):
        for name, digest, amount in announced:
            held.setdefault((name, digest), []).append(Rank(rank))
            amounts[name, digest] = amount
    _refuse_incomplete(amounts.values())
    shards = _named(list(held))
    groups = {shards[key]: tuple(ranks) for key, ranks in held.items()}
    if any(not announced for announced in everyone):
        groups[IDLE] = tuple(Rank(rank) for rank in range(len(everyone)))
    names = [IDLE if inner.empty else shards[_name(inner), _digest(inner)] for inner in inners]
    return Layout(len(everyone), groups), names


def _named(keys: Sequence[tuple[str, str]]) -> dict[tuple[str, str], Shard]:
    """Map each (place, digest) to its shard's name: the place, and ``.2``, ``.3`` for further shards of a place."""
    count: dict[str, int] = {}
    named: dict[tuple[str, str], Shard] = {}
    for name, digest in keys:
        count[name] = number = count.get(name, 0) + 1
        named[name, digest] = Shard(name if number == 1 else f"{name}.{number}")
    return named


def _name(inner: Inner) -> str:
    """Return a readable name for the shard of an optimizer: its place in the model, such as ``dense-tp1-pp0``."""
    from megatron.core import parallel_state as state

    parts = [inner.kind]
    if inner.kind == "expert":  # experts have replica groups of their own
        parts += _coordinate("ep", state.get_expert_model_parallel_rank(), state.get_expert_model_parallel_world_size())
        parts += _coordinate(
            "tp", state.get_expert_tensor_parallel_rank(), state.get_expert_tensor_parallel_world_size()
        )
    else:
        parts += _coordinate("tp", state.get_tensor_model_parallel_rank(), state.get_tensor_model_parallel_world_size())
    pipeline = state.get_pipeline_model_parallel_rank(), state.get_pipeline_model_parallel_world_size()
    parts += _coordinate("pp", *pipeline)
    return "-".join([*parts, *_coordinate("dp", inner.part, inner.parts)])


def _coordinate(axis: str, rank: int, size: int) -> list[str]:
    return [f"{axis}{rank}"] if size > 1 else []


def _digest(inner: Inner) -> str:
    seen = hashlib.sha256(inner.main_key.encode())
    for holding in inner.holdings:
        seen.update(repr([_identity(part) for part in holding.parts] + [holding.described.first]).encode())
    for described in inner.fixed:
        seen.update(repr([_identity(part) for part in described.whole]).encode())
    return seen.hexdigest()[:16]


def _amounts(inner: Inner) -> _Amounts:
    boxes: dict[str, list[CheckpointBox]] = {}
    for part in chain(
        *(holding.parts for holding in inner.holdings if holding.described.first),
        *(described.whole for described in inner.fixed),
    ):
        boxes.setdefault(part.key, []).append(part)
    return {
        key: (
            prod(parts[0].shape),
            sum(prod(part.sizes) for part in parts),
            hashlib.sha256(repr([_identity(part) for part in parts]).encode()).hexdigest()[:8],
        )
        for key, parts in boxes.items()
    }


def _refuse_incomplete(shards: Iterable[_Amounts]) -> None:
    """Check that the shards have as many elements of every tensor as it has. The same boxes of two shards are copies.

    Raises:
        ConfigError: they have fewer.
    """
    whole: dict[str, int] = {}
    present: dict[str, dict[str, int]] = {}
    for shard in shards:
        for key, (total, count, digest) in shard.items():
            whole[key] = total
            present.setdefault(key, {})[digest] = count
    found = {key: sum(counts.values()) for key, counts in present.items()}
    lost = [f"{key} has {found[key]} of {total} elements" for key, total in whole.items() if found[key] < total]
    if lost:
        raise ConfigError(
            f"all ranks together would not save the whole model: {first_of(lost, _LISTED_MAX, '; ')}. Ranks that "
            "Megatron takes for replicas hold different parts of these tensors. If they are experts: with "
            "expert_model_parallel_size=1 they are in one optimizer with the other layers, whose ranges all data "
            "parallel ranks share, although another expert_tensor_parallel_size than tensor_model_parallel_size gives "
            "these ranks different slices. Make the two sizes equal, or expert_model_parallel_size larger than 1"
        )


def _identity(part: CheckpointBox) -> tuple[object, ...]:
    return part.key, part.shape, part.offsets, part.sizes
