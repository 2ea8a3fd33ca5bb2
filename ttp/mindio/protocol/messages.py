"""Messages about rounds: actions that the registered handlers of many ranks carry out in step.

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


class RoundKind(enum.Enum):
    """What a rank does in a round."""

    STOP = "stop"  # get the training thread out of its loop
    CLEAN = "clean"  # make the device usable again
    CATCH_UP = "catch_up"  # make the update before which the training thread stands
    REPAIR = "repair"  # send or receive what a copy lacks
    ROLLBACK = "rollback"  # set everything else to the step of the copy
    RESUME = "resume"  # go back into the loop
    SAVE = "save"
    RENAME = "rename"  # make the saved checkpoint exist
    HOLD = "hold"  # go no further than the end of the running step
    PAUSE = "pause"  # stand still at the end of one step, the same everywhere
    SYNC = "sync"  # let the device finish its queued work
    CONTINUE = "continue"  # the end of HOLD and PAUSE
    MAKE_WAY = "make_way"  # tell the launcher that lost ranks may be started anew beside this one
    REBUILD = "rebuild"  # make the process groups anew, with the ranks that were started


class Ailment(enum.Enum):
    """What ended a training loop that may be entered again in the same process."""

    STOPPED = "stopped"  # nothing is wrong with this rank: it was told to stop
    RETRY = "retry"  # the numbers are wrong: only a checkpoint helps
    MEMORY = "memory"  # device memory was lost; replicas have its contents
    MEMORY_CORRUPT = "memory_corrupt"  # device memory was lost while it was being written
    NETWORK = "network"  # a collective failed, the state is whole
    FATAL = "fatal"  # anything else: this process cannot go on
    PEER = "peer"  # a collective has ended because another rank died: only new process groups help
    JOINED = "joined"  # a new process in the seat of a lost rank: it is ready, and holds no version yet


class RepairWay(enum.IntEnum):
    """The part of one rank in a repair; the numbers are those of the original."""

    SEND = 0
    MEMORY_HIGH = 1  # make the state anew, then receive
    MEMORY_LOW = 2  # make the device usable; no state was lost
    RECEIVE = 3
    ROLLBACK = 4
    LOAD = 5  # from the last checkpoint
    LOAD_REBUILD = 6  # make the state anew, then from the last checkpoint


@dataclass(frozen=True, slots=True)
class ReplicaSet:
    """The ranks that share one part of the state, as one of them describes it; see ``replica_lists``.

    Args:
        ranks: all ranks that hold a piece of it, this one among them.
        copies: number of copies of each piece; -1: as many as ranks.
        shift: distance of two copies in the ascending list; 0: follows from the number of copies.
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
    """What this rank can do, and with which ranks it shares state. Sent again to every new controller.

    Args:
        rank: the rank that sends it.
        sets: one set for each type of state.
        retry: lost memory and broken links may be repaired in this process.
        load_repair: the state may be loaded from a checkpoint in this process.
        halt_before_dump: stop and clean before the handlers save.
        action_ms: milliseconds that a handler may take.
        save_ms: milliseconds that the save handler may take.
        halted: the training thread was stopped in a round and has not gone back.
        recover: this process can go on with a new process in the place of a lost rank.
        elastic: a launch with fewer ranks, or with more again, goes on from the checkpoint.
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
    """The training thread has left its loop and can go back; ``code`` is the error code of the device."""

    ailment: Ailment
    code: str
    text: str


@dataclass(frozen=True, slots=True)
class Acted(m.ProgramReport):
    """The result of an ``Act``, and the version of the rank's copy after it.

    ``result`` is what the handler returned; of HOLD the step at whose end the training thread will stand.
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
    """One rank's part of a round. Carried out once for each term and serial number; the answer is said again.

    Args:
        rank: the rank that acts.
        term: term of the controller.
        serial: number of the round; grows from round to round, also when another controller takes over.
        kind: what to do.
        version: the step that it is about.
        limit_ms: milliseconds that it may take.
        purpose: ``retry``, ``recover``, ``dump``, ``pause``, ``migration``.
        lists: SAVE: the ranks that save, for each type that this rank saves.
        memory_error: CLEAN: this rank's device has lost memory.
        rebuild: REPAIR: the state has to be made anew first.
        error_ranks: REPAIR: the ranks that need the repair; REBUILD: the ranks that were started anew.
        way: REPAIR: this rank's part.
        transfers: REPAIR: what this rank sends or receives.
        ranks: REPAIR: all ranks that send or receive.
        store: REBUILD: ``host:port`` of an unused store for new process groups; empty: this host's launcher names it.
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
