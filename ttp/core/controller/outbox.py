"""Collects the actions that the controller has to do after one event."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ttp.core import messages as m
from ttp.core.controller.events import Action, ConnectionId, Record, Send, SendAlike
from ttp.core.controller.membership import Membership
from ttp.core.layout import Rank


class Outbox:
    """Actions in the order in which they have to be done.

    Args:
        job: has the stream of each rank.
    """

    def __init__(self, job: Membership) -> None:
        self.incident = ""
        """Id of the open incident, for records; empty: none is open."""
        self._job = job
        self._actions: list[Action] = []

    def take(self) -> list[Action]:
        """Return all actions since the last call."""
        actions, self._actions = self._actions, []
        return actions

    def add(self, action: Action) -> None:
        """Add an action."""
        self._actions.append(action)

    def send(self, connection: ConnectionId, order: m.Order) -> None:
        """Send an order on a stream."""
        self._actions.append(Send(connection, order))

    def send_to(self, rank: Rank, order: m.Order) -> None:
        """Send an order to a rank; nothing happens if it has no stream."""
        member = self._job.members.get(rank)
        if member is not None and member.connection is not None:
            self.send(member.connection, order)

    def send_alike(self, ranks: Iterable[Rank], order: m.Order) -> None:
        """Send one order, whose rank is ``SEVERAL``, to these ranks; ranks without a stream do not get it."""
        members = self._job.members
        streams = ((members[rank].connection, rank) for rank in ranks if rank in members)
        who = tuple((stream, rank) for stream, rank in streams if stream is not None)
        if who:
            self._actions.append(SendAlike(who, order))

    def refuse(self, connection: ConnectionId, hello: m.Hello, code: m.RefusalCode, text: str) -> None:
        """Tell a rank that it is not admitted and why, and record that."""
        self.send(connection, m.Refused(hello.rank, code, text))
        self.record("refused", rank=hello.rank, host=hello.host, pid=hello.pid, code=code.value, text=text)

    def record(self, kind: str, **facts: Any) -> None:
        """Add a record, with its kind and facts, for the file of the open incident."""
        self.record_of(self.incident, kind, **facts)

    def record_of(self, incident: str, kind: str, **facts: Any) -> None:
        """Add a record for the file of this incident, which need not be open any more."""
        self._actions.append(Record(kind, incident, facts))
