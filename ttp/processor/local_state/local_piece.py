"""Rank-local state in a checkpoint: one piece per host, collected from the pages by one rank of the host."""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ttp.core.layout import Rank
from ttp.core.messages import Piece
from ttp.errors import CheckpointError, ToldAs
from ttp.processor.local_state.mirror import read_page_or_kept
from ttp.processor.local_state.page_reader import read_early
from ttp.store.encoding import EncodingError, decode, encode
from ttp.store.json_text import parse_json
from ttp.store.piece_file import write_piece
from ttp.store.plain_file import read_plain

log = logging.getLogger("ttp.processor")

LOCAL_KIND = "rank_local"

Change = tuple[str, str]
"""Digests of an object's state before and after an update. ``before`` is empty if it is unknown, and ``after`` if the
rank died in the update."""

Changes = Mapping[str, Mapping[Change, list[int]]]
"""How an update has changed each object, by name, with the ranks where it did so."""

Digests = Callable[[bytes, bool], Mapping[str, str]]
"""Returns a digest of the state of each object in an image, by name. The flag: the rank has finished the version, and
the image is from before; states with which that of a dead rank must not be compared are left out then."""


@dataclass(frozen=True, slots=True)
class Pages:
    """The pages of a host that could be read.

    Args:
        data: the image of each rank that has a page of the wanted version.
        provisional: ranks that died before they had finished the version; their pages hold the state before the update.
        missing: why a rank has no page.
        changes: how the update has changed each object. A rank that finished the update is listed for its state at the
            gate and for an earlier one, if both are left: a rank that died between the two is compared with the earlier
            one.
    """

    data: dict[Rank, bytes]
    provisional: tuple[Rank, ...]
    missing: dict[Rank, str]
    changes: Changes = field(default_factory=dict)


def collect(
    page_dir: Path, ranks: Iterable[Rank], version: int, incarnation: int, digests: Digests | None = None
) -> Pages:
    """Read the pages of these ranks, alive or dead, of this host or kept for another one.

    Args:
        page_dir: directory of the job on this host.
        ranks: the ranks whose pages to read.
        version: the version to read.
        incarnation: launch of the job.
        digests: looks into an image; None: the changes of objects are not recorded.
    """
    data: dict[Rank, bytes] = {}
    changes: dict[str, dict[Change, list[int]]] = {}
    provisional: list[Rank] = []
    missing: dict[Rank, str] = {}
    for rank in ranks:
        page = read_page_or_kept(page_dir, rank, version, incarnation)
        if isinstance(page, str):
            missing[rank] = page
            log.warning("the rank-local state of rank %s cannot be saved: %s", rank, page)
            continue
        data[rank] = page.data
        if not page.final:
            provisional.append(rank)
        if digests is not None:
            early = read_early(page_dir, rank, version, incarnation) if page.final else [page.data]
            before = [digests(image, page.final) for image in early] or [{}]
            for name, digest in digests(page.data, False).items():
                for old in sorted({states.get(name, "") for states in before}):
                    change = old, digest if page.final else ""
                    changes.setdefault(name, {}).setdefault(change, []).append(int(rank))
    return Pages(data, tuple(provisional), missing, changes)


def write_local_piece(draft: Path, file: str, pages: Pages, writer: Rank) -> Piece:
    """Write the pages to ``draft/file``, durably.

    Raises:
        OSError: the disk refused.
    """
    table = {
        "ranks": sorted(pages.data),
        "provisional": sorted(pages.provisional),
        "missing": {str(rank): why for rank, why in sorted(pages.missing.items())},
        "changes": {name: [[*change, ranks] for change, ranks in by.items()] for name, by in pages.changes.items()},
    }
    data = encode({int(rank): image for rank, image in pages.data.items()})
    return write_piece(draft, file, data, LOCAL_KIND, writer, table=json.dumps(table))


def read_local_image(path: Path, pieces: Sequence[Piece], rank: int) -> bytes | None:
    """Return the page of ``rank`` that the checkpoint at ``path`` keeps, as its adapter wrote it; None: there is none.

    Raises:
        CheckpointError: a piece cannot be read.
    """
    for piece in pieces:
        if piece.kind != LOCAL_KIND or rank not in _listed(piece, "ranks", list, [rank]):
            continue
        with ToldAs(CheckpointError, f"{path / piece.file} cannot be read", OSError, EncodingError):
            images = decode(read_plain(path / piece.file))
        if isinstance(images, dict) and isinstance(images.get(rank), bytes):
            return bytes(images[rank])
    return None


def is_provisional(pieces: Sequence[Piece], rank: int) -> bool:
    """Return whether ``rank`` died before it had finished the version, so that its page holds the state before it."""
    return any(piece.kind == LOCAL_KIND and rank in _listed(piece, "provisional", list, []) for piece in pieces)


