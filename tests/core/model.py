"""Every interleaving of the real machines in a small world, explored breadth first with states seen before left out.

A state is the controller's machine, the machines of the ranks, what is on its way in each direction of each stream,
the gates, what each saver is doing, and the storage. Anything enabled may happen next: a message arrives, an update
begins or ends, a saver finishes a piece, a committer renames, a rank is killed or its stream breaks (what was said
last may arrive or not), the controller dies and another takes over, and only when nothing else can happen: time passes
to the next deadline. Ranks in ``hanging`` never leave the barrier.
"""

from __future__ import annotations

import enum
import io
import pickle
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from types import MappingProxyType
from typing import Any

from tests.core.oracle import best
from ttp.core import messages as m
from ttp.core import processor_machine as pm
from ttp.core.controller_events import ConnectionId, Patience, Received, Record, Send, StreamEnded, Tick
from ttp.core.controller_machine import ControllerMachine
from ttp.core.decide import Answer
from ttp.core.layout import Layout, Rank, Shard, Version

PATIENCE = Patience(
    answer_s=5, freeze_s=30, grace_s=1, rescue_s=360, gather_s=5, exit_s=10, abandoned_s=1e6, linger_s=1
)
MANNERS = pm.Manners(
    heartbeat_s=1e9, rescue_s=400, alone_s=1e8, start_controller_after=10**9, retry_min_s=0, retry_max_s=0
)
BASE, NEXT = Version(1), Version(2)
END = "end"


class Broken(AssertionError):  # noqa: N818 - it is what it says
    """An invariant does not hold; the text ends with how it came to that."""


@dataclass(frozen=True, slots=True)
class Gate:
    """Of one rank: one update can follow, if it has left the barrier."""

    version: Version = BASE
    updating: bool = False
    closed: bool = False
    acked: bool = False

    @property
    def phase(self) -> m.Phase:
        return m.Phase.UPDATING if self.updating else m.Phase.IDLE


@dataclass(frozen=True, slots=True)
class State:
    controller: bytes
    ranks: tuple[bytes, ...]  # empty: gone
    exits: tuple[int | None, ...]
    streams: tuple[int, ...]  # 0: none, its rank wants to connect
    up: tuple[tuple[tuple[int, Any], ...], ...]  # (stream, what is said on it)
    down: tuple[tuple[Any, ...], ...]
    gates: tuple[Gate, ...]
    jobs: tuple[tuple[Any, ...], ...]
    durable: frozenset[tuple[str, str, Version]]  # file, shard, version of its content
    committed: tuple[Version, ...]
    kills: int
    breaks: int
    takeovers: int
    opened: int  # streams so far
    now: float


@dataclass(frozen=True)
class Names:
    """Of incidents; unique between controllers."""

    controller: int

    def __call__(self, number: int) -> str:
        return f"i{self.controller}.{number}"


_SHARED: dict[tuple[str, str], object] = {}
"""Layouts and hellos never change: one object of each is enough for all states."""


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: object) -> tuple[str, str] | None:
        if not isinstance(obj, (Layout, m.Hello)):
            return None
        key = (type(obj).__name__, repr(obj))
        _SHARED.setdefault(key, obj)
        return key


class _Unpickler(pickle.Unpickler):
    def persistent_load(self, pid: tuple[str, str]) -> object:
        return _SHARED[pid]


def dump(machine: object) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(machine)
    return buffer.getvalue()


def load(dumped: bytes) -> Any:
    return _Unpickler(io.BytesIO(dumped)).load()


def canonical(value: Any) -> Any:  # noqa: PLR0911 - one line for each kind of value
    """What a machine knows, without the order in which it came to know it."""
    if isinstance(value, (str, int, float, bool, bytes, type(None))):
        return value
    if isinstance(value, (Layout, m.Hello, enum.Enum)):
        return repr(value)
    if isinstance(value, (set, frozenset)):
        return tuple(sorted(map(repr, map(canonical, value))))
    if isinstance(value, (dict, MappingProxyType)):
        return tuple(sorted((repr(canonical(k)), canonical(v)) for k, v in value.items()))
    if isinstance(value, (list, tuple, deque)):
        return tuple(map(canonical, value))
    if is_dataclass(value) and not isinstance(value, type):
        return (type(value).__name__, *(canonical(getattr(value, f.name)) for f in fields(value)))
    if hasattr(value, "__dict__"):
        return (type(value).__name__, *(canonical(v) for k, v in sorted(vars(value).items()) if k not in SILENT))
    return repr(value)


SILENT = {"patience", "manners", "_patience", "_new_id"}


