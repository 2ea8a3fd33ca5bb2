"""A slow, second implementation of Statement 1, written from its text alone."""

from __future__ import annotations

from collections.abc import Iterable

from ttp.core.answer import Answer
from ttp.core.layout import Layout


def can_make(answer: Answer) -> set[int]:
    """Return the versions that one readable rank can still produce."""
    if answer.torn and not answer.has_preimage:
        return set()
    if answer.torn:
        return {answer.version}
    made = {int(answer.version)}
    if answer.has_gradient:
        made.add(answer.version + 1)
    if answer.has_preimage and answer.version >= 1:
        made.add(answer.version - 1)
    return made


def best(layout: Layout, answers: Iterable[Answer]) -> int | None:
    """Return the largest n that for every shard a readable rank of its group can produce.

    Instead of a rank of the group, any readable rank may have a kept copy of that shard at n. Copies that are more than
    one version ahead of all answers are of an earlier start of the job.
    """
    answers = list(answers)
    readable = {a.rank: can_make(a) for a in answers}
    made = {s: {n for r in ranks for n in readable.get(r, ())} for s, ranks in layout.groups.items()}
    kept: dict[str, set[int]] = {s: set() for s in layout.groups}
    ahead = max((a.version for a in answers), default=0) + 1
    for shard, version in (copy for a in answers for copy in a.kept):
        kept[shard] |= {version} if version <= ahead else set()
    return max(set.intersection(*(made[s] | kept[s] for s in made)), default=None)
