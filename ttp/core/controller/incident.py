"""The state of one incident: everything from the first sign of a fault to the release."""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from ttp.core import messages as m
from ttp.core import stripes
from ttp.core.controller.copy_counts import CopyCounts
from ttp.core.controller.evidence import EvidenceBook
from ttp.core.decide import Assignment, How, Plan, lost_story
from ttp.core.layout import Layout, Rank, Shard, Version

OVER, NEVER = float("-inf"), float("inf")
FAILURES_SHOWN = 16
"""Number of failed ranks that the text of a release names."""


class Stage(enum.Enum):
    """The stage of an incident; see the theory of operation in ``ttp.core.controller.machine``."""

    FREEZING = "freezing"
    SAVING = "saving"
    PROGRAM = "mending"  # the name that journals use
    COMMITTING = "committing"
    SAVED = "saved"
    RELEASED = "released"


_EDGES = {
    Stage.FREEZING: set(Stage),
    Stage.SAVING: {Stage.FREEZING, Stage.COMMITTING, Stage.RELEASED},
    Stage.PROGRAM: {Stage.SAVED, Stage.RELEASED},
    Stage.COMMITTING: {Stage.FREEZING, Stage.SAVING, Stage.SAVED, Stage.RELEASED},
    Stage.SAVED: {Stage.FREEZING, Stage.COMMITTING, Stage.RELEASED},
    Stage.RELEASED: set(),
}
"""The stages that may follow each stage; see ``Incident.enter``."""


@dataclass(slots=True, eq=False)  # to compare thousands of orders takes too long when one of them is dropped
class Task:
    """The order to one saver; ``pieces`` is ``None`` until all of its pieces are durable."""

    order: m.SaverOrder
    generation: int
    pieces: tuple[m.Piece, ...] | None = None

    def keep_ordered(self) -> None:
        """Drop the pieces of parts that are no longer in the order."""
        if self.pieces is not None:
            parts = {p.shard for p in self.pieces if stripes.parse(Shard(p.shard)).count > 1}
            stale = parts.difference(self.order.shards)
            self.pieces = tuple(p for p in self.pieces if p.shard not in stale)


@dataclass(frozen=True, slots=True)
class Written:
    """What is durable in one directory: the plan, its durable tasks, and how they have cut the shards."""

    directory: str
    plan: Plan | None = None
    tasks: list[Task] = field(default_factory=list)
    cuts: dict[Shard, str] = field(default_factory=dict)


