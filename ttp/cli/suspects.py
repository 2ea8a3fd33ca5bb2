"""``ttp suspects``: lists hosts that a job's last incidents accuse, for a scheduler that may leave them out."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from ttp.cli.directories import SaveDir, existing, save_dir_of
from ttp.cli.incident_reader import IncidentLog, incident_files, readable
from ttp.cli.incidents import complain_of_lacking, noting
from ttp.cli.output import Json, complain, print_json, say, screen, table, when_text
from ttp.core.controller.evidence import OUTSIDER
from ttp.core.layout import compact_ranks, ranks_text
from ttp.errors import CheckpointError
from ttp.store.history import read_launches

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
    Checkpoints on request are left out, and of a launch that was cut in two what its smaller part recorded. If a rank
    is accused whose host is not known, or the last incident is not here, a message says so.

    Exits with 1 if no host is named. JSON: a list of hosts with host, incidents, ranks, kinds, text, unix_s.
    """
    ends: list[float] = []
    telling = filter(_tells, noting(ends, readable(incident_files(existing(directory)), complain)))
    incidents = itertools.islice(_believed(telling, _beginnings(directory)), last)
    found = [each for each in named(_told(incidents)) if each.incidents >= at_least]
    complain_of_lacking(directory, ends, last=True)
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
    """Return whether an incident can say something about hosts: not if it was only a request for a checkpoint."""
    opened = incident.last("opened")
    return bool(incident.accusations) or opened is None or not opened.facts.get("snapshot")


def _beginnings(directory: Path) -> list[float]:
    """Return when the launches began that are recorded, in seconds since 1970."""
    try:
        return [launch.began_unix_s for launch in read_launches(save_dir_of(directory))]
    except CheckpointError as problem:
        complain(str(problem))
        return []


def _believed(incidents: Iterable[IncidentLog], began: Sequence[float]) -> Iterator[IncidentLog]:
    """Yield the incidents, but of those that ended one launch only the one that accuses the fewest ranks.

    If the network is cut, there is a controller on each side, and each accuses the ranks of the other side.

    Args:
        incidents: beginning with the newest.
        began: when the launches began, in seconds since 1970, the oldest first; some may be lacking.
    """

    def launch(incident: IncidentLog) -> object:
        opened, place = incident.last("opened"), bisect.bisect(began, incident.opened_unix_s)
        if opened is None or not place or incident.last("released") is None:
            return incident.id
        return place, opened.facts.get("run_id"), opened.facts.get("incarnation")

    for _, ends in itertools.groupby(incidents, launch):
        yield min(ends, key=lambda each: (len(each.accusations), each.opened_unix_s))


def _told(incidents: Iterable[IncidentLog]) -> Iterator[IncidentLog]:
    """Yield the incidents, and say which accuse ranks whose host they do not name."""
    for incident in incidents:
        unnamed = {line.facts.get("rank") for line in incident.accusations if not line.facts.get("host")}
        if ranks := [rank for rank in unnamed if isinstance(rank, int) and rank != OUTSIDER]:
            complain(f"incident {incident.id} accuses {ranks_text(ranks)}, whose host is not known")
        yield incident


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
