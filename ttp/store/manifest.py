"""``manifest.json``: the pieces of a checkpoint, which job wrote them, and why. It is written last and read first."""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from ttp._version import __version__
from ttp.core.layout import WORLD_SIZE_MAX, Rank, Shard, Version
from ttp.core.messages import Piece
from ttp.core.restore_choice import DAMAGED, UPGRADE
from ttp.errors import CheckpointError, ToldAs
from ttp.store.digest import digest_bytes
from ttp.store.json_text import parse_json
from ttp.store.plain_file import read_plain

MANIFEST = "manifest.json"
FORMAT_VERSION = 1
"""A later format keeps the keys ``format``, ``format_version``, ``ttp_version`` and ``digest``: without a right digest,
a manifest counts as damaged, and a restart goes back to an older checkpoint."""

_FORMAT = "ttp-checkpoint"
_SEAL = "digest"
"""Key of the digest of all other keys: after most bit flips a manifest is still valid JSON, with other values."""

_SIZE_MAX = 1 << 30
"""Most bytes of a manifest; a longer file is not a manifest of ttp and is not read into memory."""

_NUMBER_MAX = 2**63 - 1

_DIGEST = re.compile(r"xxh3_128:[0-9a-f]{32}", re.ASCII)


class ForeignCheckpointError(CheckpointError):
    """A directory that ttp did not write; it is not damaged."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of one checkpoint's manifest.

    Args:
        version: finished updates.
        run_id: the job, as its launcher calls it.
        incarnation: launch of the job that wrote the checkpoint.
        incident: id of the incident in which it was written.
        cause: the cause of the incident, in words.
        reason: the plan's reason for this version and these savers.
        world_size: number of ranks of the job that wrote it.
        groups: replica groups of that job.
        framework: ``torch`` or ``mindspore``.
        created_unix_s: wall time in seconds; only for people, no code decides by it.
        pieces: every file but this one. ``table`` is stored as JSON, so its formatting may change.
        missing_pages: ranks whose rank-local state no rank could read; it is derived again on resume.
        extra: further facts (JSON), such as disputed shards.
    """

    version: Version
    run_id: str
    incarnation: int
    incident: str
    cause: str
    reason: str
    world_size: int
    groups: Mapping[Shard, tuple[Rank, ...]]
    framework: str
    created_unix_s: float
    pieces: tuple[Piece, ...]
    missing_pages: tuple[Rank, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)
    ttp_version: str = __version__
    format_version: int = FORMAT_VERSION

    @property
    def size(self) -> int:
        """Bytes of all pieces together."""
        return sum(piece.size for piece in self.pieces)

    def to_json(self) -> str:
        """Return the text of the file.

        Raises:
            CheckpointError: ``extra`` or a piece's table is not JSON.
        """
        document = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "pieces"}
        document["format"] = _FORMAT
        document["groups"] = {shard: list(ranks) for shard, ranks in self.groups.items()}
        document["missing_pages"] = list(self.missing_pages)
        document["extra"] = dict(self.extra)
        with ToldAs(
            CheckpointError, f"the manifest of version {self.version} cannot be written", TypeError, ValueError
        ):
            document = json.loads(json.dumps(document, allow_nan=False))  # as a reader gets it
            document["pieces"] = [_piece_to_json(piece) for piece in self.pieces]
            document[_SEAL] = _seal(document)
            return _laid_out(document)

    @classmethod
    def load(cls, directory: Path) -> Manifest:
        """Read and check ``directory/manifest.json``.

        Raises:
            CheckpointError: the manifest is absent, damaged, not ttp's (``ForeignCheckpointError``), or of a newer
                format.
        """
        return load_with_digest(directory)[0]

    @classmethod
    def load_or_none(cls, directory: Path) -> Manifest | None:
        """Return the manifest that ``load`` returns; None if there is none, or it cannot be read."""
        try:
            return cls.load(directory)
        except CheckpointError:
            return None


def load_with_digest(directory: Path) -> tuple[Manifest, str]:
    """Return the manifest and the digest of its file, from one read.

    Raises:
        CheckpointError: as ``Manifest.load``.
    """
    data = _read(directory / MANIFEST)
    return _parse(data, directory / MANIFEST), digest_bytes(data)


def manifest_digest(directory: Path) -> str:
    """Return the digest of the manifest's bytes. It identifies the checkpoint, as the manifest has all pieces' digests.

    Raises:
        CheckpointError: there is no manifest, or it cannot be read.
    """
    return digest_bytes(_read(directory / MANIFEST))


def safe_path(file: str) -> bool:
    """Return whether ``file`` is a plain relative path that stays inside the checkpoint and is not the manifest."""
    parts = file.split("/")
    return all(part not in ("", ".", "..") and "\0" not in part for part in parts) and file != MANIFEST


def _read(path: Path) -> bytes:
    try:
        return read_plain(path, _SIZE_MAX)
    except (FileNotFoundError, NotADirectoryError):
        raise ForeignCheckpointError(
            f"{path.parent} has no {MANIFEST}: ttp did not write it, or the file was lost"
        ) from None
    except OSError as problem:
        if problem.errno == errno.EFBIG:
            raise ForeignCheckpointError(f"{path} is longer than {_SIZE_MAX} bytes: not a manifest of ttp") from None
        raise CheckpointError(f"{path} cannot be read: {problem.strerror or problem}") from problem


