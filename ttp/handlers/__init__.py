"""For programs whose own handlers save, repair and resume: the side of a rank and the side of an outside manager."""

from ttp.core.rounds_messages import Ailment, RepairWay, ReplicaSet, TypeRanks
from ttp.handlers.call import Call, HandlerKind
from ttp.handlers.loop import ForcedStop, NextAction
from ttp.handlers.manager import Manager
from ttp.handlers.participant import Participant

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
