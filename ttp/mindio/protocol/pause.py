"""The script that lets all ranks stand still at the end of the same step, and go on.

A step that all ranks have in common cannot be named from outside: when its name arrives, a rank may be beyond it. So
every rank is first told to go no further than the end of its running step (HOLD) and reports that step. No rank can get
beyond the largest of those steps, and every rank can reach it: there they stand (PAUSE).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ttp.core.controller.program_recovery import Ending, Outcome
from ttp.core.layout import Rank, Version
from ttp.mindio.protocol.handshake import ManagerMailbox
from ttp.mindio.protocol.manager_messages import CallKind, Code, Notice, NoticeKind, RankFault
from ttp.mindio.protocol.messages import Act, RoundKind
from ttp.mindio.protocol.repair_state import RepairState
from ttp.mindio.protocol.rounds import Part, Pause, Round, Script

PURPOSE = "pause"
FOR_EVER_S = 1e9


class Pausing:
    """Runs pauses, at most one at a time.

    Args:
        state: the ranks.
        mailbox: the manager.
        end_job: called when the manager wants a paused job to end (``dump`` or ``exit``).
    """

    def __init__(self, state: RepairState, mailbox: ManagerMailbox, end_job: Callable[[Notice], None]) -> None:
        self.paused = False
        """True while training threads may be standing still."""
        self._state, self._mailbox, self._end_job = state, mailbox, end_job
        self._faults: tuple[RankFault, ...] = ()

    def pause(self, notice: Notice) -> Script:
        """Stand still until the manager says that training is to go on, or goes away."""
        self.paused, self._faults = True, notice.faults
        problem = yield from self.stand_still(notice.seconds)
        code = Code.ERROR if problem else Code.OK
        self._mailbox.tell(CallKind.STOP_COMPLETE, self._faults, code, problem or "all ranks stand still")
        return (yield from self.go_on(at_once=bool(problem)))

    def go_on(self, *, at_once: bool = False) -> Script:
        """Wait for the end of the pause, and end it."""
        while not at_once and self._mailbox.present:
            notice = self._mailbox.take(NoticeKind.STRATEGY)
            if notice is not None and notice.strategy in ("dump", "exit"):
                self._end_job(notice)
            at_once = notice is not None and notice.strategy == "continue"
            if not at_once:
                yield Pause(self._state.now + FOR_EVER_S)
        result = yield self._state.everyone(RoundKind.CONTINUE, purpose=PURPOSE)
        self.paused = False
        text = result.words or "training goes on"
        self._mailbox.tell(CallKind.RESULT, (), Code.OK if result.ok else Code.ERROR, text, strategy="continue")
        return Ending(Outcome.RESUMED, Version(0), text)

    def stand_still(self, seconds: float) -> Part:
        """Have all ranks stand at the end of the same step; each round may take ``seconds``, 0: as long as usual."""
        hold = yield self._round(RoundKind.HOLD, Version(0), seconds)
        if not hold.ok:
            return hold.words
        boundary = Version(max(acted.result for acted in hold.done.values()))
        pause = yield self._round(RoundKind.PAUSE, boundary, seconds)
        if not pause.ok:
            return pause.words
        sync = yield self._round(RoundKind.SYNC, boundary, seconds)
        return sync.words

    def _round(self, kind: RoundKind, version: Version, seconds: float) -> Round:
        acts: dict[Rank, Act] = {}
        for rank in self._state.live:
            act = self._state.act(rank, kind, version, PURPOSE)
            acts[rank] = replace(act, limit_ms=int(seconds * 1000)) if seconds else act
        return Round(kind, acts, together=True)
