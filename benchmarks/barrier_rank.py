"""A rank that only passes barriers, without updates. Started by ``benchmarks.barrier``.

Arguments: twice the number of blocks and the number of barriers in a block, first for ranks on one host, then for ranks
on many hosts. Prints a JSON list of two objects, for one host and for many: for
every block the microseconds of one barrier (``us``) and of this process's CPU for one barrier (``cpu_us``).
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from ttp.adapters.torch.loop.barrier import UpdateBarrier
from ttp.core.messages import FaultKind
from ttp.processor.gate.gate import Gate
from ttp.processor.liveness.sentinel import Sentinel


class Processor:
    """The parts of a processor that the barrier needs."""

    def __init__(self, page_dir: Path | None) -> None:
        self.gate, self.page_dir = Gate(), page_dir
        self.on_death: Callable[[], None] = lambda: None

    def report(self, kind: FaultKind, text: str, detail: str = "") -> None:
        """See ``ttp.processor.processor.Processor``."""
        raise RuntimeError(text)


def main(pages: Path, one_host: tuple[int, int], many_hosts: tuple[int, int]) -> None:
    """Measure, and print the results."""
    pages.mkdir(mode=0o700, exist_ok=True)
    sentinel = Sentinel(pages, dist.get_rank(), f"{dist.get_rank()}", 0)
    found = [measure(pages, *one_host), measure(None, *many_hosts)]
    print(json.dumps(found), flush=True)
    dist.barrier()
    sentinel.close()


def measure(page_dir: Path | None, blocks: int, meetings: int) -> dict[str, list[float]]:
    """Measure blocks of barriers, after one block that is not counted.

    Args:
        page_dir: the directory of this host's sentinels; None: as if each rank had its own host.
        blocks: number of counted blocks.
        meetings: number of barriers in a block.
    """
    barrier = UpdateBarrier(dist.get_world_size(), (), Processor(page_dir))
    took, cpu = [], []
    for _ in range(blocks + 1):
        barrier.wait()
        begin, spent = time.perf_counter_ns(), time.process_time_ns()
        for _ in range(meetings):
            barrier.wait()
        took.append((time.perf_counter_ns() - begin) / meetings / 1e3)
        cpu.append((time.process_time_ns() - spent) / meetings / 1e3)
    return {"us": took[1:], "cpu_us": cpu[1:]}


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    numbers = [int(argument) for argument in sys.argv[1:]]
    main(Path(os.environ["TTP_RUN_DIR"]) / "pages", (numbers[0], numbers[1]), (numbers[2], numbers[3]))
    dist.barrier()
    dist.destroy_process_group()
