"""A rank's side of a stand-in: while its controller is silent, a standby controller saves over a second stream.

The kernel of this host knows for how long nothing has come from the controller's host, neither data nor an
acknowledgement of data that this rank has sent. After ``doubt_s`` of such silence that host is in doubt, as silent
hosts are for the controller (``ttp.core.controller.silence``). The stream to it stays open, and it still leads the job.
But the next controller on the ring, the *stand-in*, may freeze this rank, have it save, and thaw it over a second
stream (``ttp.core.controller.stand_in``); other orders on that stream are ignored. As soon as anything comes from the
controller the second stream is closed, which thaws the rank.

If the stream to the controller ends while this rank saves, the second stream stays open. The stand-in will be asked to
take over next. It lets the save end (``ttp.core.controller.meanwhile``) before it freezes the rank for the fault, and
that freeze closes the second stream. The welcome of any other controller closes it as well.
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
"""Heartbeat periods of silence after which the rank looks more often: the other kernel acknowledges each heartbeat."""
LOOK_S = 0.25
"""Seconds between two looks at a silent host."""
LATE_S = 0.5
"""Seconds by which a look may be late; a later one is skipped, because this rank or its host did not run."""


class StandInStream:
    """The second stream of a rank. Times are seconds of the caller's clock.

    Args:
        state: the rank's state.
        outbox: takes reports and actions.
        rescue: carries out the orders of the stand-in.
        route: has the addresses of the standby controllers.
        timeouts: see ``RankTimeouts``.
        greeting: returns the rank's present ``Hello``.
        tell_layout: answers ``TellLayout``, with an action for each part.
    """

    def __init__(
        self,
        state: RankState,
        outbox: RankOutbox,
        rescue: RankRescue,
        route: Route,
        timeouts: ev.RankTimeouts,
        greeting: Callable[[], m.Hello],
        tell_layout: Callable[[str, type[act.Send | act.SendAside]], None],
    ) -> None:
        self._state, self._outbox, self._rescue, self._route = state, outbox, rescue, route
        self._timeouts, self._greeting, self._tell_layout = timeouts, greeting, tell_layout
        self._look_at: float | None = None
        self._open = False
        self.welcomed = False
        self._to = HOME
        self._tries = 0

    def watch(self, now: float) -> None:
        """Start to watch the controller's host, because the controller has welcomed this rank."""
        if not self._goes_on:
            self.close()
        self._look_at = now + self._timeouts.heartbeat_s

    def deadlines(self) -> Iterator[float]:
        """Yield the time at which ``on_time`` has something to do."""
        if self._look_at is not None and self._watches:
            yield self._look_at

    @property
    def _watches(self) -> bool:
        """Whether to watch: a controller leads this rank, there is another one, and the rank has made an update."""
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
        """Take an event of the second stream, or the result of a look."""
        match event:
            case ev.Looked(silent_s):
                self._looked(silent_s, now)
            case ev.AsideUp() if self._open:
                hello = replace(self._greeting(), meanwhile=True, takeover=False, incident="", broken="")
                self._outbox.do(act.SendAside(hello))
            case ev.AsideOrder(order) if self._open:
                self._ordered(order, now)
            case ev.AsideDown():
                self._down()

    def say(self, beat: m.Heartbeat) -> None:
        """Send a heartbeat to the stand-in too, which follows the progress of a save."""
        if self.welcomed:
            self._outbox.do(act.SendAside(beat))

    def controller_lost(self) -> None:
        """Close the second stream because the controller's has ended, unless the stand-in has frozen this rank."""
        if not self._outbox.answers_aside:
            self.close()

    def led(self, order: m.LedOrder) -> None:
        """Close the second stream after an order of the controller.

        If the controller was the stand-in before, and this rank still saves for it, only urgent orders close it.
        """
        if not self._goes_on or isinstance(order, (m.Freeze, m.Release, m.Finished, m.ProgramOrder)):
            self.close()

    @property
    def _goes_on(self) -> bool:
        """Whether the stand-in for which this rank saves is the controller that leads now."""
        return self._open and self._outbox.answers_aside and self._to == self._route.current

    def close(self) -> None:
        """Close the second stream, which thaws a freeze of the stand-in."""
        if self._open:
            self._open = self.welcomed = False
            self._outbox.do(act.CloseAside())
            self._rescue.hung_up()
        self._tries = 0

    def _looked(self, silent_s: float | None, now: float) -> None:
        beat_s = self._timeouts.heartbeat_s
        quiet = silent_s is not None and silent_s > QUIET * beat_s
        self._look_at = now + (LOOK_S if quiet else max(LOOK_S, beat_s))
        if silent_s is None or not self._watches:
            return  # it may be known later: the name service may be slow
        if silent_s < self._timeouts.doubt_s:
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
        self._outbox.do(act.ConnectAside(self._to, self._timeouts.connect_s))
        self._tries += 1

    def _down(self) -> None:
        """Thaw, because the second stream broke. If the controller is still silent, the next look opens another one."""
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
