"""The function names of MindIO TTP's first generations: ``ttp_init_controller`` and so on.

For programs that drive the protocol by hand, with save and rename callbacks of their own. They use the same controller,
processor and state machines as ``wrap_optimizer``, as participants in rounds (``ttp.mindio``). Signatures and order of
calls follow the vendor's guide for MindIO TTP. As there, functions return 0 for success and 1 for failure; the
functions that register a callback return nothing.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from numbers import Integral
from typing import TYPE_CHECKING, Any

from ttp import session
from ttp.config import Config, RankEnv, of_launcher, port_number
from ttp.core.layout import Rank
from ttp.errors import RET_ERROR, RET_OK, TtpError, UsageError, told_by_code
from ttp.launch.admission import admitted
from ttp.launch.controller_process import ensure_controller
from ttp.launch.rank_names import in_torchruns_names
from ttp.mindio.protocol.messages import ReplicaSet
from ttp.mindio.protocol.replica_lists import check_set

if TYPE_CHECKING:
    from ttp.mindio.handlers import Call, Participant

__all__ = [
    "ttp_end_updating_os",
    "ttp_init_controller",
    "ttp_init_processor",
    "ttp_register_rename_handler",
    "ttp_register_save_ckpt_handler",
    "ttp_set_ckpt_args",
    "ttp_set_fm_dump_callback",
    "ttp_set_fm_rename_callback",
    "ttp_start_controller",
    "ttp_start_processor",
    "ttp_start_updating_os",
]

log = logging.getLogger("ttp.legacy")

START_S = 120.0
"""Seconds that a controller may take to answer: a host on which everything starts at once is slow."""

SaveHandler = Callable[..., Any]
RenameHandler = Callable[..., Any]


class Program:
    """Holds what the program of this process has registered. Its save handler writes, its rename handler commits."""

    def __init__(self) -> None:
        self.save: SaveHandler | None = None
        self.rename: RenameHandler | None = None
        self.args: Any = None
        self.rank: int | None = None
        self.world_size = 0
        self.replicas: ReplicaSet | None = None
        self.participant: Participant | None = None

    def write(self, call: Call) -> None:
        """Call the save handler, with ``(save_rank, rank_list, args)`` or ``(save_rank, step, rank_list, args)``.

        Raises:
            UsageError: no save handler is registered.
            RuntimeError: the handler returned a value that means failure.
        """
        if self.save is None:
            raise UsageError("no save handler: call ttp_register_save_ckpt_handler() before training")
        (entry,) = call.lists
        ranks = [int(rank) for rank in entry.ranks]
        four = _positional(self.save) >= 4
        given = (self.rank, call.step, ranks, self.args) if four else (self.rank, ranks, self.args)
        _check(self.save(*given, **({} if four else _named(self.save, call.step))), "save")

    def finish(self, call: Call) -> None:
        """Call the rename handler with the checkpoint arguments. Raises the errors of ``write``."""
        if self.rename is None:
            raise UsageError("no rename handler: call ttp_register_rename_handler() before training")
        _check(self.rename(self.args, **_named(self.rename, call.step)), "rename")


_program = Program()


@told_by_code(log, TtpError)
def ttp_init_controller(rank: int, world_size: int, replica: int = 0, enable_local_copy: bool = False) -> None:
    """Check the rank of the process that will start the controller. Returns 0 if it is in the world, else 1.

    ``replica`` and ``enable_local_copy`` are accepted for compatibility and have no effect.
    """
    _check_whole(rank=rank, world_size=world_size)
    if not 0 <= rank < world_size:
        raise UsageError(f"rank {rank} is not from 0 to {world_size - 1}")


def _check_whole(**given: object) -> None:
    """Check that all arguments are whole numbers.

    Raises:
        UsageError: one is not.
    """
    wrong = {name: value for name, value in given.items() if not isinstance(value, Integral)}
    if wrong:
        raise UsageError(f"not whole numbers: {wrong}")


@told_by_code(log, TtpError)
def ttp_start_controller(bind_ip: str | None, port: int) -> None:
    """Start a controller at ``bind_ip:port`` in a process of its own, unless one serves there. Returns 0 or 1 (failed).

    Without ``bind_ip`` the address is ``XDL_IP``, else ``MASTER_ADDR``, else loopback.
    """
    port, config = _port(port), Config.from_env()
    address = bind_ip or os.environ.get("XDL_IP") or os.environ.get("MASTER_ADDR") or "127.0.0.1"
    config, address = admitted(config, address)
    ensure_controller(address, replace(config, port=port), config.resolved_run_dir(), patience_s=START_S)


def _port(port: object) -> int:
    """Return the port that a program passes. Raises ``ConfigError``."""
    return int(of_launcher({"port": str(port)}, "port", port_number, ""))


@told_by_code(log, TtpError)
def ttp_init_processor(
    rank: int, dp_ranks: Sequence[int], dp_size: int, world_size: int, replica: int = 0, enable_local_copy: bool = False
) -> None:
    """Describe this rank. Returns 0, or 1 if the values do not fit.

    Args:
        rank: this rank.
        dp_ranks: the ranks that hold the same data-parallel state.
        dp_size: the number of ``dp_ranks``.
        world_size: the number of ranks of the job.
        replica: the number k of shards in the group. With k > 1 the rank at place i of the group holds shard i mod k,
            as with the original's ReplicatedOptimizer.
        enable_local_copy: has no effect.
    """
    try:
        ranks = [int(r) for r in dp_ranks]
    except (TypeError, ValueError):
        raise UsageError(f"dp_ranks {dp_ranks!r} is not a list of ranks") from None
    _check_whole(rank=rank, world_size=world_size, replica=replica)
    if len(ranks) != dp_size or rank not in ranks:
        raise UsageError(f"rank {rank}, dp_ranks {ranks} and dp_size {dp_size} do not fit")
    _program.replicas = check_set(replica_set(ranks, replica), Rank(rank), world_size)
    _program.rank, _program.world_size = rank, world_size


@told_by_code(log, TtpError)
def ttp_start_processor(master_ip: str, port: int) -> None:
    """Join the job at the controller. Returns 0 if this rank has joined, else 1."""
    if _program.replicas is None or _program.rank is None:
        raise UsageError("call ttp_init_processor() first")
    from ttp.mindio.handlers import HandlerKind, Participant

    environ, rank = in_torchruns_names(os.environ), str(_program.rank)
    if "RANK" not in environ:  # without a launcher the arguments tell all that its variables would
        environ = {"RANK": rank, "WORLD_SIZE": str(_program.world_size), "LOCAL_RANK": rank, **environ}
    env = RankEnv.from_env({**environ, "MASTER_ADDR": master_ip})
    if env.rank != _program.rank:
        raise UsageError(f"RANK={env.rank} is not the rank given to ttp_init_processor ({_program.rank})")
    participant = Participant(env, replace(session.current().config, port=_port(port)))
    participant.register(HandlerKind.SAVE, _program.write)
    participant.register(HandlerKind.RENAME, _program.finish)
    participant.set_replicas([_program.replicas])
    participant.start()
    _program.participant = participant


def ttp_register_save_ckpt_handler(handler: SaveHandler) -> None:
    """Register ``handler(save_rank, rank_list, args)``, which writes this rank's part under a temporary name.

    A handler that takes four arguments gets ``(save_rank, step, rank_list, args)``. A method ``note_args`` of the
    handler is called with whatever ``ttp_set_ckpt_args`` is given.

    Raises:
        TypeError: ``handler`` cannot be called.
    """
    _program.save = _callable(handler)


def ttp_register_rename_handler(handler: RenameHandler) -> None:
    """Register ``handler(args)``, which gives the finished checkpoint its name.

    Raises:
        TypeError: ``handler`` cannot be called.
    """
    _program.rename = _callable(handler)


def _callable(handler: Callable[..., Any]) -> Callable[..., Any]:
    if not callable(handler):
        raise TypeError(f"a save or rename handler is a function, not {handler!r}")
    return handler


def ttp_set_ckpt_args(args: Any) -> None:
    """Set the arguments of the handlers. Call it once per iteration with the state of the last finished step."""
    note = getattr(_program.save, "note_args", None)
    if note is not None:
        note(args)
    _program.args = args


ttp_set_fm_dump_callback = ttp_register_save_ckpt_handler
ttp_set_fm_rename_callback = ttp_register_rename_handler


def ttp_start_updating_os(backup_step: int = -1) -> int:
    """Report that the optimizer is about to write. Waits while the job is frozen. ``backup_step`` has no effect.

    Returns 0; 1 if the processor was not started.
    """
    if _program.participant is None:
        return RET_ERROR
    _program.participant.begin_update()
    return RET_OK


def ttp_end_updating_os(step: int) -> int:
    """Report that the optimizer has written: this rank's copy is now of ``step``.

    Returns 0; 1 if the processor was not started.
    """
    if _program.participant is None:
        return RET_ERROR
    _program.participant.end_update(int(step))
    return RET_OK


def replica_set(dp_ranks: Sequence[int], shards: int) -> ReplicaSet:
    """Return the replicas of a data-parallel group in which the rank at place i holds shard i mod ``shards``."""
    ranks, pieces = tuple(Rank(r) for r in sorted(dp_ranks)), max(1, shards)
    return ReplicaSet(ranks, max(1, len(ranks) // pieces), pieces)


def _named(handler: Callable[..., Any], step: int) -> dict[str, int]:
    """Return the step as a keyword argument if the handler has a parameter ``step``, else no arguments."""
    return {"step": step} if "step" in inspect.signature(handler).parameters else {}


def _positional(handler: Callable[..., Any]) -> int:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in kinds for p in inspect.signature(handler).parameters.values())


def _check(returned: Any, what: str) -> None:
    if returned is not None and returned is not True and (returned is False or returned != RET_OK):
        raise RuntimeError(f"the {what} handler returned {returned!r}")
