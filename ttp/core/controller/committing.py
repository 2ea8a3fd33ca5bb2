"""Makes a checkpoint exist when all of its pieces are durable: orders one rank to commit, and replaces it if it fails.

A commit is idempotent, so another rank may make it while the first one still tries.
"""

from __future__ import annotations

from ttp.core import messages as m
from ttp.core.controller.incident import Incident, Stage
from ttp.core.controller.membership import Membership
from ttp.core.controller.outbox import Outbox
from ttp.core.decide import NoPlan, Plan
from ttp.core.layout import Rank, Version


class Committing:
    """The stage COMMITTING, and the checkpoints that were committed.

    Args:
        job: the ranks.
        outbox: takes the orders.
    """

    def __init__(self, job: Membership, outbox: Outbox) -> None:
        self.base = Version(0)
        """The version that the ranks have restored in this launch."""
        self.last: tuple[Version, str] | None = None
        """Version and path of the newest checkpoint on the storage; None: this launch has made none."""
        self.held: tuple[Version, str] | None = None
        """Version and path of the held checkpoint; None: none is held, or a later commit went to the storage."""
        self._job, self._outbox = job, outbox

    def start_launch(self, base: Version) -> None:
        """Begin a launch whose ranks hold version ``base``."""
        self.base, self.last, self.held = base, None, None

    def restored(self, version: Version) -> None:
        """Note that ranks have restored ``version``."""
        self.base = max(self.base, version)

    def on_disk(self) -> Version:
        """Return the newest version that is known to be durable."""
        return Version(max(self.base, self.last[0] if self.last else 0))

    def lost(self, newest: Version) -> str:
        """Return, as a clause to append, what an end without a checkpoint costs if ranks have finished ``newest``."""
        on_disk = self.on_disk()
        if newest <= on_disk:
            return ""
        lost = f"versions {on_disk + 1} to {newest} are" if newest > on_disk + 1 else f"version {newest} is"
        return f"; {lost} lost: {then(on_disk)}, or with a newer checkpoint of the program's own"

    def take_over(self, made: tuple[Version, str] | None) -> None:
        """Take over a checkpoint (version, path) that was made while the controller was silent."""
        if made is not None and (self.last is None or made[0] > self.last[0]):
            self.last = made

    def nothing_new(self, incident: Incident, result: Plan | NoPlan) -> None:
        """End the save, because no rank has a newer version, or none that can be saved, than the one on disk."""
        on_disk = self.on_disk()
        plan = result if isinstance(result, Plan) else Plan(on_disk, (), result.reason)
        incident.draft.plan, incident.saved, incident.draft.committer = plan, on_disk, None
        incident.path = self.last[1] if self.last else ""
        nothing = "no update had finished in this launch: there is nothing to lose"  # restore() may have failed
        incident.outcome = f"version {on_disk} is on disk already" if on_disk else nothing
        incident.enter(Stage.SAVED, incident.outcome)
        self._outbox.record("nothing_new", version=plan.version, text=incident.outcome, reason=plan.reason)

    def begin(self, incident: Incident, why: str, now: float) -> None:
        """Order a rank to commit: a writer, else a frozen rank, else one that may hang. None left: ``stranded``."""
        draft, ranks = incident.draft, incident.ranks
        able = [*filter(ranks.can_commit, ranks.answers)]
        if not able:
            return
        writers = {task.order.rank for task in draft.tasks}
        incident.enter(Stage.COMMITTING, why)
        draft.committer = min(able, key=lambda r: (r not in writers, not ranks.answered(r), r))
        draft.wrote(draft.committer, -1, now)
        self._send_commit(incident)

    def stranded(self, incident: Incident) -> bool:
        """Return whether all pieces are durable and no rank can commit them, now or later."""
        draft, ranks = incident.draft, incident.ranks
        if incident.stage is not Stage.SAVING or draft.pending or draft.dropped or ranks.waiting or self._job.in_doubt:
            return False
        return not any(map(ranks.can_commit, ranks.answers))

    def _send_commit(self, incident: Incident) -> None:
        draft, plan, committer = incident.draft, incident.draft.plan, incident.draft.committer
        assert plan is not None and committer is not None and self._job.layout is not None
        collected = draft.collected
        tasks = sorted(draft.tasks, key=lambda t: (t.order.rank, t.generation))
        self._outbox.record("commit", rank=committer, generation=draft.generation)
        self._outbox.send_to(
            committer,
            m.Commit(
                rank=committer,
                term=self._job.term,
                incident=incident.id,
                generation=draft.generation,
                version=plan.version,
                incarnation=self._job.incarnation,
                draft=draft.name,
                cause=incident.cause,
                reason=plan.reason,
                keep=self._job.members[committer].hello.keep,
                pieces=tuple(p for t in tasks for p in t.pieces or ()),
                missing_pages=tuple(Rank(r) for r in range(self._job.layout.world_size) if r not in collected),
                directory=draft.directory,
                disputed=plan.disputed,
            ),
        )

    def check(self, incident: Incident) -> None:
        """Have a committer that was lost or failed replaced; the commit is idempotent."""
        assert incident.draft.committer is not None
        if not incident.ranks.can_commit(incident.draft.committer):
            incident.draft.committer = None
            incident.enter(Stage.SAVING, "the committer was lost or failed: another one commits")

    def committed(self, incident: Incident, report: m.Committed, now: float) -> None:
        """Note that the checkpoint exists."""
        if not _of_this_commit(incident, report):
            return
        plan, holds = incident.draft.plan, incident.draft.holds
        assert plan is not None
        version = plan.version
        incident.enter(Stage.SAVED, "the checkpoint exists")
        incident.path, incident.size = report.path, report.size
        incident.saved = version
        incident.outcome = f"saved version {version}{plan.caveats}{incident.ranks.undone(plan)}"
        if holds:
            incident.outcome = f"version {version} is held in the memory of the host and is being copied to the storage"
            self.held = (version, report.path)
        else:
            self.last, self.held = (version, report.path), None
        self._outbox.record(
            "held" if holds else "committed",
            rank=report.rank,
            version=version,
            path=report.path,
            size=report.size,
            after_ms=incident.after_ms(now),
        )

    def failed(self, incident: Incident, report: m.CommitFailed) -> None:
        """Note that the committer failed, so that another rank commits."""
        if _of_this_commit(incident, report) and incident.draft.committer == report.rank:
            incident.ranks.fail(report.rank, report.text, report.may_pass)
            self._outbox.record("commit_failed", rank=report.rank, text=report.text)


def _of_this_commit(incident: Incident, report: m.Committed | m.CommitFailed) -> bool:
    expected = (incident.id, incident.draft.generation, Stage.COMMITTING)
    return (report.incident, report.generation, incident.stage) == expected


def then(version: Version) -> str:
    """Return what a restart does if ``version`` is on disk; 0: no update has been saved."""
    return f"a restart goes on with step {version + 1}" if version else "a restart begins where this launch did"
