"""Owns the machine: turns what happens on the event loop into events, and actions into what has to be done."""

from __future__ import annotations

import asyncio
import collections
import itertools
import json
import logging
import secrets
import time
from dataclasses import dataclass, field

from ttp.controller.journal import Journal
from ttp.core import controller_events as ce
from ttp.core import messages as m
from ttp.core.controller_machine import ControllerMachine
from ttp.core.layout import Rank

log = logging.getLogger("ttp.controller")

HISTORY_MAX = 10_000
"""Events kept for late watchers."""


@dataclass(slots=True)
class Connection:
    """One stream; ``None`` in the outbox ends it."""

    id: ce.ConnectionId
    outbox: asyncio.Queue[m.Order | None] = field(default_factory=asyncio.Queue)


@dataclass(frozen=True, slots=True)
class Happening:
    """One recorded event, as watchers and the journal get it."""

    sequence: int
    unix_s: float
    monotonic_s: float
    kind: str
    incident: str
    facts: str  # JSON


class Driver:
    """Everything runs on one event loop, so the machine needs no lock.

    Args:
        patience: see ``Patience``.
        journal: where incidents are written.
        host: name of this host, as ranks name theirs.
    """

    def __init__(self, patience: ce.Patience, journal: Journal, host: str = "") -> None:
        self.machine = ControllerMachine(patience, new_incident_id, time.monotonic(), host)
        self.stopped = asyncio.Event()
        self.started_at = time.monotonic()
        self.history: collections.deque[Happening] = collections.deque(maxlen=HISTORY_MAX)
        self._journal = journal
        self._connections: dict[ce.ConnectionId, Connection] = {}
        self._ids = itertools.count(1)
        self._sequence = itertools.count(1)
        self._watchers: set[asyncio.Queue[Happening]] = set()
        self._saves: dict[int, asyncio.Future[ce.AnswerSave]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._plan_timer()

    # --------------------------------------------------------------------------------------------------------- inwards

    def connect(self) -> Connection:
        """A stream was opened."""
        connection = Connection(ce.ConnectionId(next(self._ids)))
        self._connections[connection.id] = connection
        return connection

    def disconnect(self, connection: Connection) -> None:
        """A stream has ended."""
        if self._connections.pop(connection.id, None) is not None:
            self.feed(ce.StreamEnded(connection.id))

    def feed(self, event: ce.Event) -> None:
        """Give the machine an event and do what it says."""
        for action in self.machine.on_event(event, time.monotonic()):
            self._perform(action)
        self._plan_timer()

    def accuse(self, ranks: tuple[Rank, ...], kind: m.FaultKind, reason: str, pids: tuple[int, ...]) -> None:
        """Evidence from outside."""
        self.feed(ce.Accused(ranks, kind, reason, pids))

    async def save(self, reason: str) -> ce.AnswerSave:
        """A checkpoint now; returns when it is committed or refused."""
        request = next(self._ids)
        self._saves[request] = asyncio.get_running_loop().create_future()
        self.feed(ce.SaveRequested(request, reason))
        try:
            return await self._saves[request]
        finally:
            self._saves.pop(request, None)

    def watch(self, replay: int) -> asyncio.Queue[Happening]:
        """A queue of events from now on, preceded by the last ``replay`` ones."""
        queue: asyncio.Queue[Happening] = asyncio.Queue()
        for happening in list(self.history)[-replay:] if replay else []:
            queue.put_nowait(happening)
        self._watchers.add(queue)
        return queue

    def unwatch(self, queue: asyncio.Queue[Happening]) -> None:
        """The watcher has left."""
        self._watchers.discard(queue)

    # -------------------------------------------------------------------------------------------------------- outwards

    def _perform(self, action: ce.Action) -> None:
        match action:
            case ce.Send(connection, order):
                self._send(connection, order)
            case ce.Record(kind, incident, facts):
                self._record(kind, incident, facts)
            case ce.AnswerSave(request):
                future = self._saves.get(request)
                if future is not None and not future.done():
                    future.set_result(action)
            case ce.Stop(reason):
                log.info("stopping: %s", reason)
                self.stopped.set()

    def _send(self, connection_id: ce.ConnectionId, order: m.Order) -> None:
        connection = self._connections.get(connection_id)
        if connection is None:
            return
        connection.outbox.put_nowait(order)
        if isinstance(order, m.Refused):
            connection.outbox.put_nowait(None)

    def _record(self, kind: str, incident: str, facts: dict[str, object]) -> None:
        text = json.dumps(facts, default=str)
        happening = Happening(next(self._sequence), time.time(), time.monotonic(), kind, incident, text)
        self.history.append(happening)
        log.info("%s%s %s", f"[{incident}] " if incident else "", kind, text[:2000])
        for queue in self._watchers:
            queue.put_nowait(happening)
        if incident:
            self._journal.write(self.machine.save_dir, happening)

    def _plan_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        deadline = self.machine.deadline()
        if deadline is not None:
            delay_s = max(0.0, deadline - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(delay_s, self.feed, ce.Tick())


def new_incident_id(number: int) -> str:
    """Sortable by time, unique between controllers: ``20261120-094512-1-3fa9``."""
    return f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{number}-{secrets.token_hex(2)}"
