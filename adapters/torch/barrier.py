"""A barrier of all ranks between the reduced gradient and the update, for layouts of several shards.

With one shard any replica will do, and no barrier is needed. With several, one shard's group could start an update
whose gradient another group never gets; then no version is whole in every shard. Behind the barrier every rank holds
its final gradient: ranks that were left behind can make the same update. Where updates can be undone it is not needed
either: the ranks ahead go back.

It runs on the host, in a group of its own. On a device the host first waits for the gradient, because a host at the
barrier says nothing about its device; that costs the host its lead.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from ttp.core.layout import Layout
from ttp.errors import ConfigError


def needs_barrier(layout: Layout, undo: str | None) -> bool:
    """Whether an update of this layout has to wait until all ranks can make it."""
    return len(layout.groups) > 1 and undo is None


class UpdateBarrier:
    """To be made by all ranks at the same point of their programs: it makes a process group.

    Args:
        world_size: ranks of the job; all of them take part.
        device: where the state lives.
        timeout: after which a rank that does not come is an error; None: that of torch, half an hour, because ranks
            may wait for each other for good reasons. The death of a rank is an error at once.

    Raises:
        ConfigError: there is no process group of this size yet.
    """

    def __init__(self, world_size: int, device: torch.device, timeout: timedelta | None = None) -> None:
        ready = dist.is_available() and dist.is_initialized()
        if not ready or dist.get_world_size() != world_size:
            found = f"has {dist.get_world_size()} ranks" if ready else "is not initialised"
            raise ConfigError(
                f"a layout of several shards needs a process group of all {world_size} ranks for the barrier before "
                f"each update, and torch.distributed {found}: call init_process_group() before wrap_optimizer(), or "
                'give wrap_optimizer() undo="preimage"'
            )
        self._device = device
        self._group = dist.new_group(backend="gloo", timeout=timeout)

    def wait(self) -> None:
        """Return when every rank holds its final gradient.

        Raises:
            RuntimeError: a rank died or does not come: like any collective of the program.
        """
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        dist.barrier(group=self._group)
