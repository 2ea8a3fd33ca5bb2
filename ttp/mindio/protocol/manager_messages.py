"""What an outside manager and the controller say to each other about a fault."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from ttp.core.controller.events import ProgramAction, ProgramEvent
from ttp.core.layout import Rank


class NoticeKind(enum.Enum):
    """What the manager says."""

    STOP_TRAIN = "stop_train"
    PAUSE_TRAIN = "pause_train"
    GLOBAL_RANK = "global_rank"  # these are all the faults there are
    STRATEGY = "strategy"
    HOT_SWITCH = "hot_switch"  # processes are started on other hosts for ranks that live
    STOP_SWITCH = "stop_switch"  # they are not
    MOVE = "move"  # an operator: the ranks of a host, which ``params`` names, to one that has offered its place
    FAILED = "failed"  # it could not take what it was told: it is out of the game


class CallKind(enum.Enum):
    """What the manager is told."""

    FAULT_RANKS = "fault_ranks"
    STOP_COMPLETE = "stop_complete"
    STRATEGIES = "strategies"
    RESULT = "result"


class Code(enum.IntEnum):
    """Of a result; the numbers are those of the original."""

    OK = 0
    ERROR = 1
    MAY_RECOVER = 405
    MAY_DUMP = 406
    MAY_EXIT = 499


class FaultOf(enum.IntEnum):
    """What is broken of a rank; the numbers are those of the original."""

    MEMORY = 0
    PROCESS = 1
    NETWORK = 2


@dataclass(frozen=True, slots=True)
class RankFault:
    """A rank and what is broken of it; ``code`` is the device's word for it."""

    rank: Rank
    kind: FaultOf
    code: str = ""


@dataclass(frozen=True, slots=True)
class Notice:
    """The manager says what is to be done.

    Args:
        kind: see ``NoticeKind``.
        faults: ranks that it speaks of.
        seconds: how long something may take; 0: as long as it usually may.
        strategy: ``retry``, ``recover``, ``migration``, ``downgrade``, ``upgrade``, ``dump``, ``exit``, ``continue``,
            or one that cannot be had.
        params: of the strategy.
    """

    kind: NoticeKind
    faults: tuple[RankFault, ...] = ()
    seconds: float = 0.0
    strategy: str = ""
    params: str = ""


@dataclass(frozen=True, slots=True)
class ManagerCall:
    """The manager is told what happened.

    Args:
        kind: see ``CallKind``.
        faults: as they are known.
        code: 0 for good, else see ``Code``.
        text: for people.
        strategies: those that can be chosen, the best one last.
        strategy: the one whose result this is.
    """

    kind: CallKind
    faults: tuple[RankFault, ...] = ()
    code: int = 0
    text: str = ""
    strategies: tuple[str, ...] = ()
    strategy: str = ""


# ------------------------------------------------------------------------------------ to and from the controller's core


@dataclass(frozen=True, slots=True)
class ManagerCame(ProgramEvent):
    """Somebody wants to decide what is to be done after a fault; ``wait_s``: how long to wait for each answer."""

    wait_s: float


@dataclass(frozen=True, slots=True)
class ManagerLeft(ProgramEvent):
    """Nobody does any more."""


@dataclass(frozen=True, slots=True)
class Noticed(ProgramEvent):
    """The manager says something."""

    notice: Notice


@dataclass(frozen=True, slots=True)
class PlaceOffered(ProgramEvent):
    """A launcher that stands by could start ranks on ``host``, and keeps a ``store`` (``host:port``) for them."""

    host: str
    store: str


@dataclass(frozen=True, slots=True)
class TakePlace(ProgramAction):
    """The answer to a ``PlaceOffered``, at once: the ranks that are to be started there; none: not now."""

    ranks: tuple[Rank, ...]


@dataclass(frozen=True, slots=True)
class CallManager(ProgramAction):
    """Tell the manager."""

    call: ManagerCall


@dataclass(frozen=True, slots=True)
class AnswerNotice(ProgramAction):
    """The answer to a ``Noticed``, at once: why it is not accepted; empty if it is."""

    problem: str
