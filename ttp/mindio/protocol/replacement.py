"""The script by which new processes take the seats of ranks that have died, while the others keep theirs.

The newest version is saved first, as without this: whatever goes wrong afterwards, be it a second death, a handler that
fails or a process that does not come, ends as if nothing had been tried, with that checkpoint. Then all loops are ended
and cleaned, the survivors tell their launcher that they have nothing to lose (MAKE_WAY), and the launcher or an outside
manager starts the dead ranks again. A new process joins this incarnation, makes its state, and says that it is ready;
its copy is of no version. From there on it is a repair like any other (``in_process_repair``), with new process groups
before it and the new processes as receivers.
"""

from __future__ import annotations

from dataclasses import replace

from ttp.core import messages as m
from ttp.core.controller.continuing import SEAT_READY, SEAT_S
from ttp.core.controller.incident import Incident
from ttp.core.controller.program_recovery import Ending, Outcome
from ttp.core.decide import NoPlan
from ttp.core.layout import Rank, Version, compact_ranks
from ttp.mindio.protocol.in_process_repair import halt, repair_in_process
from ttp.mindio.protocol.messages import RoundKind
from ttp.mindio.protocol.repair_state import REPAIRABLE, RepairState
from ttp.mindio.protocol.replica_lists import Replicas, sources
from ttp.mindio.protocol.rounds import Part, Pause, Script
from ttp.mindio.protocol.save_script import dump

PURPOSE = "recover"
DEATHS = (m.FaultKind.EXITED, m.FaultKind.LOST, m.FaultKind.OUTSIDE)
"""Kinds of evidence that a rank has died; OUTSIDE: a manager knew it first."""
DEATH_S = 1.0
"""Seconds that a death may take to be known after a collective has told of it."""
LOOK_S = 1.0


def recover(state: RepairState, incident: Incident, *, alone: bool) -> Script:
    """Save, have the lost ranks replaced, and train on. If that fails, end with what was saved.

    Args:
        state: the ranks.
        incident: the open incident.
        alone: there is no manager: the launcher of each lost rank has to say that it can start it.
    """
    saved = yield from dump(state, incident)
    if saved.outcome is not Outcome.SAVED:
        return saved
    state.until = state.now + state.patience_s(incident)
    try:
        yield from see_clearly(state, seats=alone)
        problem = why_not(state, incident, alone=alone)
        ending = _failed(problem) if problem else (yield from _replace(state, incident))
    finally:
        state.until = None
        state.job.seats.clear()
    if ending.outcome is Outcome.RESUMED:
        return replace(ending, path=saved.path if saved.version == ending.version else "")
    state.tried.add(incident.id)
    state.outbox.record("not_recovered", text=ending.text)
    return replace(saved, text=f"{saved.text}; lost ranks were not replaced: {ending.text}")


def wanted(state: RepairState, incident: Incident) -> bool:
    """Return whether ranks may have died, and all others would go on with new ones in their places."""
    live = state.job.live
    lost = len(live) < len(state.job.members) or bool(state.broken_off)
    return lost and bool(live) and incident.id not in state.tried and all(state.recovers(rank) for rank in live)


def why_not(state: RepairState, incident: Incident, *, alone: bool) -> str:
    """Return why the lost ranks cannot be replaced; empty if they can."""
    if not wanted(state, incident):
        return "no rank was lost, not all ranks were started with enable_arf and a rebuild_group handler, or it failed"
    dead = _dead(state)
    return (
        _why_not_the_job(state, dead)
        or _why_not_the_evidence(incident, dead)
        or _why_not_the_state(state, incident, dead)
        or _why_no_seat(state, dead, alone=alone)
    )


def _why_not_the_job(state: RepairState, dead: set[Rank]) -> str:
    if not dead:
        return "no rank has died"
    if state.job.in_doubt or state.job.done or not state.job.complete:
        return "not every rank is known to train or to be dead"
    return "a rank that lives cannot go on" if state.must_load or state.job.broken - dead else ""


def _why_not_the_evidence(incident: Incident, dead: set[Rank]) -> str:
    for kind, found in incident.evidence.by_kind.items():
        for rank, evidence in found.items():
            if kind not in (*REPAIRABLE, m.FaultKind.SNAPSHOT) and not (kind in DEATHS and rank in dead):
                return f"{evidence.text}; only deaths are mended so"
    return ""


def _why_not_the_state(state: RepairState, incident: Incident, dead: set[Rank]) -> str:
    plan = state.decide(incident)
    if isinstance(plan, NoPlan) or not isinstance(state.replicas, Replicas):
        return "no version is whole"
    if not plan.version:
        return "no step was finished"
    if sources(state.replicas, dead, state.standing(incident, plan.version)) is None:
        return "what a lost rank held is on no other one"
    return ""


def _why_no_seat(state: RepairState, dead: set[Rank], *, alone: bool) -> str:
    for rank in sorted(dead):
        member = state.job.members[rank]
        if member.left or not member.fenced:
            return f"rank {rank} is not known to be dead"
        if member.seat != SEAT_READY and (alone or member.seat):
            return f"rank {rank} cannot be started alone: {member.seat or 'its launcher says nothing'}"
    return ""


def _dead(state: RepairState) -> set[Rank]:
    return {rank for rank in state.job.members if rank not in state.job.live}


def see_clearly(state: RepairState, *, seats: bool) -> Part:
    """Wait until it is known which ranks have died, and with ``seats`` whether launchers can start them.

    A rank that was lost may be back in a moment, a collective tells of a death before any process does, and the
    launcher of a dead rank sees the death later than its neighbours.
    """
    deaths_until, seats_until = state.now + DEATH_S, 0.0
    while True:
        dead = _dead(state)
        if dead and not seats_until:
            seats_until = state.now + SEAT_S
        unseen = bool(state.broken_off) and not dead and state.now < deaths_until
        unsaid = seats and any(not state.job.members[rank].seat for rank in dead) and state.now < seats_until
        if not (unseen or unsaid or state.job.in_doubt):
            return ""
        yield Pause(min(state.now + LOOK_S, deaths_until if unseen else seats_until if unsaid else state.now + LOOK_S))


def _replace(state: RepairState, incident: Incident) -> Script:
    dead, everybody = _dead(state), set(state.job.members)
    problem = yield from halt(state, incident, PURPOSE)
    if problem:
        return _failed(problem)
    state.job.seats.update(dead)
    state.outbox.record("seats_open", ranks=sorted(dead))
    way = yield state.everyone(RoundKind.MAKE_WAY, state.on_disk(), PURPOSE)
    while way.ok and not dead <= set(state.newcomers):
        gone = everybody - state.job.seats - state.job.live
        late = dead - set(state.newcomers)
        if gone or state.job.broken & state.job.live:
            return _failed(f"rank {min(gone or state.job.broken)} was lost meanwhile, or cannot go on")
        if state.now >= (state.until or 0.0):
            return _failed(f"nobody has taken the seats of ranks {compact_ranks(late)} in time")
        yield Pause(state.until or 0.0)
    if not way.ok or state.job.broken or state.job.live != everybody:
        return _failed(way.words or "a rank was lost meanwhile")
    return (yield from repair_in_process(state, incident))


def _failed(text: str) -> Ending:
    return Ending(Outcome.NOT_SAVED, Version(0), text)
