"""A device without free memory: the memory that the rescue needs was allocated at start."""

from __future__ import annotations

import torch

from tests.gpu.stand import Stand, Thread
from tests.gpu.training import Training, check_saved_behind_a_hang

LEFT = 16 << 20
"""Bytes that are left free, for what the driver itself may want."""


def full(stand: Stand) -> None:
    """Fill the device's memory up to the last 16 MiB, let it hang, and save the state."""
    training = Training(stand)
    with stand.protected():
        training.protect()
        Thread(stand, [training.step]).join()  # its cuBLAS handle is used again by the thread below
        ballast = _fill(stand)
        before = _allocations(stand)
        check_saved_behind_a_hang(stand, training, stand.no_memory)
        assert _allocations(stand) == before, "memory of the device was allocated meanwhile"
        del ballast


def _fill(stand: Stand) -> list[torch.Tensor]:
    """Allocate memory in ever smaller parts until there is none."""
    taken: list[torch.Tensor] = []
    if not stand.real:
        return taken
    size = torch.cuda.mem_get_info(stand.device)[0]
    while size > LEFT:
        try:
            taken.append(torch.empty(size, dtype=torch.uint8, device=stand.device))
        except torch.OutOfMemoryError:
            size //= 2
        else:
            size = min(size, torch.cuda.mem_get_info(stand.device)[0])
    stand.numbers["free_mb"] = torch.cuda.mem_get_info(stand.device)[0] >> 20
    return taken


def _allocations(stand: Stand) -> tuple[int, ...]:
    """Return the number of segments that torch has got from the driver, and of its retries."""
    if not stand.real:
        return ()
    stats = torch.cuda.memory_stats(stand.device)
    return int(stats["segment.all.allocated"]), int(stats["num_alloc_retries"])
