"""Classify handwritten digits with DistributedDataParallel; the death of a rank costs no step.

    ttp run --nproc-per-node 4 --max-restarts 3 examples/digits/train.py

Only the three lines marked with <- ttp are special about this script. Kill any rank while it runs: the other ranks save
the last finished step, the job starts again, and its result is the same as that of an unbroken run, bit for bit. The
script runs under plain torchrun too; without TTP_PORT the three lines only restore.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import ttp
from ttp.testing.digests import digest

BATCH = 16
ACCUMULATE = 2
"""Batches per optimizer step."""

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


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(32 * 2 * 2, 10),
    )


def make_batches(seed: int, start: int) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Yield the ``ACCUMULATE`` batches of each step, from step ``start`` on, epoch after epoch, without end.

    The position in the data depends only on the number of finished steps: a job can resume in the middle of an epoch.
    """
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(labels))
    sampler: DistributedSampler[Any] = DistributedSampler(data, shuffle=True, seed=seed, drop_last=True)
    # The loader draws a random number each time an iterator is made. With its own generator it does not draw from the
    # stream of dropout, which would otherwise differ after a restart in the middle of an epoch.
    loader = DataLoader(data, BATCH, sampler=sampler, drop_last=True, generator=torch.Generator())
    epoch, done = divmod(start, len(loader) // ACCUMULATE)
    while True:
        sampler.set_epoch(epoch)
        batches = itertools.islice(loader, done * ACCUMULATE, None)
        while len(step := list(itertools.islice(batches, ACCUMULATE))) == ACCUMULATE:
            yield step
        epoch, done = epoch + 1, 0


@ttp.ttp_to_persist  # <- ttp
def train(steps: int, save_dir: Path, seed: int, step_s: float) -> dict[str, str]:
    rank = dist.get_rank()
    torch.manual_seed(seed)
    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    scheduler = SequentialLR(
        optimizer,
        [LinearLR(optimizer, 0.1, total_iters=WARM_UP), CosineAnnealingLR(optimizer, max(steps - WARM_UP, 1))],
        milestones=[WARM_UP],
    )
    curve = LossCurve()
    torch.manual_seed(seed * 1000 + rank)  # dropout differs between ranks

    optimizer = ttp.wrap_optimizer(  # <- ttp
        optimizer, model=model, scheduler=scheduler, save_dir=save_dir, extra_state=curve
    )
    start = ttp.restore()  # <- ttp

    if rank == 0 and start:
        print(f"resumed after step {start}", flush=True)
    loss_of = nn.CrossEntropyLoss()
    for step, batches in zip(range(start, steps), make_batches(seed, start), strict=False):
        total = 0.0
        for part, (images, labels) in enumerate(batches, start=1):
            with nullcontext() if part == ACCUMULATE else model.no_sync():  # gradients are averaged once per step
                loss = loss_of(model(images), labels) / ACCUMULATE
                total += loss.item()
                if part == ACCUMULATE:
                    curve.losses.append(total)  # before the last backward(): if this rank dies after the exchange of
                loss.backward()  # gradients, its peers finish the step, and its loss belongs to the step
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if rank == 0:
            rate = scheduler.get_last_lr()[0]
            print(f"step {step + 1}/{steps}  loss {total:.4f}  learning rate {rate:.6f}", flush=True)
        time.sleep(step_s)
    return digests(model, optimizer, curve)


# ------------------------------------------------------------------------- the proof: digests of the final state


def digests(model: nn.Module, optimizer: torch.optim.Optimizer, curve: LossCurve) -> dict[str, str]:
    """Return digests of the final state. The digests of two runs are equal only if the states are, bit for bit."""
    losses = torch.tensor(curve.losses, dtype=torch.float64)
    of_all_ranks = [torch.empty_like(losses) for _ in range(dist.get_world_size())]
    dist.all_gather(of_all_ranks, losses)
    return {
        "weights": digest(model.state_dict()),
        "optimizer": digest(optimizer.state_dict()),
        "losses": digest(of_all_ranks),
        "final_loss": f"{torch.stack(of_all_ranks)[:, -1].mean().item() if len(losses) else math.nan:.6f}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=120, help="optimizer steps (default %(default)s)")
    parser.add_argument("--save-dir", type=Path, default=Path("runs/digits"), help="default %(default)s")
    parser.add_argument("--seed", type=int, default=1, help="default %(default)s")
    parser.add_argument("--step-ms", type=float, default=0, help="sleep after each step, to have time to watch")
    options = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    result = train(options.steps, options.save_dir, options.seed, options.step_ms / 1e3)
    if dist.get_rank() == 0:
        options.save_dir.mkdir(parents=True, exist_ok=True)
        (options.save_dir / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    dist.barrier()  # leave together: gloo may abort a rank whose neighbour is still talking
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
