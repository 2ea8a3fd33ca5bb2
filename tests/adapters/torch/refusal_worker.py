"""The two ranks of test_refusals.py: one of them has something wrong, or both hold parameters that are not
replicated.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable, Iterable
from logging.handlers import QueueHandler
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import ttp
from tests.adapters.torch.stub_processor import StubProcessor, join, leave, registered, save_together
from ttp import session
from ttp.adapters.torch.adapter import TorchAdapter
from ttp.core.layout import Layout, Rank, Shard
from ttp.errors import ConfigError, UsageError

WORLD = 2
Ddp: Any = DistributedDataParallel


class Experts(nn.Module):
    """A common layer, and one that DistributedDataParallel is told to ignore."""

    def __init__(self, name: str, value: float, frozen: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.common = nn.Linear(2, 2)
        expert = nn.Linear(2, 2)
        nn.init.constant_(expert.weight, value)
        self.experts = nn.ModuleDict({name: expert})
        self.experts.requires_grad_(not frozen)
        self.name = name
        ignored = [f"experts.{name}.weight", f"experts.{name}.bias"]
        Ddp._set_params_and_buffers_to_ignore_for_model(self, ignored)

    def forward(self, x: torch.Tensor) -> Any:
        return self.experts[self.name](self.common(x))


def adapter(model: nn.Module, own: bool = False, **given: Any) -> TorchAdapter:
    """Register the model; with ``own`` its optimizer is an extra state too, of which each rank gets back its own."""
    optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.1)
    return registered(model, optimizer, **given, **({"extra_state": {"optimizer": optimizer}} if own else {}))


def refused(call: Callable[[], object]) -> str:
    try:
        call()
    except (ConfigError, UsageError) as problem:
        return f"{type(problem).__name__}: {problem}"
    return ""


def everything(directory: Path, rank: int) -> dict[str, Any]:
    return {
        "one rank": refused(lambda: adapter(one_is_wrong(rank)).layout(WORLD)),
        "both ranks": refused(lambda: adapter(Ddp(Experts("mine", rank))).layout(WORLD)),
        "said to be copies": refused(
            lambda: adapter(Ddp(Experts("mine", rank)), layout=Layout.data_parallel(WORLD)).layout(WORLD)
        ),
        "frozen and equal": refused(lambda: adapter(Ddp(Experts("mine", 1.0, frozen=True))).layout(WORLD)),
        "frozen and not": refused(lambda: adapter(Ddp(Experts("mine", rank, frozen=True))).layout(WORLD)),
        "one name in two shards": refused(lambda: two_shards(rank).layout(WORLD)),
        "a layout that rank 1 does not fit": refused(lambda: labelled(rank).layout(WORLD)),
        "public": public(directory, rank),
        "experts": experts(directory, rank),
        "tables": experts(directory / "tables", rank, wrapped=False),
        "tables of one name": refused(
            lambda: adapter(partly_wrapped(mine=nn.Linear(2, 2 + rank))).layout(WORLD)
        ).partition(" and other ranks ")[2],
        "a table on one rank": groups_of(partly_wrapped(**{"mine": nn.Linear(2, 2)} if rank else {})),
        "an expert on one rank": groups_of(
            Ddp(Experts("mine", 1.0)) if rank else Ddp(nn.ModuleDict({"common": nn.Linear(2, 2)}))
        ),
        "outside of DDP": outside(directory / "outside", rank),
        "initialised by each rank": connected(directory / "initialised", rank, own_values=True),
        "past the DDP": connected(directory / "past", rank, past=True),
        "connected": connected(directory / "connected", rank),
        "beside a distributed tensor": connected(directory / "beside", rank, own_values=True, beside=True),
        "on their own": reduced_by_hand(directory / "own", rank, every=0),
        "now and then": reduced_by_hand(directory / "then", rank, every=4),
        "always": reduced_by_hand(directory / "always", rank, every=1),
        "state of their own": reduced_by_hand(directory / "state", rank, every=1, error=rank),
        "state of their own as extra state": reduced_by_hand(directory / "s", rank, every=1, error=rank, own=True),
        "counts of their own": reduced_by_hand(directory / "counts", rank, every=1, error=rank, shape=()),
        "state on one rank": spread(directory / "spread", rank),
        "state on one rank, and as extra state": spread(directory / "too", rank, own=True),
        "rows of a parameter": spread(directory / "rows", rank, OwnRows),
        "rows of a parameter, and as extra state": spread(directory / "rows too", rank, OwnRows, own=True),
        "parameters of a group": spread(directory / "group", rank, OwnOfGroup),
        "one parameter of a group": spread(directory / "one", rank, OwnOfGroup, bias=False),
        "as small as a share": spread(directory / "small", rank, SmallState),
        "state made anew": made_anew(directory / "anew", rank),
        "declared": reduced_by_hand(directory / "declared", rank, every=4, layout=Layout.data_parallel(WORLD)),
    }


def reduced_by_hand(
    directory: Path, rank: int, every: int, error: float = 0.0, shape: tuple[int, ...] = (2, 2), **given: Any
) -> list[str]:
    """Average the weights after every so many updates (0: never; 1: the gradients). Returns what ``trained`` does.

    The state of the optimizer has an ``error`` of each rank's own, of this ``shape``.
    """
    torch.manual_seed(3)
    model = nn.Linear(2, 2)
    job = adapter(model, **given)

    def iterate(step: int, update: Callable[[], None]) -> None:
        model(torch.full((1, 2), 1.0 - 2 * rank)).sum().backward()
        if every == 1:
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
        update()
        job._given[0].state[model.weight]["error"] = torch.full(shape, error)
        if every and step % every == 0:
            for parameter in model.parameters():
                dist.all_reduce(parameter.data)
                parameter.data /= WORLD

    return trained(job, directory, rank, iterate)


def connected(
    directory: Path, rank: int, own_values: bool = False, past: bool = False, beside: bool = False
) -> list[str]:
    """A DistributedDataParallel whose first forward pass sets a weight by this rank's data, or that is not called.

    There may be a distributed tensor beside it, whose elements cannot be looked at.
    """
    torch.manual_seed(3)
    model = Ddp(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    both = nn.ModuleList([model])
    if beside:
        scale = distribute_tensor(torch.ones(2, 2), init_device_mesh("cpu", (WORLD,)), [Replicate()])
        both.append(nn.ParameterList([nn.Parameter(scale)]))

    def iterate(step: int, update: Callable[[], None]) -> None:
        if step == 1 and own_values:
            nn.init.constant_(model.module[0].bias, rank)
        (model.module if past else model)(torch.full((1, 2), 1.0 - 2 * rank)).sum().backward()
        update()

    return trained(adapter(both), directory, rank, iterate)


class OwnShare(torch.optim.Optimizer):
    """Each rank updates a share of the parameters, as distributed versions of Muon do; the loop exchanges them."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for number, parameter in enumerate(self.param_groups[0]["params"]):
            if number % WORLD == dist.get_rank():
                momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                parameter.sub_(momentum.add_(parameter.grad), alpha=0.1)


