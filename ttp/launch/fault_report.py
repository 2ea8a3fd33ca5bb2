"""Reports the end of a rank's process to the controller that leads the job, from the launcher.

A report goes at once to the controller that led last, on a connection that is already open. That controller may have
died with its host, or may have been replaced. If it does not accept the report, the report is sent to all controllers
of the job (``ttp.launch.ring``) until one accepts it or ``PATIENCE_S`` seconds have passed.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ttp.aside import aside
from ttp.core.copy_messages import Mirror
from ttp.inbox import Inbox
from ttp.launch.presence import CHANNEL_OPTIONS, ask
from ttp.launch.ring import ask_everybody
from ttp.polling import poll

logger = logging.getLogger("ttp.launch")

TIMEOUT_S = 1.0
"""Seconds that one controller may take to answer."""
PATIENCE_S = 15.0
"""Seconds for which a report is repeated. If hosts do not answer, ranks take seconds to agree on a new controller."""
LAST_S = 3.0
"""Seconds that ``close`` waits for reports that no controller has accepted yet."""
LOOK_S = 1.0
AGAIN_S = 0.2
"""Seconds between two attempts to send a report."""
WATCHED_S = 1.0
"""Seconds that grpc may take to end the thread that watches a connection. It looks every 0.2 s."""


PagesAfter = Callable[[int, int], Sequence[Mirror]]
"""Called with the rank and pid of a dead process; returns the pages to send with the report (``DeadPages.after``)."""


@dataclass(slots=True)
class _Report:
    """The report of one death that no controller has accepted yet."""

    rank: int
    request: Any
    until: float
    heard: set[str] = field(default_factory=set)
    """Controllers that answered without accepting the report. They may accept it later, when they lead the job."""
    waited_for: bool = True
    """Whether ``close`` waits for the report: a controller that has not answered yet may lead the job."""


class _Leader:
    """The controller that led last, and an open connection to it."""

    def __init__(self, place: str) -> None:
        from ttp.wire.channel import stub
        from ttp.wire.tls import open_channel

        self.place, self.channel = place, open_channel(place, CHANNEL_OPTIONS)
        self.channel.subscribe(self._changed, try_to_connect=True)
        self.stub = stub(self.channel)

    def _changed(self, state: Any) -> None:
        if state.name == "READY":  # it is watched no longer: see ``close``
            self.channel.unsubscribe(self._changed)

    def close(self) -> None:
        """Close the connection. Wait first, up to ``WATCHED_S``, for grpc's thread that watches it, which may raise."""
        self.channel.unsubscribe(self._changed)
        watch = getattr(self.channel, "_connectivity_state", None)
        poll(lambda: not getattr(watch, "polling", False), WATCHED_S, 0.05)
        self.channel.close()


