"""The words of a chaos script: points of a step, events of an incident, targets, and kinds of faults."""

from __future__ import annotations

import re
from dataclasses import dataclass

STEP_PHASES = ("data", "forward", "loss", "backward", "allreduced", "in_step", "stepped", "scheduler", "scheduled")
"""Phases of a step, in their order; ``in_step`` is half-way through ``optimizer.step()``."""

CALLED_PHASES = ("extra_state", "evaluation")
"""Phases outside the training itself: while ``extra_state`` returns its state, and during an evaluation."""

START_PHASES = ("leaving", "seated", "regrouping", "entered", "joined", "restored", "updating")
"""Phases of a start, in their order.

The first three are for ranks that continue in their processes and for ranks that replace dead ones: ``leaving`` (out
of ``train()``), ``seated`` (waiting for the others), ``regrouping`` (before the process groups are exchanged). The next
three are for every rank: ``entered`` (in ``train()``), ``joined`` (after ``wrap_optimizer()``), ``restored`` (after
``restore()``). ``updating`` is where a rank that continues begins its first update.
"""

EVENTS = (
    "abdicated", "acknowledged", "answer", "awaited", "closed", "commit", "commit_failed", "committed", "done",
    "drained", "evidence", "fallback", "finished", "formed", "gone", "held", "incarnation", "interrupted", "joined",
    "left", "not_held", "nothing_new", "opened", "outvoted", "plan", "reconnected", "refused", "released", "replan",
    "misfit", "restore", "restored", "retracted", "retry", "save_failed", "saved", "stack", "standby",
    "stood_still", "thawed", "waits", "witness_asked",
)  # fmt: skip
"""Kinds of events that a controller sends to its watchers; see ``WatchEvents``."""

LAUNCHERS = ("ttp", "torchrun")
RESTARTS = ("agent", "scheduler")
"""What restarts a job: ``agent``, the launcher, which keeps running; ``scheduler``, after the launchers have ended."""

EXPECTED = ("saved", "unhurt", "refused", "any")
"""Outcomes that a script may expect of a run (see ``ttp.chaos.checks``); ``any`` accepts all."""

FEATURES = ("fallback", "hang", "keep", "mirror", "soak", "standby", "warm")
"""Features of jobs and runs that are drawn only with ``--include``."""

_PROCESSES = ("ranks", "all", "saver", "committer", "bystander")


@dataclass(frozen=True, slots=True)
class FaultWord:
    """One kind of fault.

    Args:
        targets: the kinds of targets that it can strike.
        inside: whether the rank carries it out itself, at a phase.
        needs: ``hosts`` (several hosts), ``mount`` (a file system for this job only), or empty.
    """

    targets: tuple[str, ...]
    inside: bool = False
    needs: str = ""


FAULT_WORDS: dict[str, FaultWord] = {
    "kill": FaultWord((*_PROCESSES, "controller", "launcher", "host", "template")),
    "segv": FaultWord((*_PROCESSES, "controller")),
    "term": FaultWord((*_PROCESSES, "launcher")),
    "stop": FaultWord((*_PROCESSES, "controller", "launcher", "host", "template")),
    "cont": FaultWord((*_PROCESSES, "controller", "launcher", "host", "template")),
    "raise": FaultWord(("ranks", "all"), inside=True),
    "exit": FaultWord(("ranks", "all"), inside=True),
    "hang": FaultWord(("ranks", "all"), inside=True),
    "hang-gil": FaultWord(("ranks", "all"), inside=True),
    "partition": FaultWord(("host",), needs="hosts"),
    "unplug": FaultWord(("host",), needs="hosts"),
    "heal": FaultWord(("host",), needs="hosts"),
    "disk-quota": FaultWord(_PROCESSES),
    "disk-full": FaultWord(("disk",), needs="mount"),
    "disk-ro": FaultWord(("disk",), needs="mount"),
    "disk-heal": FaultWord(("disk",), needs="mount"),
    "save": FaultWord(("controller",)),
    "again": FaultWord(("controller",)),
    "report": FaultWord(_PROCESSES),
}
"""The kinds of faults, by the word that a script uses in ``what``."""

ALONE = ("all", "bystander", "committer", "controller", "disk", "launcher", "random", "saver", "template")
"""Words for ``who`` without a number."""


@dataclass(frozen=True, slots=True)
class Target:
    """The target of a fault. ``numbers``: the ranks (kind ``ranks``), or the one host (kind ``host``); else empty."""

    kind: str
    numbers: tuple[int, ...] = ()

    def __str__(self) -> str:
        if not self.numbers:
            return self.kind
        word = {"ranks": "rank" if len(self.numbers) == 1 else "ranks"}.get(self.kind, self.kind)
        return f"{word} {' '.join(map(str, self.numbers))}"


_NUMBERED = re.compile(r"(ranks?|host)((?:[ ,]+\d+)+)")


def parse_target(text: str) -> Target | None:
    """Parse ``rank 2``, ``ranks 0 3``, ``host 1``, or one of ``ALONE``; return None for any other text."""
    if text in ALONE:
        return Target(text)
    match = _NUMBERED.fullmatch(text)
    if match is None:
        return None
    numbers = tuple(dict.fromkeys(int(n) for n in re.findall(r"\d+", match[2])))
    kind = "host" if match[1] == "host" else "ranks"
    return None if kind == "host" and len(numbers) != 1 else Target(kind, numbers)
