"""A barrier of all ranks between the reduced gradient and the update, for layouts of several shards.

With one shard any replica will do, and no barrier is needed. With several, one shard's group could start an update
whose gradient another group never gets; then no version is whole in every shard. Behind the barrier every rank holds
its final gradient: ranks that were left behind can make the same update. Where updates can be undone it is not needed
either: the ranks ahead go back.

Who is frozen in the barrier stands at the gate there, as it holds its gradient: it may be told to make the update
without the others (redo). So does who is left in a barrier that broke, because a peer died: it reports that, waits for
the freeze and raises only when none comes or the rescue is over.

It runs on the host, in a group of its own. On a device the host first waits for the gradient, because a host at the
barrier says nothing about its device; that costs the host its lead.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from ttp.core.layout import Layout
from ttp.core.messages import FaultKind
from ttp.errors import ConfigError
from ttp.processor.faults import describe
from ttp.processor.gate import Gate

POLL_S = 5e-5
"""Between two looks whether all have come, or the world is frozen."""
FREEZE_S = 30.0
"""How long a rank whose barrier broke waits to be frozen. Outlasts the loss of a controller."""


class Frozen(Protocol):
    """The processor, as the barrier needs it."""

    gate: Gate

    def report(self, kind: FaultKind, text: str, detail: str = "") -> None:
        """This rank cannot train on."""


def needs_barrier(layout: Layout, undo: str | None) -> bool:
    """Whether an update of this layout has to wait until all ranks can make it.

    Shards that the same ranks hold are never at different versions: only distinct replica groups need to agree.
    """
    return len(set(layout.groups.values())) > 1 and undo is None


class UpdateBarrier:
    """To be made by all ranks at the same point of their programs: it makes a process group.

    Args:
        world_size: ranks of the job; all of them take part.
        device: where the state lives.
        processor: of this rank.
        reduced: called when the gradient is final, before anybody is waited for.
        timeout: after which a rank that does not come is an error; None: that of torch, half an hour, because ranks
            may wait for each other for good reasons. The death of a rank is an error at once.

    Raises:
        ConfigError: there is no process group of this size yet.
    """

    def __init__(
        self,
        world_size: int,
        device: torch.device,
        processor: Frozen,
        reduced: Callable[[], None] = lambda: None,
        timeout: timedelta | None = None,
    ) -> None:
        ready = dist.is_available() and dist.is_initialized()
        if not ready or dist.get_world_size() != world_size:
            found = f"has {dist.get_world_size()} ranks" if ready else "is not initialised"
            raise ConfigError(
                f"a layout of several shards needs a process group of all {world_size} ranks for the barrier before "
                f"each update, and torch.distributed {found}: call init_process_group() before wrap_optimizer(), or "
                'give wrap_optimizer() undo="preimage"'
            )
        self._device, self._processor, self._reduced = device, processor, reduced
        self._group = dist.new_group(backend="gloo", timeout=timeout)

    def wait(self) -> None:
        """Return when every rank holds its final gradient, or this one is to make the update without them.

        Raises:
            RuntimeError: a rank died or does not come: like any collective of the program.
        """
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        self._reduced()
        gate = self._processor.gate
        with gate.nearby():
            self._meet(gate)

    def _meet(self, gate: Gate) -> None:
        try:
            work = dist.barrier(group=self._group, async_op=True)
            while not work.is_completed():
                if gate.closed and gate.stand_aside():
                    return
                time.sleep(POLL_S)
            work.wait()
        except RuntimeError as problem:
            if not self._rescued(problem):
                raise

    def _rescued(self, problem: RuntimeError) -> bool:
        """The barrier broke, the gradient is whole: whether the update is to be made all the same."""
        self._processor.report(FaultKind.COLLECTIVE, f"the barrier before the update broke: {describe(problem)}")
        gate, deadline = self._processor.gate, time.monotonic() + FREEZE_S
        while not gate.closed and time.monotonic() < deadline:
            time.sleep(POLL_S)
        return gate.closed and gate.stand_aside()
