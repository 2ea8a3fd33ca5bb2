"""``ttp list``: shows the contents of a ``save_dir``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from ttp.cli.directories import CheckpointOrDir, existing, fallback_of, is_checkpoint
from ttp.cli.output import Json, fields_of, print_json, say, screen, table, when_text
from ttp.errors import CheckpointError
from ttp.store.catalog import CatalogEntry, look, scan
from ttp.store.room import size_text

All = Annotated[bool, typer.Option("--all", help="Also list directories that ttp did not make.")]


def list_checkpoints(directory: CheckpointOrDir, everything: All = False, json: Json = False) -> None:
    """List the checkpoints of a job, newest first, with drafts that were never committed.

    Looks at names, manifests and sizes; `ttp verify` reads the contents. Kinds: checkpoint; draft (being written, or
    left over: never restored); superseded (another checkpoint of that version took its name); foreign (not ttp's). The
    directory in TTP_FALLBACK_DIR is listed like any other; a newer checkpoint in it is mentioned in one line.

    JSON: a list with the keys name, path, kind, version (finished updates; null: unknown), whole (by manifest and
    sizes), problem (null: none found), size (bytes), created_unix_s, incident, cause, reason, world_size, incarnation
    (null without a manifest).
    """
    given = existing(directory)
    entries = [look(given)] if is_checkpoint(given) else scan(given)
    found = [e for e in entries if everything or e.kind != "foreign" or e.version is not None]
    if json:
        print_json([describe(entry) for entry in found])
    elif found:
        columns = ("version", "name", "kind", "size", "written", "ranks", "why")
        screen().print(table(columns, map(_row, found), right=("version", "size", "ranks")))
    else:
        say(f"there is no checkpoint in {directory}")
    if not json and (note := _newer_elsewhere(found, given)):
        say(note)


def _newer_elsewhere(found: list[CatalogEntry], directory: Path) -> str:
    """Return a line about a newer checkpoint in the fallback directory, which a restart would use; empty: none."""
    fallback = fallback_of(directory)
    if fallback is None:
        return ""
    try:
        newest = next((e for e in scan(fallback) if e.kind == "checkpoint" and e.whole), None)
    except CheckpointError as problem:
        return f"TTP_FALLBACK_DIR: {problem}"
    here = max((e.version for e in found if e.whole and e.version is not None), default=-1)
    if newest is None or newest.version is None or newest.version <= here:
        return ""
    return f"newer: step {newest.version} is in TTP_FALLBACK_DIR, see `ttp list {fallback}`; a restart takes it"


def describe(entry: CatalogEntry) -> dict[str, Any]:
    """Return what ``ttp list --json`` prints of one entry."""
    m = entry.manifest
    names = ("created_unix_s", "incident", "cause", "reason", "world_size", "incarnation")
    return {
        "name": entry.path.name,
        "path": str(entry.path),
        **fields_of(entry, "kind", "version", "whole", "problem"),
        "size": m.size if m else None,
        **(fields_of(m, *names) if m else dict.fromkeys(names)),
    }


def _row(entry: CatalogEntry) -> tuple[str | Text, ...]:
    m = entry.manifest
    version = "" if entry.version is None else str(entry.version)
    why = Text(entry.problem, "red") if entry.problem else Text(m.cause if m else "never committed")
    if m is None:
        return version, entry.path.name, entry.kind, "", "", "", why
    written = when_text(m.created_unix_s)
    return version, entry.path.name, entry.kind, size_text(m.size), written, str(m.world_size), why
