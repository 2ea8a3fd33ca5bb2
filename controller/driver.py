"""The driver of the controller's state machine: it feeds the machine events from streams, timers and calls, and
performs the actions that the machine returns.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import functools
import itertools
import json
import logging
import secrets
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

from ttp.controller.connection import Connection, Peer
from ttp.controller.journal import Journal, RecordedEvent
from ttp.controller.log_output import RecordLog
from ttp.core import messages as m
from ttp.core.controller import events as ce
from ttp.core.controller.incident import Stage
from ttp.core.controller.machine import ControllerMachine
from ttp.core.controller.program_recovery import MakeRecovery, no_recovery
from ttp.core.layout import Rank, Version
from ttp.errors import EXIT_BAD_CONFIG
from ttp.store.history import BEGINS, HISTORY_KINDS, Launch
from ttp.wire.sockets import Sockets

log = logging.getLogger("ttp.controller")

P = TypeVar("P", bound=Peer)

HISTORY_MAX = 10_000
HISTORY_BYTES_MAX = 64 << 20
"""Most events, and most characters of their facts, that are kept for watchers that connect later."""
WATCH_MAX = 2 * HISTORY_MAX
"""Most events that may wait for a watcher before it is dropped."""
GIVES_UP_MS = 10_000
"""Milliseconds without an answer after which the kernel drops a connection that it probes. gRPC waits equally long, see
``ttp.wire.channel``.
"""
RETRY_S = 1.0
"""Seconds until the next tick after a tick that failed."""


class Watch:
    """The queue of events for one watcher, with None at its end. A watcher with ``WATCH_MAX`` waiting is dropped.

    Args:
        past: earlier events that the watcher gets first.
    """

    def __init__(self, past: Iterable[RecordedEvent]) -> None:
        self.lagging = False
        self.queue: asyncio.Queue[RecordedEvent | None] = asyncio.Queue()
        for recorded in past:
            self.queue.put_nowait(recorded)

    def add(self, recorded: RecordedEvent) -> bool:
        """Queue an event. Return False if the watcher is too far behind, and is dropped."""
        self.lagging = self.queue.qsize() >= WATCH_MAX
        self.queue.put_nowait(None if self.lagging else recorded)
        return not self.lagging

    def end(self) -> None:
        """End the watch once all queued events are read."""
        self.queue.put_nowait(None)


class Driver:
    """Runs a ``ControllerMachine``: feeds it events, and performs its actions. One event loop, so there are no locks.

    Args:
        timeouts: the machine's timeouts.
        journal: records every event of an incident.
        host: name of this host, as its ranks give it.
        port: the controller's port, which standby controllers are told.
        program: makes the part of the machine that leads jobs that save and repair themselves (MindIO handlers).
    """

    def __init__(
        self,
        timeouts: ce.ControllerTimeouts,
        journal: Journal,
        host: str = "",
        port: int = 0,
        program: MakeRecovery = no_recovery,
    ) -> None:
        self.machine = ControllerMachine(timeouts, new_incident_id, time.monotonic(), host, port, program)
        self.stopped = asyncio.Event()
        self.closed = False
        """Whether the controller is stopping: then the end of a stream is no evidence of a fault of its rank."""
        self.started_at = time.monotonic()
        self.history: collections.deque[RecordedEvent] = collections.deque()
        self._history_bytes = 0
        self._journal, self._log = journal, RecordLog()
        self._beginning: RecordedEvent | None = None  # of a launch of which no rank of this host has joined
        self._connections: dict[ce.ConnectionId, Peer] = {}
        self._ids = itertools.count(1)
        self._sequence = itertools.count(1)
        self._sockets = Sockets(GIVES_UP_MS)
        self._watchers: set[Watch] = set()
        self._saves: dict[int, asyncio.Future[ce.AnswerSave]] = {}
        self.launcher_lives: Callable[[], bool] = lambda: False
        """Returns whether a launcher keeps this controller, and has not ended."""
        self.perform_program: Callable[[ce.ProgramAction], None] = lambda action: None
        """Function that performs each action of ``program``."""
        self.observers: list[Callable[[str, dict[str, object], float, float], None]] = []
        """Called with each recorded event: its kind, its facts, and its time on the monotonic and on the wall clock."""
        self.on_close: Callable[[], None] = lambda: None
        self._timer: asyncio.TimerHandle | None = None
        self._settling = False
        self._alike: tuple[list[tuple[ce.ConnectionId, Rank]], m.Heartbeat | m.Frozen] | None = None
        """Ranks that have just sent equal reports, and this report. The machine gets them as one event."""
        self._loop = asyncio.get_running_loop()
        self._plan_timer()

    # --------------------------------------------------------------------------------------------------------- inwards

    @property
    def between_launches(self) -> bool:
        """True if a launch has ended and its launcher lives: it may start ranks again, or is ending."""
        over = self.machine.job.layout is not None and self.machine.stage in ("waiting", Stage.RELEASED.value)
        return over and self.launcher_lives()

    def connect(self, cancel: Callable[[], object], peer: str = "") -> Connection:
        """Register a new stream.

        Args:
            cancel: ends the stream.
            peer: address of the other end, as gRPC writes it.
        """
        return self.admit(lambda id: Connection(id, cancel, peer))

    def admit(self, make: Callable[[ce.ConnectionId], P]) -> P:
        """Register a new stream, or a line of a relay, and return its outgoing half.

        Args:
            make: takes the id of the new stream and returns its outgoing half.
        """
        connection = make(ce.ConnectionId(next(self._ids)))
        self._connections[connection.id] = connection
        if self.closed:
            connection.end()
        return connection

    def disconnect(self, connection: Peer) -> None:
        """Tell the machine that a stream has ended."""
        if self._connections.pop(connection.id, None) is not None:
            self.feed(ce.StreamEnded(connection.id))

    def feed(self, event: ce.Event, *, more: bool = False) -> None:
        """Give the machine an event and perform its actions.

        Args:
            event: the event.
            more: whether further reports may follow at once. Then equal reports of several ranks become one event, and
                the machine decides on answers to a freeze once all reports that have arrived are taken.
        """
        if self.closed:
            return
        if more and not self._settling:
            self._settling = True
            self._loop.call_soon(self._settle)
        if more and self._gathered(event):
            return
        self._take_alike()
        self._perform_all(self.machine.on_event(event, time.monotonic(), more=more))
        if not more:
            self._plan_timer()

    def feed_all(self, events: Iterable[ce.Event]) -> None:
        """Give the machine several events. If one raises, the exception is logged, and the others are handled."""
        for event in events:
            try:
                self.feed(event, more=True)
            except Exception:
                log.exception("an error while the controller handled a report of a rank")

    def _gathered(self, event: ce.Event) -> bool:
        """Keep a report, to give it to the machine together with equal ones: thousands of ranks answer a freeze alike.

        Returns:
            False if the event is not of a kind that is kept; then the caller handles it.
        """
        match event:
            case ce.ReceivedAlike(who, report):
                pass
            case ce.Received(connection, m.Frozen() as answer):
                who, report = ((connection, answer.rank),), dataclasses.replace(answer, rank=m.SEVERAL)
            case _:
                return False
        if self._alike is None or self._alike[1] != report:
            self._take_alike()
            self._alike = [], report
        self._alike[0].extend(who)
        return True

    def _take_alike(self) -> None:
        if self._alike is None:
            return
        (who, report), self._alike = self._alike, None
        try:
            self._perform_all(self.machine.on_event(ce.ReceivedAlike(tuple(who), report), time.monotonic(), more=True))
        except Exception:
            log.exception("an error while the controller handled the reports of %d ranks", len(who))

    def _settle(self) -> None:
        self._settling = False
        if self.closed:
            return
        self._take_alike()
        try:
            self._perform_all(self.machine.settle(time.monotonic()))
        except Exception:
            log.exception("an error while the controller decided on the reports that have arrived")
        self._plan_timer()

    async def save(self, reason: str, *, again: bool = False) -> ce.AnswerSave:
        """Save a checkpoint now, and wait until it is committed or refused.

        Args:
            reason: the reason, for people.
            again: whether the ranks continue training from the checkpoint.

        Returns:
            Whether the checkpoint was saved, its version and path, and a text for people.
        """
        request = next(self._ids)
        if self.closed:
            return _no_more(request)
        self._saves[request] = asyncio.get_running_loop().create_future()
        self.feed(ce.SaveRequested(request, reason, again))
        try:
            return await self._saves[request]
        finally:
            self._saves.pop(request, None)

    def watch(self, replay: int) -> Watch:
        """Start a watch of the last ``replay`` events and of all later events."""
        watch = Watch(list(self.history)[-replay:] if replay else [])
        self._watchers.add(watch)
        if self.closed:
            watch.end()
        return watch

    def unwatch(self, watch: Watch) -> None:
        """Stop a watch."""
        self._watchers.discard(watch)

    def close(self) -> None:
        """End every stream once its queued orders are sent, and answer every waiting call."""
        self.closed = True
        if self._timer is not None:
            self._timer.cancel()
        for connection in self._connections.values():
            connection.end()
        for watch in self._watchers:
            watch.end()
        self.on_close()
        for request, future in self._saves.items():
            if not future.done():
                future.set_result(_no_more(request))
        self._note_beginning()

    # -------------------------------------------------------------------------------------------------------- outwards

    def _perform_all(self, actions: list[ce.Action]) -> None:
        for action in actions:
            try:
                self._perform(action)
            except Exception:  # orders must still be sent
                log.exception("the controller could not carry out %s", type(action).__name__)

    def _perform(self, action: ce.Action) -> None:
        match action:
            case ce.Send(connection, order):
                self._send(connection, order)
            case ce.SendAlike(who, order):
                for connection, _ in who:
                    self._send(connection, order)
            case ce.Record(kind, incident, facts):
                self._record(kind, incident, facts)
            case ce.AnswerSave(request):
                future = self._saves.get(request)
                if future is not None and not future.done():
                    future.set_result(action)
            case ce.ProgramAction():
                self.perform_program(action)
            case ce.LookAt(host, connections):
                peers = (self._connections[c].peer for c in connections if c in self._connections)
                asyncio.get_running_loop().call_soon(self.feed, ce.LookedAt(host, self._sockets.silent_s(peers)))
            case ce.Stop(reason):
                log.info("the controller stops: %s", reason)
                self.stopped.set()

    def _send(self, connection_id: ce.ConnectionId, order: m.Order) -> None:
        connection = self._connections.get(connection_id)
        if connection is not None and not connection.put(order):
            log.warning("stream %s does not read its orders: the controller closes it", connection_id)
            asyncio.get_running_loop().call_soon(self.disconnect, connection)

    def _record(self, kind: str, incident: str, facts: dict[str, object]) -> None:
        text = _to_json(facts)
        recorded = RecordedEvent(next(self._sequence), time.time(), time.monotonic(), kind, incident, text)
        self._remember(recorded)
        self._log.take(kind, incident, facts, text)
        if self._watchers:
            self._watchers = {watch for watch in self._watchers if watch.add(recorded)}
        if incident:
            self._journal.write(self.machine.job.save_dir, recorded)
        if kind == BEGINS:
            self._note_beginning()  # of the launch before, which no rank of this host has joined
            self._beginning = recorded
        if facts.get("resumed") or kind in HISTORY_KINDS or self.machine.job.at_home >= 0:
            self._note_beginning()
        if kind in HISTORY_KINDS:
            job = self.machine.job
            self._journal.launch_goes_on(job.save_dir, recorded, (job.run_id, job.incarnation))
        for observe in self.observers:
            observe(kind, facts, recorded.monotonic_s, recorded.unix_s)

    def _note_beginning(self) -> None:
        """Record that a launch begins, once it is known how this host names the directory of the job."""
        recorded, self._beginning = self._beginning, None
        if recorded is not None:
            facts = json.loads(recorded.facts)
            save_dir = self.machine.job.save_dir or facts["save_dir"]
            found = functools.partial(self._remembered, facts["incarnation"])
            self._journal.launch_begins(save_dir, recorded, found)

    def _remembered(self, incarnation: int, fruitless: int, present: Launch | None, stood_s: float) -> None:
        """Give the machine the result of ``Journal.launch_begins``. Called on the journal's thread."""
        event = ce.Remembered(fruitless, progress=False, stood_s=stood_s)
        if present is not None:
            saved = (Version(present.version), present.path) if present.version and present.path else None
            wrong = present.text if present.code == EXIT_BAD_CONFIG else ""
            hosts = present.hosts_of_ranks()
            event = ce.Remembered(fruitless, present.progress, saved, wrong, present.drained, hosts, stood_s, True)

        def feed() -> None:
            if self.machine.job.incarnation == incarnation:  # else the disk was slow, and this is a later launch
                self.feed(event)

        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(feed)

    def _remember(self, recorded: RecordedEvent) -> None:
        self.history.append(recorded)
        self._history_bytes += len(recorded.facts)
        while len(self.history) > HISTORY_MAX or (self._history_bytes > HISTORY_BYTES_MAX and len(self.history) > 1):
            self._history_bytes -= len(self.history.popleft().facts)

    def _plan_timer(self) -> None:
        """Keep one timer that fires at the machine's deadline or before it.

        Reports move the deadline to a later time often. The timer is not moved each time: when it fires too early, the
        next timer is set.
        """
        deadline = self.machine.deadline()
        if deadline is None or (self._timer is not None and self._timer.when() <= deadline):
            return
        if self._timer is not None:
            self._timer.cancel()
        delay_s = max(0.0, deadline - time.monotonic())
        self._timer = self._loop.call_later(delay_s, self._tick)

    def _tick(self) -> None:
        """Give the machine a ``Tick`` if its deadline is due. Even after an error another tick is planned."""
        self._timer = None
        try:
            deadline = self.machine.deadline()
            if deadline is not None and deadline <= time.monotonic():
                self.feed(ce.Tick())
            else:
                self._plan_timer()
        except Exception:
            log.exception("an error in a timed action of the controller; the controller tries again")
            self._timer = asyncio.get_running_loop().call_later(RETRY_S, self._tick)


_to_json = json.JSONEncoder(default=str).encode


def _no_more(request: int) -> ce.AnswerSave:
    return ce.AnswerSave(request, False, Version(0), "", "this controller ends")


def new_incident_id(number: int) -> str:
    """Return an id such as ``20261120-094512-1-3fa9``: sortable by time and unique between controllers."""
    return f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{number}-{secrets.token_hex(2)}"
