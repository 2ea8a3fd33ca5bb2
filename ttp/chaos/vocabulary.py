"""The words of a chaos script: points of a step, events of an incident, targets, and kinds of faults."""

from __future__ import annotations

import re
from dataclasses import dataclass

STEP_PHASES = (
    "data",
    "forward",
    "loss",
    "backward",
    "allreduced",
    "in_step",
    "stepped",
    "scheduler",
    "scheduled",
)
"""Points of a step at which a rank can be met, in their order; ``in_step``: half-way through ``optimizer.step()``."""

CALLED_PHASES = ("extra_state", "evaluation")
"""Points outside the training itself: while ``extra_state`` is asked for its state, and during an evaluation."""

START_PHASES = ("leaving", "seated", "regrouping", "entered", "joined", "restored", "updating")
"""Points of a start, in their order.

For ranks that go on in their processes, or take the seat of a dead one: out of ``train()``, waiting for the others, and
before the process groups are exchanged. For every rank: in ``train()``, after ``wrap_optimizer()``, after
``restore()``. ``updating``: where a rank that goes on begins its first update.
"""

EVENTS = (
    "abdicated",
    "acknowledged",
    "answer",
    "awaited",
    "closed",
    "commit",
    "commit_failed",
    "committed",
    "done",
    "evidence",
    "fallback",
    "finished",
    "formed",
    "gone",
    "held",
    "incarnation",
    "joined",
    "left",
    "not_held",
    "nothing_new",
    "opened",
    "plan",
    "reconnected",
    "refused",
    "released",
    "replan",
    "misfit",
    "restore",
    "restored",
    "retracted",
    "retry",
    "save_failed",
    "saved",
    "stack",
    "standby",
    "thawed",
    "waits",
    "witness_asked",
)
"""Kinds of events that a controller sends to its watchers; see ``WatchEvents``."""

LAUNCHERS = ("ttp", "torchrun")
RESTARTS = ("agent", "scheduler")
"""What starts a job again: the launcher, in place; or the scheduler, after the launchers have left."""

OUTCOMES = ("saved", "unhurt", "refused", "any")
"""Outcomes that a script may expect of a run; see ``ttp.chaos.checks``."""

FEATURES = ("fallback", "hang", "keep", "mirror", "soak", "standby", "warm")
"""Features that are drawn only if asked for with ``--include``."""

_PROCESSES = ("ranks", "all", "saver", "committer", "bystander")


@dataclass(frozen=True, slots=True)
class FaultWord:
    """One kind of fault.

    Args:
        targets: the kinds of target that it can be done to.
        inside: done by the rank itself, at a phase.
        needs: ``hosts`` (several of them), ``mount`` (a file system of the job's own), or nothing.
    """

    targets: tuple[str, ...]
    inside: bool = False
    needs: str = ""


FAULT_WORDS: dict[str, FaultWord] = {
    "kill": FaultWord((*_PROCESSES, "controller", "launcher", "host", "template")),
    "segv": FaultWord((*_PROCESSES, "controller")),
    "term": FaultWord((*_PROCESSES, "launcher")),
    "stop": FaultWord((*_PROCESSES, "controller", "host", "template")),
    "cont": FaultWord((*_PROCESSES, "controller", "host", "template")),
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
"""All words for ``what``."""

ALONE = ("all", "bystander", "committer", "controller", "disk", "launcher", "random", "saver", "template")
"""Words for ``who`` that need no number."""


@dataclass(frozen=True, slots=True)
class Target:
    """The target of a fault. ``numbers``: of ranks (kind ``ranks``) or of the one host (kind ``host``); else empty."""

    kind: str
    numbers: tuple[int, ...] = ()

    def __str__(self) -> str:
        if not self.numbers:
            return self.kind
        word = {"ranks": "rank" if len(self.numbers) == 1 else "ranks"}.get(self.kind, self.kind)
        return f"{word} {' '.join(map(str, self.numbers))}"


_NUMBERED = re.compile(r"(ranks?|host)((?:[ ,]+\d+)+)")


def parse_target(text: str) -> Target | None:
    """Parse ``rank 2``, ``ranks 0 3``, ``host 1``, or one of ``ALONE``; None for anything else."""
    if text in ALONE:
        return Target(text)
    match = _NUMBERED.fullmatch(text)
    if match is None:
        return None
    numbers = tuple(dict.fromkeys(int(n) for n in re.findall(r"\d+", match[2])))
    kind = "host" if match[1] == "host" else "ranks"
    return None if kind == "host" and len(numbers) != 1 else Target(kind, numbers)
