"""Every interleaving of the real machines in a small world, explored breadth first with states seen before left out.

A state is the controllers' machines, the machines of the ranks, what is on its way in each direction of each stream,
the gates, what each saver is doing, and the storage. Anything enabled may happen next: a message arrives, a second time
too, an update begins or ends, a rank comes to the gate, a saver finishes a piece, a committer renames, a rank is killed
or its stream breaks (what was said last may arrive or not), a controller dies and another takes over, and only when
nothing else can happen: time passes to the next deadline. Ranks in ``hanging`` never leave the barrier.

With a rival there are two controllers. A rank whose stream breaks goes to the one that its machine wants to go to, and
asks it to take over; the other one goes on with whom it has.

``python -m tests.core.model --large`` explores larger worlds than the tests do and prints how many states they have.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from tests.core.machines import GONE, Machines
from tests.core.oracle import best
from ttp.core import messages as m
from ttp.core.controller.events import ConnectionId, ControllerTimeouts, Received, Record, Send, StreamEnded, Tick
from ttp.core.controller.incident import Incident
from ttp.core.controller.layout_exchange import in_parts
from ttp.core.controller.machine import ControllerMachine
from ttp.core.decide import Answer, How
from ttp.core.layout import Layout, Rank, Shard, Version
from ttp.core.rank import actions as act
from ttp.core.rank import events as ev
from ttp.core.rank.failover import HOME
from ttp.core.rank.machine import ProcessorMachine, RankTimeouts
from ttp.core.replication import keepers
from ttp.core.stripes import split
from ttp.testing.network import apart
from ttp.testing.scenario import grid

PATIENCE = ControllerTimeouts(
    answer_s=5,
    freeze_s=30,
    grace_s=1,
    rescue_s=360,
    gather_s=5,
    exit_s=10,
    abandoned_s=1e6,
    forming_s=1e6,
    linger_s=1,
    standbys=0,
    quiet_s=None,
)
RANK_TIMEOUTS = RankTimeouts(
    heartbeat_s=1e9,
    rescue_s=400,
    alone_s=1e8,
    start_controller_after=10**9,
    retry_min_s=0,
    retry_max_s=0,
    failover_s=0,
)
BASE, NEXT = Version(1), Version(2)
END = "end"
RIVAL = "rival"
"""Address and host of the second controller."""


class Broken(AssertionError):  # noqa: N818 - it is what it says
    """An invariant does not hold; the text ends with how it came to that."""


class Gate(NamedTuple):
    """Of one rank: one update can follow, if it has left the barrier."""

    version: Version = BASE
    updating: bool = False
    closed: bool = False
    acked: bool = False
    parked: bool = False
    admitted: bool = False

    @property
    def phase(self) -> m.Phase:
        return m.Phase.UPDATING if self.updating else m.Phase.IDLE


class State(NamedTuple):
    controllers: tuple[int, ...]  # numbers of machines
    ranks: tuple[int, ...]
    exits: tuple[int | None, ...]
    streams: tuple[int, ...]  # 0: none, its rank wants to connect; else its remainder says to which controller
    up: tuple[tuple[tuple[int, Any], ...], ...]  # (stream, what is said on it)
    down: tuple[tuple[Any, ...], ...]
    gates: tuple[Gate, ...]
    jobs: tuple[tuple[Any, ...], ...]
    durable: frozenset[tuple[str, str, Version]]  # file, shard, version of its content
    committed: tuple[Version, ...]
    kills: int
    breaks: int
    takeovers: int
    repeats: int
    opened: int  # streams so far
    now: float


@dataclass(frozen=True)
class Names:
    """Of incidents; unique between controllers."""

    controller: int

    def __call__(self, number: int) -> str:
        return f"i{self.controller}.{number}"


def _deadline(machine: Any) -> float | None:
    due: float | None = machine.deadline()
    return due


def _address(machine: ProcessorMachine) -> str:
    return machine._route.address


def _incident(machine: ProcessorMachine) -> str:
    return machine.incident


class Model:
    """See the module.

    Args:
        layout: of the job; its ranks live on one host.
        kills: how many ranks may be killed.
        hanging: ranks that never leave the barrier, so that their update never begins.
        breaks: how many streams may break.
        takeovers: how often a controller may die; the first one is replaced, the rival is not.
        repeats: how many messages may arrive twice.
        rival: there is a second controller, which stands by.
        gradients: ranks at the closed gate, or frozen in the barrier, can make the update on request.
        preimages: ranks that have made the update can go back.
        kept: every rank can read a copy of the first version of every shard.
        late: whoever has to connect again may take longer than the grace.
        eager: orders arrive at once; reports still interleave.
        stripes: into how many parts shards are cut.
        uneven: this rank cuts them in another way than the others.
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
        preimages: bool = False,
        kept: bool = False,
        late: bool = False,
        eager: bool = False,
        stripes: int = 0,
        uneven: int | None = None,
    ) -> None:
        self.stripes, self.uneven = stripes, uneven
        self.layout, self.kills, self.hanging, self.eager = layout, kills, hanging, eager
        self.breaks, self.takeovers, self.repeats, self.late = breaks, takeovers, repeats, late
        self.rival, self.gradients, self.preimages = rival, gradients, preimages
        self.copies = tuple(m.KeptCopy(r, BASE) for r in sorted(keepers(layout))) if kept else ()
        self.kept = tuple((shard, BASE) for shard in layout.groups) if kept else ()
        self.world = layout.world_size
        self.outcomes: set[tuple[int | None, ...]] = set()
        self.hows: set[str] = set()
        """What savers were told to do first."""
        self.machines = Machines()
        cuts = [[split(s, n) for n in range(1, max(stripes, 1) + 1)] for s in layout.groups]
        self._cuts = [[name for names in chosen for name in names] for chosen in itertools.product(*cuts)]

    def explore(self, states_max: int) -> int:
        """Look at every state; the number of them.

        Raises:
            Broken: an invariant does not hold in one of them, or there are more than ``states_max``.
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
                        raise Broken(f"more than {states_max} states {_story(path)}")
                    frontier.append((after, (path, name)))
            if ended:
                self._check_end(state, path)
        return len(seen)

    # ------------------------------------------------------------------------------------------------------------ start

    def _start(self) -> State:
        patience = replace(PATIENCE, standbys=1) if self.rival else PATIENCE
        controller = ControllerMachine(patience, Names(0), 0.0)
        ranks = [ProcessorMachine(self._hello(r), RANK_TIMEOUTS, 0.0, in_parts(self.layout)) for r in range(self.world)]
        for r, machine in enumerate(ranks):
            machine.on_event(ev.Observed(Version(0), m.Phase.IDLE), 0.0)
            self._talk(controller, ranks, r, ev.StreamUp())
        for machine in ranks:
            machine.on_event(ev.Observed(BASE, m.Phase.IDLE), 0.0)
        n = self.world
        first = self.machines.number(controller)
        second = self.machines.number(self._fresh(1, 0.0)) if self.rival else GONE
        return State(
            controllers=(first, second),
            ranks=tuple(map(self.machines.number, ranks)),
            exits=(None,) * n,
            streams=tuple(2 * r + 2 for r in range(n)),
            up=((),) * n,
            down=((),) * n,
            gates=(Gate(),) * n,
            jobs=((),) * n,
            durable=frozenset(),
            committed=(),
            kills=self.kills,
            breaks=self.breaks,
            takeovers=self.takeovers,
            repeats=self.repeats,
            opened=n,
            now=0.0,
        )

    def _fresh(self, number: int, now: float, host: str = RIVAL) -> ControllerMachine:
        return ControllerMachine(PATIENCE, Names(number), now, host)

    @staticmethod
    def _talk(controller: ControllerMachine, ranks: list[ProcessorMachine], r: int, event: ev.Event) -> None:
        """Nothing goes wrong while the job forms."""
        events: deque[tuple[int, ev.Event]] = deque([(r, event)])
        while events:
            r, event = events.popleft()
            for action in ranks[r].on_event(event, 0.0):
                if isinstance(action, act.StartStandby):
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
                yield "the rival dies", self._rival_dies(state)
        if quiet:
            yield from self._time(state, path)

    def _arrivals(self, state: State, r: int, stream: int, path: Any) -> Iterator[tuple[str, State]]:
        index = next(i for i, (s, _) in enumerate(state.up[r]) if s == stream)
        said = state.up[r][index]
        left = (*state.up[r][:index], *state.up[r][index + 1 :])
        yield f"report of {r} arrives", self._arrive(state._replace(up=_put(state.up, r, left)), said, path)
        if state.repeats and said[1] != END and not isinstance(said[1], m.Hello):
            again = state._replace(repeats=state.repeats - 1, up=_put(state.up, r, (*left, said)))
            yield f"report of {r} arrives, and will again", self._arrive(again, said, path)

    def _orders(self, state: State, r: int) -> Iterator[tuple[str, State]]:
        order, left = state.down[r][0], state.down[r][1:]
        yield f"order for {r} arrives", self._obey(state._replace(down=_put(state.down, r, left)), r, order)
        if state.repeats and not isinstance(order, (m.Welcome, m.Refused)):
            again = state._replace(repeats=state.repeats - 1, down=_put(state.down, r, (*left, order)))
            yield f"order for {r} arrives, and will again", self._obey(again, r, order)

    def _faults(self, state: State, r: int) -> Iterator[tuple[str, State]]:
        if state.kills:
            fewer = state._replace(kills=state.kills - 1)
            yield f"{r} is killed", self._gone(fewer, r, None, keep=True)
            if state.up[r]:
                yield f"{r} is killed and unheard", self._gone(fewer, r, None, keep=False)
        if state.breaks and state.streams[r]:
            fewer = state._replace(breaks=state.breaks - 1)
            yield f"the stream of {r} breaks", self._break(fewer, r, keep=True)
            if state.up[r]:
                yield f"the stream of {r} breaks and loses", self._break(fewer, r, keep=False)

    def _break(self, state: State, r: int, *, keep: bool) -> State:
        return self._processor(self._cut(state, r, keep=keep), r, ev.StreamDown("broken"))

    def _cut(self, state: State, r: int, *, keep: bool) -> State:
        stream = state.streams[r]
        said = tuple(s for s in state.up[r] if keep or s[0] != stream)
        end = ((stream, END),) if stream else ()
        return state._replace(
            streams=_put(state.streams, r, 0),
            up=_put(state.up, r, (*said, *end)),
            down=_put(state.down, r, ()),
        )

    def _connect(self, state: State, r: int) -> State:
        place = 0 if self.machines.ask(state.ranks[r], _address) == HOME else 1
        if not state.controllers[place]:
            return self._processor(state, r, ev.StreamDown("nobody answers"))
        opened = state.opened + 1
        state = state._replace(opened=opened, streams=_put(state.streams, r, 2 * opened + place))
        return self._processor(state, r, ev.StreamUp())

    def _take_over(self, state: State) -> State:
        fresh = self.machines.number(self._fresh(state.opened, state.now, ""))
        return self._forgotten(state._replace(controllers=(fresh, state.controllers[1])), 0)

    def _rival_dies(self, state: State) -> State:
        return self._forgotten(state._replace(controllers=(state.controllers[0], GONE)), 1)

    def _forgotten(self, state: State, place: int) -> State:
        """What was on its way to a controller that died reaches nobody."""
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
            after = self._at_gate(state, r, version=NEXT, updating=False)
            yield f"{r} ends its update", self._quiet(after, r) if gate.closed else after
        elif gate.version == BASE:
            if gate.admitted or not (gate.closed or r in self.hanging):
                if gate.acked and not gate.admitted:
                    raise Broken(f"I3: rank {r} writes after it acknowledged")
                yield f"{r} begins its update", self._at_gate(state, r, updating=True, parked=False, admitted=False)
            elif gate.closed and self.gradients and not gate.parked:
                yield f"{r} comes to the gate", self._quiet(self._at_gate(state, r, parked=True), r)

    def _save(self, state: State, r: int, path: Any) -> Iterator[tuple[str, State]]:
        if not state.jobs[r]:
            return
        order = state.jobs[r][0]
        state = state._replace(jobs=_put(state.jobs, r, state.jobs[r][1:]))
        if isinstance(order, m.Save):
            version = order.version if order.order.how is How.UNDO else state.gates[r].version
            files = frozenset((f"{order.draft}/{s}_{order.generation}", s, version) for s in order.order.shards)
            if order.order.kept and (not self.kept or order.version != BASE):
                raise Broken(f"I1: a copy of version {order.version} is wanted {_story(path)}")
            files |= {(f"{order.draft}/{s}_{order.generation}", s, BASE) for s in order.order.kept}
            if {f for f, _, _ in files} & {f for f, _, _ in state.durable}:
                raise Broken(f"I4: a file is written twice {_story(path)}")
            cut = "uneven" if r == self.uneven else ""
            pieces = tuple(m.Piece(f, 1, f"{v}", "shard", s, Rank(r), cut=cut) for f, s, v in sorted(files))
            state = state._replace(durable=state.durable | files)
            done = ev.PiecesWritten(order.incident, order.generation, pieces)
            yield f"{r} has saved", self._processor(state, r, done)
        elif isinstance(order, ev.CommitDone):
            yield f"{r} is done with the commit", self._processor(state, r, order)
        else:
            self._check_commit(state, order, path)
            state = state._replace(committed=(*state.committed, order.version))
            committed = ev.CommitDone(order.incident, order.generation, "path", 1)
            yield f"{r} has renamed", state._replace(jobs=_put(state.jobs, r, (committed, *state.jobs[r])))

    def _time(self, state: State, path: Any) -> Iterator[tuple[str, State]]:
        machines = [*enumerate(state.controllers, -2), *enumerate(state.ranks)]  # controllers are -2 and -1
        dues = {who: self.machines.ask(number, _deadline) for who, number in machines if number}
        known = {who: due for who, due in dues.items() if due is not None and due < 1e5}
        if known:
            who = min(known, key=lambda w: (known[w], w))
            state = state._replace(now=max(state.now, known[who]))
            name = f"time passes to {state.now}"
            if who < 0:
                yield name, self._controller(state, who + 2, Tick(), path)
            else:
                gate = state.gates[who]
                yield name, self._processor(state, who, ev.Observed(gate.version, gate.phase))

    # --------------------------------------------------------------------------------------------------------- machines

    def _controller(self, state: State, place: int, event: Any, path: Any) -> State:
        actions, number = self.machines.step(state.controllers[place], event, state.now)
        state = state._replace(controllers=_put(state.controllers, place, number))
        down = list(state.down)
        for action in apart(actions):
            if isinstance(action, Send) and action.connection in state.streams:
                r = state.streams.index(action.connection)
                down[r] = (*down[r], action.order)
            elif isinstance(action, Record) and action.kind in ("plan", "nothing_new", "released"):
                self._check_decision(state, place, action, path)
        state = state._replace(down=tuple(down))
        while self.eager and any(state.down):
            r = next(r for r in range(self.world) if state.down[r])
            state = self._obey(state._replace(down=_put(state.down, r, state.down[r][1:])), r, state.down[r][0])
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
        return state._replace(ranks=_put(state.ranks, r, number))

    def _perform(  # noqa: PLR0911 - one line for each action
        self, state: State, r: int, action: act.Action, inbox: deque[ev.Event]
    ) -> State:
        match action:
            case act.Send(report):
                if isinstance(report, m.Frozen) and report.final:
                    state = self._at_gate(state, r, acked=True)
                return state._replace(up=_put(state.up, r, (*state.up[r], (state.streams[r], report))))
            case act.CloseGate():
                state = self._at_gate(state, r, closed=True)
                inbox.append(self._seen(state, r))
                return state
            case act.OpenGate():
                return self._at_gate(state, r, closed=False, acked=False, parked=False, admitted=False)
            case act.Redo(version):
                if not state.gates[r].parked:
                    inbox.append(ev.Quiet(version, m.Phase.TORN, False, False))
                    return state
                return self._at_gate(state, r, admitted=True)
            case act.StartSave(order) | act.StartCommit(order):
                return state._replace(jobs=_put(state.jobs, r, (*state.jobs[r], order)))
            case act.CancelSave():
                return state._replace(jobs=_put(state.jobs, r, ()))
            case act.Exit(code) | act.Rejected(code):
                return self._gone(state, r, code if isinstance(code, int) else 70, keep=True)
            case _:
                return state

    @staticmethod
    def _at_gate(state: State, r: int, **changes: Any) -> State:
        return state._replace(gates=_put(state.gates, r, state.gates[r]._replace(**changes)))

    def _quiet(self, state: State, r: int) -> State:
        return self._processor(state, r, self._seen(state, r))

    def _seen(self, state: State, r: int) -> ev.Quiet:
        """What is seen under the closed gate."""
        gate = state.gates[r]
        back = self.preimages and gate.version == NEXT and not gate.updating
        return ev.Quiet(
            gate.version, gate.phase, gate.parked, True, has_gradient=gate.parked, has_preimage=back, kept=self.copies
        )

    def _gone(self, state: State, r: int, code: int | None, *, keep: bool) -> State:
        return self._cut(state, r, keep=keep)._replace(
            ranks=_put(state.ranks, r, GONE),
            exits=_put(state.exits, r, -9 if code is None else code),
            jobs=_put(state.jobs, r, ()),
        )

    # ------------------------------------------------------------------------------------------------------- invariants

    def _check_decision(self, state: State, place: int, record: Record, path: Any) -> None:
        machine: ControllerMachine = self.machines.look(state.controllers[place])
        incident = machine.incident or machine.last_incident
        if incident is None:
            return
        self.hows.update(record.facts.get("how", {}).values())
        possible = self._possible(state, machine.job.live - self._elsewhere(state, place, incident), incident)
        saved = max((record.facts.get("version", 0), incident.saved))
        if record.kind != "released" and possible is not None and possible > saved:
            raise Broken(f"I2: {record.facts} while {possible} was possible {_story(path)}")
        if record.kind == "released" and record.facts["exit_code"] == 70 and possible is not None:
            raise Broken(f"I6: {record.facts} while {possible} was possible {_story(path)}")
        if record.kind == "released" and record.facts["exit_code"] == 75 and incident.saved not in state.committed:
            raise Broken(f"I4: {record.facts}, but {state.committed} is on disk {_story(path)}")

    def _elsewhere(self, state: State, place: int, incident: Incident) -> set[Rank]:
        """Ranks that speak to the other controller, or were thawed by it and speak to nobody now."""
        over = {Rank(r) for r, stream in enumerate(state.streams) if stream and stream % 2 != place}
        if self.rival:
            alone = (r for r, stream in enumerate(state.streams) if not stream and state.ranks[r])
            over |= {Rank(r) for r in alone if self.machines.ask(state.ranks[r], _incident) != incident.id}
        return over

    def _possible(self, state: State, live: set[Rank], incident: Incident) -> int | None:
        """The largest version; made or unmade by request only if somebody has finished it and it is not whole."""
        alive = [r for r in sorted(live) if state.ranks[r] and not state.gates[r].updating]
        copies = [Answer(r, state.gates[r].version, kept=self.kept) for r in alive]
        plain = best(self.layout, copies)
        if plain is not None and plain >= max(a.version for a in copies):
            return plain
        full = best(self.layout, [self._offered(incident, copy) for copy in copies])
        return full if plain is None else max(plain, plain if full is None else full)

    @staticmethod
    def _offered(incident: Incident, copy: Answer) -> Answer:
        said = incident.answers.get(copy.rank)
        if said is None or not said.final or said.version != copy.version:
            return copy
        return replace(copy, has_gradient=said.has_gradient, has_preimage=said.has_preimage)

    def _check_commit(self, state: State, order: m.Commit, path: Any) -> None:
        content = {(f, s): v for f, s, v in state.durable}
        shards = [p.shard for p in order.pieces if p.kind == "shard"]
        if not any(sorted(shards) == sorted(names) for names in self._cuts):
            raise Broken(f"I1: {shards} are committed {_story(path)}")
        if len({p.cut for p in order.pieces if "#" in p.shard}) > 1:
            raise Broken(f"I1: parts that do not fit together are committed {_story(path)}")
        for piece in order.pieces:
            if content.get((piece.file, Shard(piece.shard))) != order.version:
                raise Broken(f"I1: {piece} is not of version {order.version} {_story(path)}")

    def _check_end(self, state: State, path: Any) -> None:
        self.outcomes.add(state.exits)
        if not any(state.exits) and any(g.closed for g in state.gates):
            raise Broken(f"I6: a healthy job stays frozen {_story(path)}")
        left = [r for r in range(self.world) if state.exits[r] is None]
        killed = -9 in state.exits
        if any(state.exits) and left:
            raise Broken(f"I6: ranks {left} are never released {_story(path)}")
        if not killed and not self.late and not self.rival and any(state.exits):
            raise Broken(f"I6: healthy ranks were released {_story(path)}")


def _put(values: tuple[Any, ...], index: int, value: Any) -> tuple[Any, ...]:
    return (*values[:index], value, *values[index + 1 :])


def _story(path: Any) -> str:
    steps: list[str] = []
    while path:
        path, name = path
        steps.append(name)
    return "after: " + ", ".join(reversed(steps))


LARGE: list[tuple[int, int, int, frozenset[int], dict[str, Any]]] = [
    (1, 2, 1, frozenset(), {"rival": True, "breaks": 1, "takeovers": 1}),
    (1, 2, 1, frozenset(), {"rival": True, "breaks": 2}),
    (1, 2, 0, frozenset(), {"rival": True, "breaks": 2, "takeovers": 1}),
    (1, 2, 1, frozenset(), {"rival": True, "breaks": 1, "repeats": 1}),
    (1, 3, 1, frozenset(), {"rival": True, "takeovers": 1}),
    (1, 3, 0, frozenset(), {"rival": True, "breaks": 1}),
    (2, 2, 0, frozenset(), {"rival": True, "breaks": 1, "eager": True}),
    (1, 2, 2, frozenset(), {"breaks": 1, "takeovers": 1}),
    (1, 3, 2, frozenset(), {"repeats": 1, "eager": True}),
    (1, 3, 1, frozenset(), {"breaks": 1, "eager": True}),
    (2, 2, 1, frozenset(), {"gradients": True, "preimages": True, "repeats": 1, "eager": True}),
    (2, 2, 1, frozenset({0}), {"gradients": True, "takeovers": 1, "eager": True}),
    (2, 2, 2, frozenset({0}), {"gradients": True, "preimages": True, "eager": True}),
    (3, 2, 1, frozenset({0, 1, 2, 3}), {"gradients": True, "preimages": True, "eager": True}),
]
"""Shards, replicas, kills, who hangs, and the rest, as ``Model`` says."""


def main(arguments: list[str]) -> int:
    """Explore the large worlds, or those whose numbers are given."""
    if arguments[:1] != ["--large"]:
        sys.stdout.write("python -m tests.core.model --large [NUMBER ...]\n")
        return 64
    chosen = [int(a) for a in arguments[1:]] or range(len(LARGE))
    total = 0
    for number in chosen:
        shards, replicas, kills, hanging, more = LARGE[number]
        model, began = Model(grid(shards, replicas), kills, hanging, **more), time.process_time()
        states = model.explore(8_000_000)
        total += states
        extra = "".join(f", {name}" if value is True else f", {value} {name}" for name, value in more.items())
        sys.stdout.write(
            f"{shards} shards x {replicas} replicas, {kills} kills, {set(hanging) or 'nobody'} hangs{extra}: "
            f"{states} states, {len(model.outcomes)} ways to end, {time.process_time() - began:.0f} s\n"
        )
        sys.stdout.flush()
    sys.stdout.write(f"{total} states, every invariant holds\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
