"""The script by which handlers save: together, with the same list for all ranks that save one replica set.

``ttp.core.decide`` chooses the version, ``replica_lists`` the savers. A rank that waits at the gate for the update it
lacks makes that update first. Save handlers work together, so if a saver is lost or fails, the whole attempt fails, and
all savers are chosen again and save again. After a success one rank renames the checkpoint; if that rank is lost before
it has answered, the next one does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ttp.core.controller.incident import Incident
from ttp.core.controller.program_recovery import Ending, Outcome, not_saved
from ttp.core.decide import Assignment, How, NoPlan, Plan
from ttp.core.layout import Rank, Shard, Version
from ttp.mindio.protocol.in_process_repair import halt
from ttp.mindio.protocol.messages import RoundKind, TypeRanks
from ttp.mindio.protocol.repair_state import RepairState
from ttp.mindio.protocol.replica_lists import Replicas, choose, renamer
from ttp.mindio.protocol.rounds import Part, Round, Script

FAILURES_MAX = 3
"""Largest number of failed attempts without a lost rank, because a storage error would repeat for ever."""

PLACE = "where the save handlers wrote it"
"""Shown as the path of the checkpoint, which only the handlers know."""

Lists = Mapping[Rank, tuple[TypeRanks, ...]]


def dump(state: RepairState, incident: Incident, *, halts: bool = True) -> Script:
    """Save the newest version that can be saved, and rename its checkpoint.

    Args:
        state: the state of the ranks.
        incident: the open incident.
        halts: whether training threads leave their loops first, in programs that want this.
    """
    if state.must_load and not incident.saved:
        words = sorted(f"rank {a.rank}: {a.text}" for a in state.ailing.values())[:4]
        return not_saved(f"no copy of the state can be trusted ({'; '.join(words)}); nothing is saved")
    if halts and not incident.snapshot and any(each.halt_before_dump for each in state.announced.values()):
        yield from halt(state, incident, "dump")  # after a failure of this the state may still be saved
    failures = 0
    while failures < FAILURES_MAX:
        plan = state.decide(incident)
        if isinstance(plan, NoPlan) or (state.must_load and incident.saved):
            return _saved_before(incident, plan.reason)
        if plan.version <= state.on_disk():
            incident.saved, incident.path = state.on_disk(), PLACE  # also if the time limit ends the incident later
            text = f"version {state.on_disk()} is on disk already" if state.on_disk() else "no update had finished"
            return Ending(Outcome.SAVED, state.on_disk(), text, PLACE)
        behind = [a.rank for a in plan.assignments if a.how is How.REDO]
        if behind:
            yield from _catch_up(state, incident, plan.version, behind)
            continue
        lists = _chosen(state, incident, plan)
        if lists is None:
            return not_saved("ranks contradict the replica sets that they declared before")
        result = yield _save(state, plan.version, lists)
        if result.ok:
            return (yield from _name(state, incident, plan.version, lists))
        if not result.lost:
            first, text = next(iter(result.failed.items()))
            incident.ranks.fail(first, text)  # the failures of the others follow from it
            failures += 1
    return not_saved("; ".join(f"rank {rank}: {text}" for rank, text in incident.ranks.failures.items()))


def _saved_before(incident: Incident, reason: str) -> Ending:
    """End with the version that this incident has saved before, if any, because no other can be saved."""
    if not incident.saved:
        return not_saved(reason)
    return Ending(Outcome.SAVED, incident.saved, f"saved version {incident.saved}", PLACE)


def _catch_up(state: RepairState, incident: Incident, version: Version, ranks: list[Rank]) -> Part:
    """Let ranks make the update for which they wait at the gate. A rank that cannot counts as failed."""
    for rank in ranks:
        incident.ranks.redoing[rank] = version
    result = yield state.everyone(RoundKind.CATCH_UP, version, "dump", ranks=ranks)
    state.note(incident, result)
    for rank, text in result.failed.items():
        incident.ranks.fail(rank, text)
    return result.words


def _chosen(state: RepairState, incident: Incident, plan: Plan) -> Lists | None:
    """Return the save lists by rank, and put them into the plan; None if a piece is on no usable rank."""
    assert isinstance(state.replicas, Replicas)
    lists = choose(state.replicas, state.standing(incident, plan.version), state.suspect(incident))
    if lists is None:
        return None
    incident.draft.plan = replace(plan, assignments=_assignments(lists))
    state.outbox.record("plan", version=plan.version, reason=plan.reason, savers=list(lists))
    return lists


def _save(state: RepairState, version: Version, lists: Lists) -> Round:
    plain = state.everyone(RoundKind.SAVE, version, "dump", ranks=lists)
    acts = {rank: replace(act, lists=lists[rank]) for rank, act in plain.acts.items()}
    return Round(RoundKind.SAVE, acts, together=True)


def _name(state: RepairState, incident: Incident, version: Version, lists: Lists) -> Script:
    """Let one saver after the other rename the checkpoint, until one has succeeded or failed."""
    first = renamer(lists)
    for rank in [first, *(r for r in lists if r != first)]:
        if rank not in state.job.live:
            continue
        result = yield state.everyone(RoundKind.RENAME, version, "dump", ranks=[rank])
        if result.ok:
            state.saved = incident.saved = version
            incident.path = PLACE
            return Ending(Outcome.SAVED, version, f"saved version {version}", PLACE)
        if not result.lost:
            return not_saved(f"version {version} is written but not renamed: {result.words}")
    return not_saved(f"version {version} is written but not renamed: all ranks that wrote it are lost")


def _assignments(lists: Lists) -> tuple[Assignment, ...]:
    """Return the savers as the assignments of a plan, for display."""
    named = {
        (entry.type, place, rank)
        for entries in lists.values()
        for entry in entries
        for place, rank in enumerate(entry.ranks)
    }
    return tuple(Assignment(Shard(f"type{kind}-piece{place}"), rank, How.AS_IS) for kind, place, rank in sorted(named))