def _parse(data: bytes, path: Path) -> Manifest:
    with ToldAs(CheckpointError, f"{path}{DAMAGED}", ValueError):
        document = parse_json(data)
    if not isinstance(document, dict) or document.get("format") != _FORMAT:
        raise ForeignCheckpointError(f'{path} was not written by ttp: it does not say "format": "{_FORMAT}"')
    found, newer = document.get("format_version"), ""
    if isinstance(found, int) and found > FORMAT_VERSION:
        newer = (
            f"has format {found}, written by ttp {document.get('ttp_version', '?')}; this is ttp {__version__},"
            f" which reads up to format {FORMAT_VERSION}{UPGRADE}"
        )
    if document.pop(_SEAL, None) != _seal(document):
        subject = f"{path} {newer}, unless it" if newer else path
        raise CheckpointError(f"{subject}{DAMAGED}: it does not have the digest that it was written with")
    if newer:
        raise CheckpointError(f"{path} {newer}")
    try:
        return _from_json(document)
    except (AttributeError, KeyError, TypeError, ValueError, ArithmeticError) as problem:
        raise CheckpointError(f"{path}{DAMAGED}: {type(problem).__name__}: {problem}") from None


def _seal(document: dict[str, Any]) -> str:
    """Return a digest of ``document`` that does not depend on white space and the order of keys."""
    return digest_bytes(json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False).encode())


def _from_json(document: dict[str, Any]) -> Manifest:
    def whole(name: str) -> int:
        return _natural(document[name], name)

    return Manifest(
        version=Version(whole("version")),
        run_id=_string(document["run_id"], "run_id"),
        incarnation=whole("incarnation"),
        incident=_string(document["incident"], "incident"),
        cause=_string(document["cause"], "cause"),
        reason=_string(document["reason"], "reason"),
        world_size=_world_size(document["world_size"]),
        groups={Shard(shard): _ranks(ranks, f"groups[{shard!r}]") for shard, ranks in document["groups"].items()},
        framework=_string(document["framework"], "framework"),
        created_unix_s=float(document["created_unix_s"]),
        pieces=_pieces(document["pieces"]),
        missing_pages=_ranks(document["missing_pages"], "missing_pages"),
        extra=dict(document["extra"]),
        ttp_version=_string(document["ttp_version"], "ttp_version"),
        format_version=whole("format_version"),
    )


def _laid_out(document: Mapping[str, Any]) -> str:
    """Return the document as JSON, with a line for each key and each piece.

    ``json`` itself indents with an encoder in Python, which takes most of the time of a commit of ten thousand pieces.
    """

    def text(key: str, value: Any) -> str:
        if key != "pieces" or not value:
            return json.dumps(value, sort_keys=True)
        return "[\n  " + ",\n  ".join(json.dumps(piece, sort_keys=True) for piece in value) + "\n ]"

    return "{\n " + ",\n ".join(f"{json.dumps(key)}: {text(key, document[key])}" for key in sorted(document)) + "\n}\n"


def _piece_to_json(piece: Piece) -> dict[str, Any]:
    document = {f.name: getattr(piece, f.name) for f in fields(piece) if f.name not in ("table", "cut")}
    if piece.table:
        document["contents"] = json.loads(piece.table)
    return document


def _pieces(documents: Any) -> tuple[Piece, ...]:
    pieces = tuple(_piece_from_json(document) for document in _listed(documents, "pieces"))
    files = [piece.file for piece in pieces]
    if len(set(files)) != len(files):
        raise ValueError("a piece is listed twice")
    return pieces


def _piece_from_json(document: Any) -> Piece:
    file, digest = _string(document["file"], "file"), _string(document["digest"], "digest")
    if not safe_path(file):
        raise ValueError(f"{file!r} is not a path inside the checkpoint")
    if not _DIGEST.fullmatch(digest):
        raise ValueError(f"{digest!r} is not a digest")
    contents = document.get("contents")
    return Piece(
        file=file,
        size=_natural(document["size"], "size"),
        digest=digest,
        kind=_string(document["kind"], "kind"),
        shard=_string(document["shard"], "shard"),
        writer=Rank(_integer(document["writer"], "writer")),
        table="" if contents is None else json.dumps(contents, sort_keys=True, separators=(",", ":")),
    )


def _ranks(values: Any, name: str) -> tuple[Rank, ...]:
    return tuple(Rank(_natural(value, name)) for value in _listed(values, name))


def _listed(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"{name} is {value!r:.60}, not a list")
    return value


def _string(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{name} is {value!r:.60}, not a text")
    return value


def _integer(value: Any, name: str) -> int:
    if type(value) is not int:
        raise TypeError(f"{name} is {value!r:.60}, not a whole number")
    if abs(value) > _NUMBER_MAX:
        raise ValueError(f"{name} is a number of {value.bit_length()} bits")
    return value


def _world_size(value: Any) -> int:
    if _natural(value, "world_size") > WORLD_SIZE_MAX:
        raise ValueError(f"world_size is {value}, more than {WORLD_SIZE_MAX}")
    return int(value)


def _natural(value: Any, name: str) -> int:
    if _integer(value, name) < 0:
        raise ValueError(f"{name} is {value}, less than 0")
    return int(value)
