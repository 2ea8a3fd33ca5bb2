"""Chooses the ranks that add rank-local pages to a checkpoint: on each host one rank collects the pages of all."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from ttp.core.controller.incident import Incident, Stage
from ttp.core.controller.membership import Membership
from ttp.core.controller.mirrors import Mirrors
from ttp.core.layout import Rank, ranks_text

PAGES_S = 1.0
"""Seconds for which ranks that have come back after the commit are waited for, because only they have their pages."""
AGAIN_MIN_S = 5.0
"""Least seconds that a checkpoint which lacks pages may take to be made once more."""
STRAGGLERS_MAX = 64
"""If more ranks than this have not answered, a commit does not wait for their pages."""


class PageCollectors:
    """Finds a rank that can still read the page of each rank.

    Args:
        job: the ranks.
        mirrors: tells which ranks keep the pages of lost hosts.
    """

    def __init__(self, job: Membership, mirrors: Mirrors) -> None:
        self._job, self._mirrors = job, mirrors

    def collectors(self, incident: Incident, savers: Iterable[Rank]) -> dict[Rank, tuple[Rank, ...]]:
        """Choose collectors for the pages that no rank was ordered to collect yet.

        On each host the collector is a rank that gets an order to write now, else one that is not writing. After a
        takeover dead ranks and their hosts are unknown, so every collector is also asked for their pages.

        Args:
            incident: the incident that makes the checkpoint.
            savers: ranks that get something to write now.

        Returns:
            For each collector the ranks whose pages it adds.
        """
        collected, pending = incident.draft.collected, incident.draft.pending
        by_host: defaultdict[str, list[Rank]] = defaultdict(list)
        for rank, member in sorted(self._job.members.items()):
            by_host[member.hello.host].append(rank)
        unknown = self._unknown()
        copies: dict[Rank, Rank] | None = None
        pages: dict[Rank, tuple[Rank, ...]] = {}
        writing = {*savers, *pending}
        for ranks in by_host.values():
            missing = tuple(r for r in ranks if r not in collected) if collected else tuple(ranks)
            if not missing:
                continue
            able = filter(incident.ranks.able, ranks)
            if writing.isdisjoint(ranks):
                collector = next(able, None)
            else:
                collector = min(able, key=lambda r: (r not in savers, r in pending, r), default=None)
            if collector is not None:
                pages[collector] = (*pages.get(collector, ()), *missing, *unknown)
            else:
                copies = self._copied_pages(incident) if copies is None else copies
                for rank in missing:  # of a lost host: ranks elsewhere have copies
                    buddy = self._mirrors.keeper(rank)
                    holder = buddy if buddy is not None and incident.ranks.able(buddy) else copies.get(rank)
                    if holder is not None:
                        pages[holder] = (*pages.get(holder, ()), rank)
        return pages

    def may_come(self, incident: Incident) -> bool:
        """Return whether a host of which no rank can collect pages now may still bring them.

        Its ranks have not answered yet; or it is unknown whether they live, and if they do not, their launcher hands
        their pages over. If more than ``STRAGGLERS_MAX`` ranks are awaited, they are not waited for: False.
        """
        members, known = self._job.members, incident.ranks
        awaited = known.waiting | (self._job.suspects.keys() - incident.draft.collected)
        if not 0 < len(awaited) <= STRAGGLERS_MAX:
            return False
        able = {members[rank].hello.host for rank in known.answers if known.able(rank)}
        return not {members[rank].hello.host for rank in awaited} <= able

    def repeats(self, incident: Incident, now: float) -> bool:
        """Begin the save of the committed version anew if ranks whose pages it lacks have come back.

        Their host was cut off, and the checkpoint was made without it. Also True for a moment while such a rank is
        being asked. All ranks wait for the save, so it may take no longer than all before it.
        """
        draft, known, collected = incident.draft, incident.ranks, incident.draft.collected
        wanted = self._job.live - collected if collected and not draft.hold else set()
        if not wanted or draft.committer is None or not incident.size:  # 0: the program has saved, without pages
            return False  # nothing is missing, it was made from one in memory, or that was tried before
        asked = max((known.asked_at[rank] for rank in wanted & known.waiting), default=None)
        if asked is not None and incident.waits(f"pages of ranks asked at {asked}", PAGES_S, now):
            return True
        if not any(known.able(rank) and known.answers[rank].version == incident.saved for rank in wanted):
            return False
        draft.plan = draft.committer = None
        incident.again_until = now + max(AGAIN_MIN_S, now - incident.patient_since)
        draft.set_aside()
        incident.enter(Stage.FREEZING, f"the checkpoint lacks the pages of ranks that came back: {ranks_text(wanted)}")
        return True

    def _unknown(self) -> tuple[Rank, ...]:
        if self._job.complete or self._job.layout is None:
            return ()
        return tuple(Rank(r) for r in range(self._job.layout.world_size) if r not in self._job.members)

    def _copied_pages(self, incident: Incident) -> dict[Rank, Rank]:
        """Return, for each rank whose page is in a kept copy of the planned version, a rank that has this copy."""
        assert incident.draft.plan is not None
        version = incident.draft.plan.version
        return {
            copy.of: rank
            for rank, answer in incident.ranks.answers.items()
            for copy in answer.kept
            if copy.version == version and incident.ranks.able(rank)
        }
