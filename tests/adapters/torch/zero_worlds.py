"""The ranks of test_replicated_optimizer.py."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import OneCycleLR

from ttp.adapters.torch import ReplicatedOptimizer
from ttp.errors import ConfigError
from ttp.processor.faults import is_collective_error
from ttp.testing.digests import digest

STEPS = 5
Groups = list[dict[str, Any]]


class Model(nn.Module):
    """Parameters of several sizes, memory formats and dtypes; some are frozen, one has one element, one has none."""

    def __init__(self, mixed: bool = True) -> None:
        super().__init__()
        torch.manual_seed(7)
        image: Any = nn.Conv2d(3, 4, 3)
        self.image: nn.Module = image.to(memory_format=torch.channels_last)
        self.wide = nn.Linear(4 * 4 * 4, 33)
        self.frozen = nn.Linear(33, 33).requires_grad_(False)
        self.middle = nn.Linear(33, 40)
        self.exact = nn.Linear(40, 5, dtype=torch.float64 if mixed else None)
        self.scale = nn.Parameter(torch.ones(()))
        self.nothing = nn.Parameter(torch.ones(0))
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        hidden = self.middle(self.frozen(self.wide(self.image(x).flatten(1)).relu()))
        answer: Tensor = self.exact(hidden.to(self.exact.weight.dtype)) * self.scale + self.nothing.sum()
        return answer

    def groups(self) -> Groups:
        """Return param groups with and without weight decay."""
        matrices = [p for p in self.parameters() if p.dim() > 1]
        return [{"params": matrices, "weight_decay": 0.1}, {"params": [p for p in self.parameters() if p.dim() <= 1]}]


class Training:
    """One training of ``Model`` with the optimizer that ``make`` makes of its param groups."""

    def __init__(self, make: Callable[[Groups], Any], mixed: bool = True) -> None:
        self.model = Model(mixed)
        self.ddp = DistributedDataParallel(self.model)
        self.optimizer = make(self.model.groups())
        self.scheduler = OneCycleLR(self.optimizer, max_lr=[0.1, 0.05], total_steps=20)
        self.losses: list[float] = []

    def backward(self) -> Tensor:
        data = torch.Generator().manual_seed(1000 * len(self.losses) + dist.get_rank())
        self.optimizer.zero_grad()
        loss: Tensor = self.ddp(torch.randn(2, 3, 6, 6, generator=data)).square().mean()
        loss.backward()
        return loss.detach()

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.losses.append(float(self.backward()))
            self.optimizer.step()
            self.scheduler.step()

    def equals(self, other: Training) -> bool:
        mine, theirs = self.model.state_dict(), other.model.state_dict()
        return self.losses == other.losses and all(torch.equal(mine[name], theirs[name]) for name in mine)

    def moments_equal(self, other: Training) -> bool:
        """Compare the moments of the parameters whose state this rank has."""
        pairs = zip(self.model.parameters(), other.model.parameters(), strict=True)
        found = [(self.optimizer.state[a], other.optimizer.state[b]) for a, b in pairs if a in self.optimizer.state]
        return bool(found) and all(torch.equal(a[key], b[key]) for a, b in found for key in a)


def plain(groups: Groups) -> AdamW:
    return AdamW(groups, lr=1e-2)


def replicated(replicas: int, limit: int | None = None, **settings: Any) -> Callable[[Groups], ReplicatedOptimizer]:
    def make(groups: Groups) -> ReplicatedOptimizer:
        optimizer = ReplicatedOptimizer(groups, AdamW, replicas, lr=1e-2, **settings)
        if limit is not None:
            optimizer._gather._limit = limit
        return optimizer

    return make


def steps_like_plain(replicas: int, limit: int | None = None) -> dict[str, Any]:
    """Train like plain DDP; a frozen layer is thawed on the way."""
    one, reference = Training(replicated(replicas, limit)), Training(plain)
    for training in (one, reference):
        training.step(STEPS)
        training.model.frozen.requires_grad_(True)  # DDP does not reduce it: the gradient has to be the same by itself
        for parameter in training.model.frozen.parameters():
            parameter.grad = torch.full_like(parameter, 0.5)
        training.optimizer.step()
        training.model.frozen.requires_grad_(False)
        training.step()
    names = {id(p): name for name, p in one.model.named_parameters()}
    return {
        "equal": one.equals(reference),
        "moments": one.moments_equal(reference),
        "mine": [names[id(p)] for p in one.optimizer.state],
        "bytes": sum(v.nbytes for s in one.optimizer.state.values() for v in s.values()),
        "bytes_plain": sum(v.nbytes for s in reference.optimizer.state.values() for v in s.values()),
        "collectives": sum(len(rounds) for _, rounds in one.optimizer._gather._rounds),
        "own written": not _received(one.optimizer).isdisjoint(
            p.data_ptr() for p in one.optimizer.parameters_of(one.optimizer.shard) if p.numel()
        ),
    }


def _received(optimizer: ReplicatedOptimizer) -> set[int]:
    """Return the memory that an exchange writes to."""
    rounds = [one for _, some in optimizer._gather._rounds for one in some]
    return {tensor.data_ptr() for one in rounds for to, _ in one.receive for tensor in to}


def like_zero() -> dict[str, Any]:
    """Compare the bits with those of torch's ZeroRedundancyOptimizer."""
    one = Training(replicated(2), mixed=False)
    torch_zero = Training(
        lambda groups: ZeroRedundancyOptimizer(groups, AdamW, lr=1e-2, betas=(0.9, 0.999)), mixed=False
    )
    for training in (one, torch_zero):
        training.step(STEPS)
    return {"equal": one.equals(torch_zero)}


