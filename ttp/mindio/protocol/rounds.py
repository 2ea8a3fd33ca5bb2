"""Runs one action at a time, by many ranks in step: a *round*.

Theory of operation
-------------------
A round is sent to its ranks and is over when each of them has answered, was lost, or is out of time. Ranks act with
handlers that may wait for each other in collectives. So once one of them has failed or is lost, the others get only a
short respite: their later answers are a consequence. The result keeps the first failure apart from those.

Serial numbers grow from round to round, and with the term in their upper half also when another controller takes over.
So a rank carries out each act once and repeats its answer when it is asked again, and answers of an earlier round are
recognised.

``RoundRunner`` runs *scripts*: generators that yield rounds and waits, and are sent the results. A script reads from
top to bottom like the procedure that it is, and is given up by closing it.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, field, replace

from ttp.core.controller.outbox import Outbox
from ttp.core.controller.program_recovery import Ending
from ttp.core.layout import Rank
from ttp.mindio.protocol.messages import Act, Acted, RoundKind

SERIALS_PER_TERM = 1 << 32
RESPITE_S = 10.0
"""Seconds that ranks have to come out of a handler whose partner has failed."""
SPARE_S = 5.0
"""Seconds beyond the time that a rank gives its handler, for the order and the answer to travel."""


@dataclass(frozen=True, slots=True)
class Round:
    """One action of several ranks.

    Args:
        kind: kind of action.
        acts: the act of each rank; term and serial number are filled in later.
        together: the handlers wait for each other: if one fails, all do.
    """

    kind: RoundKind
    acts: Mapping[Rank, Act]
    together: bool = False


@dataclass(slots=True)
class Result:
    """The result of a round.

    Args:
        done: answers of the ranks that did it.
        failed: why others could not, the first failure first; lost ranks are not among them.
        lost: ranks that cannot be reached any more, or have not reported success since they came back.
    """

    done: dict[Rank, Acted] = field(default_factory=dict)
    failed: dict[Rank, str] = field(default_factory=dict)
    lost: list[Rank] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """True if every rank did it."""
        return not (self.failed or self.lost)

    @property
    def words(self) -> str:
        """Why the round failed; empty if it did not."""
        failures = [f"rank {rank}: {text}" for rank, text in list(self.failed.items())[:4]]
        return "; ".join([*[f"rank {rank} was lost" for rank in self.lost[:4]], *failures])


@dataclass(frozen=True, slots=True)
class Pause:
    """Wait for anything to happen, until this time in seconds at the latest."""

    until: float


Step = Round | Pause
Part = Generator[Step, Result, str]
"""A part of a script: returns why it failed, empty if it did not."""
Script = Generator[Step, Result, Ending]
"""A script: returns the ending of the recovery. The result of a ``Pause`` is empty."""


class RoundRunner:
    """Runs one script at a time.

    Args:
        outbox: takes the orders.
    """

    def __init__(self, outbox: Outbox) -> None:
        self.ending: Ending | None = None
        """How the last script ended; ``None``: it is running, or was given up."""
        self._outbox = outbox
        self._script: Script | None = None
        self._round: Round | None = None
        self._result = Result()
        self._acts: dict[Rank, Act] = {}
        self._until = 0.0
        self._term = self._serial = 0

    @property
    def running(self) -> bool:
        """True while a script is running."""
        return self._script is not None

    @property
    def doing(self) -> RoundKind | None:
        """The kind of the running round; None: there is none."""
        return self._round.kind if self._round is not None else None

    def begin(self, script: Script, term: int, now: float) -> None:
        """Run ``script``; a script that is running is given up."""
        self.give_up()
        self._script, self._term = script, term
        self._next(None, now)
        self._go_on(now)

    def give_up(self) -> None:
        """Give the running script up; answers of its ranks count no more."""
        if self._script is not None:
            self._script.close()
        self._script = self._round = self.ending = None
        self._acts = {}

    # ---------------------------------------------------------------------------------------------------------- events

    def acted(self, report: Acted, now: float) -> None:
        """Take the answer of a rank; an answer that is too late changes nothing."""
        act = self._acts.get(report.rank)
        if act is None or report.serial != act.serial:
            return
        del self._acts[report.rank]
        if report.ok:
            self._result.done[report.rank] = report
        else:
            self._result.failed[report.rank] = report.text or "it said no more than that it failed"
            self._hurry(now)

    def lost(self, rank: Rank, now: float) -> None:
        """Note that the rank cannot be reached any more."""
        if self._round is not None and (rank in self._acts or rank in self._result.done):
            self._acts.pop(rank, None)
            self._result.done.pop(rank, None)
            self._result.lost.append(rank)
            self._hurry(now)

    def again(self, rank: Rank) -> None:
        """Send the rank its act again, as the first order may be lost."""
        if rank in self._acts:
            self._outbox.send_to(rank, self._acts[rank])

    def advance(self, now: float) -> None:
        """Go on as far as the known facts allow. Called after every event."""
        if self._script is not None and self._round is None:
            self._next(Result(), now)  # something has happened: the script checks whether it waits for that
        self._go_on(now)

    def deadlines(self) -> Iterator[float]:
        """Yield the time at which ``advance`` has something to do."""
        if self._script is not None:
            yield self._until

    # ---------------------------------------------------------------------------------------------------------- inside

    def _go_on(self, now: float) -> None:
        while self._round is not None and (not self._acts or now >= self._until):
            self._finish_round(now)

    def _hurry(self, now: float) -> None:
        if self._round is not None and self._round.together:
            self._until = min(self._until, now + RESPITE_S)

    def _finish_round(self, now: float) -> None:
        assert self._round is not None
        for rank, act in sorted(self._acts.items()):
            self._result.failed[rank] = f"{act.kind.value} has not ended in time"
        result, kind = self._result, self._round.kind
        self._acts, self._round = {}, None
        self._outbox.record(
            "round_over", round=kind.value, done=sorted(result.done), failed=dict(result.failed), lost=result.lost
        )
        self._next(result, now)

    def _next(self, result: Result | None, now: float) -> None:
        assert self._script is not None
        try:
            step = next(self._script) if result is None else self._script.send(result)
        except StopIteration as end:
            self._script, self.ending = None, end.value
            return
        if isinstance(step, Pause):
            self._until = step.until
        else:
            self._start(step, now)

    def _start(self, step: Round, now: float) -> None:
        self._serial += 1
        serial = (self._term - 1) * SERIALS_PER_TERM + self._serial
        self._acts = {rank: replace(act, term=self._term, serial=serial) for rank, act in step.acts.items()}
        limit_s = max((act.limit_ms for act in self._acts.values()), default=0) / 1000
        self._round, self._result, self._until = step, Result(), now + limit_s + SPARE_S
        about = next(iter(self._acts.values()), None)
        self._outbox.record(
            "round",
            round=step.kind.value,
            version=about.version if about else 0,
            ranks=sorted(self._acts),
            purpose=about.purpose if about else "",
        )
        for rank in sorted(self._acts):
            self._outbox.send_to(rank, self._acts[rank])
