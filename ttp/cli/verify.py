"""``ttp verify``: compares checkpoints with their manifests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from ttp.cli.bars import bars
from ttp.cli.directories import CheckpointOrDir, bears_name, existing, is_checkpoint
from ttp.cli.output import Json, print_json, say, size_text
from ttp.core.layout import Version
from ttp.errors import CheckpointError
from ttp.store import names
from ttp.store.catalog import CatalogEntry, scan
from ttp.store.manifest import Manifest
from ttp.store.verify import unlisted_files, verify_checkpoint

ATTEMPTS_MAX = 5
"""Number of checkpoints that a restart examines to find a whole one; see ``restore()``."""

NOTES_SHOWN_MAX = 20

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
    damaged, older ones are read too, to tell which one a restart would resume from.

    JSON keys: path, whole (the answer), restores (name of the checkpoint that a restart would take; null: none),
    checkpoints (list: name, path, version, size in bytes, whole, problems, notes).
    """
    given = existing(path)
    single = is_checkpoint(given)
    found = _read([given] if single else _candidates(given, everything), first_whole_is_enough=not everything)
    if not found:
        raise CheckpointError(f"there is no checkpoint in {given}")
    answer = all(f.whole for f in found) if everything else found[0].whole
    restores = next((f for f in found if f.whole and names.parse_checkpoint_name(f.path.name) is not None), None)
    if json:
        print_json(
            {
                "path": str(given),
                "whole": answer,
                "restores": restores.path.name if restores else None,
                "checkpoints": [describe(finding) for finding in found],
            }
        )
    else:
        _tell(found, restores, single)
    if not answer:
        raise typer.Exit(1)


def _candidates(save_dir: Path, everything: bool) -> list[Path]:
    def wanted(entry: CatalogEntry) -> bool:
        return bears_name(entry) or (everything and entry.kind == "superseded")

    paths = [entry.path for entry in scan(save_dir) if wanted(entry)]
    return paths if everything else paths[:ATTEMPTS_MAX]


def _read(paths: list[Path], *, first_whole_is_enough: bool) -> list[Finding]:
    findings: list[Finding] = []
    with bars() as watch:
        for path in paths:
            findings.append(examine(path, watch(path.name, _size(path))))
            if first_whole_is_enough and findings[-1].whole:
                break
    return findings


def _size(path: Path) -> int:
    try:
        return Manifest.load(path).size
    except CheckpointError:
        return 0


def examine(path: Path, progress: Callable[[int], None] | None = None) -> Finding:
    """Read one checkpoint to its last byte. ``progress`` is called with the number of bytes just read."""
    draft = names.parse_draft_name(path.name)
    if draft is not None:
        return Finding(path, draft[0], 0, ("it is a draft: it was never committed, and is never restored",), ())
    version = names.parse_checkpoint_name(path.name)
    problems = tuple(verify_checkpoint(path, progress))
    try:
        manifest = Manifest.load(path)
    except CheckpointError as problem:
        return Finding(path, version, 0, problems or (str(problem),), ())
    return Finding(path, manifest.version, manifest.size, problems, tuple(unlisted_files(path, manifest)))


def describe(finding: Finding) -> dict[str, Any]:
    """Return what ``ttp verify --json`` prints of one checkpoint."""
    return {
        "name": finding.path.name,
        "path": str(finding.path),
        "version": finding.version,
        "size": finding.size,
        "whole": finding.whole,
        "problems": list(finding.problems),
        "notes": [f"{name} is not in the manifest" for name in finding.notes],
    }


def _tell(found: list[Finding], restores: Finding | None, single: bool) -> None:
    for finding in found:
        if finding.whole:
            say(Text.assemble(("whole    ", "green"), f"{finding.path.name}, {size_text(finding.size)}"))
        else:
            say(Text.assemble(("damaged  ", "bold red"), finding.path.name))
        for problem in finding.problems:
            say(f"         {problem}")
        for name in finding.notes[:NOTES_SHOWN_MAX]:
            say(f"         note: {name} is not in the manifest and cannot be verified; a restore ignores it")
        if len(finding.notes) > NOTES_SHOWN_MAX:
            say(f"         note: and {len(finding.notes) - NOTES_SHOWN_MAX} more files (--json lists them)")
    if not single and not found[0].whole:
        say(f"A restart would resume from {restores.path.name}." if restores else "A restart would start from nothing.")
