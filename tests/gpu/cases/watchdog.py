"""NCCL's watchdog and monitor beside a collective that never ends. A world of one rank is enough for their threads."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.gpu.stand import Stand, assert_same, saved_tensors
from tests.gpu.training import Training, references
from ttp.launch import nccl

TIMEOUT_S = 5.0
"""Of the collective. The watchdog then waits four times the dump's time-out before it acts."""
DUMP_MS = 1000


def hung_collective(stand: Stand, watch_s: float = 30.0) -> None:
    """With the environment's settings: print how long this process lives, and whether later kernels run.

    Returns when it has lived for ``watch_s`` seconds.
    """
    _group(stand)
    cuda: Any = torch.cuda
    side = cuda.Stream() if stand.real else None
    later, seen = torch.zeros(1, device=stand.device), torch.zeros(1)
    if side is not None:
        seen = seen.pin_memory()
    value = torch.ones(4, device=stand.device)
    dist.all_reduce(value)
    stand.synchronize()
    spin = stand.spin()
    began = time.monotonic()
    dist.all_reduce(value, async_op=True)
    later.add_(1)
    while (lived_s := time.monotonic() - began) < (watch_s if stand.real else 0.1):
        if side is not None:
            with torch.cuda.stream(side):
                seen.copy_(later, non_blocking=True)
        print(f"lived {lived_s:.1f} {'later ran' if seen.item() else ''}", flush=True)
        time.sleep(0.25)
    stand.numbers["lived_s"] = round(lived_s, 1)
    assert not (stand.real and seen.item()), "what was queued behind the collective ran"
    spin.release()
    _leave(stand)


def saved_after_the_time_out(stand: Stand) -> None:
    """With ttp's settings the state is saved long after NCCL has noticed the timeout."""
    for name in (nccl.HANDLING, nccl.HEARTBEAT):
        os.environ.pop(name, None)
    nccl.prepare()
    assert os.environ[nccl.HANDLING] == "0"
    _group(stand)
    wanted = references(lambda: _ddp(stand), 4)
    training = _ddp(stand)
    with stand.protected():
        training.protect()
        for _ in range(3):
            training.step()
        stand.synchronize()
        spin = stand.spin()
        try:
            training.step()  # the gradient's all-reduce and the update hang behind it
            time.sleep(TIMEOUT_S + 5 * DUMP_MS / 1000 + 5 if stand.real else 0)
            version, checkpoint = stand.save()
        finally:
            spin.release()
        assert version == (3 if stand.hangs else 4)
        assert_same(saved_tensors(checkpoint), wanted[version])
    _leave(stand)


def _ddp(stand: Stand) -> Training:
    ids = [0] if stand.real else None
    return Training(stand, wrap=lambda model: DistributedDataParallel(model, device_ids=ids))


def _group(stand: Stand) -> None:
    os.environ.setdefault("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", str(DUMP_MS))
    stand.join_world(TIMEOUT_S)


def _leave(stand: Stand) -> None:
    """Destroy the group, except on a real device, where NCCL's watchdog still waits."""
    if not stand.real:
        dist.destroy_process_group()