class UpdateChanges:
    """How the last update has changed the objects, on the ranks whose pages are in a checkpoint.

    The methods take the name of an object. A state that was not saved, or is not of the form that is written, is as if
    nothing were known of it.

    Args:
        pieces: the pieces of the checkpoint.
    """

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._of: defaultdict[str, list[tuple[str, str, list[int]]]] = defaultdict(list)  # digests, and the ranks
        tables = [_listed(piece, "changes", dict, {}) for piece in pieces if piece.kind == LOCAL_KIND]
        self.names = sorted({name for table in tables for name in table})
        """The names of the objects whose changes are known."""
        for name, entries in (item for table in tables for item in table.items()):
            for entry in entries if isinstance(entries, list) else ():
                match entry:
                    case [str(before), str(after), [*ranks]] if ranks and all(isinstance(rank, int) for rank in ranks):
                        self._of[name].append((before, after, ranks))

    def lender(self, name: str, rank: int, replicas: Collection[int]) -> int | None:
        """Return a replica whose state of the object is right for ``rank`` too, which saved none after the update.

        The replicas whose state was equal to that of ``rank`` before the update tell what the update has made of it, if
        they all agree. If the state of ``rank`` was not saved at all, all replicas are asked.

        Args:
            name: name of the object.
            rank: the rank without a state.
            replicas: the ranks that hold the same shards as ``rank``: the state may be that of a shard.

        Returns:
            The replica; None: there is none, or they disagree.
        """
        own = next((before for before, _, ranks in self._of[name] if rank in ranks), None)
        fitting = [(after, ranks) for before, after, ranks in self._of[name] if after and own in (None, before)]
        states = {other: after for after, ranks in fitting for other in ranks if other in replicas}
        return min(states) if len({*states.values()}) == 1 else None

    def leveller(self, name: str, replicas: Collection[int]) -> int | None:
        """Return a replica whose state of the object is right for any of ``replicas`` that saved none after the update.

        So it is if the update has made different states equal, on each replica that finished it: counts of an
        iteration, for example, that are set to zero. None: it is not so.
        """
        finished = [(before, after, r) for before, after, ranks in self._of[name] if after for r in ranks]
        known = [(before, after, r) for before, after, r in finished if r in replicas]
        befores, afters = {before for before, _, _ in known}, {after for _, after, _ in known}
        levelled = len(afters) == 1 < len(befores) and "" not in befores and befores.isdisjoint(afters)
        return min(r for _, _, r in known) if levelled else None

    def moves(self, name: str) -> set[bool]:
        """Return whether the update has changed the object, for all ranks that finished it; empty: nothing is known."""
        return {before != after for before, after, _ in self._of[name] if after}

    def is_alone(self, name: str, rank: int) -> bool:
        """Return whether the object may be one that only ``rank`` changes: the others do not tell what it became.

        That is so if it was equal on several others before the update, and another one on ``rank``; or if what it was
        there is not known.
        """
        own = {before for before, _, ranks in self._of[name] if rank in ranks}
        before = {state for state, after, _ in self._of[name] if after}
        others = {other for _, after, ranks in self._of[name] if after for other in ranks}
        return not own or (len(before) == 1 < len(others) and own.isdisjoint(before))

    def has_changed(self, name: str) -> bool:
        """Return whether, on a rank that finished the update, the object has changed since each state left of it.

        In a version of several backward passes the earlier states of a rank that finished it are those of several
        passes. The last one is what a rank that died in the update has.
        """
        finished = [(before != after, ranks) for before, after, ranks in self._of[name] if after]
        still = {rank for moved, ranks in finished if not moved for rank in ranks}
        return any(moved and not still.issuperset(ranks) for moved, ranks in finished)


def ranks_kept(pieces: Sequence[Piece]) -> list[int]:
    """Return the ranks whose state is in these pieces."""
    kept = [rank for p in pieces if p.kind == LOCAL_KIND for rank in _listed(p, "ranks", list, [])]
    return sorted(rank for rank in kept if isinstance(rank, int))


def not_kept(pieces: Sequence[Piece], world_size: int) -> tuple[Rank, ...]:
    """Return the ranks whose state is not in these pieces."""
    known = set(ranks_kept(pieces))
    return tuple(Rank(rank) for rank in range(world_size) if rank not in known)


def lent(ours: Sequence[Piece], theirs: Sequence[Piece]) -> dict[Rank, Piece]:
    """Return, for each rank whose state is only in ``theirs``, the piece that has it, with a table of such ranks only.

    Args:
        ours: the pieces of a checkpoint.
        theirs: the pieces of another one, of the same version and launch.
    """
    known, found = set(ranks_kept(ours)), {}
    for piece in theirs:
        new = [] if piece.kind != LOCAL_KIND else [rank for rank in ranks_kept([piece]) if rank not in known]
        if new:
            early = [rank for rank in _listed(piece, "provisional", list, []) if rank in new]
            table = {**parse_json(piece.table), "ranks": new, "provisional": early}
            found.update(dict.fromkeys(map(Rank, new), replace(piece, table=json.dumps(table))))
            known.update(new)
    return found


def why_lost(pieces: Sequence[Piece], rank: int) -> str:
    """Return why the state of ``rank`` is not in these pieces."""
    for piece in pieces:
        missing = _listed(piece, "missing", dict, {}) if piece.kind == LOCAL_KIND else {}
        if why := missing.get(str(rank)):
            return str(why)
    return "no rank of its host was left to save it"


def _listed(piece: Piece, name: str, kind: type, absent: Any) -> Any:
    """Return a field of a piece's table; ``absent`` if it is missing or not of type ``kind``."""
    try:
        table = parse_json(piece.table or "{}")
    except ValueError:
        return absent
    found = table.get(name) if isinstance(table, dict) else None
    return found if isinstance(found, kind) else absent
