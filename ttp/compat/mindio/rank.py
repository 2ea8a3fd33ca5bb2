"""The rank of this process in a job with the names of the later generation: its participant and its settings."""

from __future__ import annotations

import logging
import math
import operator
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ttp.compat.mindio import tls_info as tls_settings
from ttp.compat.mindio import values
from ttp.compat.mindio.handlers import Handler, Handlers
from ttp.config import Config, RankEnv
from ttp.core.layout import Rank
from ttp.errors import ConfigError, UsageError
from ttp.mindio.handlers import Ailment, HandlerKind, Participant, ReplicaSet
from ttp.mindio.protocol.messages import ACTION_S

log = logging.getLogger("ttp.compat.mindio")

RESOLVE_TRIES = 3
RESOLVE_PAUSE_S = 1.0


class ThisRank:
    """The rank of this process. There is one object per process."""

    def __init__(self) -> None:
        self.handlers = Handlers()
        self.enable_uce = True
        self.enable_arf = self.enable_zit = False
        self.participant: Participant | None = None
        """This rank in the job; None: it has not joined the job, or has left it."""
        self._place: tuple[int, int] | None = None
        self._tls: tuple[bool, str] = (False, "")
        self._sets: list[ReplicaSet] = []
        self._updating = False
        self._leaving = False

    # -------------------------------------------------------------------------------------------------------- the start

    def describe(
        self, rank: int, world_size: int, enable_tls: bool, tls_info: str, *, uce: bool, arf: bool, zit: bool
    ) -> None:
        """Store the arguments of ``tft_init_processor``.

        Raises:
            ConfigError: ``rank`` is out of range.
        """
        self._place, self._tls = check_rank(rank, world_size, lowest=0), (enable_tls, tls_info)
        self.enable_uce, self.enable_arf, self.enable_zit = uce, arf, zit

    def start(self, address: str, port: int) -> None:
        """Join the job.

        Raises:
            ConfigError: settings, address or port cannot be used; the text says why.
            UsageError: ``describe`` was not called.
            RefusedError: the controller does not accept this rank.
        """
        if self._place is None:
            raise UsageError("tft_start_processor() was called before tft_init_processor()")
        address, (rank, world_size) = resolve(address), self._place
        port = job_port(port)
        tls_settings.use(*self._tls, tls_settings.run_dir_of(port), self.handlers.decrypt)
        numbers = {"RANK": str(rank), "WORLD_SIZE": str(world_size), "MASTER_ADDR": address}
        told = {name: value for name, value in os.environ.items() if name != "MS_ROLE"}  # else MS_NODE_ID would count
        env = RankEnv.from_env({"LOCAL_RANK": str(rank), **told, **numbers})
        config = replace(Config.from_env(), port=port)
        participant = Participant(
            env,
            config,
            action_s=seconds("TTP_NORMAL_ACTION_TIME_LIMIT", ACTION_S, 30.0, 1800.0),
            retry=self.enable_uce,
            load_repair=not values.for_mindspore(),
            recover=self.enable_arf,
            elastic=self.enable_zit and config.elastic,
            halt_before_dump=os.environ.get("TTP_STOP_CLEAN_BEFORE_DUMP") == "1",
            raise_when_halted=not values.for_mindspore(),
        )
        for kind in self.handlers.kinds():
            participant.register(kind, self.handlers.call)
        if self._sets:
            participant.set_replicas(self._sets)
        participant.start()
        self.participant = participant

    def register(self, kind: HandlerKind, func: Handler, ctx: Any) -> None:
        """Register a handler, before or after the job was joined."""
        self.handlers.add(kind, func, ctx)
        if self.participant is not None and kind in self.handlers.kinds():
            self.participant.register(kind, self.handlers.call)

    def set_replicas(self, rank: int, infos: Sequence[Mapping[str, Any]]) -> None:
        """Set the replica sets; see ``tft_set_optimizer_replica``.

        Raises:
            ConfigError: an entry is not valid.
        """
        if not isinstance(infos, Sequence) or not infos:
            raise ConfigError(
                f"tft_set_optimizer_replica() needs a list with an entry for each kind of optimizer, but got {infos!r}"
            )
        sets = [replica_set(rank, info) for info in infos]
        if self.participant is not None:
            self.participant.set_replicas(sets)
        self._sets = sets

    def halt_before_dump(self) -> None:
        """Have devices stopped and cleaned before a save, because this program needs it."""
        if self.participant is not None:
            self.participant.set_halt_before_dump(True)

    @property
    def joined(self) -> Participant:
        """The participant of this rank in the job.

        Raises:
            UsageError: this rank has not joined the job, or has left it.
        """
        if self.participant is None:
            raise UsageError("no processor was started: call tft_init_processor() and tft_start_processor() first")
        return self.participant

    # ------------------------------------------------------------------------------------------------------ the updates

    def start_updating(self) -> None:
        """Mark the start of an update. Waits while the job is frozen."""
        self._updating = self.joined.begin_update()

    def end_updating(self, step: int) -> None:
        """Mark the end of the update that leads to ``step``.

        Raises:
            ConfigError: ``step`` is not a number from 1.
        """
        step = check_step("tft_end_updating_os", step, lowest=1)
        if not self._updating and values.for_mindspore():
            self.start_updating()  # MindSpore's kernel would mark the start through a library of the original
        if self._updating:
            self._updating = False
            self.joined.end_update(step)

    def pause(self, step: int) -> None:
        """Mark the end of ``step``, and wait there while the job is paused.

        Raises:
            ConfigError: ``step`` is not a number from 0.
        """
        step = check_step("tft_pause_train", step)
        self.joined.pause_train(step)

    def report(self, state: int, code: str = "", text: str = "") -> None:
        """Report an error; see ``tft_report_error``.

        Args:
            state: value of a ``ReportState``.
            code: the device's error code.
            text: description in words.

        Raises:
            ConfigError: ``state`` or ``code`` is not valid.
            UsageError: the state is one that is not used here.
        """
        try:
            ailment = values.AILMENTS[values.ReportState(state)]
        except ValueError:
            raise ConfigError(f"tft_report_error({state!r}): give the value of a ReportState") from None
        except KeyError:
            raise UsageError(
                "RS_INIT_FINISH: a new process joins with ARF FINISH, when it has registered its handlers. MindSpore's "
                "own client does not, so leave ARF out of MS_ENABLE_TFT; in a program of your own remove the call"
            ) from None
        if not isinstance(code, str) or len(code) > values.ERROR_CODE_MAX:
            raise ConfigError(f"error_code {code!r} is not text of at most {values.ERROR_CODE_MAX} characters")
        self._updating = False
        self.joined.report_error(ailment, code, text)

    def report_lost_peer(self, text: str) -> None:
        """Report that a collective has failed, most likely because another rank died."""
        self._updating = False
        self.joined.report_error(Ailment.PEER, "", text)

    def leave(self, interrupt: KeyboardInterrupt | None = None) -> None:
        """Leave the job. Without ``interrupt``, wait for all ranks; handlers may be called until then."""
        if self.participant is not None and not self._leaving:
            self._leaving = True
            try:
                self.participant.leave(interrupt)
            finally:
                self._leaving = False
            self.participant = None

    def forget(self) -> None:
        """Forget the job in a forked child, which is not the rank."""
        self.participant = None


