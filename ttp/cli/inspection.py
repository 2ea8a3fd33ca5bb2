"""``ttp inspect``: shows what a checkpoint consists of, and why it was written."""

from __future__ import annotations

import json as json_format
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from ttp.cli.directories import CheckpointOrDir, checkpoint_meant
from ttp.cli.output import Json, count_text, fields_of, print_json, say, screen, table, when_text
from ttp.core.layout import ranks_text
from ttp.core.messages import Piece
from ttp.store.manifest import Manifest
from ttp.store.room import size_text

TENSORS_SHOWN_MAX = 40
_DIGITS_MAX = 10

All = Annotated[bool, typer.Option("--all", help=f"Show every tensor, not only the first {TENSORS_SHOWN_MAX}.")]


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor as the manifest describes it.

    Args:
        name: its flattened name.
        dtype: element type.
        shape: of the whole tensor, over all shards.
        files: the pieces that hold parts of it.
        size: bytes of those parts on disk.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    files: tuple[str, ...]
    size: int


def inspect(path: CheckpointOrDir, everything: All = False, json: Json = False) -> None:
    """Show a checkpoint's manifest: who wrote what and why, the tensors, and which ranks' local state is in it.

    Of a save_dir the newest checkpoint is shown. Reads the manifest only; `ttp verify` reads the contents. Rank-local
    state (random numbers, BatchNorm statistics, extra_state) that no rank could save is derived anew on resume.

    JSON keys: path, version, run_id, incarnation, incident, cause, reason, world_size, groups (ranks by shard),
    framework, created_unix_s, ttp_version, format_version, size (bytes), pieces (file, size, digest, kind, shard,
    writer), tensors (name, dtype, shape, files, size in bytes on disk), values (names of values that are no tensors),
    rank_local (present and provisional: ranks; rederived: why, by rank), extra.
    """
    checkpoint = checkpoint_meant(path)
    manifest = Manifest.load(checkpoint)
    if json:
        print_json(describe(checkpoint, manifest))
    else:
        _tell(checkpoint, manifest, everything)


def describe(path: Path, manifest: Manifest) -> dict[str, Any]:
    """Return what ``ttp inspect --json`` prints."""
    plain = ("version", "run_id", "incarnation", "incident", "cause", "reason", "world_size", "framework")
    return {
        "path": str(path),
        **fields_of(manifest, *plain, "created_unix_s", "ttp_version", "format_version"),
        "size": manifest.size,
        "groups": {shard: list(ranks) for shard, ranks in manifest.groups.items()},
        "pieces": [fields_of(p, "file", "size", "digest", "kind", "shard", "writer") for p in manifest.pieces],
        "tensors": [asdict(tensor) for tensor in tensors(manifest)],
        "values": values(manifest),
        "rank_local": asdict(rank_local(manifest)),
        "extra": dict(manifest.extra),
    }


@dataclass(frozen=True, slots=True)
class RankLocal:
    """The ranks whose rank-local state is in a checkpoint.

    Args:
        present: the ranks that resume with their own state.
        provisional: of these, the ranks that died before they had finished the version.
        rederived: all other ranks, and why their state could not be saved.
    """

    present: list[int]
    provisional: list[int]
    rederived: dict[int, str]


def rank_local(manifest: Manifest) -> RankLocal:
    """Return the ranks with rank-local state, from the tables of the pieces and the manifest's missing pages."""
    present: set[int] = set()
    provisional: set[int] = set()
    reasons = {int(rank): "no rank of its host was left" for rank in manifest.missing_pages}
    for piece in manifest.pieces:
        if piece.kind == "rank_local":
            contents = _contents(piece)
            present.update(_ranks(contents.get("ranks")))
            provisional.update(_ranks(contents.get("provisional")))
            missing = contents.get("missing")
            reasons |= _reasons(missing) if isinstance(missing, dict) else {}
    absent = set(range(manifest.world_size)) - present
    return RankLocal(sorted(present), sorted(provisional), {r: reasons.get(r, "not saved") for r in sorted(absent)})


def _reasons(missing: dict[str, Any]) -> dict[int, str]:
    return {int(k): str(v) for k, v in missing.items() if k.isascii() and k.isdecimal() and len(k) < _DIGITS_MAX}


def _ranks(value: Any) -> list[int]:
    return [rank for rank in value if type(rank) is int] if isinstance(value, list) else []


