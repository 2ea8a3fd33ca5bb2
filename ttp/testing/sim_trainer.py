"""The training thread of a simulated rank: a toy training step with the real gate.

A step waits for data, runs forward and backward, joins the all-reduce and, where there are several shards and updates
cannot be undone, a barrier; then it updates. A rank that is frozen while it waits in the barrier, or whose barrier
broke, stops at the gate. Each shard is written word by word, so that a copy taken during an update is seen to be torn.
The thread is a generator that yields the seconds until its next move, or ``None`` when it waits for other ranks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, TypeVar

from ttp.core import messages as m
from ttp.core.layout import Shard, Version
from ttp.core.rank import events as ev
from ttp.core.restore_messages import Candidate, RestoreDecision
from ttp.processor.gate.gate import Gate
from ttp.testing.toy import SLOTS, InvariantBroken, Words, contribution, draw, update

if TYPE_CHECKING:
    from ttp.testing.sim_rank import SimRank

T = TypeVar("T")
Thread = Generator[float | None, int | None, None]
FOR_EVER = float("inf")


class Parked(Exception):  # noqa: N818 - not an error
    """Raised where the training thread would block at the closed gate."""


class VirtualGate(Gate):
    """The real gate, but no thread can block at it in virtual time: ``Parked`` is raised instead."""

    __slots__ = ()

    def __init__(self, on_quiet: Callable[[], None], on_left: Callable[[], None], opened: Callable[[], None]) -> None:
        super().__init__(on_quiet, on_left)
        self._opened = Turnstile(opened)

    def _stand(self) -> None:
        self._on_quiet()
        raise Parked  # the thread stands there until it is resumed

    def passed(self) -> None:
        """Note that the training thread, which stood at the gate, has been resumed."""
        self._parked = False

    leave = Gate._leaves_gate


class Turnstile(threading.Event):
    """The event that the gate sets when it opens, for which no thread waits here: it calls back."""

    def __init__(self, opened: Callable[[], None]) -> None:
        super().__init__()
        self._opened = opened

    def set(self) -> None:
        """Call back, because the gate has opened."""
        self._opened()


class Trainer:
    """The training thread of one rank.

    Args:
        rank: the rank that the thread belongs to.
    """

    __slots__ = (
        "_barrier", "_held", "_live_random", "_order", "_parked", "_polling", "_rank", "_redoing", "_restored",
        "_thread", "_world", "gate", "hanging", "has_left", "image", "mark", "post_step_done", "random", "received",
        "redos", "shards",
    )  # fmt: skip

    def __init__(self, rank: SimRank) -> None:
        self.gate = VirtualGate(rank.on_quiet, rank.on_left, self._gate_opened)
        self.shards: dict[Shard, Words] = {}
        self._order: list[Shard] = []
        self.random = self._live_random = 0
        self.post_step_done = True
        self.hanging = False
        self.mark = 0
        self.received: dict[Shard, Words] | None = None
        """The shards of a continuing rank, kept or received from another rank; None: it reads the checkpoint."""
        self.image: tuple[Version, dict[Shard, Words]] | None = None
        """The version and state before the last update."""
        self.redos = 0
        """Number of updates that an order to redo allows although the job is frozen."""
        self._redoing = False
        self._barrier: bool | None = None
        """True: the barrier let this rank pass; False: it broke; None: it still waits for other ranks."""
        self._polling = False
        self._held: list[int | None] = []
        self._rank, self._world = rank, rank.world
        self._restored: RestoreDecision | None = None
        self._parked = False
        self.has_left = False
        """Whether the thread has left the closed gate by an exception, so that it makes no update."""
        self._thread: Thread = self._training()

    # ------------------------------------------------------------------------------------------------ from outside

    def go_on(self, value: int | None = None) -> None:
        """Run the thread until it waits again.

        Args:
            value: the result of the collective for which the thread waited, if it did; None if the collective failed.
        """
        if self.hanging:
            self._held.append(value)
            return
        try:
            wait = self._thread.send(value)
        except StopIteration:
            return
        if wait is not None:
            self._world.after(wait, self._rank.run, self.go_on)

    def hang(self, lasts_s: float) -> None:
        """Stop this thread for ``lasts_s`` seconds, or for good if that is infinite. The rest of the process runs."""
        self.hanging = True
        if lasts_s < FOR_EVER:
            self._world.after(lasts_s, self._rank.run, self._wake)

    def leave_gate(self) -> None:
        """Leave the closed gate if this thread stands there, also with an order to update. A moment later it raises."""
        if self._parked:
            self._parked, self.has_left, self.redos = False, True, 0
            self.gate.leave()
            self._world.after(self._rank.takes(0.02), self._rank.run, self.go_on)

    def _wake(self) -> None:
        self.hanging = False
        held, self._held = self._held, []
        for value in held:
            self.go_on(value)

    def decided(self, decision: RestoreDecision) -> None:
        """Take the decision about the version to restore, and continue."""
        self._restored = decision
        self._world.after(0.0, self._rank.run, self.go_on)

    def barrier_over(self, passed: int | None) -> None:
        """Take the result of the barrier; ``None`` means that it broke."""
        self._barrier = passed is not None
        self.look_up()

    def look_up(self) -> None:
        """If the thread waits in the barrier, let it check whether the barrier is over or the gate is closed."""
        if self._polling:
            self.go_on()

    def has_preimage(self) -> bool:
        """Return whether the image allows undoing the last update, be it torn or finished."""
        state = self.gate.state()
        if self.image is None or state.phase is m.Phase.UPDATING:
            return False
        return self.image[0] == (state.version if state.phase is m.Phase.TORN else state.version - 1)

    def saved_state(self, version: Version) -> dict[Shard, Words]:
        """Return the shards that a saver reads to write ``version``: those of the image, or the live ones."""
        torn = self.gate.state().phase is m.Phase.TORN
        if self.image is not None and self.image[0] == version and (torn or version != self.gate.version):
            return self.image[1]
        return self.shards

    def _gate_opened(self) -> None:
        if self._parked:
            self._world.after(0.0001, self._rank.run, self._unpark)

    def _unpark(self) -> None:
        if self._parked:
            self.go_on()

    # ----------------------------------------------------------------------------------------------------- the thread

    def _training(self) -> Thread:
        yield from self._restore()
        while self.gate.version < self._world.steps:
            gradient = yield from self._forward_backward()
            yield from self._update(gradient)
        self._world.reached("before return", self._rank)
        self.gate.mark_done()
        self._rank.put(ev.Observed(self.gate.version, m.Phase.DONE))
        self._rank.put(ev.Returned(m.GoodbyeReason.DONE))
        yield None

    def _restore(self) -> Thread:
        newest = self._world.storage.newest
        found = (Candidate(newest.version, newest.incident, f"step_{newest.version}"),) if newest else ()
        self._world.reached("in restore", self._rank)
        self._rank.put(ev.RestoreWanted(found, ()))
        while self._restored is None:
            yield None
        if self._restored.error:
            raise InvariantBroken(f"restore: {self._restored.error}")
        if self._world.transfers is not None:
            yield from self._world.transfers.state(self._rank, self._restored.version)
        self._load(self._restored.version)
        self._rank.put(ev.Based(self._restored.version))
        yield 0.001

    def _load(self, version: Version) -> None:
        state = self._world.state_at(version)
        self.gate.set_version(version)
        self._order = sorted(self._world.layout.shards_of(self._rank.rank))
        self.shards = self.received or {s: state.shards[s] for s in self._order}
        self.random = state.random[self._rank.rank]
        self.image = None
        self._write_page(version)

    def _forward_backward(self) -> Generator[float | None, int | None, int]:
        world, rank = self._world, self._rank
        world.reached("in data wait", rank)
        self.mark = 1
        yield rank.takes(0.004)
        if world.faults.raises(rank, "forward"):
            yield from self._raise("in forward")
        self._live_random = draw(self.random)
        world.reached("in forward", rank)
        self.mark = 2
        yield rank.takes(0.006)
        world.reached("in backward", rank)
        self.mark = 3
        yield rank.takes(0.003)
        part = contribution(list(self.shards.values()), self._live_random)
        world.collectives.arrive(rank, ("reduce", self.gate.version + 1), part, self.go_on)
        gradient = yield None
        if gradient is None:
            yield from self._raise("in a collective", m.FaultKind.COLLECTIVE)
        assert gradient is not None
        return gradient

    def _update(self, gradient: int) -> Thread:
        world, rank = self._world, self._rank
        if world.barrier:
            yield from self._pass_barrier()
        if world.faults.raises(rank, "refused"):
            yield from self._raise("an error that no restart repairs", wrong=True)
        self.mark = 5
        world.reached("before update", rank)
        yield from self._pass_gate()
        world.reached("update begun", rank)
        self.post_step_done = False
        if world.scenario.undo:
            self.image = self.gate.version, dict(self.shards)
        for word in (0, 1):
            for shard in self._order:
                self._write(shard, word, gradient)
                yield rank.takes(0.001)
                world.reached("in update", rank)
            if word == 0 and world.faults.raises(rank, "update"):
                yield from self._raise("in update")
        self.random = self._live_random
        self._write_page(Version(self.gate.version + 1))
        self._redoing = False
        self.gate.end_update()
        rank.copies.updated(self.gate.version)
        world.trace(rank.name, f"finished {self.gate.version}")
        self.mark = 0
        world.reached("update ended", rank)
        yield rank.takes(0.0005)
        self.post_step_done = True
        world.reached("in scheduler", rank)

    def _pass_barrier(self) -> Thread:
        self.mark, self._barrier = 4, None
        self._world.reached("in barrier", self._rank)
        self._world.collectives.arrive(self._rank, ("barrier", self.gate.version + 1), 0, self.barrier_over)
        with self.gate.nearby():
            passes = yield from self._meet()
        if not passes:
            yield from self._raise("in a broken barrier", m.FaultKind.COLLECTIVE)

    def _meet(self) -> Generator[float | None, int | None, bool]:
        """Wait in the barrier. Return True if the rank may update: the barrier is complete, or the gate admits it."""
        while not self._barrier:
            if self._barrier is False:
                self._rank.put(ev.Raised(m.FaultKind.COLLECTIVE, f"rank {self._rank.rank}: the barrier broke"))
                yield from self._poll(lambda: self.gate.closed)
            if self.gate.closed and (yield from self._at_gate(self.gate.stand_aside)):
                return True
            if self._barrier is False:
                return False
            yield from self._poll(lambda: self.gate.closed or self._barrier is not None)
        return True

    def _poll(self, over: Callable[[], bool]) -> Thread:
        while not over():
            self._polling = True
            yield None
            self._polling = False

    def _at_gate(self, ask: Callable[[], T]) -> Generator[float | None, int | None, T]:
        while True:
            try:
                return ask()
            except Parked:
                self._parked = True
                self._world.reached("parked", self._rank)
                yield None
                self._parked = False
                self.gate.passed()
                if self.has_left:
                    yield from self._raise("at the gate")

    def _pass_gate(self) -> Thread:
        yield from self._at_gate(self.gate.begin_update)
        if self._rank.acked:
            if not self.redos:
                raise InvariantBroken(f"I3: {self._rank.name} begins an update after it acknowledged the freeze")
            self.redos -= 1
            self._redoing = True

    def _write(self, shard: Shard, word: int, gradient: int) -> None:
        if self._rank.acked and not self._redoing:
            raise InvariantBroken(f"I3: {self._rank.name} writes to its state after it acknowledged the freeze")
        a, b = self.shards[shard]
        self.shards[shard] = (update(a, gradient), b) if word == 0 else (a, update(b, gradient))

    def _write_page(self, version: Version) -> None:
        self._world.pages(self._rank.host)[self._rank.rank, version % SLOTS] = (version, self.random)
        if self._world.scenario.mirror:
            self._rank.mirror(version, self.random)

    def _raise(self, where: str, kind: m.FaultKind = m.FaultKind.EXCEPTION, *, wrong: bool = False) -> Thread:
        self._world.trace(self._rank.name, f"raises {where}")
        self.gate.mark_torn()
        self._rank.put(ev.Raised(kind, f"rank {self._rank.rank} raised {where}", wrong=wrong))
        while True:
            yield None