class Model:
    """See the module.

    Args:
        layout: of the job; its ranks live on one host.
        kills: how many ranks may be killed.
        hanging: ranks that never leave the barrier, so that their update never begins.
        breaks: how many streams may break.
        takeovers: how often the controller may die and be replaced.
        late: whoever has to connect again may take longer than the grace.
        eager: orders arrive at once; reports still interleave.
    """

    def __init__(
        self,
        layout: Layout,
        kills: int,
        hanging: frozenset[int] = frozenset(),
        *,
        breaks: int = 0,
        takeovers: int = 0,
        late: bool = False,
        eager: bool = False,
    ) -> None:
        self.layout, self.kills, self.hanging, self.eager = layout, kills, hanging, eager
        self.breaks, self.takeovers, self.late = breaks, takeovers, late
        self.world = layout.world_size
        self.outcomes: set[tuple[int | None, ...]] = set()
        self._keys: dict[bytes, int] = {}

    def explore(self, states_max: int) -> int:
        """Look at every state; the number of them.

        Raises:
            Broken: an invariant does not hold in one of them, or there are more than ``states_max``.
        """
        start = self._start()
        seen = {self._key(start)}
        frontier: deque[tuple[State, Any]] = deque([(start, ())])
        while frontier:
            state, path = frontier.popleft()
            ended = True
            for name, after in self._moves(state, path):
                ended = False
                key = self._key(after)
                if key not in seen:
                    seen.add(key)
                    if len(seen) > states_max:
                        raise Broken(f"more than {states_max} states {_story(path)}")
                    frontier.append((after, (path, name)))
            if ended:
                self._check_end(state, path)
        return len(seen)

    def _key(self, state: State) -> int:
        machines = tuple(self._machine_key(b) for b in (state.controller, *state.ranks))
        return hash((machines, replace(state, controller=b"", ranks=())))

    def _machine_key(self, dumped: bytes) -> int:
        if dumped not in self._keys:
            self._keys[dumped] = hash(canonical(load(dumped))) if dumped else 0
        return self._keys[dumped]

    # ------------------------------------------------------------------------------------------------------------ start

    def _start(self) -> State:
        controller = ControllerMachine(PATIENCE, Names(0), 0.0)
        ranks = [pm.ProcessorMachine(self._hello(r), MANNERS, 0.0) for r in range(self.world)]
        for r, machine in enumerate(ranks):
            machine.on_event(pm.Observed(Version(0), m.Phase.IDLE), 0.0)
            for action in machine.on_event(pm.StreamUp(), 0.0):
                assert isinstance(action, pm.Send)
                for answer in controller.on_event(Received(ConnectionId(r + 1), action.report), 0.0):
                    if isinstance(answer, Send):
                        machine.on_event(pm.OrderReceived(answer.order), 0.0)
            machine.on_event(pm.Observed(BASE, m.Phase.IDLE), 0.0)
        n = self.world
        return State(
            controller=dump(controller),
            ranks=tuple(map(dump, ranks)),
            exits=(None,) * n,
            streams=tuple(range(1, n + 1)),
            up=((),) * n,
            down=((),) * n,
            gates=(Gate(),) * n,
            jobs=((),) * n,
            durable=frozenset(),
            committed=(),
            kills=self.kills,
            breaks=self.breaks,
            takeovers=self.takeovers,
            opened=n,
            now=0.0,
        )

    def _hello(self, rank: int) -> m.Hello:
        return m.Hello(
            Rank(rank), m.PROTOCOL_MAJOR, m.PROTOCOL_MINOR, "0", "job", 0, 0, f"n{rank}", self.world,
            self.layout.digest, tuple(m.ShardGroup(s, g) for s, g in self.layout.groups.items()), "h", rank, rank,
            "/save", "toy", Version(0), m.Phase.IDLE, Version(0), 0, "", False, False,
        )  # fmt: skip

    # ------------------------------------------------------------------------------------------------------------ moves

    def _moves(self, state: State, path: Any) -> Iterator[tuple[str, State]]:
        quiet = True
        for r in range(self.world):
            for stream in sorted({stream for stream, _ in state.up[r]}):
                quiet = False
                yield f"report of {r} arrives", self._arrive(state, r, stream, path)
            if not state.ranks[r]:
                continue
            if not state.streams[r]:
                quiet = quiet and self.late
                yield f"{r} connects", self._connect(state, r)
            if state.down[r]:
                quiet = False
                yield f"order for {r} arrives", self._order(state, r)
            for name, after in (*self._train(state, r), *self._save(state, r, path)):
                quiet = False
                yield name, after
            yield from self._faults(state, r)
        if state.takeovers:
            yield "the controller dies", self._take_over(state)
        if quiet:
            yield from self._time(state, path)

    def _faults(self, state: State, r: int) -> Iterator[tuple[str, State]]:
        if state.kills:
            fewer = replace(state, kills=state.kills - 1)
            yield f"{r} is killed", self._gone(fewer, r, None, keep=True)
            if state.up[r]:
                yield f"{r} is killed and unheard", self._gone(fewer, r, None, keep=False)
        if state.breaks and state.streams[r]:
            fewer = replace(state, breaks=state.breaks - 1)
            yield f"the stream of {r} breaks", self._break(fewer, r, keep=True)
            if state.up[r]:
                yield f"the stream of {r} breaks and loses", self._break(fewer, r, keep=False)

    def _break(self, state: State, r: int, *, keep: bool) -> State:
        return self._processor(self._cut(state, r, keep=keep), r, pm.StreamDown("broken"))

    def _cut(self, state: State, r: int, *, keep: bool) -> State:
        stream = state.streams[r]
        said = tuple(s for s in state.up[r] if keep or s[0] != stream)
        end = ((stream, END),) if stream else ()
        return replace(
            state,
            streams=_put(state.streams, r, 0),
            up=_put(state.up, r, (*said, *end)),
            down=_put(state.down, r, ()),
        )

    def _connect(self, state: State, r: int) -> State:
        opened = state.opened + 1
        state = replace(state, opened=opened, streams=_put(state.streams, r, opened))
        return self._processor(state, r, pm.StreamUp())

    def _take_over(self, state: State) -> State:
        fresh = ControllerMachine(PATIENCE, Names(state.opened), state.now)
        state = replace(state, takeovers=state.takeovers - 1, controller=dump(fresh))
        for r in range(self.world):
            if state.ranks[r] and state.streams[r]:
                state = self._break(state, r, keep=False)
        return replace(state, up=((),) * self.world)

    def _arrive(self, state: State, r: int, stream: int, path: Any) -> State:
        index = next(i for i, (s, _) in enumerate(state.up[r]) if s == stream)
        said = state.up[r][index][1]
        state = replace(state, up=_put(state.up, r, (*state.up[r][:index], *state.up[r][index + 1 :])))
        event = StreamEnded(ConnectionId(stream)) if said == END else Received(ConnectionId(stream), said)
        return self._controller(state, event, path)

    def _order(self, state: State, r: int) -> State:
        order = state.down[r][0]
        state = replace(state, down=_put(state.down, r, state.down[r][1:]))
        return self._processor(state, r, pm.OrderReceived(order))

    def _train(self, state: State, r: int) -> Iterator[tuple[str, State]]:
        gate = state.gates[r]
        if gate.updating:
            done = replace(gate, version=NEXT, updating=False)
            after = replace(state, gates=_put(state.gates, r, done))
            yield f"{r} ends its update", self._quiet(after, r) if gate.closed else after
        elif gate.version == BASE and not gate.closed and r not in self.hanging:
            if gate.acked:
                raise Broken(f"I3: rank {r} writes after it acknowledged")
            yield f"{r} begins its update", replace(state, gates=_put(state.gates, r, replace(gate, updating=True)))

    def _save(self, state: State, r: int, path: Any) -> Iterator[tuple[str, State]]:
        if not state.jobs[r]:
            return
        order = state.jobs[r][0]
        state = replace(state, jobs=_put(state.jobs, r, state.jobs[r][1:]))
        if isinstance(order, m.Save):
            files = frozenset(
                (f"{order.draft}/{s}_{order.generation}", s, state.gates[r].version) for s in order.order.shards
            )
            if {f for f, _, _ in files} & {f for f, _, _ in state.durable}:
                raise Broken(f"I4: a file is written twice {_story(path)}")
            pieces = tuple(m.Piece(f, 1, f"{v}", "shard", s, Rank(r)) for f, s, v in sorted(files))
            state = replace(state, durable=state.durable | files)
            yield (
                f"{r} has saved",
                self._processor(state, r, pm.PiecesWritten(order.incident, order.generation, pieces)),
            )
        elif isinstance(order, pm.CommitDone):
            yield f"{r} is done with the commit", self._processor(state, r, order)
        else:
            self._check_commit(state, order, path)
            state = replace(state, committed=(*state.committed, order.version))
            done = pm.CommitDone(order.incident, order.generation, "path", 1)
            yield f"{r} has renamed", replace(state, jobs=_put(state.jobs, r, (done, *state.jobs[r])))

    def _time(self, state: State, path: Any) -> Iterator[tuple[str, State]]:
        dues: dict[int | None, float | None] = {None: load(state.controller).deadline()}
        dues |= {r: load(b).deadline() for r, b in enumerate(state.ranks) if b}
        known = {who: due for who, due in dues.items() if due is not None and due < 1e5}
        if known:
            who = min(known, key=lambda w: (known[w], w is not None))
            state = replace(state, now=known[who])
            name = f"time passes to {state.now}"
            if who is None:
                yield name, self._controller(state, Tick(), path)
            else:
                gate = state.gates[who]
                yield name, self._processor(state, who, pm.Observed(gate.version, gate.phase))

    # --------------------------------------------------------------------------------------------------------- machines

    def _controller(self, state: State, event: Any, path: Any) -> State:
        machine: ControllerMachine = load(state.controller)
        actions = machine.on_event(event, state.now)
        down = list(state.down)
        for action in actions:
            if isinstance(action, Send) and action.connection in state.streams:
                r = state.streams.index(action.connection)
                down[r] = (*down[r], action.order)
            elif isinstance(action, Record):
                self._check_decision(state, machine, action, path)
        state = replace(state, controller=dump(machine), down=tuple(down))
        while self.eager and any(state.down):
            state = self._order(state, next(r for r in range(self.world) if state.down[r]))
        return state

    def _processor(self, state: State, r: int, event: pm.Event) -> State:
        machine: pm.ProcessorMachine = load(state.ranks[r])
        inbox: deque[pm.Event] = deque([event])
        while inbox and state.exits[r] is None:
            for action in machine.on_event(inbox.popleft(), state.now):
                state = self._perform(state, r, action, inbox)
        if state.exits[r] is not None:
            return state
        return replace(state, ranks=_put(state.ranks, r, dump(machine)))

    def _perform(  # noqa: PLR0911 - one line for each action
        self, state: State, r: int, action: pm.Action, inbox: deque[pm.Event]
    ) -> State:
        gate = state.gates[r]
        match action:
            case pm.Send(report):
                if isinstance(report, m.Frozen) and report.final:
                    state = replace(state, gates=_put(state.gates, r, replace(gate, acked=True)))
                return replace(state, up=_put(state.up, r, (*state.up[r], (state.streams[r], report))))
            case pm.CloseGate():
                inbox.append(pm.Quiet(gate.version, gate.phase, False, True))
                return replace(state, gates=_put(state.gates, r, replace(gate, closed=True)))
            case pm.OpenGate():
                return replace(state, gates=_put(state.gates, r, replace(gate, closed=False, acked=False)))
            case pm.StartSave(order) | pm.StartCommit(order):
                return replace(state, jobs=_put(state.jobs, r, (*state.jobs[r], order)))
            case pm.CancelSave():
                return replace(state, jobs=_put(state.jobs, r, ()))
            case pm.Exit(code) | pm.Rejected(code):
                return self._gone(state, r, code if isinstance(code, int) else 70, keep=True)
            case _:
                return state

    def _quiet(self, state: State, r: int) -> State:
        gate = state.gates[r]
        return self._processor(state, r, pm.Quiet(gate.version, gate.phase, False, True))

    def _gone(self, state: State, r: int, code: int | None, *, keep: bool) -> State:
        return replace(
            self._cut(state, r, keep=keep),
            ranks=_put(state.ranks, r, b""),
            exits=_put(state.exits, r, -9 if code is None else code),
            jobs=_put(state.jobs, r, ()),
        )

    # ------------------------------------------------------------------------------------------------------- invariants

    def _check_decision(self, state: State, machine: ControllerMachine, record: Record, path: Any) -> None:
        incident = machine.incident or machine.last_incident
        if record.kind not in ("plan", "nothing_new", "released") or incident is None:
            return
        alive = [r for r in machine.job.live if state.ranks[r] and not state.gates[r].updating]
        copies = [Answer(r, state.gates[r].version) for r in alive]
        possible = best(self.layout, copies)
        saved = max((record.facts.get("version", 0), incident.saved))
        if record.kind != "released" and possible is not None and possible > saved:
            raise Broken(f"I2: {record.facts} while {possible} was possible {_story(path)}")
        if record.kind == "released" and record.facts["exit_code"] == 70 and possible is not None:
            raise Broken(f"I6: {record.facts} while {possible} was possible {_story(path)}")
        if record.kind == "released" and record.facts["exit_code"] == 75 and incident.saved not in state.committed:
            raise Broken(f"I4: {record.facts}, but {state.committed} is on disk {_story(path)}")

    def _check_commit(self, state: State, order: m.Commit, path: Any) -> None:
        content = {(f, s): v for f, s, v in state.durable}
        shards = [p.shard for p in order.pieces if p.kind == "shard"]
        if sorted(shards) != sorted(self.layout.groups):
            raise Broken(f"I1: {shards} are committed {_story(path)}")
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
        if not killed and not self.late and any(state.exits):
            raise Broken(f"I6: healthy ranks were released {_story(path)}")


def _put(values: tuple[Any, ...], index: int, value: Any) -> tuple[Any, ...]:
    return (*values[:index], value, *values[index + 1 :])


def _story(path: Any) -> str:
    steps: list[str] = []
    while path:
        path, name = path
        steps.append(name)
    return "after: " + ", ".join(reversed(steps))
