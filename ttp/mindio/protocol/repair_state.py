"""The state of the ranks for the scripts of ``ttp.mindio.protocol.handler_recovery``, and the rounds made from it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ttp.core import messages as m
from ttp.core.controller.incident import Incident
from ttp.core.controller.program_recovery import RescueContext
from ttp.core.decide import NoPlan, Plan
from ttp.core.layout import Layout, Rank, Version
from ttp.errors import ConfigError
from ttp.mindio.protocol.messages import ACTION_S, HANDLERS, Act, Ailing, Ailment, Handlers, ReplicaSet, RoundKind
from ttp.mindio.protocol.replica_lists import Replicas, gather
from ttp.mindio.protocol.rounds import Result, Round

LAST_S = 1.0
"""Smallest time limit of a handler in seconds, after the time limit of the script has passed."""
CATCH_UP_S = 30.0
"""Time limit in seconds of an update for which the gate admits a rank."""

REPAIRABLE = (m.FaultKind.AILING, m.FaultKind.COLLECTIVE, m.FaultKind.SILENT, m.FaultKind.HUNG)
"""Kinds of evidence that a repair in the same processes can settle."""
UNTOLD = "no rank has declared its replica sets"
NO_VERSION = Version(0)
"""The version in rounds without a version."""
NO_COPY = (Ailment.RETRY, Ailment.MEMORY_CORRUPT)
"""Ailments after which every copy may be wrong, so nothing is saved and an older checkpoint has to be loaded."""


class RepairState:
    """The state of the ranks of a job with handlers.

    Args:
        context: the controller's knowledge of the job.
    """

    def __init__(self, context: RescueContext) -> None:
        self.now = 0.0
        self.announced: dict[Rank, Handlers] = {}
        self.ailing: dict[Rank, Ailing] = {}
        self.invalid: set[Rank] = set()
        """Ranks whose copy is not of any version."""
        self.low: set[Rank] = set()
        """Ranks whose device lost memory that held no part of the state."""
        self.halted = False
        """Whether training threads may be out of their loops, so that they need RESUME to continue."""
        self.cleaned = False
        self.paused = False
        """Whether training threads may be paused on the manager's request."""
        self.saved: Version | None = None
        """The version that handlers saved or loaded last, in this incident or before; None if they have not."""
        self.until: float | None = None
        """Time limit of the script, in seconds of the controller's clock; None for no limit."""
        self.store = ""
        """``host:port`` of the store for new process groups; empty if each host's launcher writes it."""
        self.tried: set[str] = set()
        """Incidents in which lost ranks could not be replaced."""
        self.job = context.job
        self.outbox = context.outbox
        self.drain = context.drain
        self._context = context
        self._sets: dict[ReplicaSet, ReplicaSet] = {}
        """One object for equal sets, because all ranks of a set send the same list."""
        self._gathered: Replicas | str | None = None
        self._layout: Layout | None = None

    def reset(self) -> None:
        """Forget all ranks, because another incarnation begins or the job has ended."""
        self.announced, self.paused = {}, False
        self.saved, self.until, self.tried = None, None, set()
        self.recovered()
        self._sets, self._gathered, self._layout = {}, None, None

    def ails(self, report: Ailing) -> None:
        """Record that the training thread of a rank has left its loop."""
        self.ailing[report.rank] = report
        if report.ailment in (Ailment.MEMORY, Ailment.JOINED, *NO_COPY):
            self.invalid.add(report.rank)

    def recovered(self) -> None:
        """Record that all ranks are in their loops again."""
        self.ailing, self.invalid, self.low = {}, set(), set()
        self.halted = self.cleaned = False

    # ------------------------------------------------------------------------------------------------------------ facts

    @property
    def leads(self) -> bool:
        """Whether the ranks of this job have handlers."""
        first = next(iter(self.job.members.values()), None)
        return first is not None and first.hello.framework == HANDLERS

    def handlers(self, report: Handlers) -> None:
        """Take a rank's report about its handlers."""
        known = self.announced.get(report.rank)
        sets = tuple(self._sets.setdefault(group, group) for group in report.sets)
        if known is not None and self.job.members[report.rank].seated:
            sets = sets or known.sets  # programs may declare sets later; a new process holds the state of the lost one
        self.announced[report.rank] = replace(report, sets=sets)
        if known is None or known.sets != sets:
            self._gathered = None

    @property
    def replicas(self) -> Replicas | str:
        """The replica sets of the job, or the reason why they are not known."""
        if self.job.layout is None or not self.announced:
            return UNTOLD
        missing = self.job.layout.world_size - len(self.announced)
        if missing and not self.job.training:  # else they are lost, and in the sets of others
            return f"{missing} ranks have not declared their replica sets"
        if self._gathered is None:
            try:
                sets = {rank: report.sets for rank, report in self.announced.items()}
                self._gathered = gather(self.job.layout.world_size, sets)
            except ConfigError as problem:
                self._gathered = str(problem)
            self._layout = self._gathered.layout() if isinstance(self._gathered, Replicas) else None
        return self._gathered

    @property
    def layout(self) -> Layout | None:
        """The replica sets as a layout of shards; None if they are not known, or handlers do not save."""
        return self._layout if self.leads and isinstance(self.replicas, Replicas) else None

    @property
    def must_load(self) -> bool:
        """Whether no copy can be trusted."""
        return any(a.ailment in NO_COPY for a in self.ailing.values())

    @property
    def newcomers(self) -> list[Rank]:
        """Ranks whose processes are new and replace lost ones, in ascending order."""
        return sorted(rank for rank, a in self.ailing.items() if a.ailment is Ailment.JOINED and rank in self.job.live)

    @property
    def purpose(self) -> str:
        """Purpose of the repair, which handlers get as its type."""
        return "recover" if self.newcomers else "retry"

    @property
    def broken_off(self) -> list[Rank]:
        """Ranks that have left their loops because a collective failed by a death, in ascending order."""
        return sorted(rank for rank, a in self.ailing.items() if a.ailment is Ailment.PEER)

    def recovers(self, rank: Rank) -> bool:
        """Return whether a rank can continue with new processes in place of lost ranks."""
        return rank in self.announced and self.announced[rank].recover

    @property
    def live(self) -> list[Rank]:
        """Ranks that can be reached, in ascending order."""
        return sorted(self.job.live)

    def standing(self, incident: Incident, version: Version) -> set[Rank]:
        """Return the ranks that hold a whole copy of exactly this version."""
        return {
            rank
            for rank, a in incident.ranks.answers.items()
            if a.final and a.version == version and a.phase is not m.Phase.TORN
            and rank not in self.invalid and rank not in incident.ranks.failures and rank not in incident.ranks.redoing
        }  # fmt: skip

    def suspect(self, incident: Incident) -> set[Rank]:
        """Return the ranks that save only if no other rank can."""
        return {*self.job.broken, *self.ailing, *incident.evidence.subjects}

    def repairable(self, incident: Incident) -> bool:
        """Return whether all processes live and can enter their loops again."""
        kinds, newcomers = incident.evidence.kinds, self.newcomers
        everybody = self.job.complete and len(self.job.live) == len(self.job.members)
        return (
            m.FaultKind.AILING in kinds
            and kinds.issubset(REPAIRABLE)
            and everybody
            and not (self.job.broken or self.job.done)
            and (bool(newcomers) or not self.broken_off)
            and all(rank in self.announced for rank in self.job.members)
            and all(self.recovers(rank) if newcomers else self.announced[rank].retry for rank in self.job.members)
        )

    def decide(self, incident: Incident) -> Plan | NoPlan:
        """Return a plan for the newest version of which every piece has a copy, or why there is none."""
        if isinstance(self.replicas, str):
            return NoPlan(self.replicas)
        return self._context.decide(incident)

    def patience_s(self, incident: Incident) -> float:
        """Return the seconds to wait for one event: half of the time that is left for the rescue."""
        return max(0.0, incident.patient_since + self._context.rescue_s - self.now) / 2

    def on_disk(self) -> Version:
        """Return the newest version on disk of the state that is trained: a checkpoint may have been loaded again."""
        return self._context.on_disk() if self.saved is None else self.saved

    # ----------------------------------------------------------------------------------------------------------- rounds

    def limit_s(self, *, saving: bool = False) -> float:
        """Return the time limit of a handler in seconds: the longest that any rank has reported."""
        limits = [(h.save_ms if saving else h.action_ms) / 1000 for h in self.announced.values()]
        limit_s = max(limits, default=ACTION_S)
        return limit_s if self.until is None else max(LAST_S, min(limit_s, self.until - self.now))

    def act(self, rank: Rank, kind: RoundKind, version: Version = NO_VERSION, purpose: str = "") -> Act:
        """Return an act with the fields that all kinds of acts have."""
        limit_s = CATCH_UP_S if kind is RoundKind.CATCH_UP else self.limit_s(saving=kind is RoundKind.SAVE)
        if kind is RoundKind.MAKE_WAY and self.until is not None:
            limit_s = max(LAST_S, self.until - self.now)  # the time in which the marks of ranks hold
        return Act(rank, 0, 0, kind, version, int(limit_s * 1000), purpose)

    def everyone(
        self,
        kind: RoundKind,
        version: Version = NO_VERSION,
        purpose: str = "",
        *,
        together: bool = False,
        ranks: Iterable[Rank] | None = None,
    ) -> Round:
        """Return a round in which all live ranks, or the given ones, carry out the same act."""
        whom = self.live if ranks is None else ranks
        return Round(kind, {rank: self.act(rank, kind, version, purpose) for rank in whom}, together)

    def note(self, incident: Incident, result: Result, version: Version | None = None) -> None:
        """Record the state of ranks after an act: as they report it, or at ``version`` if the act led there."""
        for rank, acted in result.done.items():
            if rank not in self.job.live:
                continue
            at = acted.version if version is None else version
            phase = m.Phase.TORN if acted.torn and version is None else m.Phase.IDLE
            known = incident.ranks.answers.get(rank)
            plain = known or m.Frozen(rank, incident.id, at, phase, True)
            incident.ranks.accept(
                (rank,),
                replace(plain, version=at, phase=phase, final=True, has_gradient=False, main_thread_blocked=False),
            )
