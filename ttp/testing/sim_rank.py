"""A simulated rank: the real machine and the real gate with a toy trainer and a toy saver.

Events in virtual time replace the threads of ``ttp.processor.processor``, in the same order: an inbox in front of the
machine, a saver (``sim_saver``), and a training thread that waits at the closed gate (``sim_trainer``). All their calls
pass through ``run``, so that a process that is killed or stopped does nothing.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from ttp.core import messages as m
from ttp.core.copy_messages import CopyTo, Keep, MirrorTo
from ttp.core.layout import Rank, Version
from ttp.core.rank import actions as act
from ttp.core.rank import events as ev
from ttp.core.rank.events import RankTimeouts
from ttp.core.rank.machine import ProcessorMachine
from ttp.core.stripes import PART_BYTES_MIN
from ttp.errors import EXIT_NOT_SAVED, EXIT_SAVED
from ttp.processor.gate.gate import GateState
from ttp.processor.state_inspector import Inspection
from ttp.testing.clock import Alarm, Process
from ttp.testing.network import Stream
from ttp.testing.sim_aside import SimAside
from ttp.testing.sim_copies import SimCopies
from ttp.testing.sim_saver import Saver
from ttp.testing.sim_trainer import Trainer
from ttp.testing.toy import SLOTS

if TYPE_CHECKING:
    from ttp.testing.simulation import Simulation

COMES_S = 0.05
"""Seconds that a training thread in a barrier may take to reach the gate once the gate is closed."""
SHARD_BYTES = 8 * PART_BYTES_MIN
"""Size of each shard in bytes, as reported to the controller: large enough to be cut into parts."""


class SimRank(Process):
    """One rank's process.

    Args:
        world: the simulation.
        hello: the rank's greeting, which identifies it.
        timeouts: the machine's timeouts.
    """

    __slots__ = (
        "_alarm", "_inbox", "_looked_at", "_pumping", "_rng", "acked", "aside", "copies", "exit_code", "hello", "host",
        "keeper", "machine", "mood", "rank", "saver", "stream", "trainer", "world",
    )  # fmt: skip

    def __init__(self, world: Simulation, hello: m.Hello, timeouts: RankTimeouts) -> None:
        super().__init__(world, f"rank {hello.rank}#{hello.launch}")
        self.world, self.hello, self.rank, self.host = world, hello, hello.rank, hello.host
        self.machine = ProcessorMachine(hello, timeouts, world.now, world.parts)
        self.trainer = Trainer(self)
        self.saver = Saver(self)
        self.copies = SimCopies(self)
        self.aside = SimAside(self)
        self.acked = False
        self.keeper: Rank | None = None
        self.exit_code: int | None = None
        self.stream: Stream | None = None
        self.mood = world.rng.choice((0.2, 1.0, 1.0, 3.0))  # some ranks are slow
        self._rng = world.rng
        self._inbox: deque[ev.Event | Inspection] = deque()
        self._looked_at = 0.0
        self._pumping = False
        self._alarm = Alarm(self, self.machine.deadline, self._observe)
        world.after(0.0, self.run, self._alarm.plan)
        world.after(world.rng.random() * 0.02, self.run, self.trainer.go_on)

    @property
    def streams(self) -> list[Stream]:
        """The open streams of this rank; none if its process has ended."""
        return [s for s in (self.stream, self.aside.stream) if s is not None and self.alive]

    @property
    def truth(self) -> tuple[Version, m.Phase]:
        """The real version and phase of this rank's copy."""
        state = self.trainer.gate.state()
        return state.version, state.phase

    def takes(self, seconds: float) -> float:
        """Return a random duration around ``seconds``."""
        return seconds * self.mood * (0.5 + self._rng.random())

    # ----------------------------------------------------------------------------------------------------- the process

    def preempt(self) -> None:
        """Send SIGTERM to the process."""
        self.put(ev.Raised(m.FaultKind.PREEMPTED, f"rank {self.rank} was sent SIGTERM"))

    def exit(self, code: int | None) -> None:
        """End the process with an exit code; ``None`` kills it."""
        if not self.alive:
            return
        self.end()
        self.exit_code = code
        self.world.trace(self.name, "is killed" if code is None else f"ends with {code}")
        self.world.ended(self)

    # ------------------------------------------------------------------------------------------------- the owner thread

    def put(self, event: ev.Event | Inspection) -> None:
        """Put an event into the inbox."""
        if not self.machine.gone:
            self._inbox.append(event)
            if not self._pumping:
                self._pumping = True
                self.world.after(self._rng.random() * 0.0002, self.run, self._pump)

    def _pump(self) -> None:
        self._pumping = False
        if not self._inbox:
            return
        event = self._inbox.popleft()
        if not isinstance(event, Inspection):
            self._feed(event)
        elif event.closure == self.trainer.gate.state().closure:  # else the gate has been open since
            self._feed(event.quiet)
        if self._inbox and not self._pumping:
            self._pumping = True
            self.world.after(self._rng.random() * 0.0002, self.run, self._pump)

    def _feed(self, event: ev.Event) -> None:
        for action in self.machine.on_event(event, self.world.now):
            self._perform(action)
        self._alarm.plan()

    def _observe(self) -> None:
        self._feed(ev.Observed(*self.truth, self.trainer.mark, written=self.saver.written))

    def _perform(self, action: act.Action) -> None:
        match action:
            case act.Send(report):
                self.said(report, self.stream)
            case act.Connect():
                self.world.roads.connect(self, action)
            case act.LookAtController() | act.ConnectAside() | act.SendAside() | act.CloseAside():
                self.aside.perform(action)
            case act.CloseGate():
                self._say_quiet(self.trainer.gate.close())
                self.world.after(self._rng.random() * 0.0001, self.run, self.trainer.look_up)
            case act.OpenGate():
                self.acked = False
                self.copies.thaw()
                self.trainer.gate.open()
            case act.Redo(version):
                self._redo(version)
            case act.StartSave(save):
                self.saver.save(save)
            case act.CancelSave():
                self.saver.cancel()
            case act.StartCommit(commit):
                self.saver.commit(commit)
            case act.Rejected(code, text) if code is not m.RefusalCode.BUSY:
                self.world.trace(self.name, f"rejected: {code.value} {text}")
                self.exit(EXIT_NOT_SAVED)
            case act.Decided(decision):
                self.trainer.decided(decision)
            case act.LetGo(rescued):
                self.exit(0 if rescued or self.truth[1] is m.Phase.DONE else 1)
            case act.Exit(code, text):
                self.world.trace(self.name, f"exits {code}: {text}")
                self.exit(code)
            case act.GoOn(text):  # simulated as the end of this process and a new one in the next launch
                self.world.judge.goes_on(self)
                self.world.trace(self.name, f"goes on: {text}")
                self.exit(EXIT_SAVED)
                self.world.goes_on(self)
            case act.Serve(MirrorTo() as keeper):
                self.keeper = keeper.keeper
            case act.Serve(CopyTo() as buddy):
                self.copies.named(buddy)
            case act.Serve(order):
                self._serve(order)
            case act.SettleCopy():
                self.copies.settle(action)
            case _:
                pass  # the simulation does without leases; it handles pages elsewhere

    def _serve(self, order: act.Service) -> None:
        world, soon = self.world, self._rng.random() * 0.01
        match order:
            case m.Probe():
                reachable = world.roads.reaches(self, order.address)
                probed = m.Probed(self.rank, order.subject, reachable, "looked")
                world.after(soon, self.run, self.put, ev.Tell(probed))
            case m.StandBy():
                world.after(soon, self.run, self._start_standby)
            case m.TakeStack():
                taken = m.StackTaken(self.rank, order.incident, order.subject, "a stack")
                world.after(soon, self.run, self.put, ev.Tell(taken))
            case Keep():
                page = (order.version, int.from_bytes(order.data, "big"))
                world.pages(self.host)[order.of, order.version % SLOTS] = page

    def mirror(self, version: Version, random: int) -> None:
        """Send the page of this rank to its keeper, if the keeper's host can be reached."""
        keeper = self.world.ranks.get(self.keeper) if self.keeper is not None else None
        if keeper is not None and self.world.roads.hosts_speak(self.host, keeper.host):
            page = (version, random)
            self.world.after(self.world.delay(), keeper.run, self._keep, keeper.host, version, page)

    def _keep(self, host: str, version: Version, page: tuple[Version, int]) -> None:
        self.world.pages(host)[self.rank, version % SLOTS] = page

    def _start_standby(self) -> None:
        self.put(ev.StandbyStarted(self.world.roads.start_standby(self.host)))

    def said(self, report: m.Report, stream: Stream | None) -> None:
        """Send a report on a stream of this rank; faults may strike just before and just after it."""
        if isinstance(report, m.Frozen) and report.final:
            self.acked = True
        kind = type(report).__name__
        self.world.trace(self.name, f"> {kind}" if stream is self.stream else f"> {kind}, aside")
        self.world.reached(f"before {kind}", self)
        if stream is not None:
            stream.report(report)
        self.world.reached(f"after {kind}", self)

    # ------------------------------------------------------------------------------------------------------------ gate

    def on_quiet(self) -> None:
        """Report the state of a frozen rank. The gate calls this when no update runs any more."""
        if self.machine.incident:
            self._say_quiet(self.trainer.gate.state())

    def on_left(self) -> None:
        """Report that the training thread makes no ordered update. The gate calls this."""
        self.put(ev.NotRedone("the training thread leaves the gate"))

    def _say_quiet(self, state: GateState) -> None:
        """Report the gate's state: at once while an update runs, otherwise after examining the rank's state."""
        if state.phase is m.Phase.UPDATING:
            self.put(Inspection(state.closure, ev.Quiet(state.version, state.phase, state.parked, False)))
        else:
            self._looked_at = max(self._looked_at, self.world.now) + self._rng.random() * 0.0002
            self.world.at(self._looked_at, self.run, self._look, state)

    def _look(self, state: GateState, waited: bool = False) -> None:
        if state.near and not (state.parked or waited):
            self.world.after(COMES_S, self.run, self._look, state, True)
            return
        now = self.trainer.gate.state()
        if now != state:
            if now.closure == state.closure and not waited:
                self._say_quiet(now)
            return
        hold_dir, held = ("", Version(0)) if self.world.memory is None else self.world.memory.look()
        quiet = ev.Quiet(
            hold_dir=hold_dir,
            held=held,
            version=state.version,
            phase=state.phase,
            parked=state.parked,
            post_step_done=self.trainer.post_step_done,
            has_gradient=state.parked,
            has_preimage=self.trainer.has_preimage(),
            kept=self.copies.held(),
            digests=tuple(m.ShardDigest(s, "", SHARD_BYTES) for s in self.world.layout.shards_of(self.rank)),
        )
        self.put(Inspection(state.closure, quiet))

    def _redo(self, version: Version) -> None:
        self.world.trace(self.name, f"makes the update to {version}")
        self.trainer.redos = 1
        if self.trainer.gate.admit():
            self.world.reached("admitted", self)
        else:
            self.trainer.redos = 0
            self.world.reached("not redone", self)
            self.put(ev.NotRedone("the training thread does not wait at the gate"))

    # ---------------------------------------------------------------------------------------------------------- stream

    def wanted(self, _attempt: int) -> bool:
        """Return whether an attempt to connect goes on: there is one at a time."""
        return self.alive

    def attached(self, stream: Stream | None, _attempt: int) -> None:
        """Take the result of an attempt to connect: a stream, or None if no controller answered."""
        if stream is not None and not self.alive:
            stream.end()
        elif stream is None or not stream.open:  # it may have broken before the rank got it
            self.on_down(None)
        else:
            self.stream = stream
            self.run(self.put, ev.StreamUp())

    def on_order(self, stream: Stream, order: m.Order) -> None:
        """See ``RankEnd``."""
        self.run(self.put, ev.OrderReceived(order))

    def on_down(self, stream: Stream | None) -> None:
        """See ``RankEnd``."""
        self.run(self._down, stream)

    def _down(self, stream: Stream | None) -> None:
        if stream is self.stream:
            self.stream = None
            self.put(ev.StreamDown("broken"))
