"""Refuses ranks that train different weights although they count as copies of one model.

Ranks whose gradients no library reduces count as copies if names and shapes are equal (``discovery``). Programs that
reduce gradients by hand are of this kind. So are programs whose ranks train models of their own, or average weights now
and then (local SGD), and those that forget to reduce gradients: after a failure all of their ranks would get the
weights of one. So the weights are compared once, after the first updates.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch.distributed as dist
import xxhash

from ttp.adapters.torch.loop.swapped import Swapped
from ttp.config import RankEnv
from ttp.core.layout import Version

_DIFFERENT = (
    "the weights of rank {rank} differ from those of rank {other}, but ttp takes all ranks for copies of one model, "
    "because no DistributedDataParallel, FSDP or mesh says otherwise. After a failure all ranks would get the weights "
    "of one of them. Average the gradients over all ranks in every step (DistributedDataParallel does). ttp does not "
    "protect ranks that train models of their own, or that average their weights only now and then (local SGD). If the "
    "program keeps the weights equal and they differ by rounding only, say so: wrap_optimizer(..., "
    "layout=ttp.Layout.data_parallel({world_size}))"
)


_numbers = itertools.count()
"""Numbers the trainings of this process, which may use one store."""


def different_weights(swapped: Swapped, env: RankEnv, version: Version) -> str:
    """Return why this rank is no copy of the rank that came here first; empty if it is, or if it is the first.

    Ranks do not wait for each other: the first one leaves a digest in the store of the default process group.

    Args:
        swapped: has noted some bytes of the weights after each of the first updates.
        env: the place of this rank.
        version: number of finished updates; only ranks that come here with the same one are compared.
    """
    mine = xxhash.xxh3_128_hexdigest(swapped.early())
    library: Any = dist
    store = library.PrefixStore("ttp/weights", library.distributed_c10d._get_default_store())
    key = f"{env.run_id}/{env.launch}/{next(_numbers)}/{version}"
    first = store.compare_set(key, "", f"{env.rank} {mine}").decode()
    other, _, theirs = first.partition(" ")
    return "" if theirs == mine else _DIFFERENT.format(rank=env.rank, other=other, world_size=env.world_size)
