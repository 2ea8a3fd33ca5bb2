"""The ranks of test_sharding.py: they cut models in many ways, and report what each rank holds of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, ShardingStrategy, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from tests.adapters.torch.stub_processor import StubProcessor, join, registered, save_together
from ttp.adapters.torch.restoring.rank_local import Restore
from ttp.adapters.torch.saving.checkpoint import chunks_of
from ttp.adapters.torch.sharding.names import ModelNames
from ttp.adapters.torch.sharding.sharding import Sharding, TrainingObjects, sharding_of
from ttp.core.layout import Layout, Rank, Shard, Version
from ttp.errors import ConfigError
from ttp.store.manifest import Manifest

WORLD = 4


class Net(nn.Module):
    """A model with odd sizes, so that shards are uneven or empty; with tied weights and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 6)
        self.inner = nn.Linear(6, 10)
        self.norm = nn.BatchNorm1d(10)
        self.outer = nn.Linear(10, 6)
        self.scale = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(6, 9, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Any:
        return self.head(self.outer(self.norm(self.inner(self.embed(tokens)).relu())) * self.scale)


def net() -> Net:
    torch.manual_seed(1)
    return Net()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    named = list(model.named_parameters())  # FSDP1 leaves one dimension: not what tells them apart
    decayed = [p for name, p in named if name.endswith("weight") and "norm" not in name]
    others = [p for name, p in named if not (name.endswith("weight") and "norm" not in name)]
    groups: list[dict[str, Any]] = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-2)


def mesh_of(*shape: int) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=("a", "b", "c")[: len(shape)])


def fsdp(mesh: DeviceMesh, **settings: Any) -> Any:
    model = net()
    fully_shard(model.inner, mesh=mesh, **settings)
    return fully_shard(model, mesh=mesh, **settings)


def tensor_parallel(mesh: DeviceMesh) -> nn.Module:
    gathered = ColwiseParallel(output_layouts=Replicate())
    split = RowwiseParallel(input_layouts=Replicate())
    return parallelize_module(net(), mesh, {"inner": gathered, "outer": split})


class Stage(nn.Module):
    """One half of the model, with the names of the whole model."""

    embed: Any
    inner: Any
    norm: Any
    head: Any
    outer: Any
    scale: Any

    def __init__(self, number: int) -> None:
        super().__init__()
        whole, self.number = net(), number
        for key in (("embed", "inner", "norm", "head"), ("outer", "scale"))[number]:
            setattr(self, key, getattr(whole, key))

    def forward(self, tokens: Tensor) -> Any:
        """Compute with inputs like those that the other stage would send."""
        if self.number:
            return self.outer(torch.randn(8, 10)) * self.scale
        return self.norm(self.inner(self.embed(tokens)).relu()).sum() + self.head(torch.randn(8, 6)).sum()


def sharding(model: nn.Module, layout: Layout | None = None, shard_of: Any = None) -> Sharding:
    optimizer = adamw(model)
    return sharding_of(TrainingObjects(model, optimizer, ModelNames(model, optimizer), WORLD, {}, layout, shard_of))


def groups(found: Sharding) -> dict[str, list[int]]:
    return {shard: list(ranks) for shard, ranks in found.layout.groups.items()}


def described(found: Sharding, model: nn.Module, rank: int) -> dict[str, Any]:
    """Return the names that this rank writes for each shard, and whether its chunks equal the whole model's."""
    names = ModelNames(model, adamw(model))
    whole = dict(net().named_parameters(remove_duplicate=False))
    written: dict[str, list[str]] = {}
    for shard in found.layout.shards_of(Rank(rank)):
        written[shard] = sorted(found.parameters_of(shard))
        for name in written[shard]:
            for chunk in chunks_of(found.stored(name, names.parameters[name])) or ():
                box = tuple(slice(o, o + s) for o, s in zip(chunk.offsets, chunk.tensor.shape, strict=True))
                assert type(chunk.tensor) is not DTensor
                assert torch.equal(chunk.tensor, whole[name][box].to(chunk.tensor.dtype)), (name, chunk.offsets)
    return {"groups": groups(found), "written": written}


