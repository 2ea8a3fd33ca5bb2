"""A rank of a job whose shards have one copy each (``fully_shard`` over one dimension). Run by ``test_buddy.py``.

Environment: ``JOB_DIR``, ``JOB_STEPS``, ``JOB_FAULT`` (``RANK:STEP:kill`` or ``RANK:STEP:host``, in the first life; a
host takes its shared memory with it). Writes a line for each version with the digest of this rank's state.
"""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import ttp
from ttp import session

JOB_DIR = Path(os.environ["JOB_DIR"])
RANK = int(os.environ["RANK"])
LIFE = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
VICTIM, FAULT_STEP, FAULT = os.environ.get("JOB_FAULT", "-1:0:").split(":")


def build() -> nn.Module:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 5), nn.ReLU(), nn.Linear(5, 3))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    return model


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Return a digest of this rank's part of weights and moments, and of its random streams."""
    found = hashlib.sha256(torch.get_rng_state().numpy().tobytes() + repr(random.getstate()).encode())
    for parameter in model.parameters():
        state = optimizer.state[parameter]
        for tensor in (parameter, *(state[key] for key in sorted(state))):
            local: Any = tensor.detach()
            found.update(getattr(local, "_local_tensor", local).numpy().tobytes())
    return found.hexdigest()[:16]


def note(*words: object) -> None:
    with (JOB_DIR / f"rank{RANK}.log").open("a") as log:
        log.write(" ".join(map(str, (LIFE, *words))) + "\n")


def hurt(step: int) -> None:
    if (LIFE, RANK, step) != (0, int(VICTIM), int(FAULT_STEP)):
        return
    if FAULT == "host":
        processor = session.current().processor
        assert processor is not None and processor.host.pages is not None
        shutil.rmtree(processor.host.pages.path)
    os.kill(os.getpid(), signal.SIGKILL)


@ttp.ttp_to_persist
def train() -> None:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    torch.manual_seed(100 + RANK)
    random.seed(200 + RANK)
    ttp.wrap_optimizer(optimizer, model=model, scheduler=scheduler, save_dir=JOB_DIR / "checkpoints", buddy=True)
    start = ttp.restore()
    note("start", start)
    for step in range(start, int(os.environ["JOB_STEPS"])):
        generator = torch.Generator().manual_seed(1000 * step + RANK)
        loss = model(torch.randn(4, 6, generator=generator) + random.random()).square().mean()
        hurt(step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        note("version", step + 1, digest(model, optimizer))
        time.sleep(0.05)
    processor = session.current().processor
    if processor is not None and processor.copying is not None:
        note("waited_s", processor.copying.waited_s)


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()