@dataclass(slots=True)
class Incident:
    """State of one incident. Ranks in ``waiting`` are connected and have not given their final answer.

    ``answers`` holds the answers of connected, frozen ranks: a lost rank is asked again when it comes back.
    """

    id: str
    opened_at: float
    snapshot: bool
    layout: Layout
    evidence: EvidenceBook
    recovered: bool = False
    """True if a new controller opened the incident again after a takeover, because a rank reported being frozen."""
    deferred: bool = False
    """True while no freeze is sent: ranks are frozen for another checkpoint, which ends first; see ``meanwhile``."""
    rescue_since: float | None = None
    """Time at which a fault turned a snapshot into a rescue; None: no fault did."""
    redoing: dict[Rank, Version] = field(default_factory=dict)
    """Ranks with an order to redo an update, which they have not reported yet: target versions by rank."""
    keepers: dict[Rank, tuple[Shard, ...]] = field(default_factory=dict)
    """The shards that each rank's kept copies contain; computed when the first kept copy is reported."""
    reign: str = ""
    """Suffix of the draft's name, different for each controller of an incident, so that drafts are never shared."""
    directory: str = ""
    """The directory to save to instead of the job's own; empty: the job's own."""
    awaiting: bool = False
    """True while a rank waits until the writer has copied the checkpoint from memory to the storage; see ``shadow``."""
    hold: str = ""
    """The directory in memory to which this incident saved first; empty: none; see ``shadow``."""
    progress: OrderedDict[Rank, tuple[int, float]] = field(default_factory=OrderedDict)
    """Bytes that each saver or the committer has written, and the time of the last change, the oldest change first."""
    pauses: dict[str, float] = field(default_factory=dict)
    """End of each wait that delays the incident, by the wait's name; ``OVER`` once it has passed."""
    look_again_at: float = 0.0
    """Earliest time to plan again after a plan fell short (answers come by the thousand); 0: no plan fell short."""
    planned_at: float = 0.0
    losses: int = 0
    """Number of times that the plan was made again because savers were lost."""
    next_plan_at: float = 0.0
    """Earliest time for the next plan after savers were lost."""
    stage: Stage = Stage.FREEZING
    why: str = "a fault was reported, or a checkpoint was requested"
    """Reason for the present stage, in words; only ``enter`` changes stage and reason."""
    waits_for: str = ""
    """The last reason for which no plan was made yet."""
    answers: dict[Rank, m.Frozen] = field(default_factory=dict)
    """Answers by rank, final or not. Many ranks often share one object, whose rank is ``SEVERAL``."""
    frozen_at: dict[Rank, float] = field(default_factory=dict)
    waiting: set[Rank] = field(default_factory=set)
    expire_check_at: float = 0.0
    failures: dict[Rank, str] = field(default_factory=dict)
    """Ranks that could not save or commit, and the reason; they get no order again, except by ``forgive``."""
    forgiven: dict[Rank, str] = field(default_factory=dict)
    """Reasons of earlier failures of ranks that may try again."""
    retries: int = 0
    """Number of times that the whole save was tried again because the storage had refused it."""
    passing: set[Rank] = field(default_factory=set)
    """Ranks of ``failures`` whose reason may be temporary."""
    generation: int = -1
    plan: Plan | None = None
    tasks: list[Task] = field(default_factory=list)
    pending: dict[Rank, Task] = field(default_factory=dict)
    """The tasks that are not durable yet; a rank has at most one."""
    cuts: dict[Shard, str] = field(default_factory=dict)
    """For each shard that was written in parts: a digest of how it was cut into the parts that are durable."""
    uncut: set[Shard] = field(default_factory=set)
    """Shards that are written whole, because their replicas cut them differently."""
    dropped: list[Rank] = field(default_factory=list)
    """Savers that were lost or failed since the plan was made."""
    committer: Rank | None = None
    saved: Version = Version(0)  # noqa: RUF009 - a number
    """The newest version that is known to be on disk; 0 if none is."""
    path: str = ""
    size: int = 0
    again_until: float = NEVER
    """End of the time for saving the saved version once more, with more pages; ``NEVER``: that is not done."""
    exit_code: int | None = None
    again: bool = False
    """True if ranks were released to go on in their processes."""
    trial: bool = False
    """True if a request asks all ranks to go on as after a death, as a trial of that."""
    overtaken: bool = False
    """True if a process of the next launch has said hello: the launcher will end all living ranks of this launch."""
    release_text: str = ""
    released_at: float | None = None
    outcome: str = ""
    requests: list[int] = field(default_factory=list)
    _written_in: dict[str, Written] = field(default_factory=dict)
    _aside: dict[Version, Written] = field(default_factory=dict)
    _counts: CopyCounts = field(init=False)

    def __post_init__(self) -> None:
        self._counts = CopyCounts(self.layout)

    @property
    def cause(self) -> str:
        """The text of the evidence that explains the incident best."""
        return self.evidence.cause

    @property
    def collected(self) -> set[Rank]:
        """The ranks whose pages some rank was ordered to add."""
        return {rank for task in self.tasks for rank in task.order.pages}

    @property
    def faulty(self) -> bool:
        """True if evidence of a fault stands, i.e. was not withdrawn."""
        return bool(self.evidence.kinds)

    @property
    def holds(self) -> bool:
        """True while the incident saves to memory instead of the storage."""
        return bool(self.hold) and self.directory == self.hold

    @property
    def draft(self) -> str:
        """Directory name under which the planned checkpoint is written."""
        assert self.plan is not None
        return f".draft-step_{self.plan.version}-{self.id}{self.reign}"

    def enter(self, stage: Stage, why: str) -> None:
        """Go to another stage. Only this method changes the stage. A thaw closes the incident in any stage.

        ::

            FREEZING ---> SAVING ---> COMMITTING ---> SAVED ---> RELEASED
              | | ^         | ^            | |         ^ |          ^
              | | |         | +------------+ |         | |          |   the committer failed: another rank commits
              | | +---------+----------------+---------|-+          |   a saver failed, or a newer version came
              | |                  +-------------------+            |   the checkpoint is held, and has to be durable
              | +-------------------------------------->            |   the version is on disk (if held: COMMITTING)
              +-----> PROGRAM --------------------------            |   the program itself saves
            any stage ----------------------------------------------+   ranks are told to exit: saved, or impossible

        Args:
            stage: the next stage.
            why: the reason, in words.

        Raises:
            AssertionError: the stage cannot follow the present one.
        """
        assert stage in _EDGES[self.stage], f"from {self.stage.value} ({self.why}) to {stage.value} ({why})"
        self.stage, self.why = stage, why

    @property
    def patient_since(self) -> float:
        """Time from which ``TTP_OT`` counts: a snapshot that becomes a rescue gets the full time from the fault on."""
        return self.opened_at if self.rescue_since is None else self.rescue_since

    def after_ms(self, now: float) -> float:
        """Return the milliseconds since the incident was opened, for records."""
        return round((now - self.opened_at) * 1e3, 3)

    def ends_at(self, rescue_s: float) -> float:
        """Return when to end without a newer checkpoint; ``rescue_s``: see ``ControllerTimeouts``."""
        return min(self.again_until, self.patient_since + rescue_s)

    def may_repeat(self, version: Version) -> bool:
        """Return whether the saved version, which is ``version``, is to be saved once more, and that has not begun."""
        return self.again_until < NEVER and version == self.saved and self.plan is None

    def waits(self, what: str, seconds: float, now: float) -> bool:
        """Return whether the wait named ``what`` still lasts. It begins with the first call and lasts ``seconds``."""
        return now < self.pauses.setdefault(what, now + seconds)

    def end_pauses(self, now: float) -> None:
        """Mark the waits that are over, so that they no longer make a deadline."""
        if now >= self.look_again_at:
            self.look_again_at = 0.0
        for what, until in self.pauses.items():
            if until <= now:
                self.pauses[what] = OVER

    def expect(self, order: m.SaverOrder) -> None:
        """Add the order to a saver, in place of its unfinished one."""
        if (merged := self.pending.pop(order.rank, None)) is not None:
            self.tasks.remove(merged)
        task = self.pending[order.rank] = Task(order, self.generation)
        self.tasks.append(task)

    def wrote(self, rank: Rank, size: int, now: float) -> None:
        """Note that ``rank`` has written ``size`` bytes of its save or commit at ``now`` (-1: its order was sent)."""
        self.progress[rank] = (size, now)
        self.progress.move_to_end(rank)

    # -------------------------------------------------------------------------------------------------------- answers

    def accept(self, ranks: Collection[Rank], answer: m.Frozen) -> None:
        """Take an answer of these ranks; a later answer of the same rank replaces the earlier one."""
        torn = answer.phase is m.Phase.TORN
        for rank in ranks:
            target = self.redoing.get(rank)
            self.forget(rank)
            self.answers[rank] = answer
            if target is not None and answer.version < target and not torn:
                self.redoing[rank] = target  # the answer was sent before the order arrived, or during the redo
        if not answer.final:
            return
        self.waiting.difference_update(ranks)
        if not torn:
            self._counts.count([rank for rank in ranks if rank not in self.failures], answer.version)

    def forget(self, rank: Rank) -> None:
        """Drop the answer of a rank that is lost or is asked again."""
        self.answers.pop(rank, None)
        self.redoing.pop(rank, None)
        self._counts.discount(rank)

    def fail(self, rank: Rank, text: str, may_pass: bool = False) -> None:
        """Note that a rank could not save or commit, so that another rank does. ``may_pass``: a retry may succeed."""
        self.failures[rank] = text
        if may_pass:
            self.passing.add(rank)
        self._counts.discount(rank)

    def forgive(self, directory: str, failed: Iterable[Rank]) -> None:
        """Let these ranks try again, in ``directory``: of the pieces written so far only those there count."""
        failed = set(failed)
        self.forgiven.update((rank, self.failures.pop(rank)) for rank in sorted(failed))
        self.passing -= failed
        self._written_in[self.directory] = self._written()
        self._go_back_to(self._written_in.get(directory, Written(directory)))
        self.progress = OrderedDict()
        for rank in failed:
            answer = self.answers.get(rank)
            if answer is not None and answer.final and answer.phase is not m.Phase.TORN:
                self._counts.count((rank,), answer.version)

    def set_aside(self) -> None:
        """Begin without pieces, for a plan of another version; those that are durable are kept, see ``takes_back``."""
        written = self._written()
        if self.plan is not None and written.tasks:
            self._aside[self.plan.version] = written
        self.tasks, self.pending, self.cuts = [], {}, {}

    def _written(self) -> Written:
        durable = [task for task in self.tasks if task.pieces is not None]
        return Written(self.directory, self.plan, durable, self.cuts)

    def _go_back_to(self, before: Written) -> None:
        self.directory, self.plan, self.tasks, self.cuts = before.directory, before.plan, before.tasks, before.cuts
        self.pending, self.dropped, self.committer = {}, [], None

    def takes_back(self) -> bool:
        """Plan with pieces that were set aside, as this version is lost. Return whether there are any to save."""
        while self._aside:
            version = max(self._aside)
            before = self._aside.pop(version)
            if version <= self.saved or (before.directory != self.directory and self.hold):  # memory may be emptied
                continue
            self._go_back_to(before)
            self.enter(Stage.FREEZING, f"no other version can be saved, and pieces of version {version} are durable")
            return True
        return False

    def failures_shown(self) -> list[str]:
        """Return in words which ranks could not save or commit; only the first few, as every rank gets this text."""
        reasons = {**self.forgiven, **self.failures}
        more = [f"and {len(reasons) - FAILURES_SHOWN} more ranks"] if len(reasons) > FAILURES_SHOWN else []
        return [f"rank {rank}: {text}" for rank, text in sorted(reasons.items())[:FAILURES_SHOWN]] + more

    def use(self, layout: Layout) -> None:
        """Replace the layout by a more accurate one."""
        self.layout = layout
        self._counts.use(layout)

    def answered(self, rank: Rank) -> bool:
        """Return whether the rank has given its final answer."""
        answer = self.answers.get(rank)
        return answer is not None and answer.final

    def is_stale(self, rank: Rank, answer: m.Frozen) -> bool:
        """Return whether ``answer`` is older than the rank's known answer: a version falls only by a pre-image."""
        known = self.answers[rank]
        return answer.version < known.version and answer.phase is not m.Phase.TORN and not known.has_preimage

    def able(self, rank: Rank) -> bool:
        """Return whether the rank is frozen and connected, and has not failed."""
        return self.answered(rank) and rank not in self.failures

    def can_commit(self, rank: Rank) -> bool:
        """Return whether the rank is connected and has not failed. It may hang: a commit touches only files."""
        return rank in self.answers and rank not in self.failures

    def newest_is_known(self) -> bool:
        """Return whether the newest version is known and complete in every shard, so that no more answers are needed.

        Ranks differ by at most one version (Statement 2): once two versions are known, no answer can have a newer one.
        """
        return self._counts.newest_is_whole(lambda: stripes.covered(self.written()))

    def written(self) -> dict[Shard, Version]:
        """Return the shards and parts whose pieces are durable or are being written, with the planned version."""
        if self.plan is None:
            return {}
        orders = [task.order for task in self.tasks]
        return {shard: self.plan.version for order in orders for shard in (*order.shards, *order.kept)}

    def with_all_orders(self, plan: Plan, lost: int) -> Plan:
        """Return the newest plan with everything that was ordered before, too.

        Args:
            plan: the newest plan; it lacks what was ordered before.
            lost: finished steps that an earlier plan of its version loses, because it saves kept copies.
        """
        listed = [Assignment(s, t.order.rank, t.order.how) for t in self.tasks for s in t.order.shards]
        listed += [Assignment(s, t.order.rank, How.KEPT) for t in self.tasks for s in t.order.kept]
        assignments = tuple(sorted(listed, key=lambda a: a.shard))
        if not lost or any(a.how is How.KEPT for a in plan.assignments):
            return replace(plan, assignments=assignments)
        reason = plan.reason + lost_story(assignments, lost)
        return replace(plan, assignments=assignments, reason=reason, lost=lost)

    def forget_parts(self, wanted: Mapping[Shard, int]) -> None:
        """Forget the pieces of shards that were cut into another number of parts than ``wanted`` says."""
        for task in list(self.tasks):
            parts = {name: stripes.parse(name) for name in task.order.shards}
            stale = {
                name: part.shard for name, part in parts.items() if wanted.get(part.shard, part.count) != part.count
            }
            if not stale:
                continue
            for shard in stale.values():
                self.cuts.pop(shard, None)
            order = replace(task.order, shards=tuple(name for name in parts if name not in stale))
            task.order = order
            task.keep_ordered()
            if task.pieces is None and not (order.shards or order.kept or order.pages or order.job_state):
                self.tasks.remove(task)
                del self.pending[order.rank]
