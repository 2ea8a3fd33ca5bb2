"""``ttp incidents``: shows what went wrong, and what was done about it."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from ttp.cli.directories import SaveDir, existing, holds_ours, save_dir_of
from ttp.cli.incident_reader import IncidentLog, id_of, incident_files, read_incident, readable
from ttp.cli.output import Json, complain, count_text, fields_of, print_json, say, screen, table, when_text
from ttp.cli.spans import restore_span, send, spans, trace_id
from ttp.cli.timeline import rows, style_of
from ttp.cli.trace_events import trace_text
from ttp.errors import CheckpointError, ToldAs, UsageError, strerror_of
from ttp.store.history import read_launches
from ttp.store.names import INCIDENTS

NO_FAILURE = "no failure of a rank is recorded; `ttp verdict` says how the last launch ended"
ELSEWHERE = (
    "if the save_dir could not be written, incidents are in TTP_FALLBACK_DIR, if set, and in {0}: give one of them to "
    "`ttp incidents DIR`; while the job runs `ttp status` shows the last one"
)
SOMEWHERE = "the run directory on the controller's host"
Id = Annotated[str | None, typer.Argument(metavar="ID", help="One incident: its id, or the beginning or end of it.")]
Last = Annotated[bool, typer.Option("--last", help="The newest incident.")]
Detail = Annotated[bool, typer.Option("--detail", help="Also show the details of evidence, such as tracebacks.")]

Trace = Annotated[
    Path | None,
    typer.Option("--trace", help="Write one incident to this file, for ui.perfetto.dev or chrome://tracing."),
]
Otlp = Annotated[bool, typer.Option("--otlp", help="Send one incident as spans to OTEL_EXPORTER_OTLP_ENDPOINT.")]


def incidents(
    directory: SaveDir,
    incident: Id = None,
    last: Last = False,
    detail: Detail = False,
    trace: Trace = None,
    otlp: Otlp = False,
    json: Json = False,
) -> None:
    """List a job's incidents, newest first; or show one as a timeline.

    The timeline shows, in milliseconds after the first sign: evidence, freeze, each rank's answer, the plan and its
    reason, the pieces, the commit, the release. Where the save_dir could not be written, the files are in the run_dir.

    JSON of the list: id, path, opened_unix_s, cause, outcome, saved, version (null: none saved), checkpoint,
    saved_after_ms (null: not saved), unreadable (lines lost to a crash). JSON of one incident: the same, and lines
    (kind, at_ms, unix_s, monotonic_s, facts).
    """
    files = incident_files(existing(directory))
    if incident is None and not last:
        if trace is not None or otlp:
            raise UsageError("--trace and --otlp need one incident: give its id, or --last")
        _list(files, directory, json)
        return
    if incident is None:
        ends: list[float] = []
        list(noting(ends, readable(files[:1], complain)))
        complain_of_lacking(directory, ends, last=True)
    log = read_incident(_pick(files, incident, directory))
    if otlp:
        made = [*spans(log), *_restored_after(log, directory)]
        say(f"{count_text(send(made), 'span')} sent as trace {trace_id(log.id)}")
        return
    if trace is not None:
        with ToldAs(UsageError, f"{trace} cannot be written", OSError, reason=strerror_of):
            trace.write_text(trace_text(log), encoding="utf-8")
        return
    if json:
        lines = [fields_of(line, "kind", "at_ms", "unix_s", "monotonic_s", "facts") for line in log.lines]
        print_json({**describe(log), "lines": lines})
    else:
        _tell(log, detail)


def _restored_after(log: IncidentLog, directory: Path) -> list[Any]:
    """Return a span of the next launch's restore, in a list; an empty list if that launch has restored nothing."""
    opened, released = log.last("opened"), log.last("released")
    if opened is None or released is None:
        return []
    run_id = opened.facts.get("run_id")
    later = (launch for launch in read_launches(directory) if launch.began_unix_s > released.unix_s)
    following = next((launch for launch in later if launch.run_id == run_id), None)
    return [restore_span(following, log.id)] if following is not None and following.restored else []


