"""Explores every order in which a few ranks can meet: the real protocol over a memory that suspends at each access.

A state is the memory, the store buffers of the processors (x86 lets a later load overtake a store; only an atomic
operation waits for the buffer), the position of each thread, the closed gates and the dead processes. Threads are the
training threads, the couriers, and those that ring the bell: for a gate that was closed, for a neighbour that died. Any
enabled event may happen next: a thread makes its next access, a buffer reaches memory, a gate is closed, a process is
killed (between any two accesses). Sleeps never time out, unless the world is ``impatient``.

The position of a thread is known by its frames. A coroutine cannot be copied, so it is made again from its inputs, once
for each position that it can reach.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ttp.processor.gate.meeting import BROKEN, RELEASED, BrokenError, Meeting, reached, slot

Op = tuple[Any, ...]
Host = tuple[int, ...]


class Wrong(AssertionError):  # noqa: N818 - it is what it says
    """A state that must not be reached; the text ends with the moves that led to it."""


class _Ask:
    def __init__(self, *op: Any) -> None:
        self._op = op

    def __await__(self) -> Generator[Op, Any, Any]:
        return (yield self._op)


class Suspending:
    """``Words`` that leave every access to the model."""

    async def load(self, at: int) -> int:
        return int(await _Ask("load", at))

    async def store(self, at: int, value: int) -> None:
        await _Ask("store", at, value)

    async def add_one(self, at: int) -> None:
        await _Ask("add", at)

    async def all_reached(self, places: Sequence[int], turn: int) -> bool:
        for at in places:
            if not reached(await self.load(at), turn):
                return False
        return True

    async def wake(self, at: int) -> None:
        await _Ask("wake", at)

    async def ring(self, at: int) -> None:
        await self.add_one(at)
        await self.wake(at)

    async def sleep(self, at: int, expected: int) -> bool:
        return bool(await _Ask("sleep", at, expected))


class _Places:
    """All places that one thread's program can reach, by number."""

    def __init__(self, program: Callable[[], Coroutine[Op, Any, None]]) -> None:
        self._program = program
        self._told: list[tuple[Any, ...]] = []
        self._ops: list[Op | None] = []
        self._numbers: dict[Any, int] = {}
        self._next: dict[tuple[int, Any], int] = {}
        self.start = self._number(())

    def op(self, place: int) -> Op | None:
        """Return the thread's next operation at a place; None: its program has ended."""
        return self._ops[place]

    def after(self, place: int, result: Any) -> int:
        """Return the place that the thread reaches when its operation returns ``result``."""
        if (place, result) not in self._next:
            self._next[place, result] = self._number((*self._told[place], result))
        return self._next[place, result]

    def _number(self, told: tuple[Any, ...]) -> int:
        thread = self._program()
        try:
            op: Op | None = thread.send(None)
            for result in told:
                op = thread.send(result)
        except StopIteration:
            op = None
        key = (op, tuple(_frames(thread))) if op is not None else None
        thread.close()
        if key not in self._numbers:
            self._numbers[key] = len(self._ops)
            self._ops.append(op)
            self._told.append(told)
        return self._numbers[key]


def _frames(thread: Any) -> Iterator[Any]:
    while thread is not None and (frame := getattr(thread, "cr_frame", None)) is not None:
        values = {name: value for name, value in frame.f_locals.items() if isinstance(value, int)}
        yield frame.f_lasti, tuple(sorted(values.items()))
        thread = thread.cr_await


@dataclass(frozen=True, slots=True)
class Thread:
    """A thread: its place, its writes that are not in memory yet, and the word on which it sleeps."""

    place: int
    buffer: tuple[tuple[int, int], ...] = ()
    asleep: int | None = None
    runs: bool = True


@dataclass(frozen=True, slots=True)
class State:
    memories: tuple[tuple[tuple[int, int], ...], ...]  # of hosts
    threads: tuple[Thread, ...]
    came: tuple[int, ...]  # ranks: the last meeting for which they have all that is needed
    entered: tuple[int, ...]  # hosts: the last meeting of hosts that their courier came to
    closed: frozenset[int] = frozenset()
    gone: frozenset[int] = frozenset()
    closes: int = 0
    kills: int = 0


