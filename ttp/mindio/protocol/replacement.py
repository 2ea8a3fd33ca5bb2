"""The script that replaces dead ranks by new processes, while the other ranks continue in their processes.

First the newest version is saved, as without a replacement. If anything fails afterwards (a second death, a handler, a
process that does not join), the incident ends with that checkpoint. Then all training threads leave their loops and the
devices are cleaned, the survivors tell their launcher that they may be killed without a loss (MAKE_WAY), and the
launcher or an outside manager starts the dead ranks again. A new process joins this incarnation, creates its state, and
reports that it is ready; its copy is not of any version yet. The rest is a repair (``in_process_repair``) after new
process groups were made, with the new processes as receivers.
"""

from __future__ import annotations

from dataclasses import replace

from ttp.core import messages as m
from ttp.core.controller.continuing import SEAT_S, dead_ranks, why_no_seat
from ttp.core.controller.incident import Incident
from ttp.core.controller.program_recovery import Outcome, not_saved
from ttp.core.decide import NoPlan
from ttp.core.layout import Rank, ranks_text
from ttp.mindio.protocol.in_process_repair import halt, repair_in_process
from ttp.mindio.protocol.messages import RoundKind
from ttp.mindio.protocol.repair_state import REPAIRABLE, RepairState
from ttp.mindio.protocol.rounds import Part, Pause, Script
from ttp.mindio.protocol.save_script import dump

PURPOSE = "recover"
DEATHS = (m.FaultKind.EXITED, m.FaultKind.LOST, m.FaultKind.OUTSIDE)
"""Kinds of evidence that a rank has died; OUTSIDE because a manager may report it first."""
DEATH_S = 1.0
"""Seconds in which the death of a rank has to become known after a collective has failed by it."""
LOOK_S = 1.0


def recover(state: RepairState, incident: Incident, *, alone: bool) -> Script:
    """Save, replace the lost ranks, and continue training. If that fails, end with the saved checkpoint.

    Args:
        state: the state of the ranks.
        incident: the open incident.
        alone: whether there is no manager, so that the launcher of each lost rank has to report that it can restart it.
    """
    saved = yield from dump(state, incident)
    if saved.outcome is not Outcome.SAVED:
        return saved
    state.until = state.now + state.patience_s(incident)
    try:
        yield from see_clearly(state, seats=alone)
        problem = why_not(state, incident, alone=alone)
        ending = not_saved(problem) if problem else (yield from _replace(state, incident))
    finally:
        state.until = None
        state.job.seats.clear()
    if ending.outcome is Outcome.RESUMED:
        return replace(ending, path=saved.path if saved.version == ending.version else "")
    state.tried.add(incident.id)
    state.outbox.record("not_recovered", text=ending.text)
    return replace(saved, text=f"{saved.text}; lost ranks were not replaced: {ending.text}")


def wanted(state: RepairState, incident: Incident) -> bool:
    """Return whether ranks may have died, and all others can continue with new processes in place of them."""
    live = state.job.live
    lost = len(live) < len(state.job.members) or bool(state.broken_off)
    return lost and bool(live) and incident.id not in state.tried and all(state.recovers(rank) for rank in live)


def why_not(state: RepairState, incident: Incident, *, alone: bool) -> str:
    """Return why the lost ranks cannot be replaced; empty if they can."""
    if not wanted(state, incident):
        return "no rank was lost, a rank has no enable_arf or no rebuild_group handler, or a replacement has failed"
    dead = dead_ranks(state.job)
    return (
        _why_not_the_job(state, dead)
        or _why_not_the_evidence(incident, dead)
        or _why_not_the_state(state, incident)
        or why_no_seat(state.job, dead, reported=alone)
    )


def _why_not_the_job(state: RepairState, dead: set[Rank]) -> str:
    if not dead:
        return "no rank has died"
    if state.job.in_doubt or state.job.done or not state.job.complete:
        return "some rank is neither known to train nor known to be dead"
    return "a live rank cannot continue" if state.must_load or state.job.broken - dead else ""


def _why_not_the_evidence(incident: Incident, dead: set[Rank]) -> str:
    for kind, found in incident.evidence.by_kind.items():
        for rank, evidence in found.items():
            if kind not in (*REPAIRABLE, m.FaultKind.SNAPSHOT) and not (kind in DEATHS and rank in dead):
                return f"{evidence.text}; only dead ranks can be replaced"
    return ""


def _why_not_the_state(state: RepairState, incident: Incident) -> str:
    plan = state.decide(incident)  # of live ranks, which so hold everything that the dead have held
    if isinstance(plan, NoPlan):
        return "no version is whole"
    return "" if plan.version else "no step has been finished"


def see_clearly(state: RepairState, *, seats: bool) -> Part:
    """Wait until it is known which ranks have died and, with ``seats``, whether their launchers can restart them.

    A lost rank may connect again, a collective may fail by a death before the death is reported, and the launcher of a
    dead rank learns of the death later than its neighbours.
    """
    deaths_until, seats_until = state.now + DEATH_S, 0.0
    while True:
        dead = dead_ranks(state.job)
        if dead and not seats_until:
            seats_until = state.now + SEAT_S
        unseen = bool(state.broken_off) and not dead and state.now < deaths_until
        unsaid = seats and any(not state.job.members[rank].seat for rank in dead) and state.now < seats_until
        if not (unseen or unsaid or state.job.in_doubt):
            return ""
        yield Pause(min(state.now + LOOK_S, deaths_until if unseen else seats_until if unsaid else state.now + LOOK_S))


def _replace(state: RepairState, incident: Incident) -> Script:
    dead, everybody = dead_ranks(state.job), set(state.job.members)
    problem = yield from halt(state, incident, PURPOSE)
    if problem:
        return not_saved(problem)
    state.job.seats.update(dead)
    state.outbox.record("seats_open", ranks=sorted(dead))
    way = yield state.everyone(RoundKind.MAKE_WAY, state.on_disk(), PURPOSE)
    while way.ok and not dead <= set(state.newcomers):
        gone = everybody - state.job.seats - state.job.live
        late = dead - set(state.newcomers)
        if gone or state.job.broken & state.job.live:
            return not_saved(f"rank {min(gone or state.job.broken)} was lost meanwhile, or cannot continue")
        if state.now >= (state.until or 0.0):
            return not_saved(f"no new processes have replaced {ranks_text(late)} in time")
        yield Pause(state.until or 0.0)
    if not way.ok or state.job.broken or state.job.live != everybody:
        return not_saved(way.words or "a rank was lost meanwhile")
    return (yield from repair_in_process(state, incident))
