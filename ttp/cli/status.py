"""``ttp status``: shows the state of a running job."""

from __future__ import annotations

import contextlib
import json as json_format
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from ttp.cli.connection import Address, Client, Port, Token, UnreachableError, Where, connected, find
from ttp.cli.output import (
    Json,
    count_text,
    duration_text,
    fields_of,
    print_json,
    screen,
    seconds,
    shown,
    table,
    when_text,
)
from ttp.core.layout import compact_ranks, ranks_text

if TYPE_CHECKING:
    from ttp.wire.v1 import controller_pb2 as pb

RANKS_SHOWN_MAX = 64
GROUPS_SHOWN_MAX = 16

_INCIDENT = ("id", "stage", "cause", "version", "outcome", "reason", "path", "opened_unix_s")
_COLOURS = {"live": "green", "frozen": "cyan", "done": "green", "released": "cyan", "missing": "yellow"}

_SILENT = ("done", "released", "missing")
_COUNTED = ("live", "frozen", *_SILENT)
"""States of which a large job's ranks are counted; ranks of other states, and late or silent ones, are shown."""

SHARED_NAME = (
    "two machines name their host {name}: set TTP_HOST to another name on each, or checkpoints lack rank-local state"
)
LAUNCHER_WAITS = (
    "The launcher of this host runs: it starts its ranks again, or waits for those of other hosts, as its log says"
)
BETWEEN = "between two launches: the launchers start the ranks again, or wait for other hosts; their log says which"

Watch = Annotated[bool, typer.Option("--watch", help="Go on showing it until Ctrl-C. With --json: one line a time.")]
Interval = Annotated[float, seconds("--interval", least=0.05, about="Seconds between two updates of --watch.")]
All = Annotated[
    bool,
    typer.Option(
        "--all", help=f"Show every rank. Default: with more than {RANKS_SHOWN_MAX}, only those that differ from others."
    ),
]


def status(
    *,
    watch: Watch = False,
    interval: Interval = 0.5,
    all_ranks: All = False,
    address: Address = None,
    port: Port = None,
    token: Token = None,
    json: Json = False,
) -> None:
    """Show a running job: its ranks with their versions and phases, its replica groups, its last incident.

    A version is the number of finished updates. "Silent for" is the time since a rank was last heard of. States: live,
    frozen (its gate is closed), lost, broken (it raised), released (told to exit), done, missing (not yet joined).

    A false alarm is an incident that ended with a thaw: it cost a pause. Standby controllers take over when this one is
    lost.

    JSON keys: stage, run_id, incarnation, term, world_size, framework, save_dir, groups (ranks by shard), ranks (rank,
    host, pid, version, phase, state, silent_s, activity, can_continue), incidents_total, false_alarms, standbys,
    copied_version (null without buddy=True), between_launches (a launch has ended, but not its launcher), shared_names
    (host names that two machines seem to have), restarts (of this host: state, which is preparing, ready or why they
    are cold, modules, bytes, seconds; null where no launcher has said), last_incident (null, or id, stage, cause,
    version, outcome, reason, path, opened_unix_s), controller (address, port, pid, uptime_s, ttp_version).
    """
    where = find(address, port, token)
    with connected(where) as client:
        if watch:
            with contextlib.suppress(KeyboardInterrupt):
                _watch(client, interval, all_ranks, json)
            return
        now = _asked(client)
    if json:
        print_json(describe(now, client.where))
        return
    screen().print(picture(now, all_ranks))
    if now.standbys or now.term > 1:
        screen().print(Text(f"the leading controller is at {client.where}"))
    if (restarts := _restarts(where)) is not None:
        screen().print(restarts_line(restarts))


def _asked(client: Client) -> pb.GetStatusResponse:
    """Return the status, and what only this host knows: whether a launcher waits here, as no controller else may lead.

    Raises:
        UnreachableError: no controller answers.
    """
    from ttp.launch.run_dir import launcher_lives

    try:
        now = client.status()
    except UnreachableError as problem:
        if not launcher_lives(client.where.run_dir):
            raise
        raise UnreachableError(f"{problem}. {LAUNCHER_WAITS}") from None
    if now.stage == "waiting" and now.world_size and launcher_lives(client.where.run_dir):
        now.between_launches = True
    return now


