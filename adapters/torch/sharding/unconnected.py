"""Refuses ranks that train different weights although they count as copies of one model.

Parameters whose gradients no library reduces count as copies if names and shapes are equal (``discovery``). Programs
that reduce gradients by hand have such parameters. So have programs whose ranks train models of their own, average
weights now and then (local SGD), or forget to reduce some gradients (a loss with parameters, outside of the
DistributedDataParallel): after a failure all of their ranks would get the weights of one. So some bytes of these
weights are compared once, after the first updates.

An optimizer may divide the parameters among the ranks, update a share on each and exchange the weights. Its ranks are
no copies either, however equal their weights are: so ranks also compare for which parameters they have state, and the
state that has the size of a rank's share.

A DistributedDataParallel reduces gradients. It does not notice weights that differ from rank to rank, because a layer
initialised itself from the rank's first batch, or because the forward pass went past it. Ranks say so once.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
import xxhash
from torch import Tensor
from torch.optim import Optimizer

from ttp.adapters.torch.sharding.names import ModelNames, first_of, parameters_of
from ttp.adapters.torch.tensor_memory import is_plain, sample_of
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
    "the optimizer keeps its state spread over the ranks: {found}. One of them writes a checkpoint, which would lack "
    "the rest. Use a class that updates every parameter on each rank (SingleDeviceMuon, not Muon), or spread such a "
    "class with ttp.adapters.torch.ReplicatedOptimizer"
)

_SAME_WEIGHTS = (
    "the optimizer's state differs from that of rank %s (compared: %s), although the weights are equal: after a "
    "failure all ranks get the state of one of them. If each rank makes updates of its own between averages (DiLoCo), "
    "or keeps an error of compression in this state, the job then goes on with other numbers than without the failure: "
    "give this optimizer as extra_state= too, and each rank gets its own state back"
)
_DIVERGED = (
    "the weights of rank %s differ from those of rank %s, although a DistributedDataParallel has them: after a failure "
    "all ranks get those of one of them, and the job goes on with other numbers than without the failure. A "
    "DistributedDataParallel makes weights equal when it is made, and from then on only their gradients: call it, not "
    "the module inside, and exchange what a rank writes to weights itself (an initialisation from the first batch, as "
    "ActNorm's; noise)"
)
_NAMED = 2

log = logging.getLogger("ttp.adapters.torch")
_numbers = Counter[int]()
"""How many trainings of this process were compared in each launch: they may use one store."""


class OptimizerState(NamedTuple):
    """The state of an optimizer after an update."""

    parameters: Collection[Tensor]
    """The parameters that have state."""
    equal: Mapping[Tensor, Mapping[str, Any]]
    """The state by parameter that should be equal on all ranks."""
    shares: Sequence[tuple[Tensor, Tensor]]
    """Tensors of the size of a rank's share, each with the parameter of which it may be a share; of a param group it is
    the first one."""
    weights: Mapping[Tensor, bytes]
    """Some bytes of each parameter on the host that a DistributedDataParallel should keep equal."""


def held_state(
    optimizer: Optimizer, ranks: int, reduced: Collection[int], extra: Collection[Any] = ()
) -> OptimizerState:
    """Return the state that an optimizer has now, which the loop may empty or add to at any time.

    Args:
        optimizer: the registered optimizer.
        ranks: number of ranks.
        reduced: identities of the parameters that a DistributedDataParallel should keep equal.
        extra: the user's objects of ``extra_state``. Of an optimizer among them each rank gets back its own state.
    """
    every = ((each, kept) for each, kept in optimizer.state.items() if isinstance(each, Tensor))
    state = {each: dict(kept) for each, kept in every if isinstance(kept, Mapping) and kept}
    shares: list[tuple[Tensor, Tensor]] = []
    for each, kept in state.items():
        tensors = _tensors(kept)
        if all(_is_share(tensor.shape, each.shape, ranks) for tensor in tensors):
            shares += [(each, tensor) for tensor in tensors]
    for group in optimizer.param_groups:
        for first in group["params"][:1]:
            whole = len(group["params"]), *first.shape
            shares += [(first, tensor) for tensor in _tensors(group) if _is_share(tensor.shape, whole, ranks)]
    weights = {each: b"".join(_some([each])) for each in parameters_of(optimizer) if id(each) in reduced}
    own = {id(each) for saved in extra if isinstance(saved, Optimizer) for each in parameters_of(saved)}
    equal = {each: kept for each, kept in state.items() if id(each) not in own}
    return OptimizerState([*state], equal, shares, weights)


def _is_share(shape: Sequence[int], whole: Sequence[int], ranks: int) -> bool:
    """Return whether a tensor has as many rows as a rank's share of a whole that is divided by its rows."""
    rows = whole[0] if whole else 0
    return (*shape[1:],) == (*whole[1:],) and rows > shape[0] and shape[0] in (rows // ranks, -(-rows // ranks))


def different_weights(
    noted: Sequence[tuple[Tensor, bytes]],
    names: ModelNames,
    state: OptimizerState,
    reduced: Collection[int],
    env: RankEnv,
    version: Version,
) -> str:
    """Return why this rank is no copy of the rank that came here first; empty if it is, or if it is the first.

    Ranks do not wait for each other: the first one leaves a digest in the store of the default process group. Warns if
    only the optimizer's state differs, or the weights that should be equal.

    Args:
        noted: parameters, and bytes of them after each of the first updates.
        names: names of the model.
        state: what ``held_state`` returned after the update that made ``version``.
        reduced: identities of the parameters that a DistributedDataParallel should keep equal.
        env: the place of this rank.
        version: number of finished updates; only ranks that come here with the same one are compared.
    """
    holds = sorted(map(names.of, state.parameters))  # this also finds names of new parameters
    alone = {*map(id, names.parameters.values())}.difference(reduced)  # not those that the loop has replaced meanwhile
    compared = {parameter: data for parameter, data in noted if id(parameter) in alone}
    parts = [tensor for _, tensor in state.shares]
    own = (tensor for each in compared for tensor in _tensors(state.equal.get(each, {})))
    mine = {
        "weights": _digest(compared.values()),
        "reduced": _digest(data for p, data in (*noted, *state.weights.items()) if id(p) in reduced),
        "state": _digest(_some(own)),
        "holds": _digest([str(holds).encode()]),
        "shares": _digest([str([part.shape for part in parts]).encode(), *_some(parts)]),
    }
    try:
        first = _first_of_launch(env, version, {"rank": env.rank} | mine)
    except RuntimeError as problem:  # the process that keeps the store has died, and the job is being saved
        log.debug("the ranks were not compared: %s", problem)
        return ""
    other, differing = first["rank"], {name for name, digest in mine.items() if first[name] != digest}
    listed = ", ".join(map(names.of, compared))
    if "weights" in differing:
        return _DIFFERENT.format(rank=env.rank, other=other, world_size=env.world_size, names=listed)
    if "holds" in differing:
        count = f"{len(holds)} parameter{'s' * (len(holds) > 1)}"
        some = f"{count} ({first_of(holds, _NAMED)})" if holds else "no parameter"
        return _SPREAD.format(found=f"rank {env.rank} has state for {some}, and rank {other} for others")
    if "shares" in differing:
        some = first_of(dict.fromkeys(names.of(each) for each, _ in state.shares), _NAMED) or "some parameters"
        return _SPREAD.format(found=f"rank {env.rank} and rank {other} have different shares of that for {some}")
    if "reduced" in differing:
        log.warning(_DIVERGED, env.rank, other)
    if "state" in differing:
        log.warning(_SAME_WEIGHTS, other, listed)
    return ""


def _first_of_launch(env: RankEnv, version: Version, mine: dict[str, Any]) -> dict[str, Any]:
    """Leave ``mine`` in the store for the ranks of this launch that come later. Returns what the first rank has left.

    Raises:
        RuntimeError: the store does not answer.
    """
    library: Any = dist
    store = library.PrefixStore("ttp/weights", library.distributed_c10d._get_default_store())
    key = f"{env.run_id}/{env.launch}/{_numbers[env.launch]}/{version}"
    _numbers[env.launch] += 1
    left: dict[str, Any] = json.loads(store.compare_set(key, "", json.dumps(mine)))
    return left


def _digest(parts: Iterable[bytes]) -> str:
    return xxhash.xxh3_128_hexdigest(b"".join(parts))


def _tensors(state: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors of a state. Numbers, such as counts of steps, may be ahead of a device."""
    every = (value for _, value in sorted(state.items(), key=lambda item: str(item[0])))
    return [value for value in every if type(value) is Tensor and value.dim()]


def _some(tensors: Iterable[Tensor]) -> Iterator[bytes]:
    """Yield some bytes of each tensor on the host. Those on a device may be behind the noted weights."""
    for value in tensors:
        if is_plain(value) and value.device.type == "cpu" and value.numel():
            yield sample_of(value).numpy().tobytes()