class FaultReporter:
    """Sends ``ReportFault`` without blocking or raising. Opens its connection before the first report.

    Args:
        places: returns where the job's controller may be (``host:port``), the likeliest first. Called on a thread.
        home: the controller's address that the job was started with (``host:port``).
        token: the job's shared secret; may be empty.
        pages_after: returns the pages to send when the process of a rank has died; must not raise.
        seat: returns whether the launcher can start the dead rank alone; see ``ttp.core.controller.continuing``.
    """

    def __init__(
        self,
        places: Callable[[], Sequence[str]],
        home: str,
        token: str,
        pages_after: PagesAfter = lambda rank, pid: (),
        seat: Callable[[], str] = lambda: "",
    ) -> None:
        from ttp.wire.channel import metadata

        self._places = places
        self._around: tuple[str, ...] = (home,)
        self._pages_after, self._seat = pages_after, seat
        self._home, self._token, self._metadata = home, token, metadata(token)
        self._pending: Inbox[_Report | None] = Inbox()
        self._unheard = 0
        self._all_heard = threading.Condition()
        self._closing = False
        self._leader = _Leader(home)
        self._thread = threading.Thread(target=self._run, name="ttp-fault-report", daemon=True)
        self._thread.start()

    def goes_on(self, home: str, token: str, pages_after: PagesAfter) -> bool:
        """Use this reporter for newly started workers, too, if they belong to the same job.

        The connection stays open: closing it and opening another one takes a fifth of a second, in which workers may
        die.

        Args:
            home: the address that the job was started with (``host:port``).
            token: the job's shared secret.
            pages_after: as in the constructor, for the new workers.

        Returns:
            False if this is another job, which needs a reporter of its own.
        """
        if (home, token) != (self._home, self._token) or self._closing:
            return False
        self._pages_after = pages_after
        return True

    def exited(self, rank: int, pid: int, reason: str, code: int = 0) -> None:
        """Report that process ``pid`` of ``rank`` has ended for ``reason``, with exit code ``code`` (0: unknown)."""
        from ttp.wire.v1 import controller_pb2 as wire

        request = wire.ReportFaultRequest(ranks=[rank], pids=[pid], reason=reason, kind=wire.FAULT_KIND_EXITED)
        request.exit_code, request.seat = code, self._seat()
        for page in self._pages_after(rank, pid):
            request.pages.add(**asdict(page))
        with self._all_heard:
            self._unheard += 1
        self._send(_Report(rank, request, time.monotonic() + PATIENCE_S))

    def close(self) -> None:
        """Wait up to ``LAST_S`` seconds for reports that no controller has accepted yet, then close the connection."""
        with self._all_heard:
            self._all_heard.wait_for(lambda: self._unheard == 0, LAST_S)
            self._closing = True
        self._pending.put(None)
        self._thread.join(TIMEOUT_S)
        try:
            self._leader.close()
        except Exception as problem:
            logger.debug("closing the connection to the controller: %s", problem)

    # ------------------------------------------------------------------------------------------------------- any thread

    def _send(self, report: _Report) -> None:
        """Send a report to the controller that led last. If that one does not accept it, the thread repeats it."""
        leader = self._leader
        try:
            call = leader.stub.ReportFault.future(
                report.request, timeout=TIMEOUT_S, metadata=self._metadata, wait_for_ready=True
            )
            call.add_done_callback(lambda done: self._answered(leader.place, report, done))
        except Exception as problem:  # the rescue goes on without this witness
            logger.debug("cannot report the end of rank %d to %s: %s", report.rank, leader.place, problem)
            self._pending.put(report)

    def _answered(self, place: str, report: _Report, call: Any) -> None:
        if not call.cancelled() and call.exception() is None and self._accepted(place, report, call.result()):
            self._settle(report)
        else:
            self._pending.put(report)

    def _accepted(self, place: str, report: _Report, answer: Any) -> bool:
        if not answer.accused:
            report.heard.add(place)
            logger.debug("%s does not accept the report of the end of rank %d: %s", place, report.rank, answer.text)
        return bool(answer.accused)

    def _settle(self, report: _Report) -> None:
        with self._all_heard:
            self._unheard -= report.waited_for
            report.waited_for = False
            self._all_heard.notify_all()

    # ------------------------------------------------------------------------------------------------------- the thread

    def _run(self) -> None:
        reports: list[_Report] = []
        while not self._closing:
            try:
                self._around = tuple(self._places()) or self._around
                if self._leader.place != self._around[0]:
                    before, self._leader = self._leader, _Leader(self._around[0])
                    aside("ttp-close-connection", before.close)  # reports come first
                reports = [report for report in reports if not self._went_round(report)]
            except Exception as problem:
                logger.debug("cannot look for the controller: %s", problem)
            try:
                report = self._pending.get(timeout=AGAIN_S if reports else LOOK_S)
            except queue.Empty:
                continue
            if report is not None:
                reports.append(report)

    def _went_round(self, report: _Report) -> bool:
        """Send a report to all controllers. Returns True if no further attempt is due: accepted, or out of time."""

        def tell(host: str, port: int) -> Any:
            return ask(host, port, self._token, "ReportFault", report.request, TIMEOUT_S)

        ends_s = time.monotonic() + 2 * TIMEOUT_S
        answers = ask_everybody(self._around, tell, lambda: ends_s)
        accepted = any(self._accepted(place, report, answer) for place, answer in answers)
        over = accepted or time.monotonic() >= report.until
        if over or report.heard.issuperset(self._around):
            self._settle(report)
        return over
