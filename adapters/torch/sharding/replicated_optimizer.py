"""ZeRO-1 with copies: the optimizer's state is sharded, and every shard is on several ranks.

Each rank updates the parameters of one shard with an inner optimizer, and receives the other parameters from the ranks
of its block. ``partition`` computes which rank holds which shard; ``gather`` makes the exchange. Before the step,
DistributedDataParallel reduces the gradients over the whole group, as usual. All copies of a shard get the same
gradients and make the same update, so they stay equal without communication, and when a rank dies, another rank holds
the same shard.

The update of a rank is finished when ``step()`` of its inner optimizer returns, before the exchange. The exchange
writes only to parameters of other shards, so the shard of a rank stays whole if the rank hangs or raises in it.
"""

from __future__ import annotations

import hashlib
import logging
import socket
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from ttp.adapters.torch.sharding.gather import block_gather, dense_memory
from ttp.adapters.torch.sharding.partition import ShardPlacement, assign
from ttp.errors import ConfigError

log = logging.getLogger("ttp.adapters.torch")

_NOT_SHARED = ("params", "param_names")
"""Keys of param groups whose values differ between the outer and the inner optimizer."""


class ReplicatedOptimizer(Optimizer):
    """Any optimizer with its state sharded over ``dp // replicas`` ranks, each shard on at least ``replicas`` ranks. ::

        model = DistributedDataParallel(model)
        optimizer = ReplicatedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
        optimizer = ttp.wrap_optimizer(optimizer, model=model, save_dir="checkpoints")

    All ranks of the group construct it with the same arguments, and make the same calls of ``step`` and
    ``add_param_group``. ``param_groups`` holds all parameters. Settings that a scheduler changes there are copied to
    the inner optimizer, and settings that the inner optimizer changes are copied back. ``state`` and ``state_dict()``
    show the state of this rank's parameters only, numbered as in ``param_groups``; a checkpoint of ttp has the state of
    all. ``load_state_dict`` takes the state of this rank's parameters out of a dictionary of this or of the plain
    optimizer. Losses and weights are the same as with the plain optimizer, bit for bit.

    Memory: a rank keeps the state of ``1 / (dp // replicas)`` of the parameters, up to the largest parameter more, and
    a buffer of at most 64 MiB for the exchange (``gather.GATHER_BYTES``; gloo makes a copy of it).

    Args:
        params: parameters or param groups, as for any optimizer. Plain dense tensors; frozen ones are not exchanged.
        optimizer_class: class of the inner optimizer. It has to update each parameter by itself, as nearly all do.
        replicas: copies of each shard. If it is the number of ranks, nothing is sharded or exchanged.
        process_group: group of the data-parallel ranks; None: all ranks.
        **defaults: arguments for ``optimizer_class``.

    Raises:
        ConfigError: there is no process group yet, it is smaller than ``replicas``, its ranks do not have the same
            parameters, or one of them cannot be exchanged.
    """

    def __init__(
        self,
        params: Any,
        optimizer_class: type[Optimizer],
        replicas: int = 2,
        process_group: Any = None,
        **defaults: Any,
    ) -> None:
        _check_usable(optimizer_class)
        self._inner: Optimizer | None = None
        self._rank = dist.get_rank(process_group)
        self.placement = ShardPlacement(dist.get_world_size(process_group), replicas)
        self.shard = self.placement.shard_of(self._rank)
        self.process_group = process_group
        self._shards: list[list[Tensor]] = [[] for _ in range(self.placement.shards)]
        self._shard_of: dict[Tensor, int] = {}
        self._loads: dict[bool, list[int]] = {trained: [0] * self.placement.shards for trained in (True, False)}
        super().__init__(params, defaults)
        for parameter in self._shard_of:
            dense_memory(parameter)
        self._inner = inner = optimizer_class([self._mine(group) for group in self.param_groups], **defaults)
        inner.register_step_post_hook(lambda *_: _share(inner.param_groups, self.param_groups))
        _share(inner.param_groups, self.param_groups)
        self.defaults = inner.defaults
        self._meet()
        group = process_group or dist.group.WORLD
        self._gather = block_gather(self.placement, self._rank, self.group_ranks, group, self._shards)

    # ------------------------------------------------------------------------------------------------- as an Optimizer

    @property
    def inner(self) -> Optimizer:
        """The optimizer of this rank's parameters. Its ``step()`` is this rank's update."""
        assert self._inner is not None
        return self._inner

    @property
    def state(self) -> Any:
        """The state of this rank's parameters, which the inner optimizer keeps."""
        return defaultdict(dict) if self._inner is None else self._inner.state

    @state.setter
    def state(self, state: Any) -> None:
        if self._inner is not None:
            self._inner.state = state

    def step(self, closure: Callable[[], float] | None = None, **kwargs: Any) -> Any:
        """Update the parameters of this rank's shard, and receive the others. A collective call of the block.

        Args:
            closure: evaluates the model again; passed on to the inner optimizer.
            **kwargs: passed on to the inner optimizer.

        Returns:
            The result of the inner optimizer's ``step``.
        """
        _share(self.param_groups, self.inner.param_groups)
        step: Any = self.inner.step
        loss = step(**kwargs) if closure is None else step(closure, **kwargs)
        self._gather.run()
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group. The parameters that were there before stay in their shards."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for trained in (True, False):  # trained and frozen parameters are balanced separately: only trained have state
            parameters = [p for p in group["params"] if p.requires_grad is trained]
            shards = assign([p.numel() for p in parameters], self._loads[trained])
            self._shard_of.update(zip(parameters, shards, strict=True))
        for parameter in group["params"]:
            self._shards[self._shard_of[parameter]].append(parameter)
        if self._inner is not None:
            for parameter in group["params"]:
                dense_memory(parameter)
            self._inner.add_param_group(self._mine(group))
            _share(self._inner.param_groups[-1:], self.param_groups[-1:])  # in older groups the outer values are newer

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of this rank's parameters and the hyperparameters of all groups; ignore the rest."""
        numbers = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        parameters = chain.from_iterable(group["params"] for group in self.param_groups)
        others = {number for number, p in zip(numbers, parameters, strict=False) if not self.holds(p)}
        mine = {key: value for key, value in state_dict["state"].items() if key not in others}
        super().load_state_dict({**state_dict, "state": mine})

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over a state. ``load_state_dict`` of the base class calls this."""
        own = dict(state)
        loaded = own.pop("state", None)
        super().__setstate__(own)
        mine: dict[str, Any] = {"param_groups": [self._mine(group) for group in self.param_groups]}
        self.inner.__setstate__(mine if loaded is None else {**mine, "state": loaded})
        _share(self.inner.param_groups, self.param_groups)

    # ----------------------------------------------------------------------------------------------------- the shards

    def holds(self, parameter: Tensor) -> bool:
        """Return whether this rank updates ``parameter``."""
        return self._shard_of.get(parameter) == self.shard

    def parameters_of(self, shard: int) -> Sequence[Tensor]:
        """Return the parameters of a shard, in the order in which the program gave them."""
        return tuple(self._shards[shard])

    @property
    def group_ranks(self) -> list[int]:
        """The ranks of the process group, by their numbers in the job."""
        return list(dist.get_process_group_ranks(self.process_group or dist.group.WORLD))

    def _mine(self, group: dict[str, Any]) -> dict[str, Any]:
        """Return a param group with only the parameters that this rank updates; there may be none."""
        here = [self.holds(p) for p in group["params"]]
        own = {key: value for key, value in group.items() if key not in _NOT_SHARED}
        for key in _NOT_SHARED:
            if key in group:
                own[key] = [value for value, kept in zip(group[key], here, strict=True) if kept]
        return own

    def _meet(self) -> None:
        """Check that all ranks have the same parameters, and warn if copies share a host. A collective call."""
        described = repr((self.placement, [(list(p.shape), str(p.dtype), p.requires_grad) for p in self._shard_of]))
        mine = [_number(described), _number(socket.gethostname())]
        device = next(iter(self._shard_of)).device
        seen = [torch.zeros(2, dtype=torch.int64, device=device) for _ in range(self.placement.size)]
        dist.all_gather(seen, torch.tensor(mine, device=device), group=self.process_group)
        given, hosts = zip(*(numbers.tolist() for numbers in seen), strict=True)
        if len(set(given)) > 1:
            usual = Counter(given).most_common(1)[0][0]
            odd = [rank for rank, number in zip(self.group_ranks, given, strict=True) if number != usual]
            raise ConfigError(
                f"ranks {odd} gave ReplicatedOptimizer other parameters, or other replicas=, than the other ranks of "
                "their group: build the same model and param groups, with the same replicas=, on all ranks of the group"
            )
        if self._rank == 0 and (crowded := _crowded(self.placement, hosts)) is not None:
            log.warning("%s", crowded)


def _check_usable(optimizer_class: type[Optimizer]) -> None:
    if not (dist.is_available() and dist.is_initialized()):
        raise ConfigError(
            "ReplicatedOptimizer needs a process group: call torch.distributed.init_process_group() before"
        )
    if issubclass(optimizer_class, (LBFGS, ReplicatedOptimizer)):
        raise ConfigError(
            f"{optimizer_class.__name__} cannot be sharded by parameter, because its update of one parameter needs all "
            "others: use an optimizer that updates each parameter by itself"
        )


def _share(source: Iterable[dict[str, Any]], target: Iterable[dict[str, Any]]) -> None:
    """Copy the hyperparameters of the ``source`` groups into the ``target`` groups, by reference."""
    for one, other in zip(source, target, strict=True):
        for key, value in one.items():
            if key not in _NOT_SHARED:
                other[key] = value


def _number(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big", signed=True)


def _crowded(placement: ShardPlacement, hosts: Sequence[int]) -> str | None:
    """Return a warning if all copies of some shard are on one host, though there are several hosts; else None."""
    if placement.replicas == 1 or len(set(hosts)) == 1:
        return None
    shards = [s for s in range(placement.shards) if len({hosts[r] for r in placement.holders(s)}) == 1]
    if not shards:
        return None
    return (
        f"for {len(shards)} of {placement.shards} optimizer shards, all copies are on one host and are lost with that "
        "host: let ranks of one host be consecutive, as torchrun numbers them, with at most dp // replicas on a host"
    )
