"""One simulated rank: the real machine and the real gate, around a toy trainer and a toy saver.

What ``ttp.processor.processor`` does with threads is done here with events in virtual time, in the same order: an inbox
in front of the machine, one saver that works off jobs, a training thread that stands still at the closed gate.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Generator
from functools import partial
from typing import Protocol, cast

from ttp.core import messages as m
from ttp.core import processor_machine as pm
from ttp.core.layout import Layout, Rank, Shard, Version
from ttp.errors import EXIT_NOT_SAVED
from ttp.processor.gate import Gate
from ttp.testing.network import Stream
from ttp.testing.toy import SLOTS, InvariantBroken, ToyState, ToyStorage, Words, contribution, digest, draw, update

Pages = dict[tuple[Rank, int], tuple[Version, int]]
"""Shared memory of one host: (rank, slot) -> (version, random)."""


class Killed(Exception):  # noqa: N818 - not an error
    """The process is gone; nothing of it runs on."""


class Parked(Exception):  # noqa: N818 - not an error
    """The training thread waits at the gate."""


class Turnstile:
    """Stands in for the event on which the gate blocks: there is no thread to block here."""

    def __init__(self, opened: Callable[[], None]) -> None:
        self._opened = opened

    def clear(self) -> None:
        """Nothing to reset."""

    def set(self) -> None:
        """The gate has opened."""
        self._opened()

    def wait(self) -> None:
        """The training thread would block."""
        raise Parked


class World(Protocol):
    """What a rank needs from the simulation around it."""

    now: float
    rng: random.Random
    layout: Layout
    storage: ToyStorage
    steps: int

    def after(self, seconds: float, what: Callable[[], None]) -> None:
        """Do ``what`` in so many seconds."""

    def at(self, when: float, what: Callable[[], None]) -> None:
        """Do ``what`` at that time."""

    def trace(self, who: str, what: str) -> None:
        """Write down what happens."""

    def reached(self, point: str, rank: SimRank) -> None:
        """The rank is at a point of ``scenario.POINTS``; raises ``Killed`` if it dies there."""

    def connect(self, rank: SimRank, start_controller: bool) -> None:
        """Open a stream."""

    def arrive(self, rank: SimRank, step: int, part: int) -> None:
        """Join the all-reduce of ``step``."""

    def ended(self, rank: SimRank) -> None:
        """The process is gone."""

    def pages(self, host: str) -> Pages:
        """Shared memory of a host."""
        ...

    def state_at(self, version: Version) -> ToyState:
        """What the checkpoint of ``version`` says."""
        ...

    def write_fails(self, rank: SimRank) -> bool:
        """Whether a save of this rank fails."""
        ...

    def commit_fails(self, rank: SimRank) -> bool:
        """Whether a commit of this rank fails."""
        ...

    def raises(self, rank: SimRank, where: str) -> bool:
        """Whether the training code raises here."""
        ...


class SimRank:
    """See the module.

    Args:
        world: the simulation.
        hello: who it is.
        manners: waits of the machine.
    """

    def __init__(self, world: World, hello: m.Hello, manners: pm.Manners) -> None:
        self.world, self.hello, self.rank, self.host = world, hello, hello.rank, hello.host
        self.name = f"rank {self.rank}#{hello.launch}"
        self.machine = pm.ProcessorMachine(hello, manners, world.now)
        self.gate = Gate(self._on_quiet)
        self.gate._opened = cast("object", Turnstile(self._gate_opened))  # type: ignore[assignment]
        self.alive = True
        self.exit_code: int | None = None
        self.stream: Stream | None = None
        self.shards: dict[Shard, Words] = {}
        self.random = self._live_random = 0
        self.settled = True
        self.acked = False
        self._inbox: deque[pm.Event] = deque()
        self._pumping = False
        self._timer = 0
        self._jobs: deque[Callable[[], Generator[float, None, None]]] = deque()
        self._saving = False
        self._cancelled: list[bool] = [False]
        self._train: Generator[float | None, int | None, None] = self._training()
        self._parked = False
        self._restored: m.RestoreDecision | None = None
        self._mood = world.rng.choice((0.2, 1.0, 1.0, 3.0))  # some ranks are slow
        world.after(0.0, self._plan_timer)
        world.after(world.rng.random() * 0.02, self._go_on)

    # -------------------------------------------------------------------------------------------------------- training

    @property
    def truth(self) -> tuple[Version, m.Phase]:
        """How the copy really stands."""
        state = self.gate.state()
        return state.version, state.phase

    def _training(self) -> Generator[float | None, int | None, None]:
        yield from self._restore()
        while self.gate.version < self.world.steps:
            gradient = yield from self._forward_backward()
            if not (yield from self._update(gradient)):
                return
        self.world.reached("before return", self)
        self.gate.mark_done()
        self.put(pm.Returned(m.GoodbyeReason.DONE))
        yield None

    def _restore(self) -> Generator[float | None, int | None, None]:
        newest = self.world.storage.newest
        found = (m.Candidate(newest.version, newest.incident, f"step_{newest.version}"),) if newest else ()
        self.world.reached("in restore", self)
        self.put(pm.RestoreWanted(found, ()))
        while self._restored is None:
            yield None
        if self._restored.error:
            raise InvariantBroken(f"restore: {self._restored.error}")
        self._load(self._restored.version)
        self.put(pm.Based(self._restored.version))
        yield 0.001

    def _load(self, version: Version) -> None:
        state = self.world.state_at(version)
        self.gate.set_version(version)
        self.shards = {s: state.shards[s] for s in self.world.layout.shards_of(self.rank)}
        self.random = state.random[self.rank]
        self._write_page()

    def _forward_backward(self) -> Generator[float | None, int | None, int]:
        self.world.reached("in data wait", self)
        yield self._takes(0.004)
        if self.world.raises(self, "forward"):
            yield from self._raise("in forward")
        self._live_random = draw(self.random)
        self.world.reached("in forward", self)
        yield self._takes(0.006)
        self.world.reached("in backward", self)
        yield self._takes(0.003)
        part = contribution([self.shards[s] for s in sorted(self.shards)], self._live_random)
        self.world.arrive(self, self.gate.version + 1, part)
        gradient = yield None
        if gradient is None:
            yield from self._raise("in a collective", m.FaultKind.COLLECTIVE)
        assert gradient is not None
        return gradient

    def _update(self, gradient: int) -> Generator[float | None, int | None, bool]:
        self.world.reached("before update", self)
        while True:
            try:
                self.gate.begin_update()
                break
            except Parked:
                self._parked = True
                self.world.reached("parked", self)
                yield None
                self._parked = self.gate._parked = False
        self.world.reached("update begun", self)
        self.settled = False
        for word in (0, 1):
            for shard in sorted(self.shards):
                self._write(shard, word, gradient)
                yield self._takes(0.001)
                self.world.reached("in update", self)
            if word == 0 and self.world.raises(self, "update"):
                yield from self._raise("in update")
        self.random = self._live_random
        self._write_page(ahead=1)
        self.gate.end_update()
        self.world.trace(self.name, f"finished {self.gate.version}")
        self.world.reached("update ended", self)
        yield self._takes(0.0005)
        self.settled = True
        self.world.reached("in scheduler", self)
        return True

    def _write(self, shard: Shard, word: int, gradient: int) -> None:
        if self.acked:
            raise InvariantBroken(f"I3: {self.name} writes to its state after it acknowledged the freeze")
        a, b = self.shards[shard]
        self.shards[shard] = (update(a, gradient), b) if word == 0 else (a, update(b, gradient))

    def _write_page(self, ahead: int = 0) -> None:
        version = Version(self.gate.version + ahead)
        self.world.pages(self.host)[self.rank, version % SLOTS] = (version, self.random)

    def _raise(self, where: str, kind: m.FaultKind = m.FaultKind.EXCEPTION) -> Generator[float | None, None, None]:
        self.world.trace(self.name, f"raises {where}")
        self.gate.mark_torn()
        self.put(pm.Raised(kind, f"rank {self.rank} raised {where}"))
        while True:
            yield None

    def preempt(self) -> None:
        """SIGTERM."""
        if self.alive:
            self.put(pm.Raised(m.FaultKind.PREEMPTED, f"rank {self.rank} was sent SIGTERM"))

    def resume(self, gradient: int | None) -> None:
        """The collective is over; ``None``: it failed."""
        self._go_on(gradient)

    def _gate_opened(self) -> None:
        if self._parked:
            self.world.after(0.0001, self._unpark)

    def _unpark(self) -> None:
        if self._parked:
            self._go_on()

    def _go_on(self, value: int | None = None) -> None:
        if not self.alive:
            return
        try:
            wait = self._train.send(value)
        except (StopIteration, Killed):
            return
        if wait is not None:
            self.world.after(wait, self._go_on)

    def _takes(self, seconds: float) -> float:
        return seconds * self._mood * (0.5 + self.world.rng.random())

    # ------------------------------------------------------------------------------------------------- the owner thread

    def put(self, event: pm.Event) -> None:
        """Into the inbox."""
        if self.alive and not self.machine.gone:
            self._inbox.append(event)
            if not self._pumping:
                self._pumping = True
                self.world.after(self.world.rng.random() * 0.0002, self._pump)

    def _pump(self) -> None:
        self._pumping = False
        if not self.alive or not self._inbox:
            return
        try:
            self._feed(self._inbox.popleft())
        except Killed:
            return
        if self._inbox and self.alive:
            self._pumping = True
            self.world.after(self.world.rng.random() * 0.0002, self._pump)

    def _feed(self, event: pm.Event) -> None:
        for action in self.machine.on_event(event, self.world.now):
            self._perform(action)
        self._plan_timer()

    def _plan_timer(self) -> None:
        deadline = self.machine.deadline() if self.alive else None
        if deadline is not None:
            self._timer += 1
            self.world.at(max(deadline, self.world.now), lambda mine=self._timer: self._time(mine))  # type: ignore[misc]

    def _time(self, mine: int) -> None:
        if mine != self._timer or not self.alive or self.machine.gone:
            return
        version, phase = self.truth
        try:
            self._feed(pm.Observed(version, phase))
        except Killed:
            return
        deadline = self.machine.deadline()
        if self.alive and deadline is not None and deadline <= self.world.now:
            raise InvariantBroken(f"I6: the machine of {self.name} spins: its deadline does not move")

    def _perform(self, action: pm.Action) -> None:
        match action:
            case pm.Connect(start_controller):
                self.world.connect(self, start_controller)
            case pm.Send(report):
                self._send(report)
            case pm.CloseGate():
                state = self.gate.close()
                self.put(pm.Quiet(state.version, state.phase, state.parked, self.settled))
            case pm.OpenGate():
                self.acked = False
                self.gate.open()
            case pm.StartSave(save):
                self._cancelled = cancelled = [False]
                self._submit(lambda: self._save(save, cancelled))
            case pm.CancelSave():
                self._cancelled[0] = True
            case pm.StartCommit(commit):
                self._submit(lambda: self._commit(commit))
            case pm.Rejected(code, text):
                self.world.trace(self.name, f"rejected: {code.value} {text}")
                self.exit(EXIT_NOT_SAVED)
            case pm.Decided(decision):
                self._restored = decision
                self.world.after(0.0, self._go_on)
            case pm.LetGo(rescued):
                self.exit(0 if rescued else 1)
            case pm.Exit(code, text):
                self.world.trace(self.name, f"exits {code}: {text}")
                self.exit(code)
            case _:
                pass  # leases and pages are the edges' business

    def _send(self, report: m.Report) -> None:
        if isinstance(report, m.Frozen) and report.final:
            self.acked = True
        kind = type(report).__name__
        self.world.trace(self.name, f"> {kind}")
        self.world.reached(f"before {kind}", self)
        if self.stream is not None:
            self.stream.report(report)
        self.world.reached(f"after {kind}", self)

    def _on_quiet(self) -> None:
        if self.machine.incident:
            state = self.gate.state()
            self.put(pm.Quiet(state.version, state.phase, state.parked, self.settled))

    # ---------------------------------------------------------------------------------------------------------- stream

    def attached(self, stream: Stream) -> None:
        """A stream is open."""
        self.stream = stream
        self.put(pm.StreamUp())

    def on_order(self, stream: Stream, order: m.Order) -> None:
        """See ``RankEnd``."""
        if self.alive:
            self.put(pm.OrderReceived(order))

    def on_down(self, stream: Stream | None) -> None:
        """See ``RankEnd``."""
        if self.alive and stream is self.stream:
            self.stream = None
            self.put(pm.StreamDown("broken"))

    # ----------------------------------------------------------------------------------------------------------- saver

    def _submit(self, job: Callable[[], Generator[float, None, None]]) -> None:
        self._jobs.append(job)
        if not self._saving:
            self._saving = True
            self.world.after(0.0001, lambda: self._work(None))

    def _work(self, job: Generator[float, None, None] | None) -> None:
        while self.alive:
            if job is None:
                if not self._jobs:
                    self._saving = False
                    return
                job = self._jobs.popleft()()
            try:
                wait = next(job)
            except StopIteration:
                job = None
            except Killed:
                return
            else:
                self.world.after(wait, partial(self._work, job))
                return

    def _save(self, order: m.Save, cancelled: list[bool]) -> Generator[float, None, None]:
        pieces: list[m.Piece] = []
        self.world.reached("before save", self)
        fails = self.world.write_fails(self)
        for shard in order.order.shards:
            file = f"{shard}_{order.generation}"
            self.world.storage.begin(order.draft, file, self.rank)
            a = self.shards[shard][0]
            yield self._takes(0.004)
            self.world.reached("in save", self)
            if cancelled[0]:
                return
            if fails:
                self.put(pm.WriteFailed(order.incident, order.generation, "OSError: no space left on device"))
                return
            pieces.append(self._durable(order, file, "shard", shard, (a, self.shards[shard][1])))
        if order.order.pages:
            file = f"pages_{self.host}_{order.generation}"
            self.world.storage.begin(order.draft, file, self.rank)
            yield self._takes(0.001)
            pages = self.world.pages(self.host)
            slots = ((r, pages.get((r, order.version % SLOTS))) for r in order.order.pages)
            found = tuple((r, slot[1]) for r, slot in slots if slot is not None and slot[0] == order.version)
            pieces.append(self._durable(order, file, "rank_local", "", found))
        self.world.reached("after save", self)
        if not cancelled[0]:
            self.put(pm.PiecesWritten(order.incident, order.generation, tuple(pieces)))

    def _durable(self, order: m.Save, file: str, kind: str, shard: str, content: tuple[object, ...]) -> m.Piece:
        self.world.storage.finish(order.draft, file, content)
        return m.Piece(file, 8, digest(content), kind, shard, self.rank)

    def _commit(self, order: m.Commit) -> Generator[float, None, None]:
        self.world.reached("before commit", self)
        yield self._takes(0.001)
        self.world.reached("in commit", self)
        if self.world.commit_fails(self):
            self.put(pm.CommitBroken(order.incident, order.generation, "OSError: input/output error"))
            return
        self.world.storage.commit(order)
        self.world.trace(self.name, f"renamed step {order.version}")
        self.world.reached("after rename", self)
        yield self._takes(0.001)
        self.put(pm.CommitDone(order.incident, order.generation, f"step_{order.version}", 8))

    # ---------------------------------------------------------------------------------------------------------- leaving

    def exit(self, code: int | None) -> None:
        """The process ends; ``None``: it is killed."""
        if not self.alive:
            return
        self.alive, self.exit_code = False, code
        self.world.trace(self.name, "is killed" if code is None else f"ends with {code}")
        self.world.ended(self)
