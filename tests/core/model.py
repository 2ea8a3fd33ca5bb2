"""Explores every interleaving of the real machines in a small world, breadth first, without states seen before.

A state is the controllers' machines, the machines of the ranks, the messages on their way in each direction of each
stream, the gates, the work of each saver, and the storage. Any enabled event may happen next: a message arrives, also a
second time; an update begins or ends; a rank comes to the gate; a saver finishes a piece; a committer renames; a rank
is killed or its stream breaks (its last messages may arrive or not); a controller dies and another takes over. Only
when nothing else can happen, time passes to the next deadline. Ranks in ``hanging`` never leave the barrier.

With a rival there are two controllers. A rank whose stream breaks goes to the controller that its machine chooses, and
asks it to take over; the other controller goes on with its remaining ranks.

``pytest -m slow -s tests/core/test_model_check.py`` explores larger worlds and prints how many states they have.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

from tests.core.machines import GONE, Machines
from tests.core.model_invariants import Invariants
from tests.core.model_state import (
    BASE,
    END,
    LOOK_S,
    PATIENCE,
    RANK_TIMEOUTS,
    RIVAL,
    Broken,
    Gate,
    Names,
    State,
    address_of,
    deadline_of,
    put,
    story,
)
from tests.core.talk import apart
from ttp.core import messages as m
from ttp.core.controller import planning
from ttp.core.controller.events import ConnectionId, Received, Record, Send, StreamEnded, Tick
from ttp.core.controller.machine import ControllerMachine
from ttp.core.decide import How
from ttp.core.layout import Layout, Rank, Version
from ttp.core.layout_messages import in_parts
from ttp.core.rank import actions as act
from ttp.core.rank import events as ev
from ttp.core.rank.failover import HOME
from ttp.core.rank.machine import ProcessorMachine
from ttp.core.replication import keepers
from ttp.core.stripes import split


class Model(Invariants):
    """The model checker; see the module.

    Args:
        layout: the job's layout; its ranks are on one host.
        kills: number of ranks that may be killed.
        hanging: ranks that never leave the barrier, so that their update never begins.
        breaks: number of streams that may break.
        takeovers: number of controllers that may die; the first one is replaced, the rival is not.
        repeats: number of messages that may arrive twice.
        rival: a standby controller exists.
        gradients: ranks at the closed gate, or frozen in the barrier, can make the update on request.
        leaves: number of ranks that may leave the closed gate for good, also with an order to update.
        preimages: ranks that have made the update can undo it.
        kept: every rank can read a copy of the first version of every shard.
        late: a rank that has to connect again may take longer than the grace period.
        eager: orders arrive at once; reports still interleave.
        stripes: number of parts into which shards are cut.
        uneven: this rank cuts shards in another way than the others.
        gather_s: after two thirds of this time, in seconds, the rival sends a lone rank back.
    """

    def __init__(
        self,
        layout: Layout,
        kills: int,
        hanging: frozenset[int] = frozenset(),
        *,
        breaks: int = 0,
        takeovers: int = 0,
        repeats: int = 0,
        rival: bool = False,
        gradients: bool = False,
        leaves: int = 0,
        preimages: bool = False,
        kept: bool = False,
        late: bool = False,
        eager: bool = False,
        stripes: int = 0,
        uneven: int | None = None,
        gather_s: float = PATIENCE.gather_s,
    ) -> None:
        self._patience, self.stripes, self.uneven = replace(PATIENCE, gather_s=gather_s), stripes, uneven
        self.layout, self.hanging, self.eager, self.late = layout, hanging, eager, late
        self.rival, self.gradients, self.preimages = rival, gradients, preimages
        self._left = dict[str, Any](kills=kills, breaks=breaks, takeovers=takeovers, repeats=repeats, leaves=leaves)
        self.copies = tuple(m.KeptCopy(r, BASE) for r in sorted(keepers(layout))) if kept else ()
        self.kept = tuple((shard, BASE) for shard in layout.groups) if kept else ()
        self.world = layout.world_size
        self.outcomes: set[tuple[int | None, ...]] = set()
        self.hows: set[str] = set()
        self.machines = Machines()
        self._started: dict[tuple[int, float, str], int] = {}
        cuts = [[split(s, n) for n in range(1, max(stripes, 1) + 1)] for s in layout.groups]
        self._cuts = [[name for names in chosen for name in names] for chosen in itertools.product(*cuts)]

    @mock.patch.object(planning, "AGAIN_S", LOOK_S)
    def explore(self, states_max: int) -> int:
        """Check every state and return the number of states.

        Raises:
            Broken: an invariant does not hold in a state, or there are more than ``states_max`` states.
        """
        start = self._start()
        seen = {hash(start)}
        frontier: deque[tuple[State, Any]] = deque([(start, ())])
        while frontier:
            state, path = frontier.popleft()
            ended = True
            for name, after in self._moves(state, path):
                ended = False
                key = hash(after)
                if key not in seen:
                    seen.add(key)
                    if len(seen) > states_max:
                        raise Broken(f"more than {states_max} states {story(path)}")
                    frontier.append((after, (path, name)))
            if ended:
                self._check_end(state, path)
        return len(seen)

    # ------------------------------------------------------------------------------------------------------------ start

    def _start(self) -> State:
        controller = ControllerMachine(replace(self._patience, standbys=int(self.rival)), Names(0), 0.0)
        ranks = [ProcessorMachine(self._hello(r), RANK_TIMEOUTS, 0.0, in_parts(self.layout)) for r in range(self.world)]
        for r, machine in enumerate(ranks):
            machine.on_event(ev.Observed(Version(0), m.Phase.IDLE), 0.0)
            self._talk(controller, ranks, r, ev.StreamUp())
        for machine in ranks:
            machine.on_event(ev.Observed(BASE, m.Phase.IDLE), 0.0)
        return State(
            controllers=(self.machines.number(controller), self._fresh(1, 0.0) if self.rival else GONE),
            ranks=tuple(map(self.machines.number, ranks)),
            exits=(None,) * self.world,
            streams=tuple(2 * r + 2 for r in range(self.world)),
            up=((),) * self.world,
            down=((),) * self.world,
            gates=(Gate(),) * self.world,
            jobs=((),) * self.world,
            durable=frozenset(),
            committed=(),
            **self._left,
            opened=(0,) * self.world,
            now=0.0,
        )

    def _fresh(self, number: int, now: float, host: str = RIVAL) -> int:
        if (key := (number, now, host)) not in self._started:
            self._started[key] = self.machines.number(ControllerMachine(self._patience, Names(number), now, host))
        return self._started[key]

    @staticmethod
    def _talk(controller: ControllerMachine, ranks: list[ProcessorMachine], r: int, event: ev.Event) -> None:
        """Form the job without any fault: deliver all reports and orders."""
        events: deque[tuple[int, ev.Event]] = deque([(r, event)])
        while events:
            r, event = events.popleft()
            for action in ranks[r].on_event(event, 0.0):
                if isinstance(action, act.Serve) and isinstance(action.order, m.StandBy):
                    events.append((r, ev.StandbyStarted(RIVAL)))
                if isinstance(action, act.Send):
                    for answer in apart(controller.on_event(Received(ConnectionId(2 * r + 2), action.report), 0.0)):
                        if isinstance(answer, Send):
                            events.append((answer.order.rank, ev.OrderReceived(answer.order)))

    def _hello(self, rank: int) -> m.Hello:
        return m.Hello(
            Rank(rank), m.PROTOCOL_MAJOR, m.PROTOCOL_MINOR, "0", "job", 0, 0, f"n{rank}", self.world,
            self.layout.digest, "h", rank, rank,
            "/save", "toy", Version(0), m.Phase.IDLE, Version(0), 0, "", False, False, stripes=self.stripes,
        )  # fmt: skip

    # ------------------------------------------------------------------------------------------------------------ moves

    def _moves(self, state: State, path: Any) -> Iterator[tuple[str, State]]:
        quiet = True
        for r in range(self.world):
            for stream in sorted({stream for stream, _ in state.up[r]}):
                quiet = False
                yield from self._arrivals(state, r, stream, path)
            if not state.ranks[r]:
                continue
            if not state.streams[r]:
                quiet = quiet and self.late
                yield f"{r} connects", self._connect(state, r)
            if state.down[r]:
                quiet = False
                yield from self._orders(state, r)
            for name, after in (*self._train(state, r), *self._save(state, r, path)):
                quiet = False
                yield name, after
            yield from self._faults(state, r)
        if state.takeovers:
            yield "the controller dies", self._take_over(state)
            if state.controllers[1]:
                yield "the rival dies", self._forgotten(state._replace(controllers=(state.controllers[0], GONE)), 1)
        if quiet:
            yield from self._time(state, path)

    def _arrivals(self, state: State, r: int, stream: int, path: Any) -> Iterator[tuple[str, State]]:
        index = next(i for i, (s, _) in enumerate(state.up[r]) if s == stream)
        said = state.up[r][index]
        left = (*state.up[r][:index], *state.up[r][index + 1 :])
        yield f"report of {r} arrives", self._arrive(state._replace(up=put(state.up, r, left)), said, path)
        if state.repeats and said[1] != END and not isinstance(said[1], m.Hello):
            again = state._replace(repeats=state.repeats - 1, up=put(state.up, r, (*left, said)))
            yield f"report of {r} arrives, and will again", self._arrive(again, said, path)

    def _orders(self, state: State, r: int) -> Iterator[tuple[str, State]]:
        order, left = state.down[r][0], state.down[r][1:]
        yield f"order for {r} arrives", self._obey(state._replace(down=put(state.down, r, left)), r, order)
        if state.repeats and not isinstance(order, (m.Welcome, m.Refused)):
            again = state._replace(repeats=state.repeats - 1, down=put(state.down, r, (*left, order)))
            yield f"order for {r} arrives, and will again", self._obey(again, r, order)

    def _faults(self, state: State, r: int) -> Iterator[tuple[str, State]]:
        if state.kills:
            fewer = state._replace(kills=state.kills - 1)
            yield f"{r} is killed", fewer.gone(r, None, keep=True)
            if state.up[r]:
                yield f"{r} is killed and unheard", fewer.gone(r, None, keep=False)
        if state.breaks and state.streams[r]:
            fewer = state._replace(breaks=state.breaks - 1)
            yield f"the stream of {r} breaks", self._break(fewer, r, keep=True)
            if state.up[r]:
                yield f"the stream of {r} breaks and loses", self._break(fewer, r, keep=False)
        if state.leaves and state.gates[r].parked:
            yield f"{r} leaves the gate", self._leave(state, r)

    def _leave(self, state: State, r: int) -> State:
        left = state._replace(leaves=state.leaves - 1).at_gate(r, parked=False, admitted=False, away=True)
        if state.gates[r].admitted:
            self.not_redone += 1
            left = self._quiet(self._processor(left, r, ev.NotRedone("it has left the gate")), r)
        return left

    def _break(self, state: State, r: int, *, keep: bool) -> State:
        return self._processor(state.cut(r, keep=keep), r, ev.StreamDown("broken"))

    def _connect(self, state: State, r: int) -> State:
        place = 0 if self.machines.ask(state.ranks[r], address_of) == HOME else 1
        if not state.controllers[place]:
            return self._processor(state, r, ev.StreamDown("nobody answers"))
        state, stream = state.new_stream(r, place)
        return self._processor(state._replace(streams=put(state.streams, r, stream)), r, ev.StreamUp())

    def _take_over(self, state: State) -> State:
        controllers = (self._fresh(1 + state.takeovers, state.now, ""), state.controllers[1])
        return self._forgotten(state._replace(controllers=controllers), 0)

    def _forgotten(self, state: State, place: int) -> State:
        """Drop all messages to a controller that died, and break its streams."""
        state = state._replace(takeovers=state.takeovers - 1)
        for r in range(self.world):
            if state.ranks[r] and state.streams[r] and state.streams[r] % 2 == place:
                state = self._break(state, r, keep=False)
        return state._replace(up=tuple(tuple(s for s in said if s[0] % 2 != place) for said in state.up))

    def _arrive(self, state: State, said: tuple[int, Any], path: Any) -> State:
        stream, report = said
        event = StreamEnded(ConnectionId(stream)) if report == END else Received(ConnectionId(stream), report)
        return self._controller(state, stream % 2, event, path)

    def _obey(self, state: State, r: int, order: m.Order) -> State:
        state = self._processor(state, r, ev.OrderReceived(order))
        if isinstance(order, m.Refused) and state.ranks[r]:
            return self._break(state, r, keep=True)  # the controller ends the stream after that
        return state

    def _train(self, state: State, r: int) -> Iterator[tuple[str, State]]:
        gate = state.gates[r]
        if gate.updating:
            after = state.at_gate(r, version=Version(gate.base + 1), updating=False)
            yield f"{r} ends its update", self._quiet(after, r) if gate.closed else after
        elif gate.version == gate.base:
            if gate.admitted or not (gate.closed or r in self.hanging):
                if gate.acked and not gate.admitted:
                    raise Broken(f"I3: rank {r} writes after it acknowledged")
                yield f"{r} begins its update", state.at_gate(r, updating=True, parked=False, admitted=False)
            elif gate.closed and self.gradients and not (gate.parked or gate.away):
                yield f"{r} comes to the gate", self._quiet(state.at_gate(r, parked=True), r)

    def _save(self, state: State, r: int, path: Any) -> Iterator[tuple[str, State]]:
        if not state.jobs[r]:
            return
        order = state.jobs[r][0]
        state = state._replace(jobs=put(state.jobs, r, state.jobs[r][1:]))
        if isinstance(order, m.Save):
            version = order.version if order.order.how is How.UNDO else state.gates[r].version
            files = frozenset((f"{order.draft}/{s}_{order.generation}", s, version) for s in order.order.shards)
            if order.order.kept and (not self.kept or order.version != BASE):
                raise Broken(f"I1: a copy of version {order.version} is wanted {story(path)}")
            files |= {(f"{order.draft}/{s}_{order.generation}", s, BASE) for s in order.order.kept}
            if {f for f, _, _ in files} & {f for f, _, _ in state.durable}:
                raise Broken(f"I4: a file is written twice {story(path)}")
            cut = "uneven" if r == self.uneven else ""
            pieces = tuple(m.Piece(f, 1, f"{v}", "shard", s, Rank(r), cut=cut) for f, s, v in sorted(files))
            state = state._replace(durable=state.durable | files)
            done = ev.Worked(m.Saved(order.rank, order.incident, order.generation, pieces))
            yield f"{r} has saved", self._processor(state, r, done)
        elif isinstance(order, ev.Worked):
            yield f"{r} is done with the commit", self._processor(state, r, order)
        else:
            self._check_commit(state, order, path)
            state = state._replace(committed=(*state.committed, order.version))
            committed = ev.Worked(m.Committed(order.rank, order.incident, order.generation, "path", 1))
            yield f"{r} has renamed", state._replace(jobs=put(state.jobs, r, (committed, *state.jobs[r])))

    def _time(self, state: State, path: Any) -> Iterator[tuple[str, State]]:
        machines = [*enumerate(state.controllers, -2), *enumerate(state.ranks)]  # controllers are -2 and -1
        dues = {who: self.machines.ask(number, deadline_of) for who, number in machines if number}
        known = {who: due for who, due in dues.items() if due is not None and due < 1e5}
        if known:
            who = min(known, key=lambda w: (known[w], w))
            state = state._replace(now=max(state.now, known[who]))
            if who < 0:
                after = self._controller(state, who + 2, Tick(), path)
                self._check_tick(after, who + 2, path)
            else:
                after = self._processor(state, who, ev.Observed(state.gates[who].version, state.gates[who].phase))
            yield f"time passes to {state.now}", after

    # --------------------------------------------------------------------------------------------------------- machines

    def _controller(self, state: State, place: int, event: Any, path: Any) -> State:
        actions, number = self.machines.step(state.controllers[place], event, state.now)
        state = state._replace(controllers=put(state.controllers, place, number))
        for action in actions:
            if isinstance(action, Send):
                state = state.told(action.connection, action.order)
            elif isinstance(action, Record) and action.kind in ("plan", "nothing_new", "released"):
                self._check_decision(state, place, action, path)
        while self.eager and any(state.down):
            r = next(r for r in range(self.world) if state.down[r])
            state = self._obey(state._replace(down=put(state.down, r, state.down[r][1:])), r, state.down[r][0])
        return state

    def _processor(self, state: State, r: int, event: ev.Event) -> State:
        number = state.ranks[r]
        inbox: deque[ev.Event] = deque([event])
        while inbox and state.exits[r] is None:
            actions, number = self.machines.step(number, inbox.popleft(), state.now)
            for action in actions:
                state = self._perform(state, r, action, inbox)
        if state.exits[r] is not None:
            return state
        return state._replace(ranks=put(state.ranks, r, number))

    def _perform(  # noqa: PLR0911 - one line for each action
        self, state: State, r: int, action: act.Action, inbox: deque[ev.Event]
    ) -> State:
        match action:
            case act.Send(report):
                if isinstance(report, m.Frozen) and report.final:
                    state = state.at_gate(r, acked=True)
                return state._replace(up=put(state.up, r, (*state.up[r], (state.streams[r], report))))
            case act.CloseGate():
                state = state.at_gate(r, closed=True)
                inbox.append(self._seen(state, r))
                return state
            case act.OpenGate():
                return state.at_gate(r, closed=False, acked=False, parked=False, admitted=False)
            case act.Redo() if state.gates[r].parked:
                return state.at_gate(r, admitted=True)
            case act.Redo():
                self.not_redone += 1
                inbox.append(ev.NotRedone("it does not stand at the gate"))
                return state
            case act.StartSave(order) | act.StartCommit(order):
                return state._replace(jobs=put(state.jobs, r, (*state.jobs[r], order)))
            case act.CancelSave():
                return state._replace(jobs=put(state.jobs, r, ()))
            case act.Exit(code) | act.Rejected(code) if code is not m.RefusalCode.BUSY:
                return state.gone(r, code if isinstance(code, int) else 70, keep=True)
            case _:
                return state

    def _quiet(self, state: State, r: int) -> State:
        return self._processor(state, r, self._seen(state, r))

    def _seen(self, state: State, r: int) -> ev.Quiet:
        return state.gates[r].seen(self.copies, preimages=self.preimages)
