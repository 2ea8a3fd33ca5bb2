"""Sums over a controller's events, for its metrics. Pure: events and times are arguments."""

from __future__ import annotations

import errno
import re
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
"""Upper bounds of the histograms' buckets, in seconds; a last bucket without a bound follows."""
SPENDING = {
    "training": "training",
    "forming": "restoring",
    "freezing": "freezing",
    "saving": "saving",
    "mending": "saving",
    "committing": "saving",
    "saved": "saving",
    "released": "down",
    "waiting": "down",
}
"""Stage of the job -> state under which its time is counted. Time in the stage ``finished`` is not counted."""
POINTS = {
    "plan": ("plan", "freeze", "opened"),
    "commit": ("commit", "save", "plan"),
    "committed": ("committed", "commit", "commit"),
    "held": ("committed", "commit", "commit"),
    "released": ("released", "release", "committed"),
}
"""By kind of event: the point of an incident, the part that ends there, and the point at which that part began."""
PARTS = ("freeze", "save", "commit", "release", "total")
_ERRNO = re.compile(r"\[errno (\d+)\]", re.IGNORECASE)


@dataclass
class Histogram:
    """A histogram of durations."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS_S) + 1))
    total_s: float = 0.0

    def add(self, seconds: float) -> None:
        """Count one duration."""
        self.counts[bisect_left(BUCKETS_S, seconds)] += 1
        self.total_s += seconds


@dataclass
class Tally:
    """The sums of one controller.

    Args:
        incidents: number of ended incidents, by (cause, outcome).
        parts: durations of the parts of incidents: freeze, save, commit, release, total.
        recovery: durations from the first sign of a fault to the first new step after the saved one.
        spent_s: seconds spent in each state, see ``SPENDING``.
        lost_steps: finished steps that were lost.
        saved_bytes: bytes of committed checkpoints.
        save_failures: failed saves and commits, by the name of their errno (``ENOSPC``); ``other``: none is known.
        saved_version: the last committed version.
        committed_unix_s: time of the last commit, on the wall clock.
    """

    incidents: Counter[tuple[str, str]] = field(default_factory=Counter)
    parts: dict[str, Histogram] = field(default_factory=dict)
    recovery: Histogram = field(default_factory=Histogram)
    spent_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    lost_steps: int = 0
    saved_bytes: int = 0
    save_failures: Counter[str] = field(default_factory=Counter)
    saved_version: int = 0
    committed_unix_s: float = 0.0
    _at: dict[str, float] = field(default_factory=dict)
    """Time at which the open incident reached each of its points."""
    _cause: str = ""
    _outcome: str = ""
    _finished: int = 0
    """The newest version that a rank is known to have finished."""
    _down_since: float | None = None
    _begins_with: int | None = None
    """The version from which a launch resumes, until all ranks have loaded it or a rank has a newer version."""
    _spending: str = ""
    _looked_at: float = 0.0

    def take(self, kind: str, facts: Mapping[str, Any], now: float, unix_s: float) -> None:
        """Add an event that the controller records.

        Args:
            kind: kind of the event.
            facts: facts of the event.
            now: its time on the monotonic clock, in seconds.
            unix_s: its time on the wall clock, in seconds.
        """
        if kind in POINTS:
            self._reached(*POINTS[kind], now)
        match kind:
            case "opened":
                self._at, self._cause, self._outcome = {"opened": now}, "", ""
            case "evidence":
                self._cause = self._cause or str(facts["evidence"])
            case "answer":
                self._finished = max(self._finished, int(facts["version"]))
            case "committed":
                self._outcome, self.saved_version = "saved", int(facts["version"])
                self.saved_bytes += int(facts["size"])
                self.committed_unix_s = unix_s
            case "held":
                self._outcome = "held"
            case "save_failed" | "commit_failed":
                self.save_failures[_errno_in(str(facts["text"]))] += 1
            case "nothing_new" | "mended":
                self._outcome = self._outcome or kind
            case "thawed":
                self._over(self._outcome or "thawed", now)
            case "released":
                self._down_since = self._at.get("opened", now)
                self._over(self._outcome or "not_saved", now)
            case "incarnation" if not facts.get("resumed"):
                self._begins_with = 0
            case "restored":
                self._begins_with = None
            case "restore":
                restored = int(facts["version"])
                self._begins_with = None if self._begins_with is None else restored or None
                self.lost_steps += max(0, self._finished - restored)
                self._finished = restored

    def look(self, stage: str, newest: int, now: float) -> None:
        """Count the time since the last call under the state that held since then.

        Args:
            stage: the present stage of the job.
            newest: the newest version of any rank.
            now: time on the monotonic clock, in seconds.
        """
        if self._spending and (self.spent_s or self._spending != "down"):  # else nothing has begun
            self.spent_s[self._spending] += now - self._looked_at
        if self._begins_with is not None and newest > self._begins_with:
            self._begins_with = None
        begins = stage == "training" and self._begins_with is not None
        self._spending, self._looked_at = "restoring" if begins else SPENDING.get(stage, ""), now
        if stage == "training" and self._down_since is not None and newest > self.saved_version:
            self.recovery.add(now - self._down_since)
            self._down_since = None
        if stage == "training" and self._down_since is None:
            self._finished = max(self._finished, newest)

    def _reached(self, what: str, part: str, since: str, now: float) -> None:
        if since in self._at:
            self.parts.setdefault(part, Histogram()).add(now - self._at[since])
        self._at[what] = now

    def _over(self, outcome: str, now: float) -> None:
        self._reached("over", "total", "opened", now)
        self.incidents[self._cause or "unknown", outcome] += 1
        self._at = {}


def _errno_in(text: str) -> str:
    found = _ERRNO.search(text)
    return errno.errorcode.get(int(found[1]), "other") if found else "other"
