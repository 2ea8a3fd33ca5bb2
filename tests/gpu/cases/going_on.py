"""Communicators in a group of one, aborted and replaced as ``TTP_CONTINUITY=keep`` does."""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist

from tests.gpu import made_up_nccl
from tests.gpu.stand import Stand
from ttp.adapters.torch import regroup
from ttp.adapters.torch.transport import ABORT_S, Nccl
from ttp.config import Config
from ttp.launch import nccl


def self_test(stand: Stand) -> None:
    """With a launcher's settings there is no obstacle, and a backend is aborted and made again."""
    if not stand.real:
        made_up_nccl.install()
    os.environ.update(TTP_CONTINUITY="keep", TTP_KEEP_CUDA="1")
    for name in (nccl.HANDLING, nccl.HEARTBEAT, *nccl.TO_GO_ON):
        os.environ.pop(name, None)
    os.environ.update(nccl.settings(os.environ, Config.from_env()))
    assert (reason := Nccl().why_not()) == "", reason
    began = time.monotonic()
    assert (reason := regroup.self_test(Nccl(), stand.device.type)) == "", reason
    stand.numbers["self_test_s"] = round(time.monotonic() - began, 3)


def abort_behind_a_spin(stand: Stand) -> None:
    """Measure an abort whose collective waits behind a spinning kernel. The device works afterwards."""
    value = torch.ones(4, device=stand.device)
    if stand.real:
        stand.join_world()
        dist.all_reduce(value)
        stand.synchronize()
        spin = stand.spin()
        dist.all_reduce(value, async_op=True)
        began = time.monotonic()
        try:
            Nccl().let_go([dist.group.WORLD._get_backend(stand.device)])  # type: ignore[union-attr]
            stand.numbers["abort_s"] = round(time.monotonic() - began, 3)
        except RuntimeError:
            stand.numbers["abort_s"] = f"more than {ABORT_S:g}"
        spin.release()
        stand.synchronize()
    self_test(stand)
