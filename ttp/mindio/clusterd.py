"""Mediate between a job under ttp and ClusterD, the service of MindCluster that decides about jobs. No I/O.

ClusterD detects broken devices and nodes, ttp detects ranks that died. Each reports to the other; then ClusterD sends
these signals, and gets these answers::

    stopTrain       -> the ranks are reported as broken, and ttp freezes the job    -> StopComplete
    globalFault     -> the possible strategies are dump and exit                    -> Strategies
    changeStrategy  -> dump: ttp has saved, or cannot                               -> Result
    saveAndExit     -> all of the above at once, if only dump is configured         -> Result
    killMaster      -> this process ends

ttp's rescue is one operation: it freezes, saves and releases. So ranks are reported to the controller once per fault
(an ``Episode``), whichever side detected it, and all signals about the same hosts get the result of that rescue.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from ttp.wire.v1 import recover_pb2 as pb

OK, NOT_READY, NOT_RECOVERABLE, NOT_DUMPED, NOT_DONE = 0, 404, 406, 407, 499
DUMP, EXIT = "dump", "exit"
OTHER_FAULT = 1
ACCUSE_AGAIN_S = 2.0
EPISODE_S = 900.0
"""Largest number of seconds that ClusterD waits for a report; a later signal is about another fault."""
STOP_S = 60.0
"""Seconds in which the job has to freeze."""
KNOWN_MAX = 256


@dataclass(frozen=True, slots=True)
class Seen:
    """The state of the job, from its controller, or from its ``save_dir`` if no controller is left.

    Args:
        hosts: ranks of each host, ordered by the lowest rank; empty if there is no job.
        incident: id of the last incident; empty if there was none.
        stage: stage of that incident.
        faulty: whether the incident is a fault; False for a checkpoint on request and for a false alarm.
        lost: ranks that died in the incident.
        saved: whether the incident has committed a checkpoint.
        text: outcome of the incident, in words.
    """

    hosts: tuple[tuple[int, ...], ...] = ()
    incident: str = ""
    stage: str = ""
    faulty: bool = False
    lost: frozenset[int] = frozenset()
    saved: bool = False
    text: str = ""

    @property
    def over(self) -> bool:
        """Whether the incident has ended."""
        return self.stage in ("released", "closed")

    def hosts_of(self, ranks: Iterable[int]) -> set[int]:
        """Return the indices of the hosts of ``ranks``."""
        wanted = set(ranks)
        return {place for place, host in enumerate(self.hosts) if wanted.intersection(host)}


@dataclass(frozen=True, slots=True)
class Accuse:
    """An action: report these ranks as broken to the job's controller."""

    ranks: tuple[int, ...]
    text: str


Faults = Mapping[int, int]
"""Rank -> kind of its fault; the numbers are those of ``FaultOf`` and of ClusterD's fault types."""
Message: TypeAlias = pb.RecoverStopped | pb.RecoverStrategies | pb.RecoverResult | pb.RecoverFaults
Action: TypeAlias = Accuse | Message


@dataclass(slots=True)
class Episode:
    """One fault, and the answers about it. Times are in seconds.

    Args:
        began_s: when the fault was first reported.
        before: id of the last incident before the fault.
        ranks: the broken ranks.
        hosts: the hosts of the broken ranks.
        result: the state of the job in the incident of this fault; None before that incident.
        accused_s: when the ranks were last reported to the controller.
        owed: deadlines of the answers that ClusterD waits for, by request.
    """

    began_s: float
    before: str
    ranks: set[int] = field(default_factory=set)
    hosts: set[int] = field(default_factory=set)
    result: Seen | None = None
    accused_s: float = float("-inf")
    owed: dict[str, float] = field(default_factory=dict)


class Messages:
    """Makes ClusterD's messages about one job.

    Args:
        job_id: id of the job in ClusterD.
    """

    def __init__(self, job_id: str) -> None:
        self._job_id = job_id
        self._heard: deque[tuple[str, ...]] = deque(maxlen=KNOWN_MAX)

    def is_new(self, signal: pb.RecoverSignal) -> bool:
        """Return whether a signal says something about the job, and for the first time."""
        key = (signal.uuid, signal.signal_type, signal.change_strategy, *signal.actions)
        if signal.signal_type == "keep-alive" or signal.job_id != self._job_id or key in self._heard:
            return False
        self._heard.append(key)
        return True

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


def _to_wire(faults: Faults) -> list[pb.RecoverFault]:
    return [pb.RecoverFault(rank_id=str(rank), fault_type=str(kind)) for rank, kind in sorted(faults.items())]


