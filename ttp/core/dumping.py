"""The script by which handlers save: in step, with one list for all who save one state.

The version is that of ``ttp.core.decide``; who saves it is chosen as ``ttp.core.replica_lists`` says. A rank that
stands in front of the update that is missing to it makes it first. Save handlers work together, so a saver that is lost
or fails spoils the whole attempt: everybody is chosen anew and saves anew. Only then one rank gives the checkpoint its
name; if it is lost before it has said so, the next one does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import count

from ttp.core.curing import halt
from ttp.core.decide import Assignment, How, NoPlan
from ttp.core.incident import Incident
from ttp.core.layout import Rank, Shard, Version
from ttp.core.replica_lists import Replicas, choose, renamer
from ttp.core.rounds import Ending, Outcome, Part, Round, Script
from ttp.core.rounds_messages import RoundKind, TypeRanks
from ttp.core.ward import Ward

FAILURES_MAX = 3
"""Attempts that may fail with nobody lost: storage that refuses everybody refuses the next as well."""

Lists = Mapping[Rank, tuple[TypeRanks, ...]]


def dump(ward: Ward, incident: Incident) -> Script:
    """Save the newest version that can be saved, and name it."""
    if ward.must_load:
        words = sorted(f"rank {a.rank}: {a.text}" for a in ward.ailing.values())[:4]
        return _not_saved(f"no copy of the state can be trusted ({'; '.join(words)}); nothing is saved")
    if _halts_first(ward) and not incident.snapshot and not ward.cleaned:
        yield from halt(ward, incident, "dump")  # what hangs may still be saved: a failure is no reason to stop here
    failures = 0
    for attempt in count(1):
        plan = ward.decide(incident)
        if isinstance(plan, NoPlan):
            return _not_saved(plan.reason)
        if plan.version <= ward.on_disk():
            text = f"version {ward.on_disk()} is on disk already" if ward.on_disk() else "no update had finished"
            return Ending(Outcome.SAVED, ward.on_disk(), text)
        behind = [a.rank for a in plan.assignments if a.how is How.REDO]
        if behind:
            yield from _catch_up(ward, incident, plan.version, behind)
            continue
        lists = _chosen(ward, incident, plan.version)
        if lists is None:
            return _not_saved("the ranks that could save are gone")
        incident.plan = replace(plan, assignments=_assignments(lists))
        ward.outbox.record("plan", version=plan.version, reason=plan.reason, attempt=attempt, savers=list(lists))
        save = {rank: ward.act(rank, RoundKind.SAVE, plan.version, "dump") for rank in lists}
        acts = {rank: replace(act, lists=lists[rank]) for rank, act in save.items()}
        result = yield Round(RoundKind.SAVE, acts, together=True)
        if result.ok:
            problem = yield from _rename(ward, plan.version, lists)
            if problem:
                return _not_saved(problem)
            ward.saved = plan.version
            return Ending(Outcome.SAVED, plan.version, f"saved version {plan.version}")
        if not result.lost and result.failed:
            first, text = next(iter(result.failed.items()))
            incident.fail(first, text)  # the others' failures follow from it
            failures += 1
            if failures >= FAILURES_MAX:
                return _not_saved(result.words)
    raise AssertionError("unreachable")


def _halts_first(ward: Ward) -> bool:
    return any(said.halt_before_dump for said in ward.said.values())


def _catch_up(ward: Ward, incident: Incident, version: Version, ranks: list[Rank]) -> Part:
    """Let ranks make the one update that they stand in front of; whoever cannot is counted on no more for it."""
    for rank in ranks:
        incident.redoing[rank] = version
    result = yield ward.everyone(RoundKind.CATCH_UP, version, "dump", ranks=ranks)
    ward.note(incident, result)
    for rank, text in result.failed.items():
        incident.fail(rank, text)
    return result.words


def _chosen(ward: Ward, incident: Incident, version: Version) -> Lists | None:
    assert isinstance(ward.replicas, Replicas)
    return choose(ward.replicas, ward.standing(incident, version), ward.suspect(incident))


def _rename(ward: Ward, version: Version, lists: Lists) -> Part:
    """One saver after the other, until one has done it; one that refuses has a reason that holds for all."""
    asked: list[Rank] = []
    first = renamer(lists)
    for rank in [first, *(r for r in lists if r != first)]:
        if rank not in ward.job.live:
            continue
        asked.append(rank)
        result = yield ward.everyone(RoundKind.RENAME, version, "dump", ranks=[rank])
        if not result.lost:
            return result.words
    return f"ranks {asked} were lost before they had given the checkpoint its name"


def _assignments(lists: Lists) -> tuple[Assignment, ...]:
    named = {(entry.type, place, rank) for entries in lists.values() for entry in entries
             for place, rank in enumerate(entry.ranks)}  # fmt: skip
    return tuple(Assignment(Shard(f"type{kind}-piece{place}"), rank, How.AS_IS) for kind, place, rank in sorted(named))


def _not_saved(text: str) -> Ending:
    return Ending(Outcome.NOT_SAVED, Version(0), text)
