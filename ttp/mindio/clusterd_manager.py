"""Translate between ClusterD and the controller of a job whose program has its own handlers. No I/O.

Such a job can do more than dump and exit, and its controller exchanges the same messages with a manager as MindIO with
ClusterD (``protocol.handshake``). So all messages are passed on in both directions, without any decision here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from ttp.core.layout import Rank
from ttp.mindio.protocol.manager_messages import SWITCHES, FaultOf, Notice, NoticeKind, RankFault
from ttp.wire.v1 import recover_pb2 as pb

KNOWN_MAX = 256

Faults = Mapping[int, int]
"""Rank -> kind of its fault; the numbers are those of ``FaultOf`` and of ClusterD's fault types."""


class Interpreter:
    """Translates ClusterD's signals to notices, and calls of a manager to ClusterD's messages.

    Args:
        job_id: id of the job in ClusterD.
    """

    def __init__(self, job_id: str) -> None:
        self._job_id = job_id
        self._heard: deque[tuple[str, ...]] = deque(maxlen=KNOWN_MAX)

    def notices(self, signal: pb.RecoverSignal, hosts: Sequence[Sequence[int]]) -> list[Notice]:
        """Return the notices to send for a signal; none if the signal is a repeat.

        Args:
            signal: ClusterD's signal.
            hosts: ranks of each host, for signals that name nodes.
        """
        kind, wanted = signal.signal_type, signal.change_strategy
        key = (signal.uuid, kind, wanted, *signal.actions)
        if signal.job_id != self._job_id or key in self._heard:
            return []
        self._heard.append(key)
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

    def fault_ranks(self, faults: Faults) -> pb.RecoverFaults:
        """Return ClusterD's message for a call; see ``ReportFaultRanks``."""
        return pb.RecoverFaults(job_id=self._job_id, fault_ranks=_to_wire(faults))

    def stop_complete(self, code: int, text: str, faults: Faults) -> pb.RecoverStopped:
        """Return ClusterD's message for a call; see ``ReportStopComplete``."""
        answer = pb.RecoverAnswer(code=code, info=text)
        return pb.RecoverStopped(job_id=self._job_id, status=answer, fault_ranks=_to_wire(faults))

    def strategies(self, faults: Faults, offered: Sequence[str]) -> pb.RecoverStrategies:
        """Return ClusterD's message for a call; see ``ReportStrategies``."""
        return pb.RecoverStrategies(job_id=self._job_id, fault_ranks=_to_wire(faults), strategies=offered)

    def result(self, code: int, text: str, strategy: str) -> pb.RecoverResult:
        """Return ClusterD's message for a call; see ``ReportResult``."""
        return pb.RecoverResult(job_id=self._job_id, status=pb.RecoverAnswer(code=code, info=text), strategy=strategy)


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


def _to_wire(faults: Faults) -> list[pb.RecoverFault]:
    return [pb.RecoverFault(rank_id=str(rank), fault_type=str(kind)) for rank, kind in sorted(faults.items())]