def _pick(files: list[Path], incident: str | None, directory: Path) -> Path:
    if not files:
        raise CheckpointError(f"there are no incidents in {directory}; {ELSEWHERE.format(SOMEWHERE)}")
    if incident is None:
        return files[0]
    ids = {id_of(path): path for path in files}
    meant = [incident] if incident in ids else [i for i in ids if i.startswith(incident) or i.endswith(incident)]
    if len(meant) != 1:
        what = f"{len(meant)} incidents are called {incident!r}" if meant else f"there is no incident {incident!r}"
        raise UsageError(f"{what}; there are: {', '.join(list(ids)[:10])}")
    return ids[meant[0]]


def noting(ends: list[float], logs: Iterable[IncidentLog]) -> Iterator[IncidentLog]:
    """Yield the incidents, and append to ``ends`` when those that ended a launch were opened."""
    for log in logs:
        ends.extend([log.opened_unix_s] if log.last("released") else [])
        yield log


def complain_of_lacking(directory: Path, ends: Iterable[float], *, last: bool = False) -> bool:
    """Say which incidents have ended a launch and are not here, as on a disk that is full. Return whether any has.

    Args:
        directory: the ``save_dir``.
        ends: when the incidents that are here and ended a launch were opened, in seconds since 1970.
        last: look only at the last launch.
    """
    try:
        launches = read_launches(save_dir_of(directory))
    except CheckpointError:
        return False
    began = [launch.began_unix_s for launch in launches]
    known = {bisect.bisect(began, opened_s) - 1 for opened_s in ends}
    lacking = [launch for number, launch in enumerate(launches) if launch.released and number not in known]
    if not lacking or (last and lacking[-1] is not launches[-1]):
        return False
    newest, more = lacking[-1], f" (and of {len(lacking) - 1} before it)" if len(lacking) > 1 and not last else ""
    which = "the last launch" if newest is launches[-1] else f"the launch of {when_text(newest.began_unix_s)}"
    host = newest.controller.rpartition(":")[0]
    where = ELSEWHERE.format(f"{newest.run_dir}/{INCIDENTS} on {host}" if newest.run_dir else SOMEWHERE)
    complain(f"the incident that ended {which}{more} is not here: {where}")
    return True


def describe(log: IncidentLog) -> dict[str, Any]:
    """Return what ``ttp incidents --json`` prints of one incident."""
    plain = ("id", "opened_unix_s", "cause", "outcome", "saved", "version", "checkpoint", "saved_after_ms")
    return {"path": str(log.path), **fields_of(log, *plain, "unreadable")}


def _list(files: list[Path], directory: Path, json: bool) -> None:
    ends: list[float] = []
    logs = noting(ends, readable(files, complain))  # one at a time, as there may be many long ones
    if json:
        print_json([describe(log) for log in logs])
    elif files:
        columns = ("incident", "when", "version", "saved after", "cause", "outcome")
        screen().print(table(columns, map(_row, logs), right=("version", "saved after")))
    if not (complain_of_lacking(directory, ends) or files or json):
        what = NO_FAILURE if holds_ours(directory) else "is it the save_dir of a job?"
        say(f"there are no incidents in {directory}: {what} ({ELSEWHERE.format(SOMEWHERE)})")


def _row(log: IncidentLog) -> tuple[str | Text, ...]:
    version = "" if log.version is None else str(log.version)
    took = "" if log.saved_after_ms is None else f"{log.saved_after_ms:.0f} ms"
    outcome = Text(log.outcome, "" if log.saved or log.last("thawed") else "red")
    return log.id, when_text(log.opened_unix_s), version, took, log.cause, outcome


def _tell(log: IncidentLog, detail: bool) -> None:
    say(Text.assemble(("incident ", ""), (log.id, "bold"), f", {when_text(log.opened_unix_s)}"))
    say(f"cause:   {_inset(log.cause, 9)}")
    say(f"outcome: {_inset(log.outcome, 9)}")
    say("")
    for line, text in rows(log):
        moment = Text(f"{line.at_ms:+11.1f} ms  ", "dim")
        say(Text.assemble(moment, (f"{line.kind:<13}", style_of(line.kind)), _inset(text, 29)))
        if detail and line.facts.get("detail"):
            indented = [" " * 16 + detail for detail in str(line.facts["detail"]).rstrip().splitlines()]
            say(Text("\n".join(indented), "dim"))
    if log.unreadable:
        say(f"{log.unreadable} line(s) could not be read: the controller was stopped while it wrote")


def _inset(text: str, width: int) -> str:
    """Indent all lines of a text but the first, so that none can be taken for a line of the timeline."""
    return ("\n" + " " * width).join(text.splitlines())
