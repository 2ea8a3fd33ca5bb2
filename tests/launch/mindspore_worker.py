"""A rank of a real MindSpore job without ttp's adapter: sums in a loop; on request gets a lease, saves, exits 75.

Usage: mindspore_worker.py OUT STEPS SAVE_S. A thread saves: the main thread hangs in the sum once a peer is dead.
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

OUT, STEPS, SAVE_S = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
PID = os.getpid()


def put(name: str, text: str = "") -> None:
    draft = OUT / f".{name}.{PID}"
    draft.write_text(text)
    draft.replace(OUT / name)


def save_when_told(leases: Leases, rank: int, launch: int) -> None:
    while not (OUT / f"rescue-{launch}").exists():
        time.sleep(0.01)
    leases.grant(PID, time.monotonic() + 600)
    put(f"saving-{rank}-{launch}", str(PID))
    time.sleep(SAVE_S)
    put(f"saved-{rank}-{launch}")
    os._exit(75)


def main() -> None:
    ms.set_device("CPU")
    init()
    env = RankEnv.from_env()
    assert (env.rank, env.world_size) == (get_rank(), get_group_size())
    leases = Leases(Path(os.environ["TTP_RUN_DIR"]))
    leases.arm(PID)
    threading.Thread(target=save_when_told, args=(leases, env.rank, env.launch), daemon=True).start()
    put(f"patience-{env.rank}-{env.launch}", f"{os.environ['MS_NODE_TIMEOUT']} {os.environ['MS_CPU_COMM_OP_TIMEOUT']}")
    add = ms.ops.AllReduce()
    for step in range(STEPS if env.launch == 0 else 2):
        total = add(ms.Tensor(np.array([env.rank + 1], np.float32))).asnumpy().item()
        assert total == env.world_size * (env.world_size + 1) / 2
        if step == 1:
            put(f"pid-{env.rank}-{env.launch}", str(PID))
        time.sleep(0.01)
    leases.disarm(PID)
    put(f"trained-{env.rank}-{env.launch}")


main()
