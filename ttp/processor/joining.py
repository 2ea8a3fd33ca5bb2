"""Waits until this rank belongs to the job, and until all ranks have agreed on what to restore."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from ttp._version import __version__
from ttp.config import Config, RankEnv
from ttp.core.layout import Version
from ttp.core.messages import RefusalCode
from ttp.core.restore_messages import RestoreDecision
from ttp.errors import ConfigError, RefusedError, RestoreError, SeatTakenError, StorageAwayError, TtpError
from ttp.inbox import Inbox
from ttp.wire.address import why_unknown

log = logging.getLogger("ttp.processor")

JOIN_PATIENCE_S = 60.0
"""Seconds that a rank waits for the controller before it lets the training begin unprotected."""


class Joining:
    """Lets the training thread wait while this rank joins. The processor's threads pass on the controller's answers.

    Args:
        config: the job's settings.
        env: identity of this rank.
        alone: called when a rank that trains already will never be protected, so that it waits for no controller.
    """

    def __init__(self, config: Config, env: RankEnv, alone: Callable[[], None]) -> None:
        self.problem: TtpError | None = None
        """Why this rank can never join; None: it has joined, or may still."""
        self._env, self._at, self._alone = env, f"{env.master_addr}:{config.port}", alone
        self._known = threading.Event()
        self._put_off = ""
        self._started = False  # the training thread no longer waits for the controller
        self._untold = env.rank == 0  # rank 0 has not yet said that training is protected
        self._first: Version | None = None
        self._decision: Inbox[RestoreDecision] = Inbox()

    # ---------------------------------------------------------------------------------------- for the training thread

    def wait(self) -> None:
        """Wait until this rank has joined. After ``JOIN_PATIENCE_S`` training begins without protection.

        Raises:
            ConfigError: the port belongs to something else.
            RefusedError: the controller does not accept this rank; the text says why.
        """
        if not self._comes_to_know():
            self._started = True
            log.error(
                "%s: training starts UNPROTECTED; ttp keeps trying to join "
                "(restore() waits as long once more, then raises)",
                self._unjoined,
            )
        if self.problem is not None:
            raise self.problem
        self._started = True

    def wait_to_agree(self) -> None:
        """Wait once more for the controller before a restore: without it the ranks cannot agree on a checkpoint.

        Raises:
            RestoreError: no controller can be reached. It may be one that loads slowly, so a restart may help.
            RefusedError: the controller does not accept this rank.
        """
        if not self._comes_to_know():
            raise RestoreError(
                f"{self._unjoined}, twice: restore() cannot agree with the other ranks. Check MASTER_ADDR, "
                "TTP_PORT, the network and firewalls between this host and that one, and the controller's log there"
            )
        if self.problem is not None:
            raise self.problem

    def _comes_to_know(self) -> bool:
        """Wait for the controller's answer. Time in which it puts this rank off does not count."""
        while not self._known.wait(JOIN_PATIENCE_S):
            why, self._put_off = self._put_off, ""
            if not why:
                return False
            log.warning("rank %s waits to join: %s", self._env.rank, why)
        return True

    def decided(self, patience_s: float) -> RestoreDecision:
        """Wait for the checkpoint that all ranks can restore.

        Args:
            patience_s: seconds that the other ranks may take (``TTP_RESTORE_S``).

        Raises:
            ConfigError: a checkpoint that the job has committed has vanished, no checkpoint is whole, the newest needs
                a newer ttp, or another rank was refused.
            RestoreError: the ranks have no checkpoint in common, or the other ranks did not ask in time.
            StorageAwayError: all ranks shall look again after a pause.
        """
        try:
            decision = self._decision.get(timeout=patience_s)
        except queue.Empty:
            raise RestoreError(
                f"restore() waited {patience_s:g} s (TTP_RESTORE_S) for the other ranks: "
                "every rank must call ttp.restore()"
            ) from None
        if decision.error and decision.unread:
            raise StorageAwayError(decision.error)
        if decision.error:
            raise ConfigError(decision.error) if decision.version else RestoreError(decision.error)
        return decision

    # --------------------------------------------------------------------------------------------- for other threads

    def finished(self, version: Version, promise: Callable[[], str]) -> None:
        """Log once on rank 0 that training is protected: a version after the first shows that all ranks are there.

        Args:
            version: the last finished version.
            promise: returns what is saved, and when; empty while that is not known.
        """
        if self._untold:
            self._first = version if self._first is None else self._first
            if version > self._first and self._known.is_set() and self.problem is None:
                self._untold = False  # also if the adapter raises, which would stop each heartbeat
                if text := promise():
                    log.info("protected: %s", text)
                self._untold = not text

    def pending(self) -> bool:
        """Return whether it is still unknown if this rank belongs to the job."""
        return not self._known.is_set()

    @property
    def holds_training(self) -> bool:
        """Whether the training thread still waits to begin; so no rank has made an update, which needs all."""
        return not self._started

    def joined(self, controller: str) -> None:
        """Note that the controller has accepted this rank.

        Args:
            controller: its version of ttp. Of several versions in a job, each host's first rank tells once.
        """
        if controller != __version__ and self._env.local_rank == 0 and not self._known.is_set():
            log.warning(
                "rank %s runs ttp %s, its controller ttp %s: install the same ttp on every host",
                *(self._env.rank, __version__, controller),
            )
        if self._put_off and self._env.rank == 0:
            log.warning("rank 0 had to wait: %s", self._put_off)
            self._put_off = ""
        self._known.set()

    def refused(self, code: RefusalCode, text: str) -> None:
        """Note that the controller does not accept this rank, or, with ``BUSY``, not yet."""
        if code is RefusalCode.BUSY:
            self._put_off = text
            return
        kind = SeatTakenError if code is RefusalCode.RANK_TAKEN else RefusedError
        self.failed(kind(f"the controller at {self._at} refused this rank: {text}"))

    def failed(self, problem: TtpError) -> None:
        """Note that this rank can never join. A rank that trains already goes on without protection."""
        self.problem = problem
        if self._started:
            log.error("rank %s trains UNPROTECTED until the job is restarted: %s", self._env.rank, problem)
            self._alone()
        self._known.set()

    def decide(self, decision: RestoreDecision) -> None:
        """Take the controller's decision on what all ranks restore."""
        self._decision.put(decision)

    @property
    def _unjoined(self) -> str:
        return f"no controller at {self._at} for {JOIN_PATIENCE_S:g} s{why_unknown(self._env.master_addr)}"
