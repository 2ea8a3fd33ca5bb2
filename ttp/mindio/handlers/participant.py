"""A rank of a job whose program has its own handlers to save, repair and resume."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from ttp import session
from ttp.config import Config, RankEnv
from ttp.core.layout import Layout, Rank, Version
from ttp.core.messages import FaultKind
from ttp.core.rank.actions import ProgramAction
from ttp.errors import UsageError
from ttp.mindio.handlers import device
from ttp.mindio.handlers.actor import Actor
from ttp.mindio.handlers.call import Call, Handler, HandlerKind
from ttp.mindio.handlers.handler_source import HandlerSource
from ttp.mindio.handlers.loop import ForcedStop, Loop, NextAction
from ttp.mindio.handlers.pause import PausePoint
from ttp.mindio.handlers.seat import Seat
from ttp.mindio.protocol.messages import ACTION_S, Ailing, Ailment, Handlers, ReplicaSet
from ttp.mindio.protocol.rank_side import RankRounds, Said, StartAct
from ttp.mindio.protocol.replica_lists import check_set
from ttp.processor.gate import gate
from ttp.processor.processor import Processor

log = logging.getLogger("ttp.handlers")

RECOVERING = (HandlerKind.REBUILD, HandlerKind.REPAIR)
"""Handlers that are needed to replace a lost rank by a new process."""
LIMIT_MS_MAX = 2**31 - 1
ANOTHER_S = 60.0
"""Seconds of ``TTP_OT`` that are kept for another rank to save if a save handler hangs; at most half of ``TTP_OT``."""
HALTED = "FORCE STOP. By mindio-ttp BeginUpdating"
"""Text of an exception that programs written for MindIO look for."""


class Participant:
    """The part of this process in the job. Calls before ``start`` only set values.

    Args:
        env: identity of this rank.
        config: the job's settings.
        action_s: time limit of a handler in seconds, at most half of ``TTP_OT``. Saving may take all of ``TTP_OT`` but
            ``ANOTHER_S``, so that other ranks have time to save if a save handler hangs.
        retry: whether lost device memory and broken links may be repaired in this process.
        load_repair: whether the repair handler can load a checkpoint.
        halt_before_dump: whether to stop and clean before the handlers save.
        recover: whether a new process may replace a lost rank while this process continues; this needs handlers to
            rebuild and to repair.
        elastic: whether a launch with another number of ranks can resume from the files of the save handlers.
        raise_when_halted: whether ``begin_update`` raises ``ForcedStop``; otherwise it returns False.
    """

    def __init__(
        self,
        env: RankEnv,
        config: Config,
        *,
        action_s: float = ACTION_S,
        retry: bool = True,
        load_repair: bool = False,
        halt_before_dump: bool = False,
        recover: bool = False,
        elastic: bool = False,
        raise_when_halted: bool = True,
    ) -> None:
        self._env, self._config, self._raises = env, config, raise_when_halted
        rescue_s = config.rescue_patience_s
        self._able = Handlers(
            Rank(env.rank),
            sets=(),
            retry=retry,
            load_repair=load_repair,
            halt_before_dump=halt_before_dump,
            action_ms=_ms(min(action_s, rescue_s / 2)),
            save_ms=_ms(rescue_s - min(rescue_s / 2, ANOTHER_S)),
            halted=False,
            recover=recover,
            elastic=elastic,
        )
        self._saying = threading.Lock()
        self._seat = Seat(config.resolved_run_dir())
        self._handlers: dict[HandlerKind, Handler] = {}
        self._loop, self._pause = Loop(), PausePoint()
        self._source = HandlerSource()
        self._session: session.Session | None = None
        self._processor: Processor | None = None
        self._actor: Actor | None = None
        self._device: device.Device | None = None

    # --------------------------------------------------------------------------------------------------------- begin

    def register(self, kind: HandlerKind, func: Handler) -> None:
        """Register ``func`` to be called with a ``Call`` in each round of this kind, instead of an earlier one."""
        self._handlers[kind] = func
        if self._able.recover and kind in RECOVERING:
            self._say()

    def start(self) -> None:
        """Join the job. The training thread calls this. If no controller answers for a minute, training is unprotected.

        Raises:
            ConfigError: another program uses the port, or the environment does not fit.
            RefusedError: the controller does not accept this rank; the text says why.
            UsageError: this rank has joined before.
        """
        if self._processor is not None:
            raise UsageError("this rank has joined the job already: start() was called twice")
        self._device = device.of_this_thread()
        current = session.begin(self._config)
        save_dir = Path(self._config.save_dir or ".").absolute()
        layout = Layout.data_parallel(self._env.world_size)  # a placeholder: the replica sets describe the real layout
        self._processor = current.start_processor(self._env, layout, self._source, save_dir, self._prepare)
        self._session = current
        if self.rebooted and not self.was_guest:
            self._seat.take(self._env, self._config.rescue_patience_s / 2)
        self._say()

    def _prepare(self, processor: Processor) -> None:
        """Set the processor up before any order can arrive."""
        self._actor = Actor(
            Rank(self._env.rank), processor, self._handlers, self._loop, self._pause, self._seat,
            lambda halted: self._say(halted=halted), self._on_device,
        )  # fmt: skip
        processor.speak_for(RankRounds(), self._act)
        processor.before_exit = self._before_exit
        self._processor = processor

    def _on_device(self, kind: HandlerKind) -> AbstractContextManager[None]:
        return nullcontext() if self._device is None else self._device.borrowed(aside=kind is HandlerKind.SAVE)

    @property
    def device_index(self) -> int | None:
        """Index of the accelerator that the training thread uses; None if it uses none yet."""
        return None if self._device is None else self._device.index

    @property
    def rebooted(self) -> bool:
        """Whether this process replaces another one in a running job."""
        return self._processor is not None and self._processor.joins

    @property
    def was_guest(self) -> bool:
        """Whether the rank's old process still lived when this process joined."""
        return self._processor is not None and self._processor.was_guest

    @property
    def moves(self) -> bool:
        """Whether the training thread has to leave its loop, or has left it, because ranks are being moved."""
        return self._actor is not None and self._actor.moves

    def set_replicas(self, sets: Sequence[ReplicaSet]) -> None:
        """Declare which ranks hold the same state: one set for each type of state, the same on all ranks of a set.

        Raises:
            ConfigError: the sets are not valid; the text says why.
        """
        rank = Rank(self._env.rank)
        self._source.sets = tuple(check_set(group, rank, self._env.world_size) for group in sets)
        self._say(sets=self._source.sets)

    def set_halt_before_dump(self, halt: bool) -> None:
        """Change ``halt_before_dump``, for programs that know it only after they have joined."""
        self._say(halt_before_dump=halt)

    def _say(self, **changed: Any) -> None:
        """Change some fields of the report of what this rank can do, and send it once the rank has joined."""
        with self._saying:
            self._able = replace(self._able, **changed)
            if self._processor is not None:
                recover = self._able.recover and all(kind in self._handlers for kind in RECOVERING)
                self._processor.tell(Said(replace(self._able, recover=recover)))

    # ------------------------------------------------------------------------------------------------ training thread

    @property
    def step(self) -> int:
        """Number of finished updates."""
        return int(self._processor.gate.version) if self._processor is not None else 0

    def begin_update(self) -> bool:
        """Mark the start of an update, before its first write. Waits while the job is frozen.

        Returns:
            Whether the training thread may write; False only without ``raise_when_halted``.

        Raises:
            ForcedStop: the training thread has to leave its loop.
            UsageError: a handler calls this.
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
        """Mark the end of an update, after its last write, which leads to ``step``. No effect if none had begun."""
        processor = self._processor
        if processor is None or not processor.gate.updating:
            return
        if self._device is not None:
            self._device.updated()
        if step > 1 and not (self.step or self.rebooted):
            processor.set_base_version(Version(step - 1))  # the program has restored it by itself
        processor.end_update(Version(step))
        if processor.gate.closed and self._actor is not None:
            self._actor.updated()

    def pause_train(self, step: int) -> None:
        """Mark the end of ``step``, and pause there if a pause was requested.

        Raises:
            ForcedStop: the training thread has to leave its loop.
            UsageError: a handler calls this.
        """
        self._not_in_a_handler("the end of a step")
        self._pause.pass_by(step)

    def report_error(self, ailment: Ailment, code: str = "", text: str = "") -> None:
        """Report that the training thread has left its loop.

        Returns at once if this process may be repaired. Otherwise, as after ``FATAL``, it waits for the rescue, in
        which the process ends, and returns only if there is no controller.

        Args:
            ailment: why the thread has left its loop.
            code: error code.
            text: the reason in words.

        Raises:
            UsageError: a handler calls this.
        """
        processor = self._processor
        if processor is None:
            return
        self._not_in_a_handler("an error")
        words = text or f"the training loop has ended: {ailment.value}"
        processor.gate.mark_torn()  # before the controller learns that the state does not change any more
        self._loop.leave()
        if not self._repairable(ailment):
            processor.report(FaultKind.EXCEPTION, f"rank {self._env.rank}: {words}", code)
            processor.wait_released()
            log.error("no controller has handled the failure of rank %s", self._env.rank)
            self.close()
        else:
            processor.tell(Said(Ailing(Rank(self._env.rank), ailment, code, words)))

    def _repairable(self, ailment: Ailment) -> bool:
        """Return whether the training thread of this process may enter its loop again."""
        if ailment in (Ailment.PEER, Ailment.JOINED):
            return self._able.recover and (self.rebooted or ailment is Ailment.PEER)
        return ailment is not Ailment.FATAL and (self._able.retry or ailment is Ailment.STOPPED)

    def wait_next_action(self) -> NextAction:
        """Wait after ``report_error`` until the device is usable again, or no controller is left.

        Raises:
            UsageError: a handler calls this.
        """
        self._not_in_a_handler("waiting for a repair")
        return self._loop.wait_cleaned(self._gone)

    def wait_repair_action(self) -> NextAction:
        """Wait after ``wait_next_action`` until the loop can continue with ``repair_step() + 1``, or cannot continue.

        Raises:
            UsageError: a handler calls this.
        """
        self._not_in_a_handler("waiting for a repair")
        return self._loop.wait_resumed(self._gone)

    def _gone(self) -> bool:
        return self._processor is None or self._processor.wait_let_go(0)

    def repair_step(self) -> int:
        """Return the step of the current or the last repair."""
        return self._actor.repair_step if self._actor is not None else 0

    def repair_type(self) -> str:
        """Return the type of the current or the last repair: ``retry``, ``recover`` or ``dump``; empty if none was."""
        return self._actor.repair_type if self._actor is not None else ""

    def generation(self) -> int:
        """Return a number that grows in each repair, and is equal on all ranks that take part; 0 before the first."""
        return self._actor.generation if self._actor is not None else 0

    def report_loaded_step(self, step: int) -> None:
        """Report, from a repair handler, that it has loaded a checkpoint of ``step``."""
        if self._actor is not None:
            self._actor.loaded = step

    def reset_limit_step(self) -> None:
        """Make threads that wait in ``begin_update`` or ``pause_train`` leave their loops."""
        if self._processor is not None and self._processor.gate.closed:
            self._processor.gate.halt()
        self._pause.halt()

    # ------------------------------------------------------------------------------------------------------------ end

    def leave(self, interrupt: KeyboardInterrupt | None = None) -> None:
        """End training: wait until it is over on every rank, or no controller is left, and leave the job.

        Args:
            interrupt: the user has ended the program with Ctrl-C, so this does not wait.

        Raises:
            UsageError: a handler calls this.
        """
        self._not_in_a_handler("the end of training")
        current, self._session = self._session, None
        if self._seat.gives_way:
            self._seat.keep()
        if current is not None:
            self._loop.leave()
            if interrupt is not None:
                current.left(interrupt)
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
        """Whether the calling thread runs a handler, and so must not wait for the job, which waits for the handler."""
        return self._actor is not None and self._actor.calls_here

    def _not_in_a_handler(self, what: str) -> None:
        if self.in_handler:
            raise UsageError(f"{what} was reported in a handler, but only the training thread may: remove the call")

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
