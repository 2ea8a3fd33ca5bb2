"""A rank's side of a stand-in: while its controller is silent, a standby controller saves, over a second stream.

The kernel of this host knows for how long nothing has come from the controller's host, neither data nor an
acknowledgement of what this rank has sent. After ``DOUBT_S`` of such silence that host is in doubt, as other hosts are
for the controller (``ttp.core.controller.silence``). The stream to it stays, and it still leads: another controller,
the next on the ring, may freeze this rank, have it save, and thaw it (``ttp.core.controller.stand_in``), and no other
order is obeyed on the second stream. The second stream is closed, which thaws, as soon as anything is heard of the
controller.

If the stream to the controller ends while this rank saves, the second one stays. The controller that stands in will be
asked to take over next, and lets the save end (``ttp.core.controller.meanwhile``) before it freezes for the fault,
which closes the second stream. Any other controller that welcomes this rank closes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from ttp.core import messages as m
from ttp.core.layout_messages import TellLayout
from ttp.core.rank import actions as act
from ttp.core.rank import events as ev
from ttp.core.rank.failover import HOME, Route
from ttp.core.rank.outbox import RankOutbox
from ttp.core.rank.rescue import RankRescue, RankState

QUIET = 1.25
"""Heartbeats of silence after which the controller's host is looked at more often: each heartbeat is acknowledged."""
LOOK_S = 0.25
"""Seconds between two looks at such a host."""
LATE_S = 0.5
"""Seconds by which a look may be late: a later one shows that this rank or its host did not run, and is ignored."""


class StandInStream:
    """The second stream of a rank. Times are seconds of the caller's clock.

    Args:
        state: of the rank.
        outbox: takes reports and actions.
        rescue: is frozen and thawed.
        route: knows the standby controllers.
        heartbeat_s: seconds between two heartbeats of this rank.
        doubt_s: see ``RankTimeouts``.
        connect_s: seconds that a controller may take to answer.
        greeting: returns the rank's present ``Hello``.
        tell_layout: answers ``TellLayout``, with an action for each part.
    """

    def __init__(
        self,
        state: RankState,
        outbox: RankOutbox,
        rescue: RankRescue,
        route: Route,
        *,
        heartbeat_s: float,
        doubt_s: float,
        connect_s: float,
        greeting: Callable[[], m.Hello],
        tell_layout: Callable[[str, type[act.Send | act.SendAside]], None],
    ) -> None:
        self._state, self._outbox, self._rescue, self._route = state, outbox, rescue, route
        self._heartbeat_s, self._doubt_s, self._connect_s = heartbeat_s, doubt_s, connect_s
        self._greeting, self._tell_layout = greeting, tell_layout
        self._look_at: float | None = None
        self._open = False
        self.welcomed = False
        self._to = HOME
        self._tries = 0

    def watch(self, now: float) -> None:
        """Start to watch whether the controller is heard, because it has welcomed this rank."""
        if not self._goes_on:
            self.close()
        self._look_at = now + self._heartbeat_s

    def deadlines(self) -> Iterator[float]:
        """Yield the time at which ``on_time`` has something to do."""
        if self._look_at is not None and self._watches:
            yield self._look_at

    @property
    def _watches(self) -> bool:
        """Whether there is a controller to be watched, another one to be asked, and something to lose."""
        trained = self._state.version > self._state.hello.base_version
        return trained and self._outbox.welcomed and bool(self._route.others)

    def on_time(self, now: float) -> None:
        """Look at the controller when it is time."""
        if self._look_at is None or not self._watches or now < self._look_at:
            return
        if now >= self._look_at + LATE_S:
            self._look_at = now + LOOK_S
        else:
            self._look_at = None
            self._outbox.do(act.LookAtController())

    def happened(self, event: ev.AsideEvent, now: float) -> None:
        """Take an event of the second stream, or of what leads to one."""
        match event:
            case ev.Looked(silent_s):
                self._looked(silent_s, now)
            case ev.AsideUp() if self._open:
                hello = replace(self._greeting(), meanwhile=True, takeover=False, incident="", broken="")
                self._outbox.do(act.SendAside(hello))
            case ev.AsideOrder(order) if self._open:
                self._ordered(order, now)
            case ev.AsideDown():
                self._down(now)

    def say(self, beat: m.Heartbeat) -> None:
        """Send a heartbeat to the controller that stands in too: it follows the progress of a save."""
        if self.welcomed:
            self._outbox.do(act.SendAside(beat))

    def controller_lost(self) -> None:
        """Close the second stream as the controller's has ended, unless this rank is saving for the stand-in."""
        if not self._outbox.answers_aside:
            self.close()

    def led(self, order: m.LedOrder) -> None:
        """Handle an order of the controller. If it also stands in, only an order that cannot wait ends that."""
        if not self._goes_on or isinstance(order, (m.Freeze, m.Release, m.Finished, m.ProgramOrder)):
            self.close()

    @property
    def _goes_on(self) -> bool:
        """Whether this rank saves for a controller that stood in and leads by now."""
        return self._open and self._outbox.answers_aside and self._to == self._route.current

    def close(self) -> None:
        """Close the second stream: the controller is heard again, or is lost for good."""
        if self._open:
            self._open = self.welcomed = False
            self._outbox.do(act.CloseAside())
            self._rescue.hung_up()
        self._tries = 0

    def _looked(self, silent_s: float | None, now: float) -> None:
        if silent_s is None or not self._watches:
            return
        self._look_at = now + (LOOK_S if silent_s > QUIET * self._heartbeat_s else max(LOOK_S, self._heartbeat_s))
        if silent_s < self._doubt_s:
            if not self._goes_on:
                self.close()
        elif not self._open and self._matters:
            self._connect()

    @property
    def _matters(self) -> bool:
        """Whether this rank needs a stand-in: it is not frozen, and its program does not save itself."""
        return not (self._rescue.incident or self._state.program.saves)

    def _connect(self) -> None:
        others = self._route.others
        self._open, self._to = True, others[self._tries % len(others)]
        self._outbox.do(act.ConnectAside(self._to, self._connect_s))
        self._tries += 1

    def _down(self, now: float) -> None:
        """Thaw, because the second stream broke. The next look asks another controller if the first is still silent."""
        if self._open:
            self._open = self.welcomed = False
            self._rescue.hung_up()

    def _ordered(self, order: m.Order, now: float) -> None:
        match order:
            case m.Welcome():
                self.welcomed = True
            case TellLayout(_, digest):
                self._tell_layout(digest, act.SendAside)
            case m.Freeze(snapshot=True) if self._outbox.answers_aside or not self._rescue.incident:
                self._outbox.answers_aside = True
                self._rescue.ordered(order, now)
            case m.Thaw() | m.Save() | m.Commit() if self._outbox.answers_aside:
                self._rescue.ordered(order, now)
            case _:
                pass  # any other order: this controller does not lead the rank
