"""One rank of a job whose own handlers save, repair and resume."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from ttp import session
from ttp.config import Config, RankEnv
from ttp.core.layout import Layout, Rank, Version
from ttp.core.messages import FaultKind, Piece, SaverOrder
from ttp.core.rank.actions import ProgramAction
from ttp.errors import UsageError
from ttp.mindio.handlers import device
from ttp.mindio.handlers.actor import Actor
from ttp.mindio.handlers.call import Call, Handler, HandlerKind
from ttp.mindio.handlers.loop import ForcedStop, Loop, NextAction
from ttp.mindio.handlers.pause import PausePoint
from ttp.mindio.handlers.seat import Seat
from ttp.mindio.protocol.messages import HANDLERS, Ailing, Ailment, Handlers, ReplicaSet
from ttp.mindio.protocol.rank_side import RankRounds, Said, StartAct
from ttp.mindio.protocol.replica_lists import check_set
from ttp.processor.gate import gate
from ttp.processor.processor import Processor
from ttp.processor.source import StateSource

log = logging.getLogger("ttp.handlers")

RECOVERING = (HandlerKind.REBUILD, HandlerKind.REPAIR)
"""Handlers without which no new process can take part."""
ACTION_S = 180.0
"""Seconds that a handler may take by default."""
LIMIT_MS_MAX = 2**31 - 1
ANOTHER_S = 60.0
"""Seconds of ``TTP_OT`` that are left for other ranks when a save handler hangs; half of it, if it is short."""
HALTED = "FORCE STOP. By mindio-ttp BeginUpdating"
"""Text of an exception that programs written for MindIO look for."""


class Participant:
    """The part of this process in the job. Calls before ``start`` only set values.

    Args:
        env: identity of this rank.
        config: the job's settings.
        exit_code: of this process after a release; None: 75 saved, 70 not saved.
        action_s: seconds that a handler may take, at most half of ``TTP_OT``. Saving may take all of ``TTP_OT`` but
            ``ANOTHER_S``: a handler that hangs leaves time for others to save what they hold too.
        retry: lost device memory and broken links may be repaired in this process.
        load_repair: the repair handler can load a checkpoint.
        halt_before_dump: stop and clean before the handlers save.
        recover: a new process may take the seat of a lost rank while this one goes on, where there are handlers to
            rebuild and to repair.
        elastic: a launch with fewer ranks, or with more again, can go on from what the save handlers write.
        raise_when_halted: ``begin_update`` raises ``ForcedStop``; else it returns False.
    """

    def __init__(
        self,
        env: RankEnv,
        config: Config,
        *,
        exit_code: int | None = None,
        action_s: float = ACTION_S,
        retry: bool = True,
        load_repair: bool = False,
        halt_before_dump: bool = False,
        recover: bool = False,
        elastic: bool = False,
        raise_when_halted: bool = True,
    ) -> None:
        self._env, self._config, self._exit_code = env, config, exit_code
        self._action_s, self._retry, self._load_repair = action_s, retry, load_repair
        self._halt_before_dump, self._recover, self._raises = halt_before_dump, recover, raise_when_halted
        self._elastic = elastic
        self._seat = Seat(config.resolved_run_dir())
        self._handlers: dict[HandlerKind, Handler] = {}
        self._sets: tuple[ReplicaSet, ...] = ()
        self._halted = False
        self._said = threading.Lock()
        self._loop, self._pause = Loop(), PausePoint()
        self._session: session.Session | None = None
        self._processor: Processor | None = None
        self._actor: Actor | None = None
        self._device: device.Device | None = None

    # --------------------------------------------------------------------------------------------------------- begin

    def register(self, kind: HandlerKind, func: Handler) -> None:
        """Register ``func``, which is called with a ``Call`` in each round of this kind. It replaces an earlier one."""
        self._handlers[kind] = func
        if self._recover and kind in RECOVERING:
            self._say()

    def start(self) -> None:
        """Join the job; for the training thread. If no controller answers for a minute, warn and begin unprotected.

        Raises:
            ConfigError: the port belongs to something else, or the environment does not fit.
            RefusedError: the controller does not accept this rank; the text says why.
            UsageError: it has been started before.
        """
        if self._processor is not None:
            raise UsageError("this rank has joined the job already: start() was called twice")
        self._device = device.of_this_thread()
        current = session.begin(self._config)
        save_dir = Path(self._config.save_dir or ".").absolute()
        layout = Layout.data_parallel(self._env.world_size)  # a placeholder: the replica sets describe the real layout
        self._processor = current.start_processor(self._env, layout, HandlerSource(), save_dir, self._prepare)
        self._session = current
        if self.rebooted and not self.was_guest:
            self._seat.take(self._env, self._config.rescue_patience_s / 2)
        self._say()

    def _prepare(self, processor: Processor) -> None:
        """Set the processor up before any order can arrive."""
        self._actor = Actor(
            Rank(self._env.rank), processor, self._handlers, self._loop, self._pause, self._seat,
            self._say_halted, self._on_device,
        )  # fmt: skip
        processor.exit_with(self._exit_code)
        processor.speak_for(RankRounds(), self._act)
        processor.before_exit = self._before_exit
        self._processor = processor

    def _on_device(self, kind: HandlerKind) -> AbstractContextManager[None]:
        return nullcontext() if self._device is None else self._device.borrowed(aside=kind is HandlerKind.SAVE)

    @property
    def device_index(self) -> int | None:
        """Index of the accelerator that the training thread uses; None: it uses none yet."""
        return None if self._device is None else self._device.index

    @property
    def rebooted(self) -> bool:
        """True if this process takes the seat of another one in a running job."""
        return self._processor is not None and self._processor.joins

    @property
    def was_guest(self) -> bool:
        """True if the rank's old process still lived when this process came."""
        return self._processor is not None and self._processor.was_guest

    @property
    def moves(self) -> bool:
        """True if the training thread is to leave its loop, or has left it, because other ranks are replaced."""
        return self._actor is not None and self._actor.moves

    @property
    def started(self) -> bool:
        """True if this rank has joined the job and not left it."""
        return self._session is not None

    def set_replicas(self, sets: Sequence[ReplicaSet]) -> None:
        """Say which ranks share which state: one set for each type, the same sets on all ranks of a set.

        Raises:
            ConfigError: the sets make no sense; the text says why.
        """
        rank = Rank(self._env.rank)
        self._sets = tuple(check_set(group, rank, self._env.world_size) for group in sets)
        self._say()

    def set_halt_before_dump(self, halt: bool) -> None:
        """Set ``halt_before_dump``, for programs that know it only after they have joined."""
        self._halt_before_dump = halt
        self._say()

    def _say_halted(self, halted: bool) -> None:
        self._halted = halted
        self._say()

    def _say(self) -> None:
        with self._said:
            if self._processor is None:
                return
            rescue_s = self._config.rescue_patience_s
            self._processor.tell(
                Said(
                    Handlers(
                        rank=Rank(self._env.rank),
                        sets=self._sets,
                        retry=self._retry,
                        load_repair=self._load_repair,
                        halt_before_dump=self._halt_before_dump,
                        action_ms=_ms(min(self._action_s, rescue_s / 2)),
                        save_ms=_ms(rescue_s - min(rescue_s / 2, ANOTHER_S)),
                        halted=self._halted,
                        recover=self._recover and all(kind in self._handlers for kind in RECOVERING),
                        elastic=self._elastic,
                    )
                )
            )

    # ------------------------------------------------------------------------------------------------ training thread

    @property
    def step(self) -> int:
        """Number of finished updates."""
        return int(self._processor.gate.version) if self._processor is not None else 0

    def begin_update(self) -> bool:
        """Mark the moment before the first write of an update; waits while the world stands still. True: write.

        Raises:
            ForcedStop: the thread has to leave its loop.
            UsageError: a handler calls it.
        """
        if self._processor is None:
            return True
        self._not_in_a_handler("the beginning of an update")
        if self._device is None:
            self._device = device.of_this_thread()
        if self._seat.gives_way:
            self._seat.keep()
        try:
            self._processor.begin_update()
        except gate.Halted:
            if self._raises:
                raise ForcedStop(HALTED) from None
            return False
        return True

    def end_update(self, step: int) -> None:
        """Mark the moment after the last write: this rank's copy is of ``step``. No effect if no update had begun."""
        processor = self._processor
        if processor is None or not processor.gate.updating:
            return
        if self._device is not None:
            self._device.updated()
        processor.end_update(Version(step))
        if processor.gate.closed and self._actor is not None:
            self._actor.updated()

    def pause_train(self, step: int) -> None:
        """Mark the end of ``step``, at which all ranks can be made to stand still.

        Raises:
            ForcedStop: the thread has to leave its loop.
            UsageError: a handler calls it.
        """
        self._not_in_a_handler("the end of a step")
        self._pause.pass_by(step)

    def report_error(self, ailment: Ailment, code: str = "", text: str = "") -> None:
        """Report that the training thread has left its loop. Returns at once, unless this process cannot go on.

        After ``FATAL``, and after any ailment that may not be repaired in this process, the call waits for the rescue,
        in which the process ends. It returns only if no controller comes.

        Raises:
            UsageError: a handler calls it.
        """
        processor = self._processor
        if processor is None:
            return
        self._not_in_a_handler("an error")
        words = text or f"the training loop has ended: {ailment.value}"
        self._loop_left()
        if not self._repairable(ailment):
            text = f"rank {self._env.rank}: {words}"
            processor.report(FaultKind.EXCEPTION, text, code, then=self._exit_code)
            processor.wait_released()
            log.error("no controller has handled the failure of rank %s", self._env.rank)
            self.close()
        else:
            processor.tell(Said(Ailing(Rank(self._env.rank), ailment, code, words)))

    def _repairable(self, ailment: Ailment) -> bool:
        """Return whether this process may go back into its loop."""
        if ailment in (Ailment.PEER, Ailment.JOINED):
            return self._recover and (self.rebooted or ailment is Ailment.PEER)
        return ailment is not Ailment.FATAL and (self._retry or ailment is Ailment.STOPPED)

    def _loop_left(self) -> None:
        if self._processor is not None:
            self._processor.gate.mark_torn()  # before the controller hears that the state stands still
        self._loop.leave()

    def wait_next_action(self) -> NextAction:
        """Wait after ``report_error`` until the device is usable again, or it is clear that it will not be.

        Raises:
            UsageError: a handler calls it.
        """
        self._not_in_a_handler("waiting for a repair")
        return self._loop.wait_cleaned(self._gone)

    def wait_repair_action(self) -> NextAction:
        """Wait after ``wait_next_action`` until the loop can go on with ``repair_step() + 1``, or cannot go on.

        Raises:
            UsageError: a handler calls it.
        """
        self._not_in_a_handler("waiting for a repair")
        return self._loop.wait_resumed(self._gone)

    def _gone(self) -> bool:
        return self._processor is None or self._processor.wait_let_go(0)

    def repair_step(self) -> int:
        """Return the step of the running or the last repair."""
        return self._actor.repair_step if self._actor is not None else 0

    def repair_type(self) -> str:
        """Return ``retry``, ``recover`` or ``dump``; empty: nothing was repaired."""
        return self._actor.repair_type if self._actor is not None else ""

    def report_loaded_step(self, step: int) -> None:
        """Report inside a repair handler that a checkpoint of ``step`` was loaded."""
        if self._actor is not None:
            self._actor.loaded = step

    def reset_limit_step(self) -> None:
        """Make threads that wait in ``begin_update`` or ``pause_train`` leave their loops."""
        if self._processor is not None and self._processor.gate.closed:
            self._processor.gate.halt()
        self._pause.halt()

    # ------------------------------------------------------------------------------------------------------------ end

    def leave(self, *, at_once: bool = False) -> None:
        """End training: wait until it is over for every rank, or no controller can tell, then leave the job.

        Args:
            at_once: do not wait, because the user has ended the program here.

        Raises:
            UsageError: a handler calls it.
        """
        self._not_in_a_handler("the end of training")
        current, self._session = self._session, None
        if self._seat.gives_way:
            self._seat.keep()
        if current is not None:
            self._loop.leave()
            if at_once:
                current.left()
            else:
                current.returned()
            self._processor = None

    def close(self) -> None:
        """Leave the job at once."""
        processor, self._processor, self._session = self._processor, None, None
        if processor is not None:
            processor.close()

    @property
    def in_handler(self) -> bool:
        """True if the calling thread is running a handler: if it waits for the job, it waits for itself."""
        return self._actor is not None and self._actor.calls_here

    def _not_in_a_handler(self, what: str) -> None:
        if self.in_handler:
            raise UsageError(f"{what} is for the training thread to report, and a handler has done so: leave it out")

    def _act(self, action: ProgramAction) -> None:
        assert self._actor is not None and isinstance(action, StartAct)
        self._actor.start(action.act)

    def _before_exit(self) -> None:
        handler = self._handlers.get(HandlerKind.EXIT)
        if handler is not None:
            with self._on_device(HandlerKind.EXIT):
                handler(Call(HandlerKind.EXIT, step=self.step, repair_type=self.repair_type()))


def _ms(seconds: float) -> int:
    return min(int(seconds * 1000), LIMIT_MS_MAX)


# ------------------------------------------------------------------------------------------------------------ the state
#
# The state of a rank about which nothing is known but how often it was updated.


class HandlerSource(StateSource):
    """A source that is never asked to write: the handlers of the program save in rounds, not piece by piece."""

    framework = HANDLERS

    def gradient_ready(self) -> bool:
        """Return True: a program that reports the beginning of an update has all that it needs for it."""
        return True

    def write_pieces(
        self, *, order: SaverOrder, version: Version, draft: Path, generation: int, cancelled: Callable[[], bool]
    ) -> list[Piece]:
        """Raise ``UsageError``: this source never writes."""
        raise UsageError("the handlers of this program save in rounds, not piece by piece")
