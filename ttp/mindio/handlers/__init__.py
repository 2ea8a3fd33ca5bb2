"""The API for programs whose own handlers save, repair and resume: the part of a rank and that of a manager."""

from ttp.mindio.handlers.call import Call, HandlerKind
from ttp.mindio.handlers.loop import ForcedStop, NextAction
from ttp.mindio.handlers.manager import Manager
from ttp.mindio.handlers.participant import Participant
from ttp.mindio.protocol.messages import Ailment, RepairWay, ReplicaSet, TypeRanks

__all__ = [
    "Ailment",
    "Call",
    "ForcedStop",
    "HandlerKind",
    "Manager",
    "NextAction",
    "Participant",
    "RepairWay",
    "ReplicaSet",
    "TypeRanks",
]
