"""The rank of this process in a job that uses the original's modern names: its processor and its settings."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ttp.compat.mindio import tls_info as tls_settings
from ttp.compat.mindio.handlers import Handler, Handlers
from ttp.compat.mindio.values import (
    AILMENTS,
    ERROR_CODE_MAX,
    PORT_MIN,
    STEP_MAX,
    WORLD_MAX,
    ReportState,
    for_mindspore,
)
from ttp.config import Config, RankEnv
from ttp.core.layout import Rank
from ttp.errors import ConfigError, UsageError
from ttp.mindio.handlers import Ailment, HandlerKind, Participant, ReplicaSet

log = logging.getLogger("ttp.compat.mindio")

RESOLVE_TRIES = 3
RESOLVE_PAUSE_S = 1.0
ACTION_LIMIT_S = 180.0
"""Seconds; ``TTP_NORMAL_ACTION_TIME_LIMIT`` of the original when it is not set."""
ACTION_RANGE_S = (30.0, 1800.0)


class ThisRank:
    """The rank of this process. There is one object per process."""

    def __init__(self) -> None:
        self.handlers = Handlers()
        self.enable_uce = True
        self.enable_arf = self.enable_zit = False
        self._participant: Participant | None = None
        self._place: tuple[int, int] | None = None
        self._tls: tuple[bool, str] = (False, "")
        self._sets: list[ReplicaSet] = []
        self._updating = False
        self._leaving = False

    # -------------------------------------------------------------------------------------------------------- the start

    def describe(
        self, rank: int, world_size: int, enable_tls: bool, tls_info: str, *, uce: bool, arf: bool, zit: bool
    ) -> None:
        """Note the arguments of ``tft_init_processor``.

        Raises:
            ConfigError: ``rank`` is no rank.
        """
        check_rank(rank, world_size, lowest=0)
        self._place, self._tls = (rank, world_size), (enable_tls, tls_info)
        self.enable_uce, self.enable_arf, self.enable_zit = uce, arf, zit

    def start(self, address: str, port: int) -> None:
        """Join the job.

        Raises:
            ConfigError: settings, address or port cannot be used; the text says why.
            UsageError: ``describe`` was not called.
            RefusedError: the controller does not accept this rank.
        """
        if self._place is None:
            raise UsageError("tft_start_processor() before tft_init_processor()")
        address, (rank, world_size) = resolve(address), self._place
        port = job_port(port)
        tls_settings.use(*self._tls, tls_settings.run_dir_of(port), self.handlers.decrypt)
        numbers = {"RANK": str(rank), "WORLD_SIZE": str(world_size), "MASTER_ADDR": address}
        env = RankEnv.from_env({"LOCAL_RANK": str(rank), **os.environ, **numbers})
        config = replace(Config.from_env(), port=port)
        participant = Participant(
            env,
            config,
            action_s=action_limit_s(),
            retry=self.enable_uce,
            load_repair=not for_mindspore(),
            recover=self.enable_arf,
            elastic=self.enable_zit and config.elastic,
            halt_before_dump=os.environ.get("TTP_STOP_CLEAN_BEFORE_DUMP") == "1",
            raise_when_halted=not for_mindspore(),
        )
        for kind in self.handlers.kinds():
            participant.register(kind, self.handlers.call)
        if self._sets:
            participant.set_replicas(self._sets)
        participant.start()
        self._participant = participant

    def register(self, kind: HandlerKind, func: Handler, ctx: Any) -> None:
        """Register a handler, before or after the job was joined."""
        self.handlers.add(kind, func, ctx)
        if self._participant is not None and kind in self.handlers.kinds():
            self._participant.register(kind, self.handlers.call)

    def set_replicas(self, rank: int, infos: Sequence[Mapping[str, Any]]) -> None:
        """Set the replica sets; see ``tft_set_optimizer_replica``.

        Raises:
            ConfigError: an entry makes no sense.
        """
        self._sets = [replica_set(rank, info) for info in infos]
        if not self._sets:
            raise ConfigError("tft_set_optimizer_replica() wants an entry for each kind of optimizer, and got none")
        if self._participant is not None:
            self._participant.set_replicas(self._sets)

    def halt_before_dump(self) -> None:
        """Have devices stopped and cleaned before a save, as this program wants it."""
        if self._participant is not None:
            self._participant.set_halt_before_dump(True)

    @property
    def joined(self) -> Participant:
        """The participant through which this rank takes part in the job.

        Raises:
            UsageError: the job has not been joined, or has been left.
        """
        if self._participant is None:
            raise UsageError("this process is no processor: call tft_init_processor() and tft_start_processor() first")
        return self._participant

    @property
    def device_index(self) -> int | None:
        """Index of the accelerator that the training thread uses, on any thread; None: it uses none yet."""
        return self._participant.device_index if self._participant is not None else None

    @property
    def in_handler(self) -> bool:
        """True if the calling thread is running a handler."""
        return self._participant is not None and self._participant.in_handler

    @property
    def running(self) -> bool:
        """True if this rank has joined the job and not left it."""
        return self._participant is not None

    # ------------------------------------------------------------------------------------------------------ the updates

    def start_updating(self) -> None:
        """Say that the optimizer is about to write; waits while the job is frozen."""
        self._updating = self.joined.begin_update()

    def end_updating(self, step: int) -> None:
        """Say that the optimizer has written ``step``.

        Raises:
            ConfigError: ``step`` is no step.
        """
        if isinstance(step, bool) or not isinstance(step, int) or not 1 <= step <= STEP_MAX:
            raise ConfigError(f"tft_end_updating_os({step!r}): a step from 1 on is wanted")
        if not self._updating and for_mindspore():
            self.start_updating()  # MindSpore's kernel says so through a library of the original's, which is not here
        if self._updating:
            self._updating = False
            self.joined.end_update(step)

    def report(self, state: int, code: str = "", text: str = "") -> None:
        """Report an error; see ``tft_report_error``.

        Args:
            state: value of a ``ReportState``.
            code: the device's error code.
            text: description for people.

        Raises:
            ConfigError: ``state`` or ``code`` is not valid.
            UsageError: the state belongs to a start that no process waits for.
        """
        try:
            ailment = AILMENTS[ReportState(state)]
        except ValueError:
            raise ConfigError(f"tft_report_error({state!r}) is no ReportState: one of its values is wanted") from None
        except KeyError:
            raise UsageError(f"{ReportState(state).name} is of a start that nobody waits for: leave it out") from None
        if len(code) > ERROR_CODE_MAX:
            raise ConfigError(f"error_code {code!r} has more than {ERROR_CODE_MAX} characters")
        self._updating = False
        self.joined.report_error(ailment, code, text)

    def report_lost_peer(self, text: str) -> None:
        """Report that a collective has ended, most likely because another rank died."""
        self._updating = False
        self.joined.report_error(Ailment.PEER, "", text)

    def leave(self, *, at_once: bool = False) -> None:
        """Say goodbye, once. Unless ``at_once``, waits for all ranks; until then handlers may be called."""
        if self._participant is not None and not self._leaving:
            self._leaving = True
            try:
                self._participant.leave(at_once=at_once)
            finally:
                self._leaving = False
            self._participant = None


THIS = ThisRank()


def replica_set(rank: int, info: Mapping[str, Any]) -> ReplicaSet:
    """Make a replica set from an entry of ``tft_set_optimizer_replica``.

    Raises:
        ConfigError: the entry makes no sense; the text says why.
    """
    try:
        ranks = tuple(int(r) for r in info["rank_list"])
        copies, shift = int(info["replica_cnt"]), int(info.get("replica_shift", 0))
    except (KeyError, TypeError, ValueError) as problem:
        raise ConfigError(
            f"replica_info entry {info!r}: {{'rank_list': [...], 'replica_cnt': n, 'replica_shift': n}} is wanted; "
            f"{problem!r}"
        ) from None
    if rank not in ranks or len(set(ranks)) != len(ranks):
        raise ConfigError(f"rank_list {list(ranks)} must hold rank {rank}, and every rank once")
    if copies == 0 or copies < -1 or copies > len(ranks):
        raise ConfigError(f"replica_cnt {copies} of {len(ranks)} ranks: 1 to {len(ranks)} is wanted, or -1 for all")
    shifted = os.environ.get("TTP_FRAMEWORK_TYPE") == "1"
    return ReplicaSet(tuple(Rank(r) for r in sorted(ranks)), copies, shift if shifted else 0)


def check_rank(rank: int, world_size: int, lowest: int) -> None:
    """Check that a rank is from ``lowest`` to ``world_size - 1``.

    Raises:
        ConfigError: it is not.
    """
    if not 1 <= world_size <= WORLD_MAX:
        raise ConfigError(f"world_size {world_size} is not from 1 to {WORLD_MAX}")
    if not lowest <= rank < world_size:
        raise ConfigError(f"rank {rank} is not from {lowest} to {world_size - 1}")


def job_port(port: int) -> int:
    """Return the controller's port: ``TTP_PORT`` of the launcher, else the port that the program was written with.

    Raises:
        ConfigError: the program's port is none that a job may use.
    """
    if isinstance(port, bool) or not isinstance(port, int) or not PORT_MIN <= port <= 65535:
        raise ConfigError(f"port {port!r} is not from {PORT_MIN} to 65535")
    told = Config.from_env().port
    if told not in (None, port):
        log.info("the program asks for port %s; this job has TTP_PORT=%s", port, told)
    return told or port


def resolve(address: str) -> str:
    """Return ``address`` once it can be resolved: in a cluster names may take a moment to be known.

    Raises:
        ConfigError: it cannot be resolved, or it stands for all addresses.
    """
    for attempt in range(RESOLVE_TRIES):
        try:
            found = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0][4][0]
        except (OSError, TypeError, UnicodeError) as problem:
            if attempt + 1 == RESOLVE_TRIES or not isinstance(problem, OSError):
                raise ConfigError(f"{address!r} is no address: {problem}") from None
            time.sleep(RESOLVE_PAUSE_S)
        else:
            if found in ("0.0.0.0", "::"):
                raise ConfigError(f"{address} is every address at once: say which one ranks shall use")
            return address
    raise AssertionError


def action_limit_s() -> float:
    """Return how long a handler may take, in seconds."""
    text = os.environ.get("TTP_NORMAL_ACTION_TIME_LIMIT", "")
    try:
        return min(max(float(text), ACTION_RANGE_S[0]), ACTION_RANGE_S[1])
    except ValueError:
        return ACTION_LIMIT_S
