"""How the ranks of a job came back after a restart, and whether a reason is logged where a faster way was possible.

Ways, from the fastest: ``kept`` (survivors continued in their processes), ``forked`` (all ranks were forked from a
template that had imported their modules), ``started`` (ranks are new interpreters). The functions are pure.
"""

from __future__ import annotations

from collections.abc import Iterator

from ttp.chaos.notes import LifeKey
from ttp.chaos.record import Evidence, Record
from ttp.config import KEEP, Config

COLD, _ANEW = "restarts are cold: ", "ranks do not go on in their processes: "


def ways(record: Record) -> tuple[str, ...]:
    """Return the way of each life after the first, followed by all reasons that incidents and launchers gave."""
    whys = [str(seen.facts["why_not_again"]) for seen in record.told("released") if seen.facts.get("why_not_again")]
    return (*(way(record, life) for life in _later(record)), *whys, *record.reasons)


def way(record: Record, life: LifeKey) -> str:
    """Return the way in which the ranks of this life came about; see the module."""
    lives = sorted(record.processes)
    before = {item for other in lives[: lives.index(life)] for item in _pids(record, other)}
    if before & _pids(record, life):
        return "kept"
    return "forked" if all(forked for _, forked in record.processes[life].values()) else "started"


def way_findings(evidence: Evidence) -> Iterator[str]:
    """Yield a finding where ranks were released before the commit, or came back in a slower way without a reason."""
    record = evidence.record
    yield from _early(record)
    if not evidence.script.forks or evidence.script.restart != "agent":
        return
    told = " ".join(record.reasons)
    later = [way(record, life) for life in _later(record)]
    if "started" in later and COLD not in told and not evidence.cold:
        yield "ranks were started as new interpreters, and no launcher logged why"
    if Config.from_env(dict(evidence.script.env)).continuity != KEEP:
        return
    released = record.told("released")
    went_on = [seen for seen in released if seen.facts.get("again")]
    for seen in released:
        if not seen.facts.get("again") and "again" in seen.facts and not seen.facts.get("why_not_again"):
            yield f"{seen.incident}: all ranks were restarted, and the incident does not say why"
    if len(went_on) > later.count("kept") and _ANEW not in told and COLD not in told:
        yield "survivors were released to continue in their processes but were restarted, and no launcher logged why"


def _early(record: Record) -> Iterator[str]:
    """Yield a finding if ranks were released to continue before the checkpoint was committed (or held in memory)."""
    committed: set[str] = set()
    for seen in record.seen:
        if seen.kind in ("committed", "held"):
            committed.add(seen.incident)
        elif seen.kind == "released" and seen.facts.get("again") and seen.incident not in committed:
            yield f"{seen.incident}: ranks were released to continue before a checkpoint was committed"


def _later(record: Record) -> list[LifeKey]:
    return [life for life in sorted(record.processes) if life > record.lives[0]] if record.lives else []


def _pids(record: Record, life: LifeKey) -> set[tuple[int, int]]:
    return {(rank, pid) for rank, (pid, _) in record.processes[life].items()}
