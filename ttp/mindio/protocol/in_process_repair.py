"""The script that repairs the state and lets the training threads enter their loops again in the same processes.

All training threads leave their loops (STOP) and the devices are made usable (CLEAN). Then the version of each copy is
known. A rank whose copy is torn, whose device lost memory, or that is not at the newest whole version receives the
state from a replica (REPAIR). Everything else, such as data and schedules, is set to that version (ROLLBACK), and the
training threads enter their loops again (RESUME). If no copy can be trusted, or a piece has no copy left, all ranks
load a checkpoint instead. A failure at any point leaves the healthy copies unchanged, so that they can be saved.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ttp.core.controller.incident import Incident
from ttp.core.controller.program_recovery import Ending, Outcome, not_saved
from ttp.core.decide import NoPlan
from ttp.core.layout import Rank, Version, ranks_text
from ttp.mindio.protocol.messages import Act, Ailment, RepairWay, RoundKind, Transfer
from ttp.mindio.protocol.repair_state import RepairState
from ttp.mindio.protocol.replica_lists import Replicas, sources
from ttp.mindio.protocol.rounds import Part, Round, Script

LOW = 2
"""Result of a clean handler if the lost memory held no part of the state."""
LOST_MEMORY = (Ailment.MEMORY, Ailment.MEMORY_CORRUPT)


def halt(state: RepairState, incident: Incident, purpose: str = "") -> Part:
    """Make all training threads leave their loops, and the devices usable."""
    purpose = purpose or state.purpose
    if state.cleaned:
        return ""
    state.halted = True
    stop = yield state.everyone(RoundKind.STOP, purpose=purpose, together=True)
    state.note(incident, stop)
    if not stop.ok:
        return stop.words
    plain = state.everyone(RoundKind.CLEAN, purpose=purpose)
    acts = {rank: replace(act, memory_error=_lost_memory(state, rank)) for rank, act in plain.acts.items()}
    clean = yield Round(RoundKind.CLEAN, acts, together=True)
    for rank, acted in clean.done.items():
        if acted.result == LOW and _lost_memory(state, rank):
            state.low.add(rank)
            state.invalid.discard(rank)
    state.cleaned = clean.ok
    return clean.words


def repair_in_process(state: RepairState, incident: Incident) -> Script:
    """Stop, clean, repair, roll back, resume. If the ending is NOT_SAVED, healthy copies are unchanged.

    If some of the processes are new, new process groups are made before the repair.
    """
    problem = yield from halt(state, incident)
    if not problem and state.newcomers:
        problem = yield from _rebuild(state)
    if problem:
        return not_saved(problem)
    plan = state.decide(incident)
    lacking = set() if isinstance(plan, NoPlan) else set(state.live) - state.standing(incident, plan.version)
    transfers = None
    if not (state.must_load or isinstance(plan, NoPlan)) and isinstance(state.replicas, Replicas):
        transfers = sources(state.replicas, lacking, state.standing(incident, plan.version))
    if transfers is None or isinstance(plan, NoPlan):
        return (yield from _load(state, incident))
    version = plan.version
    if lacking or state.low:
        problem = yield from _repair(state, incident, version, transfers, lacking)
        if problem:
            return not_saved(problem)
    return (yield from _resume(state, incident, version, f"repaired {ranks_text(lacking) if lacking else 'no rank'}"))


def _rebuild(state: RepairState) -> Part:
    newcomers = tuple(state.newcomers)
    plain = state.everyone(RoundKind.REBUILD, state.on_disk(), state.purpose)
    acts = {rank: replace(act, error_ranks=newcomers, store=state.store) for rank, act in plain.acts.items()}
    result = yield Round(RoundKind.REBUILD, acts, together=True)
    return result.words


def _lost_memory(state: RepairState, rank: Rank) -> bool:
    return rank in state.ailing and state.ailing[rank].ailment in LOST_MEMORY


def _repair(
    state: RepairState, incident: Incident, version: Version, transfers: tuple[Transfer, ...], lacking: Iterable[Rank]
) -> Part:
    """Let ranks send and receive state together. A rank that lost only memory without state repairs its device."""
    ranks = tuple(sorted({r for t in transfers for r in (t.src, t.dst)}))
    errors = tuple(sorted({*lacking, *state.low}))
    acts: dict[Rank, Act] = {}
    for rank in sorted({*ranks, *state.low}):
        way = _way(state, rank, transfers)
        acts[rank] = replace(
            state.act(rank, RoundKind.REPAIR, version, state.purpose),
            way=way,
            rebuild=way is RepairWay.MEMORY_HIGH,
            error_ranks=errors,
            transfers=tuple(t for t in transfers if rank in (t.src, t.dst)),
            ranks=ranks,
        )
    state.invalid.update(lacking)
    result = yield Round(RoundKind.REPAIR, acts, together=True)
    if result.ok:
        state.invalid.difference_update(lacking)
        state.note(incident, result, version)
    return result.words


def _way(state: RepairState, rank: Rank, transfers: Iterable[Transfer]) -> RepairWay:
    if any(rank == t.src for t in transfers):
        return RepairWay.SEND
    if not any(rank == t.dst for t in transfers):
        return RepairWay.MEMORY_LOW
    return RepairWay.MEMORY_HIGH if _lost_memory(state, rank) else RepairWay.RECEIVE


def _load(state: RepairState, incident: Incident) -> Script:
    """Let all ranks load the last checkpoint."""
    unable = [rank for rank in state.live if not state.announced[rank].load_repair]
    if unable:
        return not_saved(f"{ranks_text(unable)} cannot load a checkpoint in the running process")
    acts: dict[Rank, Act] = {}
    for rank in state.live:
        high = _lost_memory(state, rank) and rank not in state.low
        acts[rank] = replace(
            state.act(rank, RoundKind.REPAIR, Version(0), state.purpose),
            way=RepairWay.LOAD_REBUILD if high else RepairWay.LOAD,
            rebuild=high,
            error_ranks=tuple(sorted(state.ailing)),
            ranks=tuple(state.live),
        )
    state.invalid.update(acts)
    result = yield Round(RoundKind.REPAIR, acts, together=True)
    loaded = sorted({acted.result for acted in result.done.values()})
    if not result.ok or len(loaded) != 1:
        return not_saved(result.words or f"ranks have loaded different steps: {loaded[:10]}")
    newest = max(answer.version for answer in incident.ranks.answers.values())
    if loaded[0] > newest:
        return not_saved(f"step {loaded[0]} cannot have been loaded: no rank was beyond step {newest}")
    version = Version(loaded[0])
    state.invalid.clear()
    state.saved = version
    state.note(incident, result, version)
    return (yield from _resume(state, incident, version, "loaded a checkpoint"))


def _resume(state: RepairState, incident: Incident, version: Version, text: str) -> Script:
    everybody = state.live
    back = yield state.everyone(RoundKind.ROLLBACK, version, state.purpose, together=True)
    state.invalid.update(back.failed)
    before = dict(state.ailing)
    if back.ok:
        state.cleaned = False  # some ranks may enter their loops although others fail
        back = yield state.everyone(RoundKind.RESUME, version, state.purpose)
    if not back.ok or everybody != state.live or state.job.broken:
        return not_saved(back.words or "a rank was lost during the repair")
    state.note(incident, back)
    state.paused = False
    anew = [ailing for rank, ailing in state.ailing.items() if ailing is not before.get(rank)]
    state.recovered()
    if anew:  # some ranks have entered their loops and left them again meanwhile
        for ailing in anew:
            state.ails(ailing)
        return (yield from repair_in_process(state, incident))
    return Ending(Outcome.RESUMED, version, f"{text}; training continues with step {version + 1}")