def _watch(client: Client, interval_s: float, all_ranks: bool, json: bool) -> None:
    if json:
        for answer in _looks(client, interval_s):
            seen = {"error": str(answer)} if isinstance(answer, UnreachableError) else describe(answer, client.where)
            sys.stdout.write(json_format.dumps(seen) + "\n")
            sys.stdout.flush()
        return
    console = screen()
    if not console.is_terminal:
        for answer in _looks(client, interval_s):
            console.print(_shown(answer, all_ranks))
        return
    with Live(console=console, auto_refresh=False, screen=False, vertical_overflow="crop") as live:
        for answer in _looks(client, interval_s):
            live.update(_shown(answer, all_ranks), refresh=True)


def _looks(client: Client, interval_s: float) -> Iterator[pb.GetStatusResponse | UnreachableError]:
    """Yield the status, or the error, every ``interval_s`` seconds without end: after an error another one may lead."""
    while True:
        try:
            yield _asked(client)
        except UnreachableError as problem:
            yield problem
        time.sleep(interval_s)


def _shown(answer: pb.GetStatusResponse | UnreachableError, all_ranks: bool) -> RenderableType:
    return Text(str(answer), "yellow") if isinstance(answer, UnreachableError) else picture(answer, all_ranks)


def _restarts(where: Where) -> dict[str, Any] | None:
    """Return how this host would start workers again; None: no launcher has written its state to the run directory."""
    from ttp.launch.proc_files import has_ended
    from ttp.launch.warm.starter import read_status

    found = None if where.run_dir is None else read_status(where.run_dir)
    if found is not None and (launcher := found.pop("launcher", None)) and has_ended(launcher):
        return {"state": "the launcher has ended, and starts no rank again"}
    return found


# -------------------------------------------------------------------------------- for people


def restarts_line(found: dict[str, Any]) -> Text:
    """Return a line on how workers of this host would be started again."""
    if found["state"] == "ready":
        facts = (
            f"{found['modules']} modules imported, {found['bytes'] / 2**20:.0f} MiB, shared with the ranks it starts"
        )
        return Text(f"restarts on this host are warm: {facts}")
    if found["state"] == "preparing":
        return Text("restarts on this host will be warm: modules are being imported")
    return Text(f"restarts on this host are cold: {found['state']}")


def picture(now: pb.GetStatusResponse, all_ranks: bool = False) -> RenderableType:
    """Return what ``ttp status`` shows."""
    parts: list[RenderableType] = [_job_line(now), *_group_lines(now)]
    if now.ranks:
        parts.append(_rank_table(now, all_ranks))
    if any(rank.can_continue for rank in now.ranks):
        parts.append(_survivors_line(now))
    if now.between_launches:
        parts.append(Text(BETWEEN))
    parts += [shown(SHARED_NAME.format(name=name)) for name in now.shared_names]
    if now.HasField("last_incident"):
        parts.append(_incident_lines(now.last_incident))
    return Group(*parts)


def _survivors_line(now: pb.GetStatusResponse) -> Text:
    """Return a line that says what the other ranks do when a rank dies: they go on only if all ranks can."""
    cannot = [rank.rank for rank in now.ranks if rank.state == "live" and not rank.can_continue]
    if cannot:
        return Text(f"when a rank dies all are started again: {ranks_text(cannot)} cannot go on (their logs say why)")
    return Text("when a rank dies the other ranks go on in their processes, if the launcher of each host lives")


def _job_line(now: pb.GetStatusResponse) -> Text:
    facts = [
        f"run {now.run_id}" if now.run_id else "no rank has joined yet",
        f"incarnation {now.incarnation}",
        count_text(now.world_size, "rank"),
        now.framework,
        f"saves to {now.save_dir}" if now.save_dir else "",
        count_text(now.incidents_total, "incident") + (" since this controller took over" if now.term > 1 else ""),
        count_text(now.false_alarms, "false alarm") if now.false_alarms else "",
        f"standby controllers {', '.join(now.standbys)}" if now.standbys else "",
        f"second copies of version {now.copied_version}" if now.HasField("copied_version") else "",
        f"controller pid {now.pid}, term {now.term}, up {duration_text(now.uptime_s)}",
    ]
    return shown(Text.assemble((now.stage, "bold"), " · ", " · ".join(fact for fact in facts if fact)))


