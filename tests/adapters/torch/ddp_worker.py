"""One rank of a small DistributedDataParallel job that can save, stop, and be resumed; run by test_ddp_buckets.py.

Arguments: a JSON object, see ``Job``. Rank 0 prints one JSON line with digests of the final state.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ttp.adapters.torch.restoring import restore
from ttp.adapters.torch.saving.checkpoint import write_shard
from ttp.adapters.torch.saving.job_state import JobState
from ttp.adapters.torch.saving.metadata import finalise
from ttp.adapters.torch.saving.state import checkpoint_state
from ttp.adapters.torch.sharding import data_parallel
from ttp.adapters.torch.sharding.names import ModelNames
from ttp.core.layout import Rank, Shard, Version
from ttp.core.messages import Piece
from ttp.store.digest import digest_bytes
from ttp.store.manifest import MANIFEST, Manifest

Watch = data_parallel.LayoutWatch


@dataclass
class Job:
    store: str
    steps: int
    bucket_cap_mb: float | None = None
    widths: tuple[int, ...] = (20, 64, 64, 64, 10)
    accumulate: int = 1
    static_graph: bool = False
    save_at: tuple[int, ...] = ()
    save_to: str = ""
    load: str = ""
    forget_layout: bool = False
    hang_at: int = 0


class Model(nn.Module):
    """A model whose layers run in another order than defined, so the rebuilt buckets are no simple reversal."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(widths))
        self.first = nn.Linear(widths[0], widths[0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def train(job: Job, rank: int) -> dict[str, object]:
    torch.manual_seed(7)
    model = DistributedDataParallel(
        Model(tuple(job.widths)),
        bucket_cap_mb=job.bucket_cap_mb,
        static_graph=job.static_graph,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    registered: Any = model.module if job.load else model  # either will do, and the other one when it is resumed
    names, start = ModelNames(registered, optimizer), 0
    watch = data_parallel.LayoutWatch(data_parallel.ddps_of(registered), names)
    notes: tuple[str, ...] = ()
    if job.load:
        if job.forget_layout:
            vars(data_parallel)["apply_bucket_layout"] = lambda *_: "forgotten"
        manifest = Manifest.load(Path(job.load))
        restored = restore.restore_into(Path(job.load), manifest, model=registered, optimizer=optimizer)
        start, notes = restored.version, restored.notes
    layouts, previous = [watch.layout], []
    for step in range(start, job.steps):
        if step and step == job.hang_at:
            hang(rank, partial(save, job, step, names, optimizer, watch), model)
        for micro in range(job.accumulate):
            data = torch.Generator().manual_seed(step * 1000 + micro * 100 + rank)
            x = torch.randn(16, job.widths[0], generator=data)
            last = micro == job.accumulate - 1
            with contextlib.nullcontext() if last else model.no_sync():
                model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        watch.update_finished()
        layouts.append(watch.layout)
        previous.append(watch.previous)
        if rank == 0 and step + 1 in job.save_at:
            thread = threading.Thread(target=save, args=(job, step + 1, names, optimizer, watch))
            thread.start()
            thread.join()
    shown = cast("Any", model)._get_ddp_logging_data().get("rebuilt_per_bucket_param_indices")
    return {
        "digest": digest(names, optimizer),
        "layouts": layouts,
        "previous": previous,
        "shown": shown,
        "notes": notes,
    }


def hang(rank: int, save: Callable[[], None], model: DistributedDataParallel) -> None:
    """Rank 1 stops for ever. Rank 0 saves on a thread as soon as its main thread waits for rank 1 in the all-reduce."""
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    waiting = threading.Event()

    def work() -> None:
        waiting.wait()
        save()
        print(json.dumps({"saved": True}), flush=True)
        os._exit(0)

    if rank == 0:
        missing: set[torch.Tensor] = {*model.parameters()}

        def ready(parameter: torch.Tensor) -> None:
            missing.discard(parameter)
            if not missing:
                waiting.set()

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(ready)  # type: ignore[no-untyped-call]
        threading.Thread(target=work).start()


def save(job: Job, version: int, names: ModelNames, optimizer: torch.optim.Optimizer, watch: Watch) -> None:
    """Save as the processor's thread does."""
    draft, pieces = Path(job.save_to) / str(version), list[Piece]()
    draft.mkdir(parents=True)
    state = JobState(version=version, ddp_buckets=watch.layout)
    tree = checkpoint_state(names, optimizer, {}, state)
    pieces.append(write_shard(draft, "__0_0.distcp", tree, shard=Shard("model"), writer=Rank(0)))
    data = state.encode()
    (draft / "job_0.msgpack").write_bytes(data)
    pieces.append(Piece("job_0.msgpack", len(data), digest_bytes(data), "job", "", Rank(0)))
    pieces += finalise(draft, pieces)
    world = dist.get_world_size()
    groups = {Shard("model"): tuple(Rank(r) for r in range(world))}
    manifest = Manifest(Version(version), "run", 1, "incident", "", "", world, groups, "torch", 0.0, tuple(pieces))
    (draft / MANIFEST).write_text(manifest.to_json())


def digest(names: ModelNames, optimizer: torch.optim.Optimizer) -> str:
    found = hashlib.sha256()
    for name, parameter in sorted(names.parameters.items()):
        found.update(name.encode() + parameter.detach().numpy().tobytes())
        for key, value in sorted(optimizer.state[parameter].items()):
            found.update(key.encode() + value.numpy().tobytes())
    return found.hexdigest()


def main() -> None:
    job, rank, world = Job(**json.loads(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{job.store}", rank=rank, world_size=world)
    result = train(job, rank)
    digests: list[str | None] = [None] * world
    dist.all_gather_object(digests, result["digest"])
    if rank == 0:
        print(json.dumps(result | {"same": len(set(digests)) == 1}), flush=True)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo sometimes aborts in the destructors of an interpreter that ends


if __name__ == "__main__":
    main()
