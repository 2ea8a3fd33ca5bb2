"""``ttp suspects``: lists hosts that a job's last incidents accuse, for a scheduler that may leave them out."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Annotated

import typer

from ttp.cli.directories import SaveDir, existing
from ttp.cli.incident_reader import IncidentLog, incident_files, readable
from ttp.cli.output import Json, complain, print_json, say, screen, table, when_text
from ttp.core.controller.evidence import OUTSIDER
from ttp.core.layout import compact_ranks

Last = Annotated[int, typer.Option("--last", min=1, help="Number of incidents to count, the newest first.")]
Least = Annotated[int, typer.Option("--at-least", min=1, help="Show only hosts that are suspected in so many of them.")]


@dataclass
class Suspect:
    """A host that incidents accuse.

    Args:
        host: as its ranks name it.
        incidents: number of the incidents read that have evidence, not withdrawn, against a rank of the host.
        ranks: the accused ranks.
        kinds: kinds of evidence, such as ``exited``, ``hung``, ``outside``.
        text: text of the newest evidence.
        unix_s: time of the newest evidence, in seconds since 1970.
    """

    host: str
    incidents: int = 0
    ranks: list[int] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    text: str = ""
    unix_s: float = 0.0


def suspects(directory: SaveDir, *, last: Last = 1, at_least: Least = 1, json: Json = False) -> None:
    """List the hosts that the last incidents of a job accuse, the most often accused first.

    Use it to decide which host to leave out when the job is started again, by hand or in a script of the scheduler. One
    killed process says little about its host, the same host in three incidents says more: --last 10 --at-least 3.
    Drained hosts are listed too. Incidents after which training went on count as well, withdrawn evidence does not.
    Checkpoints on request, and what a host that was cut off recorded of ranks that it could not reach, are left out.

    Exits with 1 if no host is named. JSON: a list of hosts with host, incidents, ranks, kinds, text, unix_s.
    """
    telling = filter(_tells, readable(incident_files(existing(directory)), complain))
    incidents = itertools.islice(telling, last)
    found = [each for each in named(incidents) if each.incidents >= at_least]
    if json:
        print_json([asdict(each) for each in found])
    elif found:
        rows = [
            [s.host, str(s.incidents), compact_ranks(s.ranks), ", ".join(s.kinds), when_text(s.unix_s), s.text]
            for s in found
        ]
        screen().print(table(["host", "incidents", "ranks", "evidence", "last", "in words"], rows, right=["incidents"]))
    else:
        say("no incident names a host as the cause")
    if not found:
        raise typer.Exit(1)


def _tells(incident: IncidentLog) -> bool:
    """Return whether an incident can say something about hosts.

    It cannot if a checkpoint was requested and nothing was wrong, or if its controller knew no host of the ranks that
    it accuses: they were never connected to it, as it took over alone on a host that was cut off.
    """
    accusations = incident.accusations
    if not accusations:
        opened = incident.last("opened")
        return opened is None or not opened.facts.get("snapshot")
    return any(line.facts.get("host") or line.facts.get("rank") == OUTSIDER for line in accusations)


def named(incidents: Iterable[IncidentLog]) -> list[Suspect]:
    """Return the hosts that incidents accuse, the most often accused first. ``incidents`` begin with the newest."""
    found: dict[str, Suspect] = {}
    for incident in incidents:
        for host, lines in incident.accused_hosts().items():
            suspect = found.setdefault(host, Suspect(host))
            suspect.incidents += 1
            suspect.text = suspect.text or str(lines[-1].facts.get("text", ""))
            suspect.unix_s = suspect.unix_s or lines[-1].unix_s
            ranks = {line.facts.get("rank") for line in lines} | set(suspect.ranks)
            suspect.ranks = sorted(rank for rank in ranks if isinstance(rank, int))
            suspect.kinds = sorted({str(line.facts.get("evidence")) for line in lines} | set(suspect.kinds))
    return sorted(found.values(), key=lambda suspect: (-suspect.incidents, suspect.host))