def inner_kinds() -> dict[str, Any]:
    """Implementations of the inner optimizer, and a learning rate that is a tensor."""
    seen = {}
    kinds: dict[str, dict[str, Any]] = {
        "foreach": {"foreach": True},
        "fused": {"fused": True},
        "tensor": {"capturable": False, "foreach": False},
    }
    for name, settings in kinds.items():
        rates = [torch.tensor(1e-2) if name == "tensor" else 1e-2 for _ in range(2)]
        one = Training(partial(ReplicatedOptimizer, optimizer_class=AdamW, lr=rates[0], **settings))
        reference = Training(partial(AdamW, lr=rates[1], **settings))
        for training in (one, reference):
            training.step(STEPS)
        seen[name] = one.equals(reference)
    return seen


def groups_and_state() -> dict[str, Any]:
    """What param groups, closures and state dictionaries do."""
    one, reference = Training(replicated(2)), Training(plain)
    for training in (one, reference):
        training.step(2)
        late = nn.Parameter(torch.ones(50))
        training.optimizer.add_param_group({"params": [late], "lr": 0.5})
        for _ in range(2):
            training.optimizer.zero_grad()
            late.grad = torch.full((50,), 0.25)
            returned = training.optimizer.step(training.backward)
        training.late = late  # type: ignore[attr-defined]
    seen: dict[str, Any] = {
        "late": torch.equal(one.late, reference.late),  # type: ignore[attr-defined]
        "closure": float(returned) > 0 and one.equals(reference),
        "defaults": one.optimizer.defaults == reference.optimizer.defaults,
        "settings": [_settings(g) for g in one.optimizer.param_groups]
        == [_settings(g) for g in reference.optimizer.param_groups],
        "pulled": [_settings(g) for g in one.optimizer.inner.param_groups]
        == [_settings(g) for g in one.optimizer.param_groups],
    }
    seen |= _state_dicts(one, reference)
    return seen


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _state_dicts(one: Training, reference: Training) -> dict[str, Any]:
    whole, local = reference.optimizer.state_dict(), one.optimizer.state_dict()
    fresh = []
    for state in (whole, local):
        training = Training(replicated(2))
        training.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(50))], "lr": 0.5})
        training.optimizer.load_state_dict(state)
        fresh.append(training.optimizer.state_dict())
    numbers = sorted(number for number in local["state"])
    return {
        "from whole": digest(fresh[0]) == digest(local),
        "from local": digest(fresh[1]) == digest(local),
        "numbered": digest({n: whole["state"][n] for n in numbers}) == digest(local["state"]),
        "part": 0 < len(numbers) < len(whole["state"]),
    }