class World:
    """The model checker of meetings; see the module.

    Args:
        hosts: the ranks of each host.
        turns: number of meetings.
        closes: number of gates that may be closed; a rank that this wakes leaves by order, and trains on.
        kills: number of ranks that may be killed.
        absent: ranks that never come, because they hang elsewhere.
        impatient: any sleep may end at once.
        kind: kind of meeting. A wrong kind must be found out.
    """

    def __init__(
        self,
        hosts: tuple[Host, ...],
        turns: int,
        closes: int = 0,
        kills: int = 0,
        absent: Host = (),
        kind: type[Meeting] = Meeting,
        *,
        impatient: bool = False,
    ) -> None:
        self._absent, self._impatient = absent, impatient
        self.hosts, self._turns, self._closes, self._kills, self._kind = hosts, turns, closes, kills, kind
        self._wide = len(hosts) > 1
        self._size = sum(map(len, hosts))
        self._home = {rank: number for number, host in enumerate(hosts) for rank in host}
        self._places: list[_Places] = []
        self._owners: list[int] = []  # the rank that a thread dies with
        self._sleepers: dict[int, int] = {}  # rank of each training thread
        for rank in self._home:
            self._sleepers[len(self._places)] = rank
            self._add(rank, partial(self._train, rank))
        for host in hosts if self._wide else ():
            self._add(host[0], partial(self._carry, host))
        self._ringers = {rank: self._add(rank, partial(self._ring, rank)) for rank in self._home}
        self._tellers = [self._add(-1, partial(self._warn, host[0])) for host in hosts]
        self.ends: set[tuple[str, ...]] = set()
        """How ranks may end: ``through``, ``left``, ``broken``, ``waits``, ``dead``."""

    def _add(self, rank: int, program: Callable[[], Coroutine[Op, Any, None]]) -> int:
        self._places.append(_Places(program))
        self._owners.append(rank)
        return len(self._places) - 1

    # -------------------------------------------------------------------------------------------------- the programs

    def _meeting(self, rank: int) -> Meeting:
        host = self.hosts[self._home[rank]]

        async def gone(place: int) -> bool:
            return bool(await _Ask("gone", host[place]))

        return self._kind(Suspending(), host.index(rank), len(host), wide=self._wide, gone=gone)

    async def _train(self, rank: int) -> None:
        meeting = self._meeting(rank)

        async def leave() -> bool:
            return bool(await _Ask("closed", rank))

        for turn in range(1, self._turns + 1):
            if rank in self._absent:
                return
            await _Ask("came", rank, turn)
            try:
                passed = await meeting.come(turn) or await meeting.wait(turn, leave)
            except BrokenError:
                await _Ask("broken", rank, turn)
                return
            await _Ask("passed" if passed else "left", rank, turn)
        await _Ask("through", rank)

    async def _ring(self, rank: int) -> None:
        await self._meeting(rank).ring()

    async def _warn(self, rank: int) -> None:
        await self._meeting(rank).warn()

    async def _carry(self, host: Host) -> None:
        meeting, number = self._meeting(host[0]), self._home[host[0]]

        async def never() -> bool:
            return False

        for turn in range(1, self._turns + 1):
            await meeting.all_here(turn, never)
            await _Ask("enter", number, turn)
            if not await _Ask("exit", number, turn):
                await meeting.break_up()
                return
            await meeting.release(turn)

    # --------------------------------------------------------------------------------------------------- exploration

    def explore(self, states_max: int = 400_000) -> int:
        """Check every state and return the number of states.

        Raises:
            Wrong: a rank leaves before all came, or sleeps although it could leave.
        """
        sleeping = [*self._ringers.values(), *self._tellers]
        threads = tuple(Thread(p.start, runs=n not in sleeping) for n, p in enumerate(self._places))
        start = State(
            ((),) * len(self.hosts), threads, (0,) * self._size, (0,) * len(self.hosts),
            closes=self._closes, kills=self._kills,
        )  # fmt: skip
        seen = {start}
        frontier: deque[tuple[State, Any]] = deque([(start, ())])
        while frontier:
            state, path = frontier.popleft()
            moves = list(self._moves(state, path))
            if not moves:
                self._check_end(state, path)
            for name, after in (*moves, *self._faults(state)):
                if after not in seen:
                    seen.add(after)
                    assert len(seen) <= states_max, f"more than {states_max} states"
                    frontier.append((after, (path, name)))
        return len(seen)

    def _moves(self, state: State, path: Any) -> Iterator[tuple[str, State]]:
        for number, thread in enumerate(state.threads):
            if thread.buffer:
                yield f"{number} reaches memory", self._flush(state, number)
            op = self._places[number].op(thread.place)
            if thread.runs and thread.asleep is None and op is not None:
                for result, after in self._do(state, number, op, path):
                    moved = replace(after.threads[number], place=self._places[number].after(thread.place, result))
                    if self._places[number].op(moved.place) is None and number in self._ringers.values():
                        moved = Thread(self._places[number].start, runs=False)
                    yield f"{number} {op}", _with(after, number, moved)

    def _faults(self, state: State) -> Iterator[tuple[str, State]]:
        for rank in self._home:
            if rank in state.gone:
                continue
            if state.closes and rank not in state.closed:
                shut = replace(state, closes=state.closes - 1, closed=state.closed | {rank})
                ringer = self._ringers[rank]
                yield f"the gate of {rank} is closed", _with(shut, ringer, replace(shut.threads[ringer], runs=True))
            if state.kills:
                yield f"{rank} is killed", self._kill(state, rank)

    def _kill(self, state: State, rank: int) -> State:
        for number, owner in enumerate(self._owners):
            if owner == rank:
                while state.threads[number].buffer:
                    state = self._flush(state, number)
                state = _with(state, number, replace(state.threads[number], runs=False, asleep=None))
        teller = self._tellers[self._home[rank]]
        state = _with(state, teller, Thread(self._places[teller].start))
        return replace(state, gone=state.gone | {rank}, kills=state.kills - 1)

    def _host(self, number: int) -> int:
        owner = self._owners[number]
        return self._home[owner] if owner >= 0 else self._tellers.index(number)

    def _flush(self, state: State, number: int) -> State:
        thread = state.threads[number]
        (at, value), *left = thread.buffer
        state = self._write(state, self._host(number), at, value)
        return _with(state, number, replace(thread, buffer=tuple(left)))

    @staticmethod
    def _write(state: State, host: int, at: int, value: int) -> State:
        memory = tuple(sorted((dict(state.memories[host]) | {at: value}).items()))
        return replace(state, memories=(*state.memories[:host], memory, *state.memories[host + 1 :]))

    def _do(self, state: State, number: int, op: Op, path: Any) -> Iterator[tuple[Any, State]]:
        """Yield the possible results of an operation, with the states that they lead to."""
        thread, host = state.threads[number], self._host(number)
        memory = dict(state.memories[host])
        match op:
            case ("load", at):
                yield (memory | dict(thread.buffer)).get(at, 0), state
            case ("store", at, value):
                yield None, _with(state, number, replace(thread, buffer=(*thread.buffer, (at, value))))
            case ("add", at):
                if not thread.buffer:
                    yield None, self._write(state, host, at, memory.get(at, 0) + 1)
            case ("wake", at):
                yield None, self._woken(state, host, at)
            case ("sleep", at, expected):
                asleep = at if memory.get(at, 0) == expected else None
                yield True, _with(state, number, replace(thread, asleep=asleep))
                if self._impatient:
                    yield False, state
            case ("gone", rank):
                yield rank in state.gone, state
            case ("closed", rank):
                yield rank in state.closed, replace(state, closed=state.closed - {rank})
            case ("enter" | "exit", *_):
                yield from self._network(state, op)
            case _:
                yield None, self._note(state, op, path)

    def _woken(self, state: State, host: int, at: int) -> State:
        for number, thread in enumerate(state.threads):
            if thread.asleep == at and self._host(number) == host:
                state = _with(state, number, replace(thread, asleep=None))
        return state

    def _network(self, state: State, op: Op) -> Iterator[tuple[Any, State]]:
        """A real barrier: each host leaves for itself when all have come. With a dead rank it fails or hangs."""
        kind, host, turn = op
        if kind == "enter":
            entered = (*state.entered[:host], turn, *state.entered[host + 1 :])
            yield None, replace(state, entered=entered)
        elif all(e >= turn for e in state.entered):
            yield True, state
        elif any(h[0] in state.gone for h in self.hosts):
            yield False, state

    # ------------------------------------------------------------------------------------------------------ invariants

    def _note(self, state: State, op: Op, path: Any) -> State:
        match op:
            case ("came", rank, turn):
                return replace(state, came=(*state.came[:rank], turn, *state.came[rank + 1 :]))
            case ("passed", rank, turn) if min(state.came) < turn:
                raise Wrong(f"rank {rank} leaves meeting {turn}, and others came to {state.came} {_story(path)}")
            case ("broken", rank, turn) if not state.gone or not (self._wide or self._missing(state, rank, turn)):
                raise Wrong(f"rank {rank} finds meeting {turn} broken {_story(path)}")
        return state

    def _check_end(self, state: State, path: Any) -> None:
        ends = []
        for number, rank in self._sleepers.items():
            thread = state.threads[number]
            op = self._places[number].op(thread.place)
            waits = thread.asleep is not None
            if waits and self._could_leave(state, rank):
                raise Wrong(f"rank {rank} sleeps on {_story(path)}")
            ends.append("dead" if rank in state.gone else "waits" if waits else "ended" if op is None else f"{op}")
        self.ends.add(tuple(ends))

    def _could_leave(self, state: State, rank: int) -> bool:
        """Return whether a rank that sleeps at the end should have been woken."""
        turn, host = state.came[rank], self.hosts[self._home[rank]]
        memory = dict(state.memories[self._home[rank]])
        if rank in state.closed or memory.get(BROKEN):
            return True
        needed = self._missing(state, rank, turn)
        if self._wide:
            return memory.get(RELEASED, 0) >= turn or bool((needed | {host[0]}) & state.gone)
        return not needed or bool(needed & state.gone)

    def _missing(self, state: State, rank: int, turn: int) -> set[int]:
        """Return the ranks of the host of ``rank`` that have not written that they came."""
        memory, ranks = dict(state.memories[self._home[rank]]), self.hosts[self._home[rank]]
        return {r for place, r in enumerate(ranks) if memory.get(slot(place), 0) < turn}


def _with(state: State, number: int, thread: Thread) -> State:
    return replace(state, threads=(*state.threads[:number], thread, *state.threads[number + 1 :]))


def _story(path: Any) -> str:
    names: list[str] = []
    while path:
        path, name = path
        names.append(name)
    return "after:\n  " + "\n  ".join(reversed(names))
