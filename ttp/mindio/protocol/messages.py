"""Messages about rounds: actions that the registered handlers of many ranks carry out together.

They are the ``ProgramReport`` and ``ProgramOrder`` of ``ttp.core.messages``; the wire form is
``proto/ttp/wire/v1/rounds.proto``.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from ttp.core import messages as m
from ttp.core.layout import Rank, Version

MIGRATION = "migration"
"""Purpose of the rounds of a hot switch."""
HANDLERS = "handlers"
"""``Hello.framework`` of a rank whose state is saved and repaired by the program's own handlers."""
ACTION_S = 180.0
"""Default time limit of a handler in seconds; MindIO's for ``TTP_NORMAL_ACTION_TIME_LIMIT`` is the same."""


class RoundKind(enum.Enum):
    """The action of a rank in a round."""

    STOP = "stop"  # make the training thread leave its loop
    CLEAN = "clean"  # make the device usable again
    CATCH_UP = "catch_up"  # let the training thread, which waits at the gate, make its update
    REPAIR = "repair"  # send or receive the state that a copy lacks
    ROLLBACK = "rollback"  # set everything else to the step of the copy
    RESUME = "resume"  # enter the loop again
    SAVE = "save"
    RENAME = "rename"  # commit the saved checkpoint
    HOLD = "hold"  # do not train beyond the end of the current step
    PAUSE = "pause"  # pause at the end of a given step, the same on all ranks
    SYNC = "sync"  # let the device finish its queued work
    CONTINUE = "continue"  # end HOLD and PAUSE
    MAKE_WAY = "make_way"  # tell the launcher that it may restart only the lost ranks
    REBUILD = "rebuild"  # make new process groups, with the restarted ranks


class Ailment(enum.Enum):
    """Why a training thread has left its loop, which it may enter again in the same process."""

    STOPPED = "stopped"  # this rank has no fault: it was ordered to stop
    RETRY = "retry"  # the numerical results are wrong: only a checkpoint helps
    MEMORY = "memory"  # device memory was lost; replicas have its contents
    MEMORY_CORRUPT = "memory_corrupt"  # device memory was lost while it was being written
    NETWORK = "network"  # a collective failed, the state is whole
    FATAL = "fatal"  # anything else: this process cannot continue
    PEER = "peer"  # a collective has failed because another rank died: only new process groups help
    JOINED = "joined"  # this is a new process that replaces a lost rank: it is ready, and holds no version yet


class RepairWay(enum.IntEnum):
    """The part of one rank in a repair; the numbers are those of the original."""

    SEND = 0
    MEMORY_HIGH = 1  # create the state anew, then receive
    MEMORY_LOW = 2  # make the device usable; no state was lost
    RECEIVE = 3
    ROLLBACK = 4
    LOAD = 5  # load the last checkpoint
    LOAD_REBUILD = 6  # create the state anew, then load the last checkpoint


@dataclass(frozen=True, slots=True)
class ReplicaSet:
    """The ranks that hold one type of state together, as one of them declares it; see ``replica_lists``.

    Args:
        ranks: all ranks that hold a piece of the state, including the declaring one.
        copies: number of copies of each piece; -1 for as many as ranks.
        shift: distance of two copies in the ascending list of ranks; 0 to compute it from the number of copies.
    """

    ranks: tuple[Rank, ...]
    copies: int
    shift: int = 0


@dataclass(frozen=True, slots=True)
class TypeRanks:
    """The ranks that save one type of state, in the order of its pieces."""

    type: int
    ranks: tuple[Rank, ...]


@dataclass(frozen=True, slots=True)
class Transfer:
    """The transfer of one type of state from one rank to another."""

    type: int
    src: Rank
    dst: Rank


# ------------------------------------------------------------------------------------------------------------- reports


@dataclass(frozen=True, slots=True)
class Handlers(m.ProgramReport):
    """The abilities of a rank, and its replica sets. Sent again to every new controller.

    Args:
        rank: the rank that sends this report.
        sets: one set for each type of state.
        retry: whether lost memory and broken links may be repaired in this process.
        load_repair: whether this process can load the state from a checkpoint.
        halt_before_dump: whether to stop and clean before the handlers save.
        action_ms: time limit of a handler in milliseconds.
        save_ms: time limit of the save handler in milliseconds.
        halted: whether the training thread was stopped in a round and has not entered its loop again.
        recover: whether this process can continue with new processes in place of lost ranks.
        elastic: whether a launch with another number of ranks can resume from the checkpoint.
    """

    sets: tuple[ReplicaSet, ...]
    retry: bool
    load_repair: bool
    halt_before_dump: bool
    action_ms: int
    save_ms: int
    halted: bool
    recover: bool = False
    elastic: bool = False


@dataclass(frozen=True, slots=True)
class Ailing(m.ProgramReport):
    """The training thread has left its loop and can enter it again; ``code`` is the error code of the device."""

    ailment: Ailment
    code: str
    text: str


@dataclass(frozen=True, slots=True)
class Acted(m.ProgramReport):
    """The result of an ``Act``, and the version of the rank's copy after it.

    ``result`` is the handler's result; for HOLD it is the step at whose end the training thread will pause.
    """

    serial: int
    ok: bool
    result: int
    version: Version
    torn: bool
    text: str


# -------------------------------------------------------------------------------------------------------------- orders


@dataclass(frozen=True, slots=True)
class Act(m.ProgramOrder):
    """The order to one rank in a round. It is carried out once per serial number; repeats get the same answer.

    Args:
        rank: the rank.
        term: term of the controller.
        serial: number of the round; grows from round to round, also when another controller takes over.
        kind: the action.
        version: the step that the action is about.
        limit_ms: time limit in milliseconds.
        purpose: ``retry``, ``recover``, ``dump``, ``pause`` or ``migration``.
        lists: for SAVE: the ranks that save, for each type of state that this rank saves.
        memory_error: for CLEAN: whether this rank's device has lost memory.
        rebuild: for REPAIR: whether the state has to be created anew first.
        error_ranks: for REPAIR: the ranks that need the repair; for REBUILD: the ranks that were restarted.
        way: for REPAIR: the part of this rank.
        transfers: for REPAIR: the transfers of this rank.
        ranks: for REPAIR: all ranks that send or receive.
        store: for REBUILD: ``host:port`` of an unused store for new process groups; empty if this host's launcher
            has written it.
    """

    serial: int
    kind: RoundKind
    version: Version
    limit_ms: int
    purpose: str = ""
    lists: tuple[TypeRanks, ...] = ()
    memory_error: bool = False
    rebuild: bool = False
    error_ranks: tuple[Rank, ...] = ()
    way: RepairWay = RepairWay.ROLLBACK
    transfers: tuple[Transfer, ...] = ()
    ranks: tuple[Rank, ...] = ()
    store: str = ""
