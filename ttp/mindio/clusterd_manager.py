"""Translate between ClusterD and the controller of a job whose program has its own handlers. No I/O.

Such a job can do more than dump and exit, and its controller exchanges the same messages with a manager as MindIO with
ClusterD (``protocol.handshake``). So all messages are passed on in both directions, without any decision here.
"""

from __future__ import annotations

from collections.abc import Sequence

from ttp.core.layout import Rank
from ttp.mindio.clusterd import Messages
from ttp.mindio.protocol.manager_messages import SWITCHES, FaultOf, Notice, NoticeKind, RankFault
from ttp.wire.v1 import recover_pb2 as pb


class Interpreter(Messages):
    """Translates ClusterD's signals to notices, and calls of a manager to ClusterD's messages."""

    def notices(self, signal: pb.RecoverSignal, hosts: Sequence[Sequence[int]]) -> list[Notice]:
        """Return the notices to send for a signal; none if the signal is a repeat.

        Args:
            signal: ClusterD's signal.
            hosts: ranks of each host, for signals that name nodes.
        """
        kind, wanted = signal.signal_type, signal.change_strategy
        if not self.is_new(signal):
            return []
        faults, seconds = _faults(signal), float(max(0, signal.timeout))
        found: list[Notice] = []
        match kind:
            case "stopTrain" if "pause_train" in signal.actions:
                found = [Notice(NoticeKind.PAUSE_TRAIN, faults, seconds)]
            case "stopTrain":
                found = [Notice(NoticeKind.STOP_TRAIN, faults)]
            case "globalFault":
                found = [Notice(NoticeKind.GLOBAL_RANK, faults, seconds)]
            case "hot-switch" if set(signal.actions) & SWITCHES.keys():
                found = [Notice(kind, faults) for action, kind in SWITCHES.items() if action in signal.actions]
            case "changeStrategy":
                found = [Notice(NoticeKind.STRATEGY, strategy=wanted, params=signal.extra_params)]
            case "saveAndExit":
                accused = faults or _of_nodes(signal, hosts)
                found = [Notice(kind, accused) for kind in (NoticeKind.STOP_TRAIN, NoticeKind.GLOBAL_RANK)]
                found.append(Notice(NoticeKind.STRATEGY, strategy="dump"))
        return found


def _faults(signal: pb.RecoverSignal) -> tuple[RankFault, ...]:
    kinds = {str(kind.value): kind for kind in FaultOf}
    named = {
        int(f.rank_id): kinds.get(f.fault_type, FaultOf.PROCESS) for f in signal.fault_ranks if f.rank_id.isdecimal()
    }
    return tuple(RankFault(Rank(rank), kind) for rank, kind in sorted(named.items()))


def _of_nodes(signal: pb.RecoverSignal, hosts: Sequence[Sequence[int]]) -> tuple[RankFault, ...]:
    """Return a fault for each rank of the named nodes; for all ranks if none of the nodes is known."""
    nodes = {int(node) for node in signal.node_rank_ids if node.isdecimal()}
    named = [host for place, host in enumerate(hosts) if place in nodes] or hosts
    return tuple(RankFault(Rank(rank), FaultOf.PROCESS) for host in named for rank in host)
