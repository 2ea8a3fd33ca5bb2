"""Numbers and enums of the original that its clients use."""

from __future__ import annotations

import enum
import os

from ttp.mindio.handlers import Ailment, NextAction, RepairWay

RET_EXIT = 2
"""Exit code of a process that could not be started, as in the original."""

STEP_MAX = 2**63 - 2
ERROR_CODE_MAX = 15
PORT_MIN = 1024
WORLD_MAX = 100_000


class ReportState(enum.Enum):
    """The states that ``tft_report_error`` takes."""

    RS_NORMAL = 0
    RS_RETRY = 1
    RS_UCE = 2
    RS_UCE_CORRUPTED = 3
    RS_HCCL_FAILED = 4
    RS_INIT_FINISH = 5
    RS_PREREPAIR_FINISH = 6
    RS_STEP_FINISH = 7
    RS_UNKNOWN = 8


AILMENTS = {
    ReportState.RS_NORMAL: Ailment.STOPPED,
    ReportState.RS_RETRY: Ailment.RETRY,
    ReportState.RS_UCE: Ailment.MEMORY,
    ReportState.RS_UCE_CORRUPTED: Ailment.MEMORY_CORRUPT,
    ReportState.RS_HCCL_FAILED: Ailment.NETWORK,
    ReportState.RS_PREREPAIR_FINISH: Ailment.JOINED,
    ReportState.RS_STEP_FINISH: Ailment.STOPPED,
    ReportState.RS_UNKNOWN: Ailment.FATAL,
}
"""The ailment of each state. ``RS_INIT_FINISH`` has none, because ttp does not use it."""


class RepairType(enum.Enum):
    """The kinds of repair for a repair handler; the numbers are those of ``RepairWay``."""

    RT_SEND = RepairWay.SEND.value
    RT_UCE_HIGHLEVEL = RepairWay.MEMORY_HIGH.value
    RT_UCE_LOWLEVEL = RepairWay.MEMORY_LOW.value
    RT_RECV_REPAIR = RepairWay.RECEIVE.value
    RT_ROLLBACK = RepairWay.ROLLBACK.value
    RT_LOAD_CKPT = RepairWay.LOAD.value
    RT_LOAD_REBUILD = RepairWay.LOAD_REBUILD.value


class OptimizerType(enum.Enum):
    """The index of each optimizer's entry in ``tft_set_optimizer_replica``."""

    ATTENTION = 0
    MOE = 1


class Action(enum.Enum):
    """The values that ``tft_wait_next_action`` returns."""

    RETRY = NextAction.RETRY.value
    EXIT = NextAction.EXIT.value


def for_mindspore() -> bool:
    """Return whether handlers are called with the arguments that MindSpore's client expects."""
    return os.environ.get("MINDIO_FOR_MINDSPORE", "").strip().lower() in ("1", "true")
