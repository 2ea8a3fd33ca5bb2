"""A rank of a real MindSpore job without ttp's adapter: sums in a loop; on request gets a lease, saves, exits 75.

Usage: mindspore_worker.py OUT. A thread saves: the main thread hangs in the sum once a peer is dead.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore.communication import get_group_size, get_rank, init

from ttp.config import RankEnv
from ttp.launch.leases import Leases

OUT, SAVE_S = Path(sys.argv[1]), 45.0
PID = os.getpid()


def put(name: str, text: str = "") -> None:
    draft = OUT / f".{name}.{PID}"
    draft.write_text(text)
    draft.replace(OUT / name)


def save_when_told(leases: Leases, rank: int) -> None:
    while not (OUT / "rescue").exists():
        time.sleep(0.01)
    leases.grant(PID, time.monotonic() + 600)
    time.sleep(SAVE_S)
    put(f"saved-{rank}")
    os._exit(75)


def main() -> None:
    ms.set_device("CPU")
    init()
    env = RankEnv.from_env()
    assert (env.rank, env.world_size) == (get_rank(), get_group_size())
    leases = Leases(Path(os.environ["TTP_RUN_DIR"]))
    leases.arm(PID)
    threading.Thread(target=save_when_told, args=(leases, env.rank), daemon=True).start()
    put("patience", f"{os.environ['MS_NODE_TIMEOUT']} {os.environ['MS_CPU_COMM_OP_TIMEOUT']}")
    add = ms.ops.AllReduce()
    for step in range(100_000):
        total = add(ms.Tensor(np.array([env.rank + 1], np.float32))).asnumpy().item()
        assert total == env.world_size * (env.world_size + 1) / 2
        if step == 1:
            put(f"pid-{env.rank}-0", str(PID))
        time.sleep(0.01)


main()
