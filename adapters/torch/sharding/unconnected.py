"""Refuses ranks that train different weights although they count as copies of one model.

Parameters whose gradients no library reduces count as copies if names and shapes are equal (``discovery``). Programs
that reduce gradients by hand have such parameters. So have programs whose ranks train models of their own, average
weights now and then (local SGD), or forget to reduce some gradients (a loss with parameters, outside of the
DistributedDataParallel): after a failure all of their ranks would get the weights of one. So some bytes of these
weights are compared once, after the first updates.

An optimizer may divide the parameters among the ranks, update a share on each and exchange the weights. Its ranks are
no copies either, however equal their weights are: so ranks also compare for which parameters they have state.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from ttp.adapters.torch.device.accelerator import copied_bytes
from ttp.adapters.torch.sharding.names import ModelNames
from ttp.config import RankEnv
from ttp.core.layout import Version

_DIFFERENT = (
    "the weights of rank {rank} differ from those of rank {other} (compared: {names}), but ttp takes them for copies, "
    "because names and shapes are equal and no DistributedDataParallel, FSDP or mesh says otherwise. After a failure "
    "all ranks would get those of one of them. Average their gradients over all ranks in every step, as a "
    "DistributedDataParallel around these parameters does. ttp does not protect ranks that train weights of their own, "
    "or that average them only now and then (local SGD). If each rank has a part of the weights (tensor parallelism by "
    "hand), make them distributed tensors: DTensor.from_local(). If the program keeps them equal and they differ by "
    "rounding only, say so: wrap_optimizer(..., layout=ttp.Layout.data_parallel({world_size}))"
)

_SPREAD = (
    "the optimizer keeps its state spread over the ranks: rank {rank} has state for {names}, and rank {other} for "
    "others. One of them writes a checkpoint, which would lack the rest. Use a class that updates every parameter "
    "on each rank (SingleDeviceMuon, not Muon), or spread such a class with ttp.adapters.torch.ReplicatedOptimizer"
)

_SAME_WEIGHTS = (
    "the optimizer's state for %s differs from that of rank %s, although the weights are equal: after a failure all "
    "ranks get the state of one of them. If each rank makes updates of its own between averages (DiLoCo), or keeps an "
    "error of compression in this state, the job then goes on with other numbers than without the failure"
)
_SOME = 16
"""Elements of each tensor of the optimizer's state that are compared."""
_NAMED = 2

log = logging.getLogger("ttp.adapters.torch")
_numbers = itertools.count()
"""Numbers the trainings of this process, which may use one store."""


def state_by_parameter(state: Mapping[Any, Any]) -> dict[Tensor, Mapping[str, Any]]:
    """Return for which parameters an optimizer has state now, which the loop may empty or add to at any time."""
    held = ((each, kept) for each, kept in state.items() if isinstance(each, Tensor) and isinstance(kept, Mapping))
    return {each: dict(kept) for each, kept in held if kept}


def different_weights(
    noted: Sequence[tuple[Tensor, bytes]],
    names: ModelNames,
    state: Mapping[Tensor, Mapping[str, Any]],
    reduced: Collection[int],
    env: RankEnv,
    version: Version,
) -> str:
    """Return why this rank is no copy of the rank that came here first; empty if it is, or if it is the first.

    Ranks do not wait for each other: the first one leaves a digest in the store of the default process group. Warns if
    only the optimizer's state differs.

    Args:
        noted: parameters, and bytes of them after each of the first updates.
        names: names of the model.
        state: what ``state_by_parameter`` returned after the update that made ``version``.
        reduced: identities of the parameters whose weights need no comparison.
        env: the place of this rank.
        version: number of finished updates; only ranks that come here with the same one are compared.
    """
    compared = {parameter: data for parameter, data in noted if id(parameter) not in reduced}
    holds = sorted(map(names.of, state))
    mine = xxhash.xxh3_128_hexdigest(b"".join(compared.values()))
    own_state = xxhash.xxh3_128_hexdigest(b"".join(part for each in compared for part in _some(state.get(each, {}))))
    held = xxhash.xxh3_128_hexdigest(str(holds).encode())
    library: Any = dist
    store = library.PrefixStore("ttp/weights", library.distributed_c10d._get_default_store())
    key = f"{env.run_id}/{env.launch}/{next(_numbers)}/{version}"
    try:
        first = store.compare_set(key, "", f"{env.rank} {mine} {own_state} {held}").decode()
    except RuntimeError as problem:  # the process that keeps the store has died, and the job is being saved
        log.debug("the ranks were not compared: %s", problem)
        return ""
    other, theirs, their_state, held_there = first.split()
    told = ", ".join(map(names.of, compared))
    where = {"rank": env.rank, "other": other, "world_size": env.world_size}
    if theirs != mine:
        return _DIFFERENT.format(**where, names=told)
    if held_there != held:
        some = ", ".join(holds[:_NAMED]) + (", ..." if len(holds) > _NAMED else "")
        return _SPREAD.format(
            **where, names=f"{len(holds)} parameter{'s' * (len(holds) > 1)} ({some})" if holds else "no parameter"
        )
    if their_state != own_state:
        log.warning(_SAME_WEIGHTS, told, other)
    return ""


def _some(state: Mapping[str, Any]) -> Iterator[bytes]:
    """Yield some bytes of each tensor of a parameter's state on the host.

    Those on a device may be behind the weights, and numbers, such as counts of steps, ahead of a device.
    """
    for _, value in sorted(state.items(), key=lambda item: str(item[0])):
        if type(value) is Tensor and value.dim() and value.device.type == "cpu" and value.layout is torch.strided:
            yield copied_bytes(value.flatten()[:_SOME])
