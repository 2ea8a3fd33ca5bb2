"""Makes all ranks wait for each other between the reduced gradient and the update, in layouts of several shards.

With one shard no barrier is needed, because any replica can be saved. With several shards, one replica group could
begin an update whose gradient another group never gets; then no version is whole in every shard. After the barrier
every rank holds its final gradient, so a rank that has not made the update yet can still make it. Where updates can be
undone no barrier is needed either: ranks that have made the update go back.

A rank that is frozen in the barrier counts as standing at the gate, because it holds its gradient: it may be ordered to
make the update without the others (redo). So does a rank whose barrier broke because a peer died: it reports the
broken barrier and waits for the freeze. It raises if no freeze comes within ``FREEZE_S``, or if the gate opens again
without an order to redo.

Ranks of a host meet in shared memory (``gate.meeting``). In a job of several hosts, one thread of each host
(``Courier``) meets the couriers of the other hosts over gloo, in a process group of its own. The training thread sleeps
on a word of memory, and is woken when its gate is closed or a neighbour dies. Decision 33 says why this is sound.

The barrier runs on the host. Where the state is on a device, the host first waits until the device has the gradient,
because the host's arrival says nothing about its device; so the host cannot run ahead of the device.
``TTP_STREAM_BARRIER=1`` makes the device wait instead (``stream_barrier.py``).
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist

from ttp.adapters.torch.device.accelerator import Runtime
from ttp.adapters.torch.loop.stream_barrier import StreamBarrier, meet
from ttp.adapters.torch.sharding.exchange import gather_bytes
from ttp.core.layout import Layout
from ttp.core.messages import FaultKind
from ttp.errors import ConfigError
from ttp.processor.faults import describe
from ttp.processor.gate.gate import Gate
from ttp.processor.gate.meeting import BrokenError, Meeting, run
from ttp.processor.gate.meeting_place import find_place

log = logging.getLogger("ttp.adapters.torch")

FREEZE_S = 30.0
"""Seconds that a rank whose barrier broke waits to be frozen: long enough to outlast the loss of a controller."""
COMES_S = 1800.0
"""Seconds that a rank waits for the others in the barrier, as torch in collectives: they may have good reasons to be
late. The death of a rank ends the wait at once."""


class Frozen(Protocol):
    """The part of the processor that the barrier uses."""

    gate: Gate
    on_death: Callable[[], None]

    @property
    def page_dir(self) -> Path | None:
        """A directory in which ranks of this host may share memory."""

    def report(self, kind: FaultKind, text: str, detail: str = "") -> None:
        """Report to the controller that this rank cannot train on."""


def needs_barrier(layout: Layout, undo: str | None) -> bool:
    """Return whether, in this layout, an update has to wait until all ranks have their gradients.

    Shards that are held by the same ranks are always at the same version, so one replica group needs no barrier.
    """
    return len(set(layout.groups.values())) > 1 and undo is None


class UpdateBarrier:
    """The barrier before an update. The constructor is collective: all ranks call it at the same point.

    With several hosts the constructor makes a process group.

    Args:
        world_size: number of ranks of the job; all of them take part.
        runtimes: the devices on which the state is.
        processor: the processor of this rank.

    Raises:
        ConfigError: torch.distributed has no default process group of ``world_size`` ranks.
    """

    def __init__(self, world_size: int, runtimes: Sequence[Runtime], processor: Frozen) -> None:
        ready = dist.is_available() and dist.is_initialized()
        if not ready or dist.get_world_size() != world_size:
            found = f"has {dist.get_world_size()} ranks" if ready else "is not initialised"
            raise ConfigError(
                f"a layout of several shards needs a process group of all {world_size} ranks for the barrier before "
                f"each update, and torch.distributed {found}: call init_process_group() before wrap_optimizer(), or "
                'give wrap_optimizer() undo="preimage"'
            )
        self._runtimes, self._processor = runtimes, processor
        place = find_place(dist.get_rank(), processor.page_dir, gather_bytes)
        wide = len(place.firsts) > 1
        self.meeting = Meeting(place.words, place.number, len(place.ranks), wide=wide, gone=place.gone)
        self._turn = 0
        self._courier: Courier | None = None
        if wide:
            group = dist.new_group(list(place.firsts), backend="gloo")
            if place.number == 0:
                self._courier = Courier(self.meeting, group)
        text = "before updates rank %d waits for ranks %s in shared memory, and for %d hosts (or lone ranks) over gloo"
        log.info(text, dist.get_rank(), place.ranks, len(place.firsts) - 1)
        self.stream: StreamBarrier | None = None
        """The barrier on the training's stream; None: the host waits."""
        processor.on_death = self._warn

    def let_device_wait(self, runtime: Callable[[], Runtime], why_not: Callable[[], str]) -> StreamBarrier | None:
        """Let the device wait instead of its host, if its driver can do that.

        Args:
            runtime: returns the device.
            why_not: see ``StreamBarrier``.

        Returns:
            The barrier on the training's stream; None: the host waits.
        """
        gate = self._processor.gate
        try:
            self.stream = StreamBarrier(self.meeting, runtime(), why_not, lambda: gate.closed, COMES_S)
        except (OSError, AttributeError, RuntimeError) as problem:
            log.warning("the host waits for its device in the barrier before each update: %s", describe(problem))
        return self.stream

    def wait(self) -> None:
        """Wait until every rank holds its final gradient, or until this rank is ordered to make the update alone.

        Raises:
            RuntimeError: a rank died or did not come in time; a collective of the program raises the same type.
        """
        self._turn += 1
        gate, stream = self._processor.gate, self.stream
        if stream is not None and stream.ready(self._turn):
            stream.queue(self._turn, gate.version + 1)
            return
        for runtime in self._runtimes:
            runtime.event(side=False).synchronize()
        with gate.nearby(self._ring):
            try:
                meet(self.meeting, self._turn, COMES_S, lambda: gate.closed and gate.stand_aside())
            except (BrokenError, TimeoutError) as problem:
                if not self._rescued(problem):
                    raise RuntimeError(f"the barrier before the update broke: {self._why(problem)}") from problem
        if stream is not None:
            stream.watch(self._turn)

    def updated(self) -> None:
        """Note that the host has finished the update."""
        if self.stream is not None:
            self.stream.updated()

    def close(self) -> None:
        """End the threads of the barrier. The training thread may make no more updates."""
        if self.stream is not None:
            self.stream.close()
        if self._courier is not None:
            self._courier.close()

    def _ring(self) -> None:
        """Wake all ranks that wait in the barrier, so that the training thread of this one checks its gate."""
        with contextlib.suppress(OSError):
            run(self.meeting.ring())

    def _warn(self) -> None:
        """Wake all ranks that wait in the barrier, so that they find out which neighbour has died."""
        with contextlib.suppress(OSError):
            run(self.meeting.warn())

    def _why(self, problem: Exception) -> str:
        courier = "" if self._courier is None else self._courier.problem
        return "; ".join(filter(None, (describe(problem), courier)))

    def _rescued(self, problem: Exception) -> bool:
        """Report the broken barrier and wait for the freeze. Returns whether this rank is to make the update anyway."""
        self._processor.report(FaultKind.COLLECTIVE, f"the barrier before the update broke: {self._why(problem)}")
        gate, deadline = self._processor.gate, time.monotonic() + FREEZE_S
        while not gate.closed and time.monotonic() < deadline:
            run(self.meeting.pause(lambda: gate.closed))
        return gate.closed and gate.stand_aside()


class Courier:
    """A thread that meets the couriers of the other hosts on behalf of all ranks of this host.

    Args:
        meeting: the meeting of the ranks of this host.
        group: a gloo process group of one rank of every host.
    """

    def __init__(self, meeting: Meeting, group: Any) -> None:
        self._meeting, self._group, self._closed = meeting, group, False
        self.problem = ""
        threading.Thread(target=self._run, name="ttp-courier", daemon=True).start()

    def close(self) -> None:
        """End the thread after its current meeting. Does not interrupt a meeting over gloo."""
        self._closed = True
        run(self._meeting.ring_front())

    async def _leave(self) -> bool:
        return self._closed

    def _run(self) -> None:
        turn = 1
        try:
            while run(self._meeting.all_here(turn, self._leave)):
                dist.barrier(group=self._group)
                run(self._meeting.release(turn))
                turn += 1
        except Exception as problem:
            self.problem = describe(problem)
            log.debug("this host no longer meets the others in the barrier before updates", exc_info=True)
            with contextlib.suppress(OSError):
                run(self._meeting.break_up())
