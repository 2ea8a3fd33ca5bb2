"""The checkpoint that an incident writes: what savers were ordered to write, where, and what of it is durable."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from ttp.core import messages as m
from ttp.core import stripes
from ttp.core.decide import Assignment, How, Plan, lost_text
from ttp.core.layout import Rank, Shard, Version

Odd = frozenset[tuple[Rank, Shard]]
"""Ranks that have written a shard from a copy that the comparison of replicas rejects."""


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


@dataclass(slots=True)
class Durable:
    """What is durable in one directory: the plan, its durable tasks, and how they have cut the shards."""

    directory: str
    plan: Plan | None = None
    tasks: list[Task] = field(default_factory=list)
    cuts: dict[Shard, str] = field(default_factory=dict)


@dataclass(slots=True)
class Draft:
    """The plan of an incident, its tasks, and the rank that commits.

    Args:
        owner: the incident and the controller that leads it. Each controller of an incident has a draft of its own.
    """

    owner: str
    directory: str = ""
    """The directory to save to instead of the job's own; empty: the job's own."""
    hold: str = ""
    """The directory in memory to which this incident saved first; empty: none; see ``shadow``."""
    awaiting: bool = False
    """True while a rank waits until the writer has copied the checkpoint from memory to the storage; see ``shadow``."""
    plan: Plan | None = None
    planned_at: float = 0.0
    generation: int = -1
    tasks: list[Task] = field(default_factory=list)
    pending: dict[Rank, Task] = field(default_factory=dict)
    """The tasks that are not durable yet; a rank has at most one."""
    dropped: list[Rank] = field(default_factory=list)
    """Savers that were lost or failed since the plan was made."""
    losses: int = 0
    """Number of times that the plan was made again because savers were lost."""
    cuts: dict[Shard, str] = field(default_factory=dict)
    """For each shard that was written in parts: a digest of how it was cut into the parts that are durable."""
    uncut: set[Shard] = field(default_factory=set)
    """Shards that are written whole, because their replicas cut them differently."""
    progress: OrderedDict[Rank, tuple[int, float]] = field(default_factory=OrderedDict)
    """Bytes that each saver or the committer has written, and the time of the last change, the oldest change first."""
    committer: Rank | None = None
    _other_places: dict[str, Durable] = field(default_factory=dict)
    """What is durable in the directories that were used before."""
    _other_versions: dict[Version, Durable] = field(default_factory=dict)
    """What is durable of the versions that were planned before; see ``take_back``."""

    @property
    def name(self) -> str:
        """Directory name under which the planned checkpoint is written."""
        assert self.plan is not None
        return f".draft-step_{self.plan.version}-{self.owner}"

    @property
    def holds(self) -> bool:
        """True while the incident saves to memory instead of the storage."""
        return bool(self.hold) and self.directory == self.hold

    @property
    def collected(self) -> set[Rank]:
        """The ranks whose pages some rank was ordered to add."""
        return {rank for task in self.tasks for rank in task.order.pages}

    # ---------------------------------------------------------------------------------------------------------- tasks

    def follow(self, plan: Plan, generation: int, now: float) -> int:
        """Begin to carry out a plan, with the pieces that it can use.

        Returns:
            The number of finished steps that the plan before loses, if it is of the same version.
        """
        same = self.plan is not None and self.plan.version == plan.version
        lost = self.plan.lost if self.plan is not None and same else 0
        if not same:
            self.set_aside()
        self.forget_parts({part.shard: part.count for part in (stripes.parse(a.shard) for a in plan.assignments)})
        self.plan, self.dropped, self.generation, self.planned_at = plan, [], generation, now
        self.awaiting &= not plan.assignments and bool(self.tasks)
        return lost

    def expect(self, order: m.SaverOrder) -> None:
        """Add the order to a saver, in place of its unfinished one."""
        if (merged := self.pending.pop(order.rank, None)) is not None:
            self.tasks.remove(merged)
        task = self.pending[order.rank] = Task(order, self.generation)
        self.tasks.append(task)

    def drop(self, rank: Rank) -> None:
        """Drop the unfinished task of ``rank``: its pieces will not come, or cannot be trusted."""
        task = self.pending.pop(rank, None)
        if task is not None:
            self.tasks.remove(task)
            self.dropped.append(rank)

    def written_by(self, odd: Mapping[Shard, Collection[Rank]]) -> Odd:
        """Return those of the ranks of each shard in ``odd`` that have written it, or a part of it, from live state."""
        written = ((task.order.rank, stripes.base_of(name)) for task in self.tasks for name in task.order.shards)
        return frozenset((rank, shard) for rank, shard in written if rank in odd.get(shard, ()))

    def distrust(self, odd: Odd) -> None:
        """Forget all that ranks with an odd copy have written, and all parts of such shards, which may not fit."""
        ranks = {rank for rank, _ in odd}
        self.tasks = [task for task in self.tasks if task.order.rank not in ranks]
        self.forget_parts({shard: 1 for _, shard in odd})

    def wrote(self, rank: Rank, size: int, now: float) -> None:
        """Note that ``rank`` has written ``size`` bytes of its save or commit at ``now`` (-1: its order was sent)."""
        self.progress[rank] = (size, now)
        self.progress.move_to_end(rank)

    def written(self, without: Collection[Rank] = ()) -> dict[Shard, Version]:
        """Return the shards and parts whose pieces are durable or are being written, with the planned version.

        Args:
            without: ranks whose pieces do not count.
        """
        if self.plan is None:
            return {}
        orders = [task.order for task in self.tasks if task.order.rank not in without]
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
        text = "" if any(a.how is How.KEPT for a in plan.assignments) else lost_text(assignments, lost)
        if not (lost and text):
            return replace(plan, assignments=assignments)
        return replace(plan, assignments=assignments, reason=plan.reason + text, lost=lost)

    def forget_parts(self, wanted: Mapping[Shard, int]) -> None:
        """Forget the pieces of shards that were cut into another number of parts than ``wanted`` says."""
        for task in list(self.tasks):
            parts = {name: stripes.parse(name) for name in task.order.shards}
            stale = {name: p.shard for name, p in parts.items() if wanted.get(p.shard, p.count) != p.count}
            if not stale:
                continue
            for shard in stale.values():
                self.cuts.pop(shard, None)
            order = task.order = replace(task.order, shards=tuple(name for name in parts if name not in stale))
            task.keep_ordered()
            if task.pieces is None and not (order.shards or order.kept or order.pages or order.job_state):
                self.tasks.remove(task)
                del self.pending[order.rank]

    # ----------------------------------------------------------------------------------- other versions, other places

    def set_aside(self) -> None:
        """Begin without pieces, for a plan of another version; those that are durable are kept, see ``take_back``."""
        durable = self._durable()
        if self.plan is not None and durable.tasks:
            self._other_versions[self.plan.version] = durable
        self.tasks, self.pending, self.cuts = [], {}, {}

    def take_back(self, saved: Version) -> Version | None:
        """Go back to the newest pieces that were set aside for a version after ``saved``.

        Pieces in the memory of the host (``hold``) may be removed there, so if it was used, only those count that lie
        in the present directory.

        Returns:
            Their version; None: there are no such pieces.
        """
        while self._other_versions:
            version = max(self._other_versions)
            before = self._other_versions.pop(version)
            if version > saved and (before.directory == self.directory or not self.hold):
                self._go_back_to(before)
                return version
        return None

    def move(self, directory: str) -> None:
        """Write to ``directory`` from now on: of the pieces written so far only those there count."""
        self._other_places[self.directory] = self._durable()
        self._go_back_to(self._other_places.get(directory, Durable(directory)))
        self.progress = OrderedDict()

    def _durable(self) -> Durable:
        tasks = [task for task in self.tasks if task.pieces is not None]
        return Durable(self.directory, self.plan, tasks, self.cuts)

    def _go_back_to(self, before: Durable) -> None:
        self.directory, self.plan, self.tasks, self.cuts = before.directory, before.plan, before.tasks, before.cuts
        self.pending, self.dropped, self.committer = {}, [], None
