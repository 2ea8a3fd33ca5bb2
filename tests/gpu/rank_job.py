"""Ranks of one job that share one device, with a fault in each life. Run by ``tests/gpu/ranks.py`` through ``ttp run``.

Environment: as for ``tests/e2e/job.py``, and ``JOB_DEVICE``, ``JOB_BACKEND``, ``JOB_KIND`` (ddp, fsdp or hsdp), and
``JOB_SPREAD``: each rank has a device of its own. Without a GPU, device and NCCL may be made up. Faults are kill, stop,
raise, assert (one in a kernel), hang (a kernel that spins) and kill-controller. Each rank writes a digest of its
weights, moments and random streams.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[2]))

import ttp
from tests.gpu import made_up_nccl
from tests.gpu.made_up import MadeUp
from tests.gpu.pages import written
from ttp.processor.import_list import AFTER_UPDATES

JOB_DIR = Path(os.environ["JOB_DIR"])
STEPS = int(os.environ["JOB_STEPS"])
FAULTS: list[dict[str, Any]] = json.loads(os.environ.get("JOB_FAULTS", "[]"))
KIND = os.environ.get("JOB_KIND", "ddp")
BACKEND = os.environ.get("JOB_BACKEND", "gloo")
RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
CUDA = os.environ.get("JOB_DEVICE", "cuda") == "cuda"
INDEX = int(os.environ["LOCAL_RANK"]) if os.environ.get("JOB_SPREAD") else 0
DEVICE = torch.device("cuda", INDEX) if CUDA else torch.device("cpu")
MADE_UP = MadeUp() if os.environ.get("JOB_DEVICE") == "made-up" else None


def hurt(step: int, phase: str) -> None:
    """Carry out the fault that is planned here, once for each directory."""
    for fault in FAULTS:
        if (fault["rank"], fault["step"], fault["phase"]) != (RANK, step, phase):
            continue
        marker = JOB_DIR / "done" / str(fault["id"])
        marker.parent.mkdir(exist_ok=True)
        if not marker.exists():
            marker.touch()
            if phase == "backward" and CUDA and BACKEND == "nccl":
                written(RANK)  # it may die before: see the limit in docs/gpu.md
            act(fault["action"])


def act(action: str) -> None:
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif action == "raise":
        raise ValueError("a wrong turn in the training loop")
    elif action == "assert":
        if not CUDA:
            raise RuntimeError("CUDA error: device-side assert triggered")
        torch.zeros(4, device=DEVICE)[torch.tensor([9], device=DEVICE)].sum().item()
    elif action == "hang":
        spin_for_ever()
    elif action == "kill-controller":
        for process in psutil.process_iter(["cmdline", "pid"]):
            if "ttp.controller" in (process.info["cmdline"] or []) and os.environ["TTP_RUN_DIR"] in " ".join(
                process.info["cmdline"]
            ):
                os.kill(process.info["pid"], signal.SIGKILL)
    else:
        raise AssertionError(action)


def spin_for_ever() -> None:
    """Let a kernel spin as long as it may, and the main thread wait behind it for ever."""
    if CUDA:
        from tests.gpu.spinning import Spinner

        Spinner().spin()
        torch.cuda.synchronize()
    time.sleep(3600)


class Net(nn.Module):
    """A model with BatchNorm and dropout: each rank has its own statistics and its own stream."""

    def __init__(self) -> None:
        super().__init__()
        self.lower = nn.Linear(32, 64)
        self.norm = (
            nn.BatchNorm1d(64) if MADE_UP is None else nn.LayerNorm(64)
        )  # torch does not say what the former writes
        self.drop, self.upper = nn.Dropout(0.2), nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.upper(self.drop(torch.relu(self.norm(self.lower(x)))))
        return result


def build() -> Any:
    torch.manual_seed(1)
    model = Net().to(DEVICE)
    if MADE_UP is not None:  # no module of torch's reduces gradients there: see ``reduce``
        MADE_UP.put(model)
        return model
    if KIND == "ddp":
        return DistributedDataParallel(model, device_ids=[INDEX] if CUDA else None)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    shape, names = ((WORLD,), ("shard",)) if KIND == "fsdp" else ((2, WORLD // 2), ("copies", "shard"))
    mesh = init_device_mesh(DEVICE.type, shape, mesh_dim_names=names)
    return fully_shard(model, mesh=mesh)


def reduce(model: nn.Module) -> None:
    """Do what DistributedDataParallel does, on a made-up device."""
    if MADE_UP is not None:
        whole: Any = dist.group.WORLD
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        whole._get_backend(torch.device("cpu")).all_reduce(MADE_UP.device, grads)


@ttp.ttp_to_persist
def train() -> None:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.97**n)
    torch.manual_seed(100 + RANK)
    random.seed(200 + RANK)
    ttp.wrap_optimizer(optimizer, model=model, scheduler=scheduler, save_dir=JOB_DIR / "checkpoints")
    start = ttp.restore()
    note("start", start)
    for step in range(start, STEPS):
        if step == AFTER_UPDATES and "LD_PRELOAD" in os.environ and "TTP_PORT" in os.environ:
            wait_until_warm()
        hurt(step, "data")
        data = torch.randn(16, 32, generator=torch.Generator().manual_seed(1000 * step + RANK)).to(DEVICE)
        optimizer.zero_grad()
        loss = model(data * (1 + 0.01 * random.random())).square().mean()
        hurt(step, "loss")
        loss.backward()
        reduce(model)
        hurt(step, "backward")
        optimizer.step()
        note("version", step + 1)
        hurt(step, "stepped")
        scheduler.step()
    finish(model, optimizer)


def wait_until_warm() -> None:
    """Wait until the launcher can replace a dead rank; elsewhere the tests fork launchers that can from the start."""
    deadline = time.monotonic() + 60
    while "the next restart is warm" not in (JOB_DIR / "launcher.log").read_text() and time.monotonic() < deadline:
        time.sleep(0.1)


def note(kind: str, value: int) -> None:
    """Append a line to the log in one write, which survives a SIGKILL, as in ``tests/e2e/job.py``."""
    with (JOB_DIR / f"rank{RANK}.log").open("a") as log:
        log.write(f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')} {kind} {value}\n")


def finish(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if MADE_UP is not None:
        MADE_UP.device.event(MADE_UP.device.training).synchronize()
    result = {
        "weights": digest(value for _, value in sorted(model.state_dict().items())),
        "moments": digest(v for p in model.parameters() for _, v in sorted(optimizer.state[p].items())),
        "streams": digest([torch.get_rng_state(), *([torch.cuda.get_rng_state()] if CUDA else [])]),
    }
    (JOB_DIR / f"result{RANK}.json").write_text(json.dumps(result, sort_keys=True))


def digest(tensors: Any) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        local = getattr(tensor, "_local_tensor", tensor).detach()
        local = local.cpu().contiguous() if MADE_UP is None else MADE_UP.copy(local)
        found.update(local.reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def main() -> None:
    train()
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    deterministic: Any = torch.utils.deterministic
    deterministic.fill_uninitialized_memory = False
    if CUDA:
        torch.cuda.set_device(INDEX)
    if BACKEND == "cpu:nccl":
        made_up_nccl.install()
    dist.init_process_group(BACKEND)
    if MADE_UP is None:
        main()
    else:
        with MADE_UP.watched(), MADE_UP.device.may_hang():
            main()
