"""A rank that connects its process groups anew, as a survivor does with ``keep``. Started by ``benchmarks.exchange``.

Argument: the number of groups. Rank 0 prints a JSON list: the milliseconds of each exchange, from the first broken
connection until all ranks have finished a collective over the new connections.
"""

from __future__ import annotations

import json
import sys
import time

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from ttp.adapters.torch.regroup import Groups

EXCHANGES = 3


def main(count: int) -> None:
    """Exchange the backends of ``count`` groups ``EXCHANGES`` times, and print how long each exchange took."""
    groups = Groups(seat=False)
    dist.init_process_group("gloo")
    for _ in range(count - 1):
        dist.new_group()
    groups.enter()
    rank, took, stores = dist.get_rank(), [], []
    for launch in range(1, EXCHANGES + 1):
        listening = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if rank == 0 else None
        stores.append(listening)  # the store serves as long as the object lives
        port = [None if listening is None else listening.port]
        dist.broadcast_object_list(port)
        dist.barrier()
        begin = time.perf_counter()
        groups.let_go()
        groups.meet("127.0.0.1", int(port[0] or 0), 60.0, "")
        groups.renew(launch)
        dist.barrier()
        took.append((time.perf_counter() - begin) * 1e3)
    if rank == 0:
        print(json.dumps(took), flush=True)
    dist.barrier()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]))
    dist.destroy_process_group()
