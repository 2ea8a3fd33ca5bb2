"""The script that pauses all ranks at the end of the same step, and continues training.

The controller cannot simply name a step: when the order arrives, a rank may be beyond it. So every rank is first
ordered not to train beyond the end of its current step (HOLD), and reports that step. No rank gets beyond the largest
of these steps, and every rank can reach it. There they pause (PAUSE).
"""

from __future__ import annotations

from collections.abc import Callable

from ttp.core.controller.program_recovery import Ending, Outcome
from ttp.core.layout import Version
from ttp.mindio.protocol.handshake import ManagerMailbox
from ttp.mindio.protocol.manager_messages import CallKind, Code, Notice, NoticeKind, RankFault
from ttp.mindio.protocol.messages import RoundKind
from ttp.mindio.protocol.repair_state import RepairState
from ttp.mindio.protocol.rounds import Part, Pause, Script

PURPOSE = "pause"


class Pausing:
    """Runs pauses, at most one at a time.

    Args:
        state: the state of the ranks.
        mailbox: the notices of the manager, and the calls to it.
        end_job: is called when the manager chooses to end a paused job (``dump`` or ``exit``).
    """

    def __init__(self, state: RepairState, mailbox: ManagerMailbox, end_job: Callable[[Notice], None]) -> None:
        self._state, self._mailbox, self._end_job = state, mailbox, end_job
        self._faults: tuple[RankFault, ...] = ()
        self._until = 0.0

    def pause(self, notice: Notice) -> Script:
        """Pause all ranks until the manager chooses ``continue``, is gone, or is silent for ``notice.seconds``."""
        self._state.paused, self._faults = True, notice.faults
        problem = yield from self.stand_still()
        self._until = self._state.now + (notice.seconds or self._mailbox.wait_s)
        code = Code.ERROR if problem else Code.OK
        self._mailbox.tell(CallKind.STOP_COMPLETE, self._faults, code, problem or "all ranks are paused")
        return (yield from self.go_on(at_once=bool(problem)))

    def go_on(self, *, at_once: bool = False) -> Script:
        """Wait until the manager ends the pause, and continue training.

        Args:
            at_once: whether to continue without waiting.
        """
        while not at_once and self._mailbox.decides and self._state.now < self._until:
            notice = self._mailbox.take(NoticeKind.STRATEGY)
            if notice is not None and notice.strategy in ("dump", "exit"):
                self._end_job(notice)
            elif notice is not None and notice.strategy != "continue":
                text = f"{notice.strategy or 'nothing'} is not possible in a pause"
                self._mailbox.tell(CallKind.RESULT, (), Code.MAY_DUMP, text, strategy=notice.strategy)
            at_once = notice is not None and notice.strategy == "continue"
            if not at_once:
                yield Pause(self._until)
        result = yield self._state.everyone(RoundKind.CONTINUE, purpose=PURPOSE)
        self._state.paused = False
        text = result.words or ("training continues" if at_once else "nobody has ended the pause in time")
        code = Code.ERROR if result.words else Code.OK if at_once else Code.MAY_DUMP
        self._mailbox.tell(CallKind.RESULT, (), code, text, strategy="continue")
        self._mailbox.clear()
        return Ending(Outcome.RESUMED, Version(0), text)

    def stand_still(self) -> Part:
        """Pause all ranks at the end of the same step."""
        hold = yield self._state.everyone(RoundKind.HOLD, purpose=PURPOSE, together=True)
        if not hold.ok:
            return hold.words
        boundary = Version(max(acted.result for acted in hold.done.values()))
        pause = yield self._state.everyone(RoundKind.PAUSE, boundary, PURPOSE, together=True)
        if not pause.ok:
            return pause.words
        sync = yield self._state.everyone(RoundKind.SYNC, boundary, PURPOSE, together=True)
        return sync.words