def _contents(piece: Piece) -> dict[str, Any]:
    try:
        contents = json_format.loads(piece.table) if piece.table else None
    except ValueError:
        return {}
    return contents if isinstance(contents, dict) else {}


def tensors(manifest: Manifest) -> list[Tensor]:
    """Return every tensor in the tables of contents of all pieces, in order; the parts of a tensor are merged."""
    found: dict[str, Tensor] = {}
    for piece, row in _rows(manifest):
        if "dtype" not in row:
            continue
        name, length = _name(row), _length(row)
        old = found.get(name)
        files = (*old.files, piece.file) if old and piece.file not in old.files else old.files if old else (piece.file,)
        found[name] = Tensor(name, str(row["dtype"]), _shape(row), files, length + (old.size if old else 0))
    return list(found.values())


def values(manifest: Manifest) -> list[str]:
    """Return the names of the values that are stored in addition to the tensors."""
    return list(dict.fromkeys(_name(row) for _, row in _rows(manifest) if "dtype" not in row))


def _rows(manifest: Manifest) -> Iterator[tuple[Piece, dict[str, Any]]]:
    """Yield the rows of all tables of contents. A table of an unknown form is skipped."""
    for piece in manifest.pieces:
        items = _contents(piece).get("items")
        for row in items if isinstance(items, list) else []:
            if isinstance(row, dict) and "path" in row:
                yield piece, row


def _name(row: dict[str, Any]) -> str:
    path = row["path"]
    return ".".join(map(str, path)) if isinstance(path, list) else str(path)


def _length(row: dict[str, Any]) -> int:
    place = row.get("at")
    if isinstance(place, list) and len(place) == 2 and type(place[1]) is int:
        return place[1]
    return 0


def _shape(row: dict[str, Any]) -> tuple[int, ...]:
    shape = row.get("shape")
    return tuple(n for n in shape if type(n) is int) if isinstance(shape, list) else ()


# -------------------------------------------------------------------------------- for people


def _tell(path: Path, m: Manifest, everything: bool) -> None:
    facts = [
        ("version", f"{m.version} finished updates; a restart goes on with step {m.version + 1}"),
        ("cause", m.cause),
        ("plan", m.reason),
        ("incident", m.incident),
        ("job", f"run {m.run_id}, incarnation {m.incarnation}, {count_text(m.world_size, 'rank')}, {m.framework}"),
        *(("shard", f"{shard}, held by {ranks_text(ranks)}") for shard, ranks in m.groups.items()),
        ("rank-local", _rank_local_text(m)),
        ("written", f"{when_text(m.created_unix_s)} by ttp {m.ttp_version}, {size_text(m.size)}"),
        *(("extra", f"{name} = {value}") for name, value in m.extra.items()),
    ]
    say(str(path))
    for name, text in facts:
        say(f"{name:>11}  {text}")
    _tell_pieces(m)
    _tell_tensors(m, everything)


def _rank_local_text(m: Manifest) -> str:
    local = rank_local(m)
    parts = [f"present for {ranks_text(local.present)}"] if local.present else []
    if local.provisional:
        parts.append(f"for {ranks_text(local.provisional)} from before the update in which they died")
    by_reason: dict[str, list[int]] = {}
    for rank, why in local.rederived.items():
        by_reason.setdefault(why, []).append(rank)
    return "; ".join([*parts, *(f"derived anew for {ranks_text(r)}: {why}" for why, r in by_reason.items())])


def _tell_pieces(m: Manifest) -> None:
    rows = [
        (p.file, p.kind, p.shard, str(p.writer) if p.writer >= 0 else "", size_text(p.size), p.digest) for p in m.pieces
    ]
    screen().print(table(("piece", "kind", "shard", "writer", "size", "digest"), rows, right=("writer", "size")))


def _tell_tensors(m: Manifest, everything: bool) -> None:
    found = tensors(m)
    if not found:
        return
    shown = found if everything else found[:TENSORS_SHOWN_MAX]
    rows = [(t.name, t.dtype, "x".join(map(str, t.shape)) or "scalar", size_text(t.size)) for t in shown]
    screen().print(table(("tensor", "dtype", "shape", "on disk"), rows, right=("on disk",)))
    if len(shown) < len(found):
        say(f"and {len(found) - len(shown)} more tensors: --all shows them")