class Bridge(Messages):
    """Decides what to send to the job and to ClusterD about the current fault.

    Args:
        job_id: id of the job in ClusterD.
        dump_s: seconds in which the job has to save.
    """

    def __init__(self, job_id: str, dump_s: float = 360.0) -> None:
        super().__init__(job_id)
        self._dump_s = dump_s
        self._seen: Seen | None = None
        self._told: deque[str] = deque(maxlen=KNOWN_MAX)
        """Incidents whose dead ranks were reported to ClusterD."""
        self._episode: Episode | None = None
        self.ended = False
        """Whether ClusterD has told this process to end."""

    def signal(self, signal: pb.RecoverSignal, now: float) -> list[Action]:
        """Handle a signal of ClusterD, and return the actions. A repeated signal has no effect."""
        kind, wanted = signal.signal_type, signal.change_strategy
        if not self.is_new(signal):
            return []
        ranks = {int(fault.rank_id) for fault in signal.fault_ranks if fault.rank_id.isdecimal()}
        match kind, wanted:
            case "killMaster", _:
                self.ended = True
            case "stopTrain", _ if "pause_train" in signal.actions:
                answer = pb.RecoverAnswer(code=NOT_DONE, info="ttp does not pause jobs: it saves and restarts them")
                return [pb.RecoverStopped(job_id=self._job_id, status=answer, fault_ranks=signal.fault_ranks)]
            case "stopTrain", _:
                self._fault(ranks, self._hosts_of(ranks), now).owed["stop"] = now + STOP_S
            case "globalFault", _:
                self._fault(ranks, self._hosts_of(ranks), now)
                can = pb.RecoverStrategies(job_id=self._job_id, fault_ranks=signal.fault_ranks)
                can.strategies.extend([DUMP, EXIT])
                return [can]
            case "saveAndExit", _:
                nodes = {int(node) for node in signal.node_rank_ids if node.isdecimal()}
                self._fault(ranks, nodes | self._hosts_of(ranks), now).owed[DUMP] = now + self._dump_s
            case "changeStrategy", "dump":
                self._fault(ranks, self._hosts_of(ranks), now).owed[DUMP] = now + self._dump_s
            case "changeStrategy", "exit":
                self._episode = None
            case "changeStrategy", _:
                return [self.result(NOT_RECOVERABLE, "ttp offers only dump and exit", wanted)]
        return []

    def look(self, seen: Seen | None, now: float) -> list[Action]:
        """Handle the job's current state, None if no controller answers, and return the actions."""
        actions: list[Action] = []
        if seen is not None:
            actions += self._died(seen, now)
            self._seen = seen if seen.hosts or self._seen is None else replace(seen, hosts=self._seen.hosts)
        episode = self._episode
        if episode is None:
            return actions
        known = episode.result
        new = seen is not None and seen.faulty and seen.incident not in ("", episode.before)
        if new and not (known and known.over):
            episode.result = seen
        if episode.result is None and seen is not None and seen.hosts and now >= episode.accused_s + ACCUSE_AGAIN_S:
            episode.accused_s = now
            actions.append(self._accuse(episode, seen))
        actions += self._answers(episode, now)
        if now >= episode.began_s + EPISODE_S and not episode.owed:
            self._episode = None
        return actions

    def believed(self) -> None:
        """Record that the controller has accepted the report of broken ranks, so that it is not repeated."""
        if self._episode is not None:
            self._episode.accused_s = float("inf")

    def _fault(self, ranks: set[int], hosts: set[int], now: float) -> Episode:
        """Return the episode of a signal: the current one, unless that is over and was about other hosts."""
        episode = self._episode
        if episode is None or (episode.result is not None and episode.result.over and not hosts <= episode.hosts):
            episode = self._episode = Episode(now, self._seen.incident if self._seen is not None else "")
        episode.ranks |= ranks
        episode.hosts |= hosts
        return episode

    def _hosts_of(self, ranks: Iterable[int]) -> set[int]:
        return self._seen.hosts_of(ranks) if self._seen is not None else set()

    def _died(self, seen: Seen, now: float) -> list[Action]:
        """Report ranks that died to ClusterD, once per incident, unless it was over before this process began."""
        if self._seen is None and seen.over:
            self._told.append(seen.incident)
        if not seen.lost or seen.incident in self._told:
            return []
        self._told.append(seen.incident)
        episode = self._episode
        if episode is not None and seen.lost <= episode.ranks:
            return []
        if episode is None or (episode.result is not None and episode.result.incident != seen.incident):
            episode = self._episode = Episode(now, "")
        episode.ranks |= seen.lost
        episode.hosts |= seen.hosts_of(seen.lost)
        episode.result = seen
        return [self.fault_ranks(dict.fromkeys(seen.lost, OTHER_FAULT))]

    def _accuse(self, episode: Episode, seen: Seen) -> Accuse:
        ranks = episode.ranks | {
            rank for place, host in enumerate(seen.hosts) if place in episode.hosts for rank in host
        }
        everybody = {rank for host in seen.hosts for rank in host}
        return Accuse(tuple(sorted(ranks & everybody or everybody)), "ClusterD says that the device or node is broken")

    def _answers(self, episode: Episode, now: float) -> list[Action]:
        found: list[Action] = []
        result = episode.result
        if "stop" in episode.owed and (
            (stands := result and result.stage != "freezing") or now >= episode.owed["stop"]
        ):
            del episode.owed["stop"]
            code, text = (OK, "the job is frozen") if stands else (NOT_READY, "ttp has frozen no job in time")
            found.append(self.stop_complete(code, text, dict.fromkeys(episode.ranks, OTHER_FAULT)))
        if DUMP in episode.owed and ((result and result.over) or now >= episode.owed[DUMP]):
            saved = result is not None and result.over and result.saved
            text = result.text if result is not None and result.over else "the end of the rescue is not known"
            found.append(self.result(OK if saved else NOT_DUMPED, text, DUMP))
            self._episode = None
        return found
