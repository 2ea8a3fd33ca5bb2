"""Counts launches in a row that failed before the job had formed: a broken script must not be started for ever.

The controller counts launches that bring no new version, but only those in which all ranks have joined it. A script
that cannot be imported, or does not find its data, ends before that. So each launcher counts such launches itself.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from ttp.core.controller.job_verdict import FRUITLESS_MAX
from ttp.errors import EXIT_NOT_SAVED, EXIT_SAVED

EARLY_S = 120.0
"""A launch that lasts longer does not count: the program may train without ttp, which nobody can see from outside."""


FORMS_S = 300.0
"""Seconds after the start of workers in which a lost host has all started again, if none has joined the job by then.

Not longer than torch's exit barrier: a host whose program has ended, without ttp, would be taken for lost after it.
"""

STARTS_S = 60.0
"""Seconds after the start of workers in which all ranks have joined the job as a rule."""

WAITED_S = 10.0
"""Seconds for which a rank may have left a restart alone before others count as waiting for it."""


class EarlyFailures:
    """Counts the launches of one launcher. Times are in seconds of ``time.monotonic()``."""

    def __init__(self) -> None:
        self.in_a_row = 0
        """Launches that failed early, without another one in between."""
        self._began_s = 0.0
        self._joined, self._late = False, True
        self._formed = 0  # incarnation of the last launch that formed
        self._left_s: float | None = 0.0  # since when a rank has left this launch early; 0: none has; None: it was told

    @property
    def enough(self) -> bool:
        """Whether the job must not be started again."""
        return self.in_a_row >= FRUITLESS_MAX

    def begins(self, now_s: float) -> None:
        """Note that the workers of a launch are being started."""
        self._began_s, self._left_s, self._joined, self._late = now_s, 0.0, False, False

    def forms(self, now_s: float, joined: bool) -> bool:
        """Return whether the workers are still starting.

        Args:
            now_s: the time.
            joined: whether one of this host has joined the job, as far as is known now: a launcher that leaves removes
                the files of all, if two of a machine share them.
        """
        self._joined = self._joined or joined
        return not self._joined and now_s - self._began_s < FORMS_S

    def is_late(self, now_s: float) -> bool:
        """Return, once in each launch, whether its workers were started ``STARTS_S`` ago."""
        before, self._late = self._late, self._late or now_s - self._began_s >= STARTS_S
        return self._late and not before

    def keeps_waiting(self, now_s: float, left: bool) -> bool:
        """Return, once in each restart of a job that had formed, whether a rank that has left keeps others waiting.

        Args:
            now_s: the time.
            left: whether a rank of this host has ended well, and others run, and none of them has joined the job.
        """
        if not (left and self._formed) or self._left_s is None:
            return False
        self._left_s = self._left_s or now_s
        if now_s - self._left_s < WAITED_S:
            return False
        self._left_s = None
        return True

    def failed(self, now_s: float, status: Any, codes: Collection[int]) -> None:
        """Note that a launch has failed.

        Args:
            now_s: the time.
            status: ``GetStatusResponse`` of the job's controller; None: no controller answers, and nothing is known.
            codes: exit codes of the ranks of this host.
        """
        if status is None:
            return
        formed = status.world_size > 0 and status.stage != "forming" and status.incarnation != self._formed
        if formed:
            self._formed = status.incarnation
        released = {EXIT_SAVED, EXIT_NOT_SAVED}.intersection(codes)
        early = not (formed or released) and now_s - self._began_s < EARLY_S
        self.in_a_row = self.in_a_row + 1 if early else 0