def _group_lines(now: pb.GetStatusResponse) -> list[Text]:
    lines = [shown(f"shard {g.name}: {ranks_text(g.ranks)}") for g in now.groups[:GROUPS_SHOWN_MAX]]
    if len(now.groups) > GROUPS_SHOWN_MAX:
        lines.append(Text(f"and {len(now.groups) - GROUPS_SHOWN_MAX} more shards (--json lists them)"))
    return lines


def _rank_table(now: pb.GetStatusResponse, all_ranks: bool) -> RenderableType:
    ranks = list(now.ranks)
    if all_ranks or len(ranks) <= RANKS_SHOWN_MAX:
        return _table_of(ranks)
    newest = max(r.version for r in ranks)
    counted: dict[str, list[int]] = {}
    standing_out = []
    for r in ranks:
        late = r.state != "missing" and (r.version + 1 < newest or (r.silent_s > 5 and r.state not in _SILENT))
        if late or r.state not in _COUNTED:
            standing_out.append(r)
        else:
            counted.setdefault(r.state, []).append(r.rank)
    parts: list[RenderableType] = []
    for state, found in counted.items():
        where = "" if state == "missing" else f" at version {newest} or one before"
        parts.append(Text(f"{count_text(len(found), 'rank')} {state}{where}: {compact_ranks(found)}"))
    if standing_out:
        parts.append(_table_of(standing_out[:RANKS_SHOWN_MAX]))
    if rest := standing_out[RANKS_SHOWN_MAX:]:
        parts.append(Text(f"and {len(rest)} more ranks: {compact_ranks(r.rank for r in rest)} (--all shows them)"))
    return Group(*parts)


def _table_of(ranks: list[pb.RankStatus]) -> RenderableType:
    rows = [
        (
            str(r.rank),
            r.host,
            str(r.pid or ""),
            str(r.version),
            phase_name(r.phase),
            Text(r.activity or r.state, _COLOURS.get(r.state, "red")),
            duration_text(r.silent_s) if r.host else "",
        )
        for r in ranks
    ]
    columns = ("rank", "host", "pid", "version", "phase", "state", "silent for")
    return table(columns, rows, right=("rank", "pid", "version", "silent for"))


def _incident_lines(incident: pb.IncidentStatus) -> Text:
    said = incident.outcome or f"now {incident.stage}: {incident.reason}"
    lines = [f"last incident {incident.id}, {when_text(incident.opened_unix_s)}: {incident.cause}", f"  {said}"]
    if incident.path:
        lines.append(f"  {incident.path}")
    return shown("\n".join(lines))


# -------------------------------------------------------------------------------- for machines


def phase_name(phase: int) -> str:
    """Return ``idle``, ``updating``, ``torn`` or ``done``; empty for a rank that has not reported a phase."""
    from ttp.wire.v1 import controller_pb2 as pb

    name = pb.Phase.Name(phase) if phase in pb.Phase.values() else f"PHASE_{phase}"  # type: ignore[arg-type]
    return "" if phase == 0 else name.removeprefix("PHASE_").lower()


def describe(now: pb.GetStatusResponse, where: Where) -> dict[str, Any]:
    """Return what ``ttp status --json`` prints."""
    return {
        **fields_of(now, "stage", "run_id", "incarnation", "term", "world_size", "framework", "save_dir"),
        "groups": {group.name: list(group.ranks) for group in now.groups},
        "ranks": [
            fields_of(r, "rank", "host", "pid", "version", "phase", "state", "silent_s", "activity", "can_continue")
            | {"phase": phase_name(r.phase), "silent_s": round(r.silent_s, 3)}
            for r in now.ranks
        ],
        **fields_of(now, "incidents_total", "false_alarms"),
        "standbys": list(now.standbys),
        "copied_version": now.copied_version if now.HasField("copied_version") else None,
        "between_launches": now.between_launches,
        "shared_names": list(now.shared_names),
        "restarts": _restarts(where),
        "last_incident": fields_of(now.last_incident, *_INCIDENT) if now.HasField("last_incident") else None,
        "controller": {
            "address": where.address,
            "port": where.port,
            "pid": now.pid,
            "uptime_s": round(now.uptime_s, 3),
            "ttp_version": now.ttp_version,
        },
    }
