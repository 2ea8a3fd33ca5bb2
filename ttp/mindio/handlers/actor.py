"""Carry out the orders (acts) of rounds on a rank: each on its own thread, with a deadline and always an answer."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

from ttp.core.layout import Rank, Version
from ttp.core.messages import Phase
from ttp.mindio.handlers.call import HANDLER_OF, Call, Handler, HandlerKind
from ttp.mindio.handlers.loop import Loop
from ttp.mindio.handlers.pause import HALTED, MOVES, PausePoint
from ttp.mindio.handlers.seat import Seat
from ttp.mindio.protocol.messages import MIGRATION, Act, Acted, RepairWay, RoundKind
from ttp.mindio.protocol.rank_side import Said
from ttp.processor.gate.gate import Gate
from ttp.processor.processor import Processor

log = logging.getLogger("ttp.handlers")

CLEANED = (0, 2)
"""Results of a clean handler after which the device is usable; see ``ttp.mindio.protocol.in_process_repair``."""
LOADS = (RepairWay.LOAD, RepairWay.LOAD_REBUILD)
WRITES = (RepairWay.MEMORY_HIGH, RepairWay.RECEIVE, *LOADS)
REPAIRS = (RoundKind.CLEAN, RoundKind.REBUILD, RoundKind.REPAIR, RoundKind.ROLLBACK)
"""Rounds that set the step and the type of the repair, for handlers that ask for them."""
NEEDED = (RoundKind.SAVE, RoundKind.REPAIR, RoundKind.REBUILD)
"""Rounds that fail without a handler."""


class CannotAct(Exception):  # noqa: N818 - it becomes the text of an answer
    """Raised when an order cannot be carried out; the text says why."""


class Actor:
    """Carries out the acts of one rank.

    Args:
        rank: the rank.
        processor: sends the answers; owns the gate.
        handlers: the program's handlers; the program may add more later.
        loop: the position of the training thread.
        pause: the point at which the training thread pauses on request.
        seat: tells the launcher whether this process may be killed while lost ranks are replaced.
        on_halted: function that tells the controller whether the training thread is stopped.
        on_device: returns the context in which a handler runs, so that it uses the device of the training thread.
    """

    def __init__(
        self,
        rank: Rank,
        processor: Processor,
        handlers: dict[HandlerKind, Handler],
        loop: Loop,
        pause: PausePoint,
        seat: Seat,
        on_halted: Callable[[bool], None],
        on_device: Callable[[HandlerKind], AbstractContextManager[None]],
    ) -> None:
        self.repair_step = 0
        self.repair_type = ""
        self.loaded: int | None = None
        """Step of the checkpoint that the running repair has loaded."""
        self.generation = 0
        """Number of the last round in which process groups may have been made; equal on all ranks of such a round."""
        self.moves = False
        """Whether ranks are being moved to other hosts; then the training thread leaves its loop at a step's end."""
        self._rank, self._processor, self._handlers = rank, processor, handlers
        self._gate: Gate = processor.gate
        self._loop, self._pause, self._on_halted, self._on_device = loop, pause, on_halted, on_device
        self._seat, self._answering = seat, threading.Lock()
        self._here = threading.local()
        self._stopped = False
        self._cleaned: int | None = None
        self._updated = threading.Event()

    def start(self, act: Act) -> None:
        """Start to carry out ``act`` on a new thread."""
        threading.Thread(target=self._oversee, args=(act,), name=f"ttp-{act.kind.value}", daemon=True).start()

    @property
    def calls_here(self) -> bool:
        """Whether the calling thread runs a handler."""
        return getattr(self._here, "calls", False)

    def updated(self) -> None:
        """Record that the training thread has ended an update while the gate is closed."""
        self._updated.set()

    # ------------------------------------------------------------------------------------------------------- one act

    def _oversee(self, act: Act) -> None:
        answer: list[tuple[bool, int, str]] = []
        worker = threading.Thread(target=lambda: answer.append(self._try(act)), name=f"ttp-{act.kind.value}-handler")
        worker.daemon = True
        worker.start()
        worker.join(act.limit_ms / 1000)
        ok, result, text = answer[0] if answer else (False, 0, f"{act.kind.value} took too long: {act.limit_ms} ms")
        if not ok:
            log.error("rank %s could not %s: %s", self._rank, act.kind.value, text)
        state = self._gate.state()
        torn = state.phase is Phase.TORN
        with self._answering:
            self._processor.tell(Said(Acted(self._rank, act.serial, ok, result, state.version, torn, text)))
            if ok and act.kind is RoundKind.RESUME:
                self._loop.resume()  # only after the answer, so that reports of the training thread follow it

    def _try(self, act: Act) -> tuple[bool, int, str]:
        try:
            return True, self._do(act), ""
        except CannotAct as problem:
            return False, 0, str(problem)
        except BaseException as problem:
            log.exception("rank %s: the %s handler failed", self._rank, act.kind.value)
            return False, 0, f"{type(problem).__name__}: {problem}"

    def _do(self, act: Act) -> int:
        if act.kind in (*REPAIRS, RoundKind.RESUME):
            self.generation = act.serial
        if act.purpose and act.kind in REPAIRS:
            self.repair_step, self.repair_type = act.version, act.purpose
        steps: dict[RoundKind, Callable[[Act], int]] = {
            RoundKind.STOP: self._stop,
            RoundKind.CLEAN: self._clean,
            RoundKind.CATCH_UP: self._catch_up,
            RoundKind.REPAIR: self._repair,
            RoundKind.RESUME: self._resume,
            RoundKind.MAKE_WAY: self._make_way,
            RoundKind.REBUILD: self._rebuild,
            RoundKind.HOLD: lambda _: self._hold(),
            RoundKind.PAUSE: self._stand_still,
            RoundKind.CONTINUE: lambda _: self._go_on(),
        }
        return steps.get(act.kind, self._call)(act)

    def _call(self, act: Act) -> int:
        kind = HANDLER_OF[act.kind]
        handler = self._handlers.get(kind)
        if handler is None:
            if act.kind in NEEDED and act.way is not RepairWay.MEMORY_LOW:
                raise CannotAct(f"no {kind.value} handler is registered")
            return 0
        log.info("rank %s: %s of step %s", self._rank, kind.value, act.version)
        self._here.calls = True  # for as long as this thread lives
        with self._on_device(kind):
            returned = handler(Call.of(kind, act))
        return int(returned or 0) if kind is HandlerKind.CLEAN else 0  # results of other kinds are not used

    # ---------------------------------------------------------------------------------------------------------- kinds

    def _stop(self, act: Act) -> int:
        """Make the training thread leave its loop.

        The gate and the pause point release it, and the stop handler ends the calls in which it may wait.
        """
        began = time.monotonic()
        with self._answering:
            pass  # the RESUME whose answer led to this act has ended: the training thread does not count as out
        if not self._stopped:
            self._on_halted(True)
            self._gate.halt()
            self.moves = act.purpose == MIGRATION
            self._pause.halt(MOVES if self.moves else HALTED)
            if not self.moves:  # else the thread pauses at the end of a step, so no call has to be ended
                self._call(act)
            self._stopped = True
        if not self._loop.wait_left(act.limit_ms / 1000 - (time.monotonic() - began)):
            raise CannotAct("the training thread has not left its loop")
        return 0

    def _clean(self, act: Act) -> int:
        if self._cleaned is None:
            result = self._call(act)
            if result not in CLEANED:
                raise CannotAct(f"the clean handler returned {result}")
            self._cleaned = result
        self._loop.cleaned()
        return self._cleaned

    def _catch_up(self, act: Act) -> int:
        deadline = time.monotonic() + act.limit_ms / 1000
        self._updated.clear()
        if self._gate.version < act.version and not self._gate.admit():
            raise CannotAct("the training thread does not wait at the gate for an update")
        while self._gate.version < act.version:
            if not self._updated.wait(max(0.0, deadline - time.monotonic())):
                raise CannotAct("the update has not ended in time")
            self._updated.clear()
        if self._gate.version != act.version:
            raise CannotAct(f"the update has led to step {self._gate.version}, not {act.version}")
        return 0

    def _repair(self, act: Act) -> int:
        self.loaded = None
        if act.way in WRITES:
            self._gate.mark_overwritten()  # for a controller that takes over meanwhile
        self._call(act)
        if act.way not in LOADS:
            return 0
        if self.loaded is None or self.loaded < 0:
            raise CannotAct("the repair handler has not reported the step that it loaded")
        return self.loaded

    def _make_way(self, act: Act) -> int:
        self._seat.give_way(act.limit_ms / 1000)
        return 0

    def _rebuild(self, act: Act) -> int:
        self._seat.enter_launch(act.store)
        return self._call(act)

    def _resume(self, act: Act) -> int:
        self.repair_step, self.repair_type = act.version, act.purpose
        self._gate.revive(Version(act.version))
        self._stopped, self._cleaned, self.moves = False, None, False
        self._pause.restart()
        return self._go_on()

    def _hold(self) -> int:
        self._on_halted(True)  # for a controller that takes over, which does not know of the pause
        self._processor.activity = "paused"
        self._processor.say()
        return self._pause.hold(self._gate.version)

    def _stand_still(self, act: Act) -> int:
        if not self._pause.stand_at(act.version, act.limit_ms / 1000):
            raise CannotAct(f"the training thread has not reached the end of step {act.version} in time")
        return 0

    def _go_on(self) -> int:
        self._pause.release()
        self._on_halted(False)
        self._processor.activity = ""
        self._processor.say()
        return 0
