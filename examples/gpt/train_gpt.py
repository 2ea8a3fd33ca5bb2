"""Train a small GPT on a text, with sharded and replicated state (HSDP); the death of a rank costs no step.

    ttp run --nproc-per-node 4 --max-restarts 3 examples/gpt/train_gpt.py

Only the three lines marked with <- ttp are special about this script. See README.md in the same folder.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from model import GPT, Shape
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

import ttp
from ttp.testing.digests import digest

SONNETS = Path(__file__).with_name("sonnets.txt")
WARM_UP = 10
"""Steps in which the learning rate rises."""


class LossCurve:
    """The loss of every step so far. Given to ttp as ``extra_state``, so it is saved and restored with the model."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        return {"losses": list(self.losses)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.losses = list(state["losses"])


class Text:
    """Draws batches from a text.

    The batch of a step depends only on the seed and the number of the step. So the position in the data need not be
    saved, and a job that resumes with another number of ranks sees the same bytes.
    """

    def __init__(self, file: Path, context: int, seed: int) -> None:
        self.bytes = torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8).long()
        self.context, self.seed = context, seed
        if len(self.bytes) <= context:
            raise SystemExit(f"{file} has {len(self.bytes)} bytes; more than the {context} of the context are needed")

    def batch(self, step: int, size: int, rank: int, ranks: int) -> tuple[Tensor, Tensor]:
        """Return this rank's share of the ``size`` sequences of one step: bytes, and for each the byte after it."""
        chance = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        starts = torch.randint(len(self.bytes) - self.context, (size,), generator=chance)[rank::ranks]
        rows = starts[:, None] + torch.arange(self.context + 1)
        found = self.bytes[rows]
        return found[:, :-1], found[:, 1:]


def spread(model: GPT, options: argparse.Namespace, device: torch.device) -> nn.Module:
    """Return the model, distributed over all ranks as ``--layout`` says."""
    if options.layout == "ddp":
        return DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    policy = half if options.precision == "bf16" else MixedPrecisionPolicy()
    mesh = make_mesh(options, device)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def make_mesh(options: argparse.Namespace, device: torch.device) -> DeviceMesh:
    """Return the mesh: with HSDP every shard is on ``--replicas`` ranks, with FSDP on one rank, and lost with it."""
    ranks = dist.get_world_size()
    if options.layout == "fsdp":
        return init_device_mesh(device.type, (ranks,), mesh_dim_names=("shard",))
    shards = ranks // options.replicas
    return init_device_mesh(device.type, (options.replicas, shards), mesh_dim_names=("replicate", "shard"))


def rate(step: int, steps: int) -> float:
    """Return the factor of the learning rate: a linear rise, then a cosine decay to a tenth."""
    if step < WARM_UP:
        return (step + 1) / WARM_UP
    return 0.55 + 0.45 * math.cos(math.pi * (step - WARM_UP) / max(steps - WARM_UP, 1))


@ttp.ttp_to_persist  # <- ttp
def train(options: argparse.Namespace, device: torch.device) -> dict[str, str]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(options.seed)
    shape = Shape(options.layers, options.heads, options.width, options.context)
    model = spread(GPT(shape).to(device), options, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.95), weight_decay=0.1)
    scheduler = LambdaLR(optimizer, partial(rate, steps=options.steps))
    text, curve = Text(options.text, options.context, options.seed), LossCurve()
    torch.manual_seed(options.seed * 1000 + rank)  # dropout differs between ranks

    optimizer = ttp.wrap_optimizer(  # <- ttp
        optimizer, model=model, scheduler=scheduler, save_dir=options.save_dir, extra_state=curve
    )
    start = ttp.restore()  # <- ttp

    if rank == 0 and start:
        print(f"resumed after step {start}", flush=True)
    for step in range(start, options.steps):
        tokens, targets = (part.to(device) for part in text.batch(step, options.batch, rank, ranks))
        with autocast(options, device):
            loss = model(tokens, targets)
        curve.losses.append(loss.item())  # before backward(): see examples/digits
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if rank == 0:
            print(f"step {step + 1}/{options.steps}  loss {curve.losses[-1]:.4f}", flush=True)
        time.sleep(options.step_ms / 1e3)
    return digests(model, optimizer, curve, device)


def autocast(options: argparse.Namespace, device: torch.device) -> AbstractContextManager[None]:
    """Return the context of the forward pass with DDP in bf16; ``fully_shard`` has its own policy."""
    mixed = options.layout == "ddp" and options.precision == "bf16"
    return torch.autocast(device.type, torch.bfloat16) if mixed else nullcontext()


def digests(
    model: nn.Module, optimizer: torch.optim.Optimizer, curve: LossCurve, device: torch.device
) -> dict[str, str]:
    """Return digests of the whole final state. Those of two runs are equal only if the states are, bit for bit."""
    losses = torch.tensor(curve.losses, dtype=torch.float64, device=device)
    of_all_ranks = [torch.empty_like(losses) for _ in range(dist.get_world_size())]
    dist.all_gather(of_all_ranks, losses)
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights, moments = get_state_dict(model, optimizer, options=whole)
    return {
        "weights": digest(weights),
        "optimizer": digest(moments),
        "losses": digest([part.cpu() for part in of_all_ranks]),
        "final_loss": f"{torch.stack(of_all_ranks)[:, -1].mean().item() if len(losses) else math.nan:.6f}",
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--layout", choices=("hsdp", "fsdp", "ddp"), default="hsdp", help="default %(default)s")
    add("--replicas", type=int, default=2, help="of every shard, for hsdp (default %(default)s)")
    add("--precision", choices=("fp32", "bf16"), default="fp32", help="of the forward pass (default %(default)s)")
    add("--deterministic", action="store_true", help="for equal bits on a GPU")
    add("--text", type=Path, default=SONNETS, help="any file (default: sonnets of Shakespeare)")
    add("--steps", type=int, default=120, help="optimizer steps (default %(default)s)")
    add("--batch", type=int, default=32, help="sequences per step, over all ranks (default %(default)s)")
    add("--lr", type=float, default=1e-3, help="default %(default)s")
    for name in ("layers", "heads", "width", "context"):
        add(f"--{name}", type=int, default=getattr(Shape, name), help="default %(default)s")
    add("--save-dir", type=Path, default=Path("runs/gpt"), help="default %(default)s")
    add("--seed", type=int, default=1, help="default %(default)s")
    add("--step-ms", type=float, default=0, help="sleep after each step, to have time to watch")
    return parser.parse_args()


def check(options: argparse.Namespace) -> None:
    """Check that the sizes fit the number of ranks."""
    ranks = dist.get_world_size()
    if options.batch % ranks:
        raise SystemExit(f"--batch {options.batch} cannot be shared evenly by {ranks} ranks")
    if options.layout == "hsdp" and ranks % options.replicas:
        raise SystemExit(f"{ranks} ranks cannot hold {options.replicas} replicas: other --replicas, or --layout ddp")


def main() -> None:
    options = parse()
    if options.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if cuda else "gloo")
    check(options)
    result = train(options, device)
    if dist.get_rank() == 0:
        options.save_dir.mkdir(parents=True, exist_ok=True)
        (options.save_dir / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    dist.barrier()  # leave together: gloo may abort a rank whose neighbour is still talking
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
