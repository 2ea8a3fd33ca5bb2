"""Run rounds: a *round* is one action that many ranks carry out together.

Theory of operation
-------------------
A round is sent to its ranks, and is over when each of them has answered, was lost, or has exceeded its time limit.
Ranks act by handlers that may wait for each other in collectives. So when one of them fails or is lost, the others get
only ``RESPITE_S`` more: their failures are consequences. In the result the first failure comes first.

Serial numbers grow from round to round. The term is their upper half, so they grow also when another controller takes
over. So a rank carries out each act once and repeats its answer to a repeated order, and answers of earlier rounds are
recognised.

``RoundRunner`` runs *scripts*: generators that yield rounds and pauses, and are sent the results. So a script reads as
a procedure from top to bottom, and is given up by closing the generator.
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
"""Seconds in which the other ranks of a round have to answer after one has failed."""
SPARE_S = 5.0
"""Seconds to wait beyond the time limit of the handlers, for the transport of orders and answers."""


@dataclass(frozen=True, slots=True)
class Round:
    """One action of several ranks.

    Args:
        kind: kind of action.
        acts: the act of each rank; the runner sets term and serial number.
        together: whether the handlers wait for each other, so that all fail if one does.
    """

    kind: RoundKind
    acts: Mapping[Rank, Act]
    together: bool = False


@dataclass(slots=True)
class Result:
    """The result of a round.

    Args:
        done: answers of the ranks that have succeeded.
        failed: rank -> reason for the ranks that have failed, the first failure first; without lost ranks.
        lost: ranks that were lost during the round.
    """

    done: dict[Rank, Acted] = field(default_factory=dict)
    failed: dict[Rank, str] = field(default_factory=dict)
    lost: list[Rank] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether every rank has succeeded."""
        return not (self.failed or self.lost)

    @property
    def words(self) -> str:
        """The reasons why the round failed; empty if it did not."""
        failures = [f"rank {rank}: {text}" for rank, text in list(self.failed.items())[:4]]
        return "; ".join([*[f"rank {rank} was lost" for rank in self.lost[:4]], *failures])


@dataclass(frozen=True, slots=True)
class Pause:
    """Wait for the next event, until the time ``until`` (seconds) at the latest."""

    until: float


Step = Round | Pause
Part = Generator[Step, Result, str]
"""A part of a script, which returns why it failed; empty if it did not."""
Script = Generator[Step, Result, Ending]
"""A script, which returns the ending of the recovery. The result of a ``Pause`` is empty."""


class RoundRunner:
    """Runs one script at a time.

    Args:
        outbox: takes the orders.
    """

    def __init__(self, outbox: Outbox) -> None:
        self.ending: Ending | None = None
        """The ending of the last script; None if it runs or was given up."""
        self._outbox = outbox
        self._script: Script | None = None
        self._round: Round | None = None
        self._result = Result()
        self._acts: dict[Rank, Act] = {}
        self._until = 0.0
        self._term = self._serial = 0

    @property
    def running(self) -> bool:
        """Whether a script runs."""
        return self._script is not None

    def begin(self, script: Script, term: int, now: float) -> None:
        """Run ``script``, after giving up a running one.

        Args:
            script: the script.
            term: term of this controller.
            now: the time in seconds.
        """
        self.give_up()
        self._script, self._term = script, term
        self._next(None, now)
        self._go_on(now)

    def give_up(self) -> None:
        """Give up the running script, and ignore the outstanding answers of ranks."""
        if self._script is not None:
            self._script.close()
        self._script = self._round = self.ending = None
        self._acts = {}

    # ---------------------------------------------------------------------------------------------------------- events

    def acted(self, report: Acted, now: float) -> None:
        """Take the answer of a rank; a late answer has no effect."""
        act = self._acts.get(report.rank)
        if act is None or report.serial != act.serial:
            return
        del self._acts[report.rank]
        if report.ok:
            self._result.done[report.rank] = report
        else:
            self._result.failed[report.rank] = report.text or "it has failed without a reason"
            self._hurry(now)

    def lost(self, rank: Rank, now: float) -> None:
        """Record that the rank cannot be reached any more."""
        if self._round is not None and (rank in self._acts or rank in self._result.done):
            self._acts.pop(rank, None)
            self._result.done.pop(rank, None)
            self._result.lost.append(rank)
            self._hurry(now)

    def again(self, rank: Rank) -> None:
        """Send the rank its act again, because the first order may be lost."""
        if rank in self._acts:
            self._outbox.send_to(rank, self._acts[rank])

    def advance(self, now: float) -> None:
        """Continue the script as far as possible. This is called after every event."""
        if self._script is not None and self._round is None:
            self._next(Result(), now)  # the script is in a pause, and checks whether the event ends it
        self._go_on(now)

    def deadlines(self) -> Iterator[float]:
        """Yield the time at which ``advance`` has to be called."""
        if self._script is not None:
            yield self._until

    # --------------------------------------------------------------------------------------------------------- private

    def _go_on(self, now: float) -> None:
        while self._round is not None and (not self._acts or now >= self._until):
            self._finish_round(now)

    def _hurry(self, now: float) -> None:
        """Shorten the time limit of a round to ``RESPITE_S``: a rank has failed for which the others wait."""
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
