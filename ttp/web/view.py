"""Compute the page's data of a job, one JSON object, from the controller's status and the newest incident's file.

The data of ranks are lists with one entry per rank, which takes 90 kB for 4,096 ranks. Sentences are composed here,
where they are tested, and not in the browser.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from ttp.cli.incident_reader import IncidentLog
from ttp.cli.output import count_text, duration_text, fields_of
from ttp.cli.status import phase_name
from ttp.core.layout import compact_ranks, ranks_text
from ttp.errors import EXIT_SAVED
from ttp.wire.v1 import controller_pb2 as pb

SILENT_S = 5.0
"""Seconds of silence after which a rank is shown as silent; a rank that trains sends a heartbeat every second."""
STILL_S = 15.0
"""Seconds without a finished step after which the page says so; steps of large jobs take some seconds."""
GROUPS_MAX = 64
TEXT_MAX = 2_000
"""Largest number of characters of a text."""
HERE = ("live", "frozen", "broken")


@dataclass(frozen=True)
class Pace:
    """The progress of a job. Ranks report their versions once a second, not all at the same time.

    Args:
        passed: the newest version some seconds ago; a rank that has not reached it is late.
        still_s: seconds since a rank last finished a step.
    """

    passed: int = 0
    still_s: float = 0.0


def view(now: pb.GetStatusResponse, log: IncidentLog | None, pace: Pace = Pace()) -> dict[str, Any]:
    """Return the data of the whole page.

    Args:
        now: the status.
        log: the newest incident's file; None if there is none that can be read here.
        pace: the progress of the job.
    """
    if log is not None and log.id != now.last_incident.id:
        log = None
    plain = ["stage", "run_id", "incarnation", "term", "world_size", "framework", "save_dir", "pid", "ttp_version"]
    plain += ["incidents_total", "false_alarms", "uptime_s"]
    versions = [rank.version for rank in now.ranks if rank.state in HERE] or [rank.version for rank in now.ranks]
    return {
        "error": "",
        "ended": "",
        "at_unix_s": time.time(),
        **fields_of(now, *plain),
        "standbys": list(now.standbys),
        "copied_version": now.copied_version if now.HasField("copied_version") else None,
        "newest": max(versions, default=0),
        "late": late(now, pace),
        "counts": Counter(rank.state for rank in now.ranks),
        "hosts": _hosts(now.ranks),
        "state": [rank.state for rank in now.ranks],
        "version": [rank.version for rank in now.ranks],
        "silent": [round(rank.silent_s, 1) for rank in now.ranks],
        "process": [rank.pid for rank in now.ranks],
        "phase": [phase_name(rank.phase) for rank in now.ranks],
        "activity": {rank.rank: rank.activity[:TEXT_MAX] for rank in now.ranks if rank.activity},
        "groups": _groups(now),
        "groups_total": len(now.groups),
        "waits": list(waits(now, log, pace)),
        "incident": _incident(now, log) if now.HasField("last_incident") else None,
    }


def _hosts(ranks: Iterable[pb.RankStatus]) -> list[tuple[str, list[int]]]:
    """Return (host name, ranks) for each host, in the order of their first ranks."""
    found: dict[str, list[int]] = defaultdict(list)
    for rank in ranks:
        found[rank.host].append(rank.rank)
    return list(found.items())


def _groups(now: pb.GetStatusResponse) -> list[dict[str, Any]]:
    """Return the replica groups, those with the fewest live copies first."""
    here = {rank.rank for rank in now.ranks if rank.state in HERE}
    found = []
    for group in now.groups:
        gone = [rank for rank in group.ranks if rank not in here]
        found.append(
            {
                "name": group.name[:TEXT_MAX],
                "living": len(group.ranks) - len(gone),
                "copies": len(group.ranks),
                "ranks": compact_ranks(group.ranks),
                "gone": compact_ranks(gone),
            }
        )
    return sorted(found, key=lambda group: (group["living"], group["name"]))[:GROUPS_MAX]


# ------------------------------------------------------------------------------------------- which ranks wait for what


def late(now: pb.GetStatusResponse, pace: Pace) -> list[int]:
    """Return the late ranks of a training job: silent ones, and those behind the newest version of seconds ago."""
    if now.stage != "training":
        return []
    live = (rank for rank in now.ranks if rank.state in HERE)
    return [rank.rank for rank in live if rank.silent_s > SILENT_S or rank.version + 1 < pace.passed]


def waits(now: pb.GetStatusResponse, log: IncidentLog | None, pace: Pace = Pace()) -> Iterator[str]:
    """Yield sentences about what the ranks wait for; none if all ranks make progress."""
    states: dict[str, list[int]] = defaultdict(list)
    for rank in now.ranks:
        states[rank.state].append(rank.rank)
    if now.stage == "training":
        yield from _behind(now, pace)
    elif now.stage in ("waiting", "forming"):
        if not now.ranks or states["released"]:
            yield "waiting for the launchers to restart the job: no rank has joined yet"
        elif states["missing"]:
            joined = now.world_size - len(states["missing"])
            yield f"{joined} of {count_text(now.world_size, 'rank')} joined; {ranks_text(states['missing'])} not yet"
    elif now.stage == "freezing":
        if states["live"]:
            frozen = f"{ranks_text(states['frozen'])} frozen; " if states["frozen"] else ""
            yield f"{frozen}waiting for the answer of {ranks_text(states['live'])}"
        if log is not None and (line := log.last("waits")) is not None and log.last("plan") is None:
            yield f"no plan yet: {str(line.facts.get('reason'))[:TEXT_MAX]}"
    elif now.stage in ("saving", "committing"):
        yield from _writing(log, now.stage)
    elif now.stage in ("saved", "released") and (stay := [*states["frozen"], *states["live"], *states["broken"]]):
        yield f"{ranks_text(stay)} {'has' if len(stay) == 1 else 'have'} not left yet"


def _behind(now: pb.GetStatusResponse, pace: Pace) -> Iterator[str]:
    here = [rank for rank in now.ranks if rank.state in HERE]
    slow = set(late(now, pace))
    silent = [rank for rank in here if rank.silent_s > SILENT_S]
    if behind := sorted(slow - {rank.rank for rank in silent}):
        at = min(rank.version for rank in here if rank.rank in behind)
        yield f"the others wait for {ranks_text(behind)}: at version {at}, while others have finished {pace.passed}"
    for rank in silent[:8]:
        yield f"rank {rank.rank} on {rank.host} has been silent for {duration_text(rank.silent_s)}"
    if pace.still_s > STILL_S:
        yield f"no rank has finished a step for {duration_text(pace.still_s)}"
    active: dict[str, list[int]] = defaultdict(list)
    for rank in here:
        if rank.activity:
            active[rank.activity[:TEXT_MAX]].append(rank.rank)
    for activity, ranks in list(active.items())[:8]:
        yield f"{ranks_text(ranks)}: {activity}"


def _writing(log: IncidentLog | None, stage: str) -> Iterator[str]:
    if log is None:
        yield "all ranks wait for the ranks that write"
        return
    plan, commit = log.last("plan"), log.last("commit")
    if stage == "committing" and commit is not None:
        yield f"all ranks wait for rank {commit.facts.get('rank')}, which writes the checkpoint's manifest"
    if stage == "saving" and plan is not None and isinstance(savers := plan.facts.get("savers"), dict):
        written = {line.facts.get("rank") for line in log.of("saved")}
        still = {rank for rank in savers.values() if isinstance(rank, int) and rank not in written}
        if still:
            yield f"all ranks wait for {ranks_text(still)} to write version {plan.facts.get('version')}"


# ------------------------------------------------------------------------------------------------- the last incident


def _incident(now: pb.GetStatusResponse, log: IncidentLog | None) -> dict[str, Any]:
    last = now.last_incident
    shown: dict[str, Any] = {
        **fields_of(last, "id", "stage", "opened_unix_s", "path"),
        "open": last.stage != "closed",
        "cause": last.cause[:TEXT_MAX],
        "outcome": last.outcome[:TEXT_MAX],
        "dead": [],
        "saved": f"version {last.version}" if last.path else "",
        "good": None,
        "told": log is not None,
    }
    return shown | ({} if log is None else tell(log))


def tell(log: IncidentLog) -> dict[str, Any]:
    """Return what an incident's file tells: the ranks that were hurt, what was saved, and whether the end was good."""
    over = log.last("released", "thawed", "closed") is not None
    told: dict[str, Any] = {"cause": log.cause[:TEXT_MAX], "dead": hurt(log), "path": log.checkpoint}
    if (line := log.last("committed", "durable")) is not None:
        size = line.facts.get("size")
        told["saved"] = f"version {log.version}, durable {line.at_ms:.0f} ms after the first sign"
        told["bytes"] = size if isinstance(size, int) else 0
    elif (line := log.last("held")) is not None:
        told["saved"] = f"version {line.facts.get('version')} is held in memory, but not durable yet"
    elif (line := log.last("nothing_new")) is not None:
        told["saved"] = f"version {log.version} was already on disk"
    released = log.last("released")
    if released is not None:
        told["good"] = released.facts.get("exit_code") == EXIT_SAVED or bool(released.facts.get("again"))
    elif over:
        told["good"] = True
    return told


def hurt(log: IncidentLog) -> list[int]:
    """Return at most 64 ranks with evidence against them, except those that only saw a collective fail."""
    ranks = (line.facts.get("rank") for line in log.accusations)
    return sorted({rank for rank in ranks if isinstance(rank, int) and rank >= 0})[:64]
