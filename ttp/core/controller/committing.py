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

    def nothing_new(self, incident: Incident, verdict: Plan | NoPlan) -> None:
        """End the save, because no rank has a newer version, or none that can be saved, than the one on disk."""
        on_disk = self.on_disk()
        plan = verdict if isinstance(verdict, Plan) else Plan(on_disk, (), verdict.reason)
        incident.plan, incident.saved, incident.committer = plan, on_disk, None
        incident.path = self.last[1] if self.last else ""
        nothing = "no update had finished in this launch: there is nothing to lose"  # restore() may have failed
        incident.outcome = f"version {on_disk} is on disk already" if on_disk else nothing
        incident.enter(Stage.SAVED, incident.outcome)
        self._outbox.record("nothing_new", version=plan.version, text=incident.outcome, reason=plan.reason)

    def begin(self, incident: Incident, why: str, now: float) -> None:
        """Order a rank to commit: a writer, else a frozen rank, else one that may hang. None left: ``stranded``."""
        able = [r for r in incident.answers if incident.can_commit(r)]
        if not able:
            return
        writers = {task.order.rank for task in incident.tasks}
        incident.enter(Stage.COMMITTING, why)
        incident.committer = min(able, key=lambda r: (r not in writers, not incident.answered(r), r))
        incident.wrote(incident.committer, -1, now)
        self._send_commit(incident)

    def stranded(self, incident: Incident) -> bool:
        """Return whether all pieces are durable and no rank can commit them, now or later."""
        return (
            incident.stage is Stage.SAVING
            and not (incident.pending or incident.dropped or incident.waiting or self._job.in_doubt)
            and not any(incident.can_commit(r) for r in incident.answers)
        )

    def _send_commit(self, incident: Incident) -> None:
        assert incident.plan is not None and incident.committer is not None and self._job.layout is not None
        collected = incident.collected
        tasks = sorted(incident.tasks, key=lambda t: (t.order.rank, t.generation))
        self._outbox.record("commit", rank=incident.committer, generation=incident.generation)
        self._outbox.send_to(
            incident.committer,
            m.Commit(
                rank=incident.committer,
                term=self._job.term,
                incident=incident.id,
                generation=incident.generation,
                version=incident.plan.version,
                incarnation=self._job.incarnation,
                draft=incident.draft,
                cause=incident.cause,
                reason=incident.plan.reason,
                keep=self._job.members[incident.committer].hello.keep,
                pieces=tuple(p for t in tasks for p in t.pieces or ()),
                missing_pages=tuple(Rank(r) for r in range(self._job.layout.world_size) if r not in collected),
                directory=incident.directory,
                disputed=incident.plan.disputed,
            ),
        )

    def check(self, incident: Incident) -> None:
        """Have a committer that was lost or failed replaced; the commit is idempotent."""
        assert incident.committer is not None
        if not incident.can_commit(incident.committer):
            incident.committer = None
            incident.enter(Stage.SAVING, "the committer was lost or failed: another one commits")

    def committed(self, incident: Incident, report: m.Committed, now: float) -> None:
        """Note that the checkpoint exists."""
        if not _of_this_commit(incident, report):
            return
        assert incident.plan is not None
        version = incident.plan.version
        incident.enter(Stage.SAVED, "the checkpoint exists")
        incident.path, incident.size = report.path, report.size
        incident.saved = version
        lost = incident.plan.lost
        incident.outcome = f"saved version {version}" + (
            f" from kept copies; {lost} finished steps are lost" if lost else ""
        )
        if incident.holds:
            incident.outcome = f"version {version} is held in the memory of the host and is being copied to the storage"
            self.held = (version, report.path)
        else:
            self.last, self.held = (version, report.path), None
        self._outbox.record(
            "held" if incident.holds else "committed",
            rank=report.rank,
            version=version,
            path=report.path,
            size=report.size,
            after_ms=incident.after_ms(now),
        )

    def failed(self, incident: Incident, report: m.CommitFailed) -> None:
        """Note that the committer failed, so that another rank commits."""
        if _of_this_commit(incident, report) and incident.committer == report.rank:
            incident.fail(report.rank, report.text, report.may_pass)
            self._outbox.record("commit_failed", rank=report.rank, text=report.text)


def _of_this_commit(incident: Incident, report: m.Committed | m.CommitFailed) -> bool:
    expected = (incident.id, incident.generation, Stage.COMMITTING)
    return (report.incident, report.generation, incident.stage) == expected


def then(version: Version) -> str:
    """Return what a restart does if ``version`` is on disk; 0: no update has been saved."""
    return f"a restart goes on with step {version + 1}" if version else "a restart begins where this launch did"