THIS = ThisRank()
os.register_at_fork(after_in_child=THIS.forget)


def replica_set(rank: int, info: Mapping[str, Any]) -> ReplicaSet:
    """Return the replica set for an entry of ``tft_set_optimizer_replica``.

    Raises:
        ConfigError: the entry is not valid; the text says why.
    """
    try:
        ranks = tuple(int(r) for r in info["rank_list"])
        copies, shift = int(info["replica_cnt"]), int(info.get("replica_shift", 0))
    except (KeyError, TypeError, ValueError) as problem:
        raise ConfigError(
            f"replica_info entry {info!r} has to be {{'rank_list': [...], 'replica_cnt': n, 'replica_shift': n}}: "
            f"{problem!r}"
        ) from None
    if rank not in ranks or len(set(ranks)) != len(ranks):
        raise ConfigError(f"rank_list {list(ranks)} must contain rank {rank}, and no rank twice")
    if copies == 0 or copies < -1 or copies > len(ranks):
        raise ConfigError(f"replica_cnt {copies} of {len(ranks)} ranks: give 1 to {len(ranks)}, or -1 for all")
    shifted = os.environ.get("TTP_FRAMEWORK_TYPE") == "1"
    return ReplicaSet(tuple(Rank(r) for r in sorted(ranks)), copies, shift if shifted else 0)


def check_rank(rank: int, world_size: int, lowest: int) -> tuple[int, int]:
    """Return rank and number of ranks.

    Raises:
        ConfigError: ``world_size`` is not valid, or ``rank`` is not from ``lowest`` to ``world_size - 1``.
    """
    world_size = _whole("world_size", world_size, 1, values.WORLD_MAX)
    return _whole("rank", rank, lowest, world_size - 1), world_size


def _whole(what: str, value: int, lowest: int, highest: int) -> int:
    """Return a number that a program passes, which may be one of numpy's.

    Raises:
        ConfigError: it is not a whole number from ``lowest`` to ``highest``.
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = lowest - 1
    if isinstance(value, bool) or not lowest <= number <= highest:
        raise ConfigError(f"{what} {value!r} is not a whole number from {lowest} to {highest}")
    return number


def job_port(port: int) -> int:
    """Return the controller's port: ``TTP_PORT`` if the launcher sets it, else the program's ``port``.

    Raises:
        ConfigError: ``port`` is out of range.
    """
    port = _whole("port", port, values.PORT_MIN, 65535)
    told = Config.from_env().port
    if told not in (None, port):
        log.info("the program passes port %s, but TTP_PORT=%s is used", port, told)
    return told or port


def check_step(call: str, step: int, *, lowest: int = 0) -> int:
    """Return the step that a program passes to the function ``call``.

    Raises:
        ConfigError: it is not a whole number from ``lowest``.
    """
    return _whole(f"{call}: step", step, lowest, values.STEP_MAX)


def resolve(address: str) -> str:
    """Return ``address`` once it can be resolved, as names in a new cluster may not be known at once.

    Raises:
        ConfigError: the address cannot be resolved, or stands for all addresses.
    """
    if not isinstance(address, str):
        raise ConfigError(f"{address!r} is not an address")
    tries = RESOLVE_TRIES
    while True:
        try:
            found = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0][4][0]
        except (OSError, UnicodeError) as problem:
            tries -= 1
            if tries == 0 or not isinstance(problem, OSError):
                raise ConfigError(f"{address!r} is not an address: {problem}") from None
            time.sleep(RESOLVE_PAUSE_S)
        else:
            if found in ("0.0.0.0", "::"):
                raise ConfigError(f"{address} stands for all addresses: give the one that ranks should use")
            return address


def seconds(name: str, default: float, lowest: float, highest: float) -> float:
    """Return the seconds in an environment variable, within these limits; ``default`` if it holds no number."""
    try:
        told = float(os.environ.get(name, ""))
    except ValueError:
        return default
    return default if math.isnan(told) else min(max(told, lowest), highest)