class OwnRows(OwnShare):
    """Each rank updates a part of the rows of each parameter, as modded-nanogpt's DistAdam."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            rows = slice(dist.get_rank(), dist.get_rank() + 1)
            momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter[rows]))
            parameter[rows].sub_(momentum.add_(parameter.grad[rows] + dist.get_rank()), alpha=0.1)


class OwnOfGroup(OwnShare):
    """Each rank updates a part of the parameters, with state in the param group, as modded-nanogpt's NorMuon."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        (group,) = self.param_groups
        for parameter in group["params"][dist.get_rank() : dist.get_rank() + 1]:
            parameter.sub_(parameter.grad, alpha=0.1)
            group["momentum"] = parameter.grad.expand(1, *parameter.shape).clone()
        group.setdefault("momentum", torch.zeros(0, *group["params"][0].shape))


class SmallState(OwnShare):
    """Each rank updates all parameters, with a state that has half of the rows."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter[:1]))
            parameter.sub_(momentum.add_(parameter.grad[:1]).sum(), alpha=0.1)


def spread(
    directory: Path, rank: int, kind: type[OwnShare] = OwnShare, bias: bool = True, own: bool = False
) -> list[str]:
    """The gradients are reduced by a DistributedDataParallel, and the optimizer has its state on one rank each."""
    torch.manual_seed(3)
    model = Ddp(nn.Linear(2, 2, bias=bias))
    optimizer = kind(model.parameters())

    def iterate(_step: int, update: Callable[[], None]) -> None:
        for number, parameter in enumerate(model.parameters()):  # not after the update, which only one rank refuses
            dist.broadcast(parameter.data, number % WORLD)
        model.zero_grad()
        model(torch.full((1, 2), 1.0 - 2 * rank)).sum().backward()
        update()

    return trained(registered(model, optimizer, extra_state=optimizer if own else None), directory, rank, iterate)


def made_anew(directory: Path, rank: int) -> list[str]:
    """The loop empties the state after an update, and one rank is compared before that, the other one after it."""
    torch.manual_seed(3)
    model = Ddp(nn.Linear(2, 2))
    job: Any = adapter(model)
    emptied = threading.Event()

    def iterate(step: int, update: Callable[[], None]) -> None:
        if step == 1 and rank == 1:
            early = job.source.swapped.early
            job.source.swapped.early = lambda: early() if emptied.wait(60) else None
        model.zero_grad()
        model(torch.full((1, 2), 1.0 - 2 * rank)).sum().backward()
        update()
        if step == 5:
            if rank == 0:
                job._trial._thread.join()
            job._given[0].state.clear()
            emptied.set()

    return trained(job, directory, rank, iterate)


def outside(directory: Path, rank: int) -> list[str]:
    """The loss has parameters, which are not in the DistributedDataParallel."""
    torch.manual_seed(3)
    model = nn.ModuleDict({"loss": nn.Linear(2, 2), "body": Ddp(nn.Linear(2, 2))})

    def iterate(_step: int, update: Callable[[], None]) -> None:
        model["loss"](model["body"](torch.full((1, 2), 1.0 - 2 * rank))).sum().backward()
        update()

    return trained(adapter(model), directory, rank, iterate)


def trained(
    job: TorchAdapter, directory: Path, rank: int, iterate: Callable[[int, Callable[[], None]], None]
) -> list[str]:
    """Make six iterations. Returns for each rank the error that one of its updates has raised, or a warning."""
    warnings: queue.SimpleQueue[logging.LogRecord] = queue.SimpleQueue()
    watcher = QueueHandler(warnings)
    watcher.setLevel(logging.WARNING)
    logging.getLogger("ttp.adapters.torch").addHandler(watcher)
    join(job, StubProcessor(directory, rank=rank, layout=Layout.data_parallel(WORLD)), directory / "pages", rank)

    def train() -> None:
        for step in range(1, 7):
            iterate(step, job._given[0].step)

    told: list[str] = [""] * WORLD
    problem = refused(train)
    warned = [warnings.get().getMessage() for _ in range(warnings.qsize())]
    dist.all_gather_object(told, problem or "".join(text for text in warned if " differ" in text))
    logging.getLogger("ttp.adapters.torch").removeHandler(watcher)
    leave(job)
    return told


def one_is_wrong(rank: int) -> Any:
    model = nn.Linear(2, 2)
    if rank == 1:
        model.register_buffer("odd", torch.empty(1, device="meta"))
    return Ddp(model, broadcast_buffers=False, init_sync=False)


def two_shards(rank: int) -> TorchAdapter:
    layout = Layout(WORLD, {Shard("a"): (Rank(0),), Shard("b"): (Rank(1),)})
    return adapter(nn.Linear(2, 2), layout=layout)


def labelled(rank: int) -> TorchAdapter:
    layout = Layout(WORLD, {Shard("all"): (Rank(0), Rank(1)), Shard("b"): (Rank(1),)})
    model = nn.ModuleDict({"common": nn.Linear(2, 2)} | ({"own": nn.Linear(2, 2)} if rank else {}))
    return adapter(model, layout=layout, shard_of=lambda name: "all" if name.startswith("common") else "nobody's")


def public(directory: Path, rank: int) -> list[str]:
    """``wrap_optimizer`` fails on rank 0 before ranks exchange anything: rank 1 gets the reason and does not join."""
    os.environ |= {"TTP_PORT": "1", "MASTER_ADDR": "localhost", "TTP_RUN_DIR": str(directory / "run")}
    model, stranger = nn.Linear(2, 2), nn.Linear(3, 3)
    told = []
    for optimizer, save_dir in (
        (torch.optim.SGD((model if rank else stranger).parameters(), lr=0.1), directory / "saved"),
        (torch.optim.SGD(model.parameters(), lr=0.1), directory / "saved" if rank else Path("/proc/nowhere")),
    ):
        session.reset()
        told.append(refused(lambda o=optimizer, d=save_dir: ttp.wrap_optimizer(o, model=model, save_dir=d)))  # type: ignore[misc]
    for name in ("TTP_PORT", "TTP_RUN_DIR"):
        os.environ.pop(name)
    session.reset()
    return told


def partly_wrapped(**tables: nn.Module) -> nn.Module:
    """Return a model of which DistributedDataParallel has a part, as the models of DLRM."""
    return nn.ModuleDict({"common": Ddp(nn.Linear(2, 2)), **tables})


def groups_of(model: nn.Module) -> list[list[int]]:
    """Return the ranks of each shard."""
    return sorted(map(list, adapter(model).layout(WORLD).groups.values()))


def experts(directory: Path, rank: int, wrapped: bool = True) -> dict[str, Any]:
    """Each rank has an expert with a name of its own. Experts are shards of their own, and are restored unchanged."""
    job = Job(directory, rank, wrapped)
    job.step()
    path = job.save()
    fresh = Job(directory / "again", rank, wrapped)
    fresh.adapter.load(path, rank, WORLD, protected=False)
    pairs = zip(job.model.parameters(), fresh.model.parameters(), strict=True)
    same = all(torch.equal(one, other) for one, other in pairs)
    moments = [job.optimizer.state[p]["exp_avg"] for p in job.model.parameters()]
    loaded = [fresh.optimizer.state[p]["exp_avg"] for p in fresh.model.parameters()]
    told = {
        "groups": {shard: list(ranks) for shard, ranks in job.processor.layout.groups.items()},
        "same": same and all(map(torch.equal, moments, loaded)),
    }
    dist.barrier()
    return told


class Job:
    """One rank of a job with an expert on each rank."""

    def __init__(self, directory: Path, rank: int, wrapped: bool) -> None:
        self.rank = rank
        self.model: Any = Experts(f"rank{rank}", 1.0 + rank)
        self.ddp = Ddp(self.model)
        if not wrapped:
            self.model = partly_wrapped(**{f"rank{rank}": nn.Linear(2, 2)})
            self.ddp = nn.Sequential(*self.model.children())
        self.adapter = adapter(self.model)  # the module inside will do
        self.optimizer: Any = self.adapter._optimizer
        self.processor = StubProcessor(directory, rank=rank, layout=self.adapter.layout(WORLD))
        join(self.adapter, self.processor, directory / "pages", rank)

    def step(self) -> None:
        self.ddp(torch.ones(1, 2)).sum().backward()
        self.optimizer.step()

    def save(self) -> Path:
        shards = (s for s, ranks in self.processor.layout.groups.items() if ranks[0] == self.rank)
        return save_together(self.adapter, self.processor, 1, shards)