class Counting(SGD):
    """An optimizer that writes into its own param groups at each step, and changes the learning rate."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            group["lr"] = group["lr"] / 2
        return super().step(closure)


def written_by_inner() -> dict[str, Any]:
    """What the inner optimizer writes is visible outside in its first post hook, and is kept for the next step."""
    parameter = nn.Parameter(torch.ones(4))
    optimizer = ReplicatedOptimizer([parameter], Counting, 2, lr=1.0)
    seen = []
    optimizer.inner.register_step_post_hook(lambda *_: seen.append(optimizer.param_groups[0]["count"]))
    for _ in range(3):
        parameter.grad = torch.zeros(4)
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 8.0
    optimizer.step()
    return {"seen": seen, "lr": optimizer.param_groups[0]["lr"]}


def skipped_by_scaler() -> dict[str, Any]:
    """An overflow skips the step on every rank; the next one is made."""
    one = Training(replicated(2))
    scaler: Any = torch.amp.GradScaler("cpu", init_scale=4.0)
    before = [p.detach().clone() for p in one.model.parameters()]
    same = []
    for overflow in (True, False):
        one.optimizer.zero_grad()
        scaler.scale(one.ddp(torch.ones(2, 3, 6, 6)).mean()).backward()
        if overflow:
            next(one.model.wide.parameters()).grad.fill_(float("inf"))  # type: ignore[union-attr]
        scaler.step(one.optimizer)
        scaler.update()
        same.append(all(torch.equal(a, b) for a, b in zip(before, one.model.parameters(), strict=True)))
    return {"same": same, "scale": scaler.get_scale()}


def few_parameters() -> dict[str, Any]:
    """There are more shards than parameters, so some ranks hold nothing, and take part."""
    parameter = nn.Parameter(torch.ones(3))
    optimizer = ReplicatedOptimizer([("only", parameter)], AdamW, 1, lr=0.1, fused=True)
    for _ in range(2):
        parameter.grad = torch.ones(3)
        optimizer.step()
    return {
        "states": len(optimizer.state),
        "value": parameter.tolist(),
        "named": optimizer.param_groups[0]["param_names"],
    }


def within_a_group() -> dict[str, Any]:
    """Two jobs of two ranks each, by ``process_group``: odd ranks and even ranks."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine = dist.get_rank() % 2
    parameters = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3))]
    optimizer = ReplicatedOptimizer(parameters, SGD, 1, groups[mine], lr=1.0)
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, -1.0 - mine)
    optimizer.step()
    held = [parameter.numel() for parameter in optimizer.parameters_of(optimizer.shard)]
    return {"values": [p.tolist() for p in parameters], "held": held, "ranks": optimizer.group_ranks}


def mistakes() -> dict[str, Any]:
    """What is refused, and how."""
    rank, world = dist.get_rank(), dist.get_world_size()
    weight = nn.Parameter(torch.zeros(2))
    tries: dict[str, Callable[[], Any]] = {
        "copies": lambda: ReplicatedOptimizer([weight], SGD, world + 1, lr=1.0),
        "zero": lambda: ReplicatedOptimizer([weight], SGD, 0, lr=1.0),
        "lbfgs": lambda: ReplicatedOptimizer([weight], torch.optim.LBFGS, 2),
        "gaps": lambda: ReplicatedOptimizer([nn.Parameter(torch.zeros(4, 4)[:, :2])], SGD, 2, lr=1.0),
        "unlike": lambda: ReplicatedOptimizer([nn.Parameter(torch.zeros(2 + (rank == 1)))], SGD, 2, lr=1.0),
    }
    return {name: _refusal(attempt) for name, attempt in tries.items()}


def _refusal(attempt: Callable[[], Any]) -> str:
    try:
        attempt()
    except ConfigError as problem:
        return str(problem)
    return "accepted"


def torn_exchange(_directory: Path, rank: int) -> dict[str, Any]:
    """Rank 1 dies between its update and the exchange. The update of the others is whole."""
    one, reference = Training(replicated(2)), Training(plain)
    for training in (one, reference):
        training.step(2)
        training.backward()
    reference.optimizer.step()
    if rank == 1:
        one.optimizer.inner.register_step_post_hook(lambda *_: os._exit(0))
    try:
        one.optimizer.step()
        raised = False
    except RuntimeError as problem:
        raised = is_collective_error(problem)
    theirs = dict(zip(one.model.parameters(), reference.model.parameters(), strict=True))
    mine = one.optimizer.parameters_of(one.optimizer.shard)
    whole = all(torch.equal(p, theirs[p]) for p in mine) and one.moments_equal(reference)
    return {"raised": raised, "whole": whole}


Case = Callable[[], dict[str, Any]]
WORLDS: Mapping[int, Mapping[str, Case]] = {
    4: {
        "2 copies": lambda: steps_like_plain(2),
        "1 copy": lambda: steps_like_plain(1),
        "3 copies": lambda: steps_like_plain(3),
        "cut into pieces": lambda: steps_like_plain(2, limit=200),
        "torch": like_zero,
        "inner kinds": inner_kinds,
        "groups and state": groups_and_state,
        "written by inner": written_by_inner,
        "scaler": skipped_by_scaler,
        "few parameters": few_parameters,
        "within a group": within_a_group,
        "mistakes": mistakes,
    },
    5: {"2 copies": lambda: steps_like_plain(2)},
}


def everything(_directory: Path, _rank: int) -> dict[str, Any]:
    return {name: case() for name, case in WORLDS[dist.get_world_size()].items()}
