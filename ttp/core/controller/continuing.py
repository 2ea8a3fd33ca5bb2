"""Decides whether the survivors of a fault may go on in their processes, once the checkpoint exists. Pure functions.

Survivors go on only after deaths, and only if every rank is known to live or to be dead. After any other fault all
ranks exit with 75 and the whole job is started again. Both ways begin with the same checkpoint, so neither loses a
step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ttp.core import messages as m
from ttp.core.controller.incident import Incident, Stage
from ttp.core.controller.job_verdict import Verdict
from ttp.core.controller.membership import Membership
from ttp.core.decide import Plan
from ttp.core.layout import Rank, Version
from ttp.errors import EXIT_SAVED

SEAT_READY = "ready"
"""A launcher reports this word if it can start a dead rank alone."""
SEAT_S = 0.5
"""Seconds to wait for the report of a dead rank's launcher: a neighbour sees a death milliseconds earlier."""

_HARMLESS = frozenset({m.FaultKind.COLLECTIVE, m.FaultKind.SNAPSHOT})
_LETHAL = frozenset({m.FaultKind.EXITED, m.FaultKind.LOST})
"""Evidence of a death. Peers of the dead rank see only that a collective failed, which is in ``_HARMLESS``."""


def waits(job: Membership, incident: Incident, now: float) -> bool:
    """Return whether a launcher may still report that it can start a dead rank alone."""
    unknown = any(not job.members[rank].seat for rank in dead_ranks(job))
    return _wanted(job) and unknown and not incident.overtaken and incident.waits("a seat", SEAT_S, now)


def judge(job: Membership, incident: Incident, end: Verdict, base: Version) -> tuple[bool, dict[str, Any]]:
    """Return whether the survivors go on in their processes, and the facts to record about that decision.

    Args:
        job: the ranks.
        incident: the incident, which is about to be released.
        end: the verdict with which the ranks would exit.
        base: the version that this incarnation started from.
    """
    if not _wanted(job):
        return False, {}
    why_not = _why_not(job, incident, end, base)
    return not why_not, {"again": not why_not, "why_not_again": why_not}


def explained(text: str, cause: str, facts: Mapping[str, Any]) -> str:
    """Return the text that ranks log when they leave.

    Args:
        text: the verdict.
        cause: the first evidence of the incident.
        facts: what ``judge`` has returned to record.
    """
    why = facts.get("why_not_again")
    kept = f". No rank goes on in its process: {why}" if why and why != text else ""
    return f"{text}{kept}" if cause in text else f"{text}. Cause: {cause}{kept}"


def trial(job: Membership, incident: Incident, base: Version) -> tuple[bool, str]:
    """Return whether ranks go on from a requested checkpoint, without any death, and the outcome in words."""
    if not incident.trial:
        return False, incident.outcome
    unable = "" if _wanted(job) else "not every rank is able to; with TTP_CONTINUITY=keep their logs say why"
    why_not = unable or _why_not_the_state(incident, incident.saved, base) or _why_not_the_job(job, incident, set())
    text = f"the ranks do not go on from it: {why_not}" if why_not else "all ranks go on from it"
    return not why_not, f"{incident.outcome}; {text}"


def _why_not(job: Membership, incident: Incident, end: Verdict, base: Version) -> str:
    if end.code != EXIT_SAVED or incident.stage is not Stage.SAVED:
        return end.text
    dead = dead_ranks(job)
    return (
        _why_not_the_evidence(incident, dead)
        or _why_not_the_state(incident, incident.saved, base)
        or _why_not_the_job(job, incident, dead)
    )


def why_not_after(job: Membership, incident: Incident, plan: Plan, base: Version) -> str:
    """Return why the survivors cannot go on after this plan, as far as is known now; empty: they may go on."""
    if not _wanted(job):
        return "not every rank is able to go on"
    return _why_not_the_evidence(incident, dead_ranks(job)) or _why_not_the_state(incident, plan.version, base, plan)


def dead_ranks(job: Membership) -> set[Rank]:
    """Return the ranks that were members and are not live."""
    return {rank for rank in job.members if rank not in job.live}


def _wanted(job: Membership) -> bool:
    """Return whether every connected rank is able to go on. If not, ``judge`` records no reason."""
    return bool(job.live) and all(job.members[rank].hello.can_continue for rank in job.live)


def _why_not_the_evidence(incident: Incident, dead: set[Rank]) -> str:
    for kind, found in incident.evidence.by_kind.items():
        for rank, evidence in found.items():
            if kind not in _HARMLESS and (kind not in _LETHAL or rank not in dead):
                return f"{evidence.text}; ranks go on only after deaths"
    return ""


def _why_not_the_state(incident: Incident, version: Version, base: Version, plan: Plan | None = None) -> str:
    plan = plan or incident.draft.plan
    if version <= base:
        return f"no step was finished since the last start, at step {base}"
    if plan is None or plan.version != version or plan.disputed or not plan.assignments:
        return "replicas differ, or the checkpoint existed before"
    answers = incident.ranks.answers
    if any(answer.bad for answer in answers.values()):
        return "the state holds NaN or Inf"
    unable = ((rank, answer.cannot_continue) for rank, answer in answers.items() if answer.cannot_continue)
    return next((f"rank {rank} cannot go on: {why}" for rank, why in unable), "")


def _why_not_the_job(job: Membership, incident: Incident, dead: set[Rank]) -> str:
    if incident.overtaken:
        return "the whole job was started again already"
    if not (dead or incident.snapshot) or not job.complete or incident.ranks.waiting or job.in_doubt or job.done:
        return "some rank is neither known to train nor known to be dead"
    return why_no_seat(job, dead)


def why_no_seat(job: Membership, dead: set[Rank], *, reported: bool = True) -> str:
    """Return why not all of these ranks can be started alone; empty if they can.

    Args:
        job: the ranks.
        dead: the ranks to start.
        reported: whether the launcher of each of them has to have reported that it can.
    """
    for rank in sorted(dead):
        member = job.members[rank]
        if member.left or not member.fenced:
            return f"rank {rank} is not known to be dead"
        if member.seat != SEAT_READY and (reported or member.seat):
            return f"rank {rank} cannot be started alone: {member.seat or 'its launcher has not reported'}"
    return ""
