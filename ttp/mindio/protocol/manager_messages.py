"""Messages between an outside manager and the controller about a fault."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from ttp.core.controller.events import ProgramAction, ProgramEvent
from ttp.core.layout import Rank

WAIT_S = 30.0
"""Default time limit in seconds for an answer of the manager; MindIO's for ``MINDIO_WAIT_MINDX_TIME`` is the same."""


class NoticeKind(enum.Enum):
    """The kinds of notices that a manager sends."""

    STOP_TRAIN = "stop_train"
    PAUSE_TRAIN = "pause_train"
    GLOBAL_RANK = "global_rank"  # all faults are known now
    STRATEGY = "strategy"
    HOT_SWITCH = "hot_switch"  # processes start on other hosts for live ranks
    STOP_SWITCH = "stop_switch"  # the ranks are not to be moved
    MOVE = "move"  # an operator drains the host that ``params`` names: its ranks move to a host that was offered
    FAILED = "failed"  # the manager could not take a call: the controller decides by itself


SWITCHES = {"hot switch": NoticeKind.HOT_SWITCH, "stop switch": NoticeKind.STOP_SWITCH}
"""MindIO's and ClusterD's names of actions."""


class CallKind(enum.Enum):
    """The kinds of calls that a manager gets."""

    FAULT_RANKS = "fault_ranks"
    STOP_COMPLETE = "stop_complete"
    STRATEGIES = "strategies"
    RESULT = "result"


class Code(enum.IntEnum):
    """Codes of a result; the numbers are those of the original."""

    OK = 0
    ERROR = 1
    MAY_RECOVER = 405
    MAY_DUMP = 406
    MAY_EXIT = 499


class FaultOf(enum.IntEnum):
    """The kind of a rank's fault; the numbers are those of the original."""

    MEMORY = 0
    PROCESS = 1
    NETWORK = 2


@dataclass(frozen=True, slots=True)
class RankFault:
    """A faulty rank and the kind of its fault; ``code`` is the error code of the device."""

    rank: Rank
    kind: FaultOf
    code: str = ""


@dataclass(frozen=True, slots=True)
class Notice:
    """A message from the manager: a request.

    Args:
        kind: see ``NoticeKind``.
        faults: the ranks that the notice is about.
        seconds: limit of a pause, or least time that a manager has to choose a strategy; 0 for the default.
        strategy: ``retry``, ``recover``, ``migration``, ``downgrade``, ``upgrade``, ``dump``, ``exit``, ``continue``,
            or another one, which is not possible.
        params: parameters of the strategy.
    """

    kind: NoticeKind
    faults: tuple[RankFault, ...] = ()
    seconds: float = 0.0
    strategy: str = ""
    params: str = ""


@dataclass(frozen=True, slots=True)
class ManagerCall:
    """A message to the manager: a report.

    Args:
        kind: see ``CallKind``.
        faults: the known faults.
        code: 0 for success, else see ``Code``.
        text: explanation in words.
        strategies: the strategies that can be chosen, best last.
        strategy: the strategy whose result this is.
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
    """A manager that decides about faults has attached; it has ``wait_s`` seconds for each answer."""

    wait_s: float


@dataclass(frozen=True, slots=True)
class ManagerLeft(ProgramEvent):
    """The manager has detached."""


@dataclass(frozen=True, slots=True)
class Noticed(ProgramEvent):
    """The manager has sent a notice."""

    notice: Notice


@dataclass(frozen=True, slots=True)
class PlaceOffered(ProgramEvent):
    """A standby launcher offers to start ranks on ``host``, and has a ``store`` (``host:port``) for them."""

    host: str
    store: str


@dataclass(frozen=True, slots=True)
class TakePlace(ProgramAction):
    """The immediate answer to a ``PlaceOffered``: the ranks to start there now; may be empty."""

    ranks: tuple[Rank, ...]


@dataclass(frozen=True, slots=True)
class CallManager(ProgramAction):
    """Send a call to the manager."""

    call: ManagerCall


@dataclass(frozen=True, slots=True)
class AnswerNotice(ProgramAction):
    """The immediate answer to a ``Noticed``: why the notice is not accepted; empty if it is."""

    problem: str
