"""The verdict: the result of a job as one exit code for all of its launchers.

A launcher sees only its own ranks: one has a rank whose configuration is wrong (64), another has ranks that were saved
(75), a third has a rank that was killed (137). The controller knows what happened to all ranks. A wrong configuration
(64) has precedence, because no restart mends it; then come not saved (70), saved (75), and trained to the end (0).

The verdict also counts launches in a row that brought no new version, whether the launcher restarted the ranks or the
whole job was launched. After ``FRUITLESS_MAX`` such launches the job must not be started again, even if it was saved.
A launch that SIGTERM ended does not count: that is no sign of a lasting fault.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ttp.core.layout import Version
from ttp.core.messages import Goodbye, GoodbyeReason
from ttp.errors import EXIT_BAD_CONFIG, EXIT_NOT_SAVED, EXIT_SAVED, EXIT_TRAINED

FRUITLESS_MAX = 3
"""Number of launches in a row without a new version after which the job must not be started again."""
WRONG = "a configuration or a program is wrong: "
"""How the text of the verdict 64 begins."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """One exit code for the job.

    Args:
        code: 64, 70, 75 or 0; None while the end is unknown.
        text: the reason.
        final: starting again does not help, however many restarts are left.
    """

    code: int | None
    text: str
    final: bool = False


class JobVerdict:
    """Keeps how this launch ends, as far as known, and how many launches before it brought no new version."""

    def __init__(self) -> None:
        self.fruitless = 0
        """Launches in a row, before this one, that brought no new version."""
        self.progress = False
        """True if this launch has brought a new version."""
        self.preempted = False
        """True if this launch was ended by SIGTERM."""
        self.asked: set[str] = set()
        """Hosts whose launcher has asked for the verdict when it ended."""
        self.left: set[str] = set()
        """Hosts of which a rank has left in good order."""
        self.drained: frozenset[str] = frozenset()
        """Hosts whose launchers must not start ranks again after this launch."""
        self._launched = False
        self._forget()

    def _forget(self) -> None:
        self._wrong = self._interrupted = ""
        self._end: Verdict | None = None
        self._claims: dict[str, int] = {}
        self.asked, self.left = set(), set()

    # --------------------------------------------------------------------------------------------------------- launches

    def launch_begins(self, *, same_job: bool) -> None:
        """Begin a launch, whose first rank has said hello; ``same_job``: of the same job as the last launch."""
        if not same_job:
            self.fruitless = 0
        elif self._launched:
            self.fruitless = 0 if self.progress else self.fruitless + (not self.preempted)
        self._launched, self.progress, self.preempted, self.drained = True, False, False, frozenset()
        self._forget()

    def remember(self, fruitless: int, progress: bool, wrong: str = "", drained: frozenset[str] = frozenset()) -> None:
        """Take the history: see ``Remembered``."""
        self.fruitless, self.progress = max(self.fruitless, fruitless), self.progress or progress
        self.drained |= drained
        if wrong:
            self.is_wrong(wrong.removeprefix(WRONG))

    def released(self, code: int, text: str, cause: str, *, preempted: bool = False) -> Verdict:
        """Return the verdict to release the ranks with.

        Args:
            code: the exit code that the rescue asks for; the verdict may have another one.
            text: the reason for ``code``.
            cause: the cause of the incident.
            preempted: whether the cause is SIGTERM.
        """
        self._end, self.preempted = Verdict(code, text), preempted
        if self._wrong:
            return replace(self.now, text=f"{self.now.text}. {text}")
        launches = self.fruitless + 1
        if not self.progress and not preempted and launches >= FRUITLESS_MAX:
            words = (
                f"no progress: launch {launches} in a row without a new version; starting again does not help "
                f"until the cause is removed ({cause}). {text}"
            )
            self._end = Verdict(EXIT_NOT_SAVED, words, final=True)
        return self._end

    def leaves(self, goodbye: Goodbye) -> None:
        """Note why a rank leaves: Ctrl-C ends a job before it has trained to its end."""
        if goodbye.reason is GoodbyeReason.INTERRUPTED and not self._interrupted:
            self._interrupted = f"rank {goodbye.rank} was interrupted (Ctrl-C)"

    def finished(self, newest: Version, on_disk: Version) -> Verdict:
        """Return the verdict after every rank has left its training loop.

        Args:
            newest: the newest version that a rank had.
            on_disk: the newest version that is known to be durable; 0: none.
        """
        self.progress = True
        self._end = Verdict(EXIT_TRAINED, "trained to the end")
        if self._interrupted:
            after = f" after version {on_disk}, which is on disk" if on_disk else ""
            whole = f"no finished step is lost, version {on_disk} is on disk already"
            lost = whole if 0 < newest <= on_disk else f"nothing was saved{after}"
            self._end = Verdict(EXIT_NOT_SAVED, f"{self._interrupted}: {lost}", final=True)
        return self._end

    # ---------------------------------------------------------------------------------------------------------- reports

    def starts(self) -> None:
        """Forget how the last launch ended, because a launcher starts ranks."""
        if self._end is not None or self._wrong:
            self._forget()

    def is_wrong(self, text: str) -> None:
        """Note that a rank has exited with 64, or will, because of ``text``; the first such text is kept."""
        self._wrong = self._wrong or text

    def asks(self, host: str, code: int) -> None:
        """Note that a launcher is about to exit and would do so with ``code``."""
        self.asked.add(host)
        self._claims[host] = code
        if code == EXIT_BAD_CONFIG:
            self.is_wrong(f"reported by the launcher on {host}: see its log for what its ranks say")

    @property
    def wrong(self) -> bool:
        """True if the job's configuration or program is known to be wrong."""
        return bool(self._wrong)

    @property
    def now(self) -> Verdict:
        """The verdict, as far as it is known."""
        if self._wrong:
            return Verdict(EXIT_BAD_CONFIG, f"{WRONG}{self._wrong}", final=True)
        if self._end is not None:
            return self._end
        claims = {code: host for host, code in self._claims.items()}
        for code in (EXIT_NOT_SAVED, EXIT_SAVED):
            if code in claims:
                return Verdict(code, f"reported by the launcher on {claims[code]}")
        return Verdict(None, "this controller does not know that the job has ended")
