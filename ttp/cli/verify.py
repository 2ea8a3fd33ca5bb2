"""``ttp verify``: compares checkpoints with their manifests."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from ttp.cli.directories import CheckpointOrDir, bears_name, existing, fallback_of, is_checkpoint
from ttp.cli.output import Json, bars, complain, fields_of, print_json, say, say_notes
from ttp.core.layout import Version
from ttp.errors import CheckpointError
from ttp.store.catalog import CatalogEntry, look, restorable, scan
from ttp.store.digest import Watch
from ttp.store.manifest import Manifest, manifest_digest
from ttp.store.room import size_text
from ttp.store.verify import name_problems, piece_problems, unlisted_files
from ttp.store.walk import ATTEMPTS

All = Annotated[bool, typer.Option("--all", help="Verify every checkpoint; exit with 0 only if all are whole.")]


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of reading one checkpoint.

    Args:
        path: the checkpoint.
        version: from its name or manifest; None if neither has it.
        size: bytes of its pieces according to the manifest; 0 without one.
        problems: why it is not whole.
        notes: files that the manifest does not list; they do no harm.
    """

    path: Path
    version: Version | None
    size: int
    problems: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def whole(self) -> bool:
        """True if a job can be restored from it."""
        return not self.problems


def verify(path: CheckpointOrDir, everything: All = False, json: Json = False) -> None:
    """Read the newest checkpoint of a job, or the one given, and recompute the digest of every piece.

    Exits with 0 if it is whole, with 1 if it is not or if there is none, and says what is wrong. If the newest one is
    damaged, older ones are read too, to tell which one a restart would resume from; so are newer ones in the directory
    in TTP_FALLBACK_DIR, if the job has one.

    JSON keys: path, whole (the answer), restores (name of the checkpoint that a restart would take; null: none),
    checkpoints (list: name, path, version, size in bytes, whole, problems, notes).
    """
    given = existing(path)
    single = is_checkpoint(given)
    here = [look(given)] if single else scan(given)
    there = [] if single else _elsewhere(given)
    found = _read(here if single else _candidates(here, everything), everything=everything)
    if not found and not json:
        raise CheckpointError(f"there is no checkpoint in {given}")
    answer = bool(found) and (all(f.whole for f in found) if everything else found[0].whole)
    restores = _restored(found, [e for e in here if not (single and e.kind == "superseded")])
    known = -1 if restores is None or restores.version is None else restores.version
    newer = _read([e for e in restorable(there) if (e.version or 0) > known], everything=False)
    restores = _restored(newer, there) or restores
    if json:
        print_json(
            {
                "path": str(given),
                "whole": answer,
                "restores": restores.path.name if restores else None,
                "checkpoints": [describe(finding) for finding in found + newer],
            }
        )
    else:
        _tell(found + newer)
        if not single and restores is not found[0]:
            say(_restart(restores, given, here, there))
    if not answer:
        raise typer.Exit(1)


def _candidates(entries: list[CatalogEntry], everything: bool) -> list[CatalogEntry]:
    if not everything:
        return list(restorable(entries))
    return [entry for entry in entries if bears_name(entry) or entry.kind == "superseded"]


def _read(entries: list[CatalogEntry], *, everything: bool) -> list[Finding]:
    """Read checkpoints, as a restart does: up to the first whole one, or the last that it tries; or all of them."""
    findings: list[Finding] = []
    attempts = ATTEMPTS
    with bars() as watch:
        for entry in entries:
            findings.append(examine(entry, watch))
            attempts -= entry.manifest is not None
            if not everything and (findings[-1].whole or attempts == 0):
                break
    return findings


def _restored(found: list[Finding], entries: list[CatalogEntry]) -> Finding | None:
    """Return the checkpoint that a restart would take of these entries; None: none of them is whole."""
    tried = (entry for entry in restorable(entries) if entry.manifest is not None)
    taken = {entry.path for entry in islice(tried, ATTEMPTS)}
    return next((finding for finding in found if finding.whole and finding.path in taken), None)


def _elsewhere(given: Path) -> list[CatalogEntry]:
    """Return the entries of the fallback directory."""
    fallback = fallback_of(given)
    try:
        return [] if fallback is None else scan(fallback)
    except CheckpointError as problem:
        complain(str(problem))
        return []


def examine(entry: CatalogEntry, watch: Watch) -> Finding:
    """Read one checkpoint to its last byte.

    Args:
        entry: the checkpoint, as ``scan`` or ``look`` has found it.
        watch: takes a name and a number of bytes, and returns what is called with the number of bytes just read.
    """
    path = entry.path
    if entry.kind == "draft":
        return Finding(path, entry.version, 0, ("it is a draft: it was never committed, and is never restored",), ())
    try:
        manifest = _manifest_of(entry)
    except CheckpointError as problem:
        return Finding(path, entry.version, 0, (str(problem),), ())
    pieces = piece_problems(path, manifest, watch(path.name, manifest.size))
    problems = (*name_problems(path, manifest), *pieces)
    return Finding(path, manifest.version, manifest.size, problems, tuple(unlisted_files(path, manifest)))


def _manifest_of(entry: CatalogEntry) -> Manifest:
    """Return the present manifest. It is parsed again only if it has changed: one of 10,000 pieces takes seconds."""
    if entry.manifest is not None and manifest_digest(entry.path) == entry.manifest_digest:
        return entry.manifest
    return Manifest.load(entry.path)


def describe(finding: Finding) -> dict[str, Any]:
    """Return what ``ttp verify --json`` prints of one checkpoint."""
    return {
        "name": finding.path.name,
        "path": str(finding.path),
        **fields_of(finding, "version", "size", "whole", "problems"),
        "notes": [f"{name} is not in the manifest" for name in finding.notes],
    }


def _tell(found: list[Finding]) -> None:
    for finding in found:
        name = _name(finding, found[0].path.parent)
        if finding.whole:
            say(Text.assemble(("whole    ", "green"), f"{name}, {size_text(finding.size)}"))
        else:
            say(Text.assemble(("damaged  ", "bold red"), name))
        for problem in finding.problems:
            say(f"         {problem}")
        say_notes(
            [f"{file} is not in the manifest and cannot be verified; a restore ignores it" for file in finding.notes]
        )


def _name(finding: Finding, home: Path) -> str:
    return finding.path.name if finding.path.parent == home else str(finding.path)


def _restart(restores: Finding | None, home: Path, *directories: list[CatalogEntry]) -> str:
    """Return what a restart would do, in a sentence."""
    if restores is not None:
        return f"A restart would resume from {_name(restores, home)}."
    if count := max(sum(entry.kind == "checkpoint" for entry in entries) for entries in directories):
        tried = f"of the {ATTEMPTS} newest ones, which it tries, " if count > ATTEMPTS else ""
        return f"A restart is refused: {tried}no checkpoint is whole. Repair one, or move the damaged ones away."
    return "A restart would start from nothing."
