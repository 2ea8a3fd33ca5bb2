"""Makes all ranks restore the same checkpoint: gathers the checkpoints that each rank found, and decides for all."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ttp.core import messages as m
from ttp.core.controller.membership import Membership
from ttp.core.controller.outbox import Outbox
from ttp.core.layout import Rank, Version, ranks_text
from ttp.core.restore_choice import LOOK_AGAIN_S, agree, beside, is_skipped, is_unread, none_whole
from ttp.core.restore_messages import Candidate, Restored, RestoreDecision, RestoreView

_FINAL = Version(1)
"""Of an error that concerns no version: one with a version is final, as another start does not help."""


class Restoring:
    """The agreement of one incarnation. Until ranks have begun to train they repeat their view to a new controller.

    Args:
        job: the ranks.
        outbox: takes the decisions.
    """

    def __init__(self, job: Membership, outbox: Outbox) -> None:
        self.decision: RestoreDecision | None = None
        self._job = job
        self._outbox = outbox
        self._views: dict[Rank, RestoreView] = {}
        self._restored: dict[Rank, Restored] = {}
        self._committed: tuple[Version, str] | None = None
        self._restarted = False
        self._looks = 0

    def reset(self) -> None:
        """Forget everything, because a new incarnation begins."""
        self._views, self._restored, self.decision = {}, {}, None

    def forget(self, rank: Rank) -> None:
        """Forget the view of a process that left before the job was formed."""
        self._views.pop(rank, None)
        self._restored.pop(rank, None)
        if not self._job.members.keys() - {rank}:
            self.decision = None  # processes that are started now look anew

    def give_up(self, error: str) -> None:
        """Answer every rank with an error that an operator has to mend: another rank can never say what it found."""
        if self.decision is None:
            self.decision = RestoreDecision(m.SEVERAL, self._job.term, _FINAL, "", "", error)
            self._tell(self._views)

    def expect(self, committed: tuple[Version, str] | None, *, same_job: bool) -> None:
        """Expect ranks to find the checkpoint that the last incarnation committed.

        Args:
            committed: its version and path; None if that incarnation committed none.
            same_job: whether the new incarnation is of the same job and save directory; else nothing is expected.
        """
        self._committed = (committed or self._committed) if same_job else None
        self._restarted, self._looks = same_job, 0

    def viewed(self, view: RestoreView) -> None:
        """Take the view of a rank: the checkpoints it found. The view of the last rank triggers the decision."""
        assert self._job.layout is not None
        self._views[view.rank] = view
        if self.decision is not None:
            self._tell((view.rank,))
        elif len(self._views) == self._job.layout.world_size:
            self._decide()

    def restored(self, report: Restored) -> None:
        """Note that a rank has read the checkpoint; when the last rank has, record the end of the restore."""
        assert self._job.layout is not None
        new = report.rank not in self._restored
        self._restored[report.rank] = report
        if new and len(self._restored) == self._job.layout.world_size:
            size = max(said.size for said in self._restored.values())
            self._outbox.record("restored", version=report.version, size=size)

    def _decide(self) -> None:
        """Choose for all ranks: a checkpoint, an error, another look after a pause, or that they read more."""
        views = self._views.values()
        agreed = agree(views)
        chosen, error = (Candidate(Version(0), "", ""), agreed) if isinstance(agreed, str) else (agreed, "")
        damaged, damage = (Version(0), "") if chosen.name else none_whole(views)
        away = ("" if damage else error) or self._not_everywhere(chosen)
        if away and self._looks < (len(LOOK_AGAIN_S) if self._is_restart else 1):
            self._look_again(away)
            return
        anew = not (chosen.name or damage or error)  # also if ranks skip the committed one, as it lacks its manifest
        if self._committed is not None and (anew or ((damage or not error) and vanished(self._committed, views))):
            chosen, error = Candidate(self._committed[0], "", ""), _gone(*self._committed, chosen.version)
        elif damage:
            chosen, error = Candidate(damaged, "", ""), damage
        self.decision = RestoreDecision(
            m.SEVERAL,
            self._job.term,
            chosen.version,
            chosen.name,
            chosen.manifest_digest,
            error,
            unread=bool(chosen.name) and is_unread(chosen, views),
        )
        if not self.decision.unread:
            self._outbox.record("restore", version=chosen.version, name=chosen.name, error=error)
        self._tell(self._views)
        if self.decision.unread:
            self.reset()  # the ranks now read more, send new views, and get another decision

    @property
    def _is_restart(self) -> bool:
        return self._restarted or any(member.hello.launch for member in self._job.members.values())

    def _not_everywhere(self, chosen: Candidate) -> str:
        """Return in words that some ranks do not see a newer checkpoint, which no rank found damaged."""
        views = sorted(self._views.values(), key=lambda view: view.rank)
        expected = {**beside(chosen, views), **dict([self._committed] if self._committed else [])}
        newer = [v for v, path in expected.items() if v > chosen.version and not is_skipped(path, views)]
        if not newer:
            return ""
        version, path = max(newer), expected[max(newer)]
        without = [view.rank for view in views if all(c.version < version for c in view.candidates)]
        seen = f"{ranks_text(without)} cannot see it" if without else "the ranks see different copies of it"
        return f"step {version} was committed as {path}, and {seen}. Is save_dir mounted?"

    def _look_again(self, error: str) -> None:
        """Have all ranks look again after a pause: the storage of a host may be away for a moment.

        On a first start they do it once: a launch that has not ended yet may have committed between two ranks' looks.
        """
        self._looks += 1
        self._outbox.record("waits", reason=error)
        self.decision = RestoreDecision(m.SEVERAL, self._job.term, Version(0), "", "", error, unread=True)
        self._tell(self._views)
        self.reset()

    def _tell(self, ranks: Iterable[Rank]) -> None:
        assert self.decision is not None
        self._outbox.send_alike(ranks, replace(self.decision, term=self._job.term))


def vanished(committed: tuple[Version, str], views: Iterable[RestoreView]) -> bool:
    """Return whether no rank has found the committed checkpoint or a newer one, whole or not.

    A damaged checkpoint has not vanished: the ranks report what is wrong with it, and restore an older one.

    Args:
        committed: version and path of the checkpoint.
        views: the views of all ranks.
    """
    version, path = committed
    seen = (c.version >= version for view in views for c in view.candidates)
    return not (any(seen) or is_skipped(path, views))


def _gone(version: Version, path: str, found: Version) -> str:
    there = f"the newest that all ranks find is step {found}" if found else "the ranks find no checkpoint at all"
    return (
        f"step {version} was committed as {path}, and {there}: going on would throw finished steps away. "
        "Is save_dir mounted, on every host? If that checkpoint was removed on purpose, start the job once more: "
        "this controller ends with that start, and the next one restores what the ranks find"
    )