def made(name: str, rank: int) -> nn.Module:
    """Return the model of this kind of job."""
    world = dist.get_world_size()
    makers: dict[str, Callable[[], nn.Module]] = {
        "by hand": net,
        "ddp": lambda: DistributedDataParallel(net()),
        "fsdp": lambda: fsdp(mesh_of(world)),
        "tp": lambda: tensor_parallel(mesh_of(world)),
        "hsdp": lambda: fsdp(mesh_of(world // 2, 2)),
        "hsdp 1xN": lambda: fsdp(mesh_of(1, world)),
        "mixed": lambda: fsdp(mesh_of(world // 2, 2), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)),
        "tp+dp": lambda: tensor_and_data_parallel(mesh_of(world // 2, 2)),
        "tp+hsdp": lambda: tensor_parallel_and_hsdp(mesh_of(world // 4, 2, 2)),
        "fsdp1": lambda: fsdp1(mesh_of(world // 2, 2)),
        "pp+dp": lambda: staged(rank, mesh_of(2, world // 2)),
    }
    return makers[name]()


def tensor_and_data_parallel(mesh: DeviceMesh) -> Any:
    return replicate(tensor_parallel(mesh["b"]), mesh=mesh["a"])


def tensor_parallel_and_hsdp(mesh: DeviceMesh) -> Any:
    return fully_shard(tensor_parallel(mesh["c"]), mesh=mesh["a", "b"])


def fsdp1(mesh: DeviceMesh) -> nn.Module:
    model = net()
    settings: Any = {
        "sharding_strategy": ShardingStrategy.HYBRID_SHARD,
        "device_mesh": mesh,
        "use_orig_params": True,
        "device_id": torch.device("cpu"),
    }
    model.inner = FullyShardedDataParallel(model.inner, **settings)  # type: ignore[assignment]
    return FullyShardedDataParallel(model, **settings)


def staged(rank: int, mesh: DeviceMesh) -> nn.Module:
    stage = Stage(rank * 2 // dist.get_world_size())
    return DistributedDataParallel(stage, process_group=mesh["b"].get_group())


KINDS = ["ddp", "fsdp", "tp", "hsdp", "hsdp 1xN", "mixed", "tp+dp", "tp+hsdp", "pp+dp", "fsdp1", "by hand"]


def layouts(directory: Path, rank: int) -> dict[str, Any]:
    told = {}
    for name in KINDS:
        model = made(name, rank)
        told[name] = described(sharding(model), model, rank)
    return told | said_by_hand(rank)


def said_by_hand(rank: int) -> dict[str, Any]:
    """A layout given by the user, and stages that use the same names for different tensors."""
    groups = {"dense": (0, 1, 2, 3), "inner-0": (0, 2), "inner-1": (1, 3)}
    layout = Layout(WORLD, {Shard(s): tuple(map(Rank, ranks)) for s, ranks in groups.items()})
    model: Any = net()
    model.inner = nn.ModuleDict({f"expert{rank % 2}": model.inner})  # two experts, two copies of each
    found = sharding(model, layout, lambda name: f"inner-{rank % 2}" if name.startswith("inner.") else "dense")
    written = {shard: sorted(found.parameters_of(shard)) for shard in found.layout.groups}
    told = {"explicit": {"written": written, "elsewhere": sorted(found.elsewhere())}}
    mesh = mesh_of(2, 2)
    stage = DistributedDataParallel(nn.Linear(2, 2), process_group=mesh["b"].get_group())
    try:
        sharding(stage)
    except ConfigError as problem:
        return told | {"clash": str(problem)}
    return told | {"clash": ""}


# ------------------------------------------------------------------------------------------------- saving and restoring


class Job:
    """One rank of a job of some kind, without a controller."""

    def __init__(
        self, directory: Path, kind: str | nn.Module, rank: int, make: Callable[[Any], Any] = adamw, **parts: Any
    ) -> None:
        self.rank = rank
        self.model: Any = made(kind, rank) if isinstance(kind, str) else kind
        self.optimizer = make(self.model)
        self.adapter = registered(self.model, self.optimizer, **parts)
        layout = self.adapter.layout(dist.get_world_size())
        self.processor = StubProcessor(directory, rank=rank, layout=layout)
        self.source: Any = self.adapter.source
        join(self.adapter, self.processor, directory / "pages", rank)

    def train(self, steps: int = 2) -> None:
        for step in range(steps):
            torch.manual_seed(step)  # the same data everywhere: what is replicated by hand stays equal
            self.optimizer.zero_grad()
            self.model(torch.randint(0, 9, (8,))).square().mean().backward()
            self.optimizer.step()

    def save(self, version: int) -> Path:
        """Save every shard from its last holder, which differs from shard to shard."""
        shards = (s for s, ranks in self.processor.layout.groups.items() if ranks[-1] == self.rank)
        pages = tuple(Rank(r) for r in range(dist.get_world_size())) if self.rank == 0 else ()
        return save_together(self.adapter, self.processor, version, shards, pages=pages)

    def close(self) -> None:
        dist.barrier()
        self.source.close()

    def state(self) -> dict[str, Tensor]:
        """Return weights, buffers and moments of this rank, whole."""
        names = ModelNames(self.model, self.optimizer)
        found = {f"model.{name}": tensor for name, tensor in names.parameters.items()}
        for parameter, values in self.optimizer.state.items():
            found |= {f"optim.{names.of(parameter)}.{key}": value for key, value in values.items()}
        return {key: whole(tensor) for key, tensor in found.items()}


def whole(tensor: Any) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def held(job: Job) -> dict[str, Tensor]:
    """Return ``job.state``; for FSDP1 torch itself puts the tensors together."""
    if not isinstance(job.model, FullyShardedDataParallel):
        return job.state()
    with FullyShardedDataParallel.summon_full_params(job.model, writeback=False):
        found = {
            f"model.{name.replace('_fsdp_wrapped_module.', '')}": parameter.detach().clone()
            for name, parameter in job.model.named_parameters(remove_duplicate=False)
        }
    # On the CPU what torch gathers first is overwritten by what it gathers last: each in its turn is the last.
    for name, values in gathered(job).items():
        found |= {f"optim.{name}.{key}": values[key].clone() for key in ("step", "exp_avg_sq")}
    swap(job.optimizer)
    for name, values in gathered(job).items():
        found[f"optim.{name}.exp_avg"] = values["exp_avg_sq"].clone()
    swap(job.optimizer)
    return found


def gathered(job: Job) -> dict[str, dict[str, Tensor]]:
    found = FullyShardedDataParallel.full_optim_state_dict(job.model, job.optimizer, rank0_only=False)
    return dict(found["state"])


def swap(optimizer: torch.optim.Optimizer) -> None:
    for values in optimizer.state.values():
        values["exp_avg"], values["exp_avg_sq"] = values["exp_avg_sq"], values["exp_avg"]


def save_all(directory: Path, rank: int) -> None:
    """Write a checkpoint of each kind of job, and remember its content."""
    for kind in SAVED:
        job = Job(directory / kind, kind, rank)
        job.train()
        scheduled(job, 2)
        job.save(2)
        remember(job, directory / kind)
        job.close()


def scheduled(job: Job, version: int) -> None:
    """Set another learning rate, as a scheduler would after this version."""
    job.optimizer.param_groups[1]["lr"] = 3e-3
    tail: Any = job.adapter._post_step
    tail._snapshot = tail._take(version)


def restore_all(directory: Path, rank: int) -> list[Any]:
    """Load each checkpoint into jobs of other kinds, and return the names that differ."""
    told, world = [], dist.get_world_size()
    for source, target in json.loads((directory / "pairs.json").read_text()):
        job = Job(directory / f"again{world}" / f"{source} {target}", target, rank)
        path = directory / source / "tft_saved_checkpoints-step_2"
        job.adapter.load(path, rank, world, protected=False)
        same = job.adapter._same_places(Restore(path, Manifest.load(path), rank, world))
        told.append({"pair": [source, target], "same": same, **compared(job, directory / source)})
        job.close()
    return told


def remember(job: Job, path: Path) -> None:
    """Store what this rank knows of the checkpoint that the job at ``path`` has written."""
    torch.save(held(job), path.with_name(f"{path.name}.{job.rank}.pt"))


def compared(job: Job, path: Path) -> dict[str, Any]:
    """Return the elements of this rank that differ from those of the job at ``path``."""
    saved: dict[str, Tensor] = {}
    for remembered in path.parent.glob(f"{path.name}.*.pt"):
        saved |= torch.load(remembered, weights_only=True)
    here = held(job)
    return {
        "wrong": sorted(name for name, tensor in here.items() if not torch.equal(tensor, saved[name])),
        "count": len(here),
        "rates": [group["lr"] for group in job.optimizer.param_groups],
    }


def link(directory: Path, rank: int) -> dict[str, Any]:
    """Run one job of a chain: compare with the job before, if any, make two updates, and save."""
    kind, before, version = json.loads((directory / "link.json").read_text())
    job = Job(directory / str(version), kind, rank)
    told: dict[str, Any] = {}
    if before:
        found = directory / str(before)
        job.adapter.load(found / f"tft_saved_checkpoints-step_{before}", rank, dist.get_world_size(), protected=True)
        job.processor.gate.set_version(Version(before))
        told = compared(job, found)
    job.train()
    if before:
        told["moved"] = len(compared(job, found)["wrong"])
    else:
        scheduled(job, version)
    job.save(version)
    remember(job, directory / str(version))
    job.close()
    return told


SAVED = ["ddp", "hsdp", "tp+dp", "pp+dp", "fsdp1"]
