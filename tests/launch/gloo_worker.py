"""A rank that sums over gloo; in the first attempt rank 1 kills itself and the others leave with 75."""

from __future__ import annotations

import contextlib
import datetime
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

OUT, BROKEN_ATTEMPTS = Path(sys.argv[1]), int(sys.argv[2])
RANK, ATTEMPT = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])


def sum_ranks() -> int:
    total = torch.tensor([RANK + 1])
    dist.all_reduce(total)
    return int(total.item())


dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=20))
(OUT / f"sum-{RANK}-{ATTEMPT}").write_text(str(sum_ranks()))
if ATTEMPT < BROKEN_ATTEMPTS:
    with contextlib.suppress(RuntimeError):
        dist.barrier()  # all ranks have written their sums
        if RANK == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        sum_ranks()
    os._exit(75)
dist.barrier()
dist.destroy_process_group()
