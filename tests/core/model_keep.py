"""The model of ``model``, where survivors of a death go on in their processes (``--continuity keep``).

Additional events: the launcher of each host reports that a rank has died and whether it could be started alone; ranks
that are released to go on leave their loops and wait; their launcher starts the dead ranks, or kills the waiting ones
if one of its ranks has left or has failed before its first update; a rank gives up on its way; time passes to the limit
of the ranks on their way. The processes of the next launch say hello, restore and make one update, which takes all of
them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from tests.core.machines import GONE
from tests.core.model import Model
from tests.core.model_state import RANK_TIMEOUTS, Broken, Gate, Process, State, put, story
from ttp.core import messages as m
from ttp.core.controller.continuing import SEAT_READY
from ttp.core.controller.events import Accused, ConnectionId, Received
from ttp.core.controller.machine import ControllerMachine
from ttp.core.layout import Layout, Rank, Version
from ttp.core.layout_messages import in_parts
from ttp.core.rank import actions as act
from ttp.core.rank import events as ev
from ttp.core.rank.machine import ProcessorMachine
from ttp.core.restore_messages import Candidate
from ttp.errors import EXIT_NOT_SAVED, EXIT_SAVED

CONTINUE_S = 30.0
KILLED = -9
FILLED, ANEW, LOST = "filled", "starts all anew", "lost"
"""What a launcher has done for the next launch; empty: nothing yet."""


class KeepModel(Model):
    """A model in which survivors go on in their processes; see the module.

    Args:
        layout: the job's layout.
        kills: number of ranks that may be killed.
        hosts: number of hosts, with one launcher each; the first ranks are on the first hosts.
        quits: number of ranks that may exit with 75 while they go on, as a rank that hangs or raises does.
        launchers: number of launchers that may be lost.
        slander: number of living ranks that another rank may report as dead.
        released: begin with rank 0 dead, and the release of the other ranks on its way.
        more: as for ``Model``.
    """

    def __init__(
        self, layout: Layout, kills: int, *, hosts: int = 1, quits: int = 0, launchers: int = 0, slander: int = 0,
        released: bool = False, **more: Any,
    ) -> None:  # fmt: skip
        super().__init__(layout, kills, **more)
        self.hosts, self.quits, self.launchers, self.slander = hosts, quits, launchers, slander
        self.released = released

    def _start(self) -> State:
        state = super()._start()._replace(processes=(Process(),) * self.world, launchers=("",) * self.hosts)
        quits = self.quits, self.launchers, self.slander
        return self._until_released(state)._replace(quits=quits) if self.released else state._replace(quits=quits)

    def _until_released(self, start: State) -> State:
        """Let rank 0 die, and make moves without further faults until the release is sent."""
        state = start._replace(kills=0, breaks=0, takeovers=0, repeats=0).gone(0, None, keep=True)
        while not any(isinstance(order, m.Release) for orders in state.down for order in orders):
            state = next(after for _, after in self._moves(state, ()))
        return state._replace(
            kills=start.kills - 1, breaks=start.breaks, takeovers=start.takeovers, repeats=start.repeats
        )

    def _hello(self, rank: int, launch: int = 0) -> m.Hello:
        hello, host = super()._hello(rank), f"h{self._host(rank)}"
        if launch == 0:
            return replace(hello, can_continue=True, host=host, pid=self._pid(rank, 0))
        pid, none = self._pid(rank, launch), Version(0)
        return replace(
            hello,
            can_continue=True,
            host=host,
            pid=pid,
            launch=launch,
            nonce=f"n{pid}",
            version=none,
            base_version=none,
        )

    def _host(self, rank: int) -> int:
        return rank * self.hosts // self.world

    @staticmethod
    def _pid(rank: int, launch: int) -> int:
        return 100 * launch + rank + 1

    # ------------------------------------------------------------------------------------------------------------ moves

    def _moves(self, state: State, path: Any) -> Iterator[tuple[str, State]]:
        yield from super()._moves(state, path)
        yield from self._launchers_moves(state, path)
        quits, launchers, slander = state.quits
        for r, process in enumerate(state.processes):
            if process.until is None or state.exits[r] is not None:
                continue
            if quits:
                yield f"{r} gives up", self._leaves(state._replace(quits=(quits - 1, launchers, slander)), r)
            if state.kills and not state.ranks[r]:
                yield f"{r} is killed on its way", state._replace(kills=state.kills - 1).gone(r, None, keep=True)
        for host, did in enumerate(state.launchers):
            if launchers and did in ("", FILLED):
                fewer = state._replace(quits=(quits, launchers - 1, slander))
                yield f"launcher {host} is lost", fewer._replace(launchers=put(state.launchers, host, LOST))
        yield from self._slanders(state)

    def _slanders(self, state: State) -> Iterator[tuple[str, State]]:
        quits, launchers, slander = state.quits
        for r in range(self.world) if slander else ():
            other = (r + 1) % self.world
            if state.ranks[r] and state.ranks[other] and state.streams[r] and state.exits[other] is None:
                nonce = self._nonce(state, other)
                event = ev.Tell(m.Fault(Rank(r), Rank(other), m.FaultKind.EXITED, "it seems so", nonce=nonce))
                fewer = state._replace(quits=(quits, launchers, slander - 1))
                yield f"{r} takes {other} for dead", self._processor(fewer, r, event)

    def _nonce(self, state: State, r: int) -> str:
        return self._hello(r, state.processes[r].launch).nonce

    def _faults(self, state: State, r: int) -> Iterator[tuple[str, State]]:
        yield from super()._faults(state, r)
        process = state.processes[r]
        early = process.launch and process.restored and not state.stuck
        if state.kills and early and all(g.version == g.base and not g.updating for g in state.gates):
            fewer = state._replace(kills=state.kills - 1, stuck=True)
            yield f"{r} is killed before its gradient", fewer.gone(r, None, keep=True)

    def _train(self, state: State, r: int) -> Iterator[tuple[str, State]]:
        process = state.processes[r]
        ready = all(p.restored and p.launch == process.launch for p in state.processes) and not state.stuck
        for name, after in super()._train(state, r):
            if not process.launch or state.gates[r].updating or not after.gates[r].updating:
                yield name, after
            elif ready:
                if len(bases := {g.base for g in state.gates}) > 1 or not bases <= set(state.committed):
                    raise Broken(f"K2: from {[g.base for g in state.gates]}, not {state.committed} {story(())}")
                yield name, after.of(r, until=None)

    def _launchers_moves(self, state: State, path: Any) -> Iterator[tuple[str, State]]:
        for host in range(self.hosts):
            did = state.launchers[host]
            if did == LOST:
                continue
            mine = [r for r in range(self.world) if self._host(r) == host]
            for r in mine:
                if state.exits[r] == KILLED and not state.processes[r].reported:
                    after = self._report(state, r, did)
                    if after is not None:
                        yield f"launcher {host} says that {r} is dead", after
            alive = [r for r in mine if state.exits[r] is None]
            waiting = [r for r in alive if state.processes[r].until is not None]
            codes = {state.exits[r] for r in mine} - {None}
            left = bool(codes & {EXIT_SAVED, EXIT_NOT_SAVED})
            fails = left if did == "" else did == FILLED and bool(codes)
            elsewhere = ANEW in state.launchers
            if waiting and (fails or elsewhere):
                after = state
                for r in waiting:
                    after = after.gone(r, None, keep=True)
                yield f"launcher {host} kills {waiting}", after._replace(launchers=put(state.launchers, host, ANEW))
            elif did == "" and not left and self._all_go_on(state, alive, waiting):
                yield f"launcher {host} fills the seats", self._fill(state, host, mine, path)

    @staticmethod
    def _all_go_on(state: State, alive: list[int], waiting: list[int]) -> bool:
        """Whether all living ranks of a host go on. If none lives, the launchers of other hosts decide."""
        on_their_way = all(not state.ranks[r] for r in waiting)
        return (alive == waiting and on_their_way) if alive else FILLED in state.launchers

    def _report(self, state: State, r: int, did: str) -> State | None:
        """Report the death of a rank. None: the controller does not know the process yet, and is told later."""
        pid = self._pid(r, state.processes[r].launch)
        machine: ControllerMachine = self.machines.look(state.controllers[0])
        if r not in machine.job.members or machine.job.members[Rank(r)].hello.pid != pid:
            return None
        seat = SEAT_READY if did == "" else "ranks were going on already"
        event = Accused((Rank(r),), m.FaultKind.EXITED, "killed", (pid,), (), seat)
        return self._controller(state, 0, event, ()).of(r, reported=True)

    def _fill(self, state: State, host: int, mine: list[int], path: Any) -> State:
        if not state.committed:
            raise Broken(f"K1: ranks go on before a commit {story(path)}")
        state = state._replace(launchers=put(state.launchers, host, FILLED))
        for r in mine:
            process = state.processes[r]
            if state.ranks[r]:
                raise Broken(f"K3: two processes have the seat of {r} {story(path)}")
            until = state.now + CONTINUE_S if state.exits[r] is not None else process.until
            hello = self._hello(r, process.launch + 1)
            machine = ProcessorMachine(hello, RANK_TIMEOUTS, state.now, in_parts(self.layout))
            found = tuple(Candidate(v, f"d{v}", "path") for v in sorted(set(state.committed)))
            machine.on_event(ev.RestoreWanted(found, ()), state.now)
            state = state._replace(
                ranks=put(state.ranks, r, self.machines.number(machine)),
                exits=put(state.exits, r, None),
                gates=put(state.gates, r, Gate(Version(0), Version(-1))),
                jobs=put(state.jobs, r, ()),
                processes=put(state.processes, r, Process(process.launch + 1, until)),
            )
        return state

    @staticmethod
    def _leaves(state: State, r: int) -> State:
        return state.gone(r, EXIT_SAVED, keep=True)

    def _time(self, state: State, path: Any) -> Iterator[tuple[str, State]]:
        if any(self._launchers_moves(state, path)):
            return
        if (heard := self._heartbeat(state, path)) is not None:
            yield "a heartbeat arrives", heard
            return
        marks = [(p.until, r) for r, p in enumerate(state.processes) if p.until is not None and state.exits[r] is None]
        until, who = min(marks, default=(float("inf"), -1))
        passed = [(name, after) for name, after in super()._time(state, path) if after.now <= until]
        if passed or who < 0:
            yield from passed
        else:
            yield f"the time of {who} is over at {until}", self._leaves(state._replace(now=max(state.now, until)), who)

    def _heartbeat(self, state: State, path: Any) -> State | None:
        """Deliver a heartbeat with a version that the controller does not know yet; None: there is none."""
        members = self.machines.look(state.controllers[0]).job.members
        for r, gate in enumerate(state.gates):
            connection = ConnectionId(state.streams[r])
            member = members.get(Rank(r)) if connection and state.processes[r].launch else None
            if member is not None and member.connection == connection and member.version < gate.version:
                beat = m.Heartbeat(Rank(r), gate.version, m.Phase.IDLE)
                return self._controller(state, 0, Received(connection, beat), path)
        return None

    # --------------------------------------------------------------------------------------------------------- machines

    def _processor(self, state: State, r: int, event: ev.Event) -> State:
        before = state.processes[r].until
        state = super()._processor(state, r, event)
        goes_on = before is None and state.processes[r].until is not None
        if not goes_on:
            return state
        return state.without_gate(r)._replace(ranks=put(state.ranks, r, GONE))

    def _perform(self, state: State, r: int, action: act.Action, inbox: deque[ev.Event]) -> State:
        match action:
            case act.GoOn():
                if not state.committed:
                    raise Broken(f"K1: rank {r} leaves its loop before a commit")
                state = state.cut(r, keep=True)._replace(jobs=put(state.jobs, r, ()))
                return state.of(r, until=state.now + CONTINUE_S)
            case act.Decided(decision):
                if decision.error or decision.version != max(state.committed):
                    raise Broken(f"K2: rank {r} restores {decision}, {state.committed} is on disk")
                inbox.append(ev.Based(decision.version))
                state = state.at_gate(r, version=decision.version, base=decision.version).of(r, restored=True)
                if state.gates[r].closed:
                    inbox.append(self._seen(state, r))
                return state
            case _:
                return super()._perform(state, r, action, inbox)

    # -------------------------------------------------------------------------------------------------------------- end

    def _on_disk(self, state: State) -> set[Version]:
        """Return the versions on disk, and those of ranks that have not restored yet: they have nothing to lose."""
        return {*state.committed, *(gate.version for gate in state.gates if gate.base < 0)}

    def _check_end(self, state: State, path: Any) -> None:
        ends: Any = zip(state.processes, state.exits, strict=True)
        outcome: Any = tuple("on" if process.launch and code is None else code for process, code in ends)
        self.outcomes.add(outcome)
        left = [r for r in range(self.world) if state.exits[r] is None]
        if any(state.exits) and left:
            raise Broken(f"K4: ranks {left} are never released {story(path)}")
        for r in left:
            gate, process = state.gates[r], state.processes[r]
            if gate.closed or process.until is not None or (process.launch and gate.version <= gate.base):
                raise Broken(f"K4: rank {r} neither trains nor leaves {story(path)}")
        if not left and state.committed and not {EXIT_SAVED, KILLED} & set(state.exits):
            raise Broken(f"K5: {state.exits}, though {state.committed} is on disk {story(path)}")
