"""Finds what one rank can restore, and checks the checkpoint that all ranks agreed on before it is loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ttp.core.restore_choice import fallback_note
from ttp.core.restore_messages import Candidate, Reading
from ttp.errors import CheckpointError, RestoreError
from ttp.store.catalog import find_whole
from ttp.store.held import Held
from ttp.store.manifest import MANIFEST, load_with_digest, manifest_digest
from ttp.store.share import NOTHING, WHOLE, Share, everything
from ttp.store.verify import verify_checkpoint


@dataclass(frozen=True, slots=True)
class Found:
    """What one rank can restore.

    Args:
        candidates: newest first.
        skipped: what was not taken and why; also which candidates lie in the fallback directory.
        verified: candidates of which every digest of the share was recomputed.
        where: the checkpoint of each candidate. Both directories use the same names.
        readings: what is read of each candidate, in their order.
    """

    candidates: tuple[Candidate, ...] = ()
    skipped: tuple[str, ...] = ()
    verified: frozenset[Candidate] = frozenset()
    where: Mapping[Candidate, Path] = field(default_factory=dict)
    readings: tuple[Reading, ...] = ()


def look_back(
    save_dir: Path,
    fallback_dir: Path | None = None,
    share: Callable[[Path], Share] = everything,
    *,
    older: bool = False,
    later: bool = False,
) -> Found:
    """Find the whole checkpoints in ``save_dir``, in the fallback directory and in memory, the newest first.

    Of the newest whole checkpoint the share is read. Older ones, which are hardly ever chosen, are offered when their
    files have the promised sizes; if one is chosen after all, its shares are read then (``older``), or all of it.

    A directory that cannot be listed is skipped, with the reason, when something whole lies in the other one: that is
    what a fallback is for.

    Args:
        save_dir: the first place to look at.
        fallback_dir: the second.
        share: of the reading in a directory that is this rank's.
        older: read the share of older ones too.
        later: read nothing now: whoever needs what is in the chosen one reads and verifies all of it then.

    Raises:
        CheckpointError: a directory cannot be listed, and nothing whole is known.
    """
    search = _Search(share, older)
    memory = Held.of(save_dir)
    places = fallback_dir, memory.memory if memory.usable else None
    for directory in (Path(save_dir), *(Path(place) for place in places if place is not None)):
        search.look(directory)
    if later:
        search.shares = dict.fromkeys(search.offers, WHOLE)
    else:
        search.read_newest()
    if search.newest is None and not (later and any(search.offers.values())):
        if search.unlisted:
            raise search.unlisted[0]
        return Found(skipped=tuple(search.skipped))
    where = search.places()
    candidates = sorted(where, key=lambda c: (c.version, c in search.verified), reverse=True)
    in_fallback = [c for c in candidates if where[c].parent == fallback_dir]
    notes = [fallback_note(str(fallback_dir), in_fallback)] if in_fallback else []
    readings = tuple(_reading(where[c], search.share_read(c, where[c].parent)) for c in candidates)
    return Found(tuple(candidates), (*search.skipped, *notes), frozenset(search.verified), where, readings)


def _reading(checkpoint: Path, share: Share) -> Reading:
    """What is said of a share. Times of the manifest tell one shared file, seen by all hosts, from copies of it."""
    try:
        status = (checkpoint / MANIFEST).stat()
    except OSError:
        return Reading("", share.index, share.count)
    return Reading(f"{status.st_mtime_ns}.{status.st_ctime_ns}", share.index, share.count)


@dataclass(slots=True)
class _Search:
    """A search through several directories; the first is preferred where both have the same checkpoint."""

    share: Callable[[Path], Share]
    older: bool
    offers: dict[Path, list[Candidate]] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    verified: list[Candidate] = field(default_factory=list)
    unlisted: list[CheckpointError] = field(default_factory=list)
    shares: dict[Path, Share] = field(default_factory=dict)

    @property
    def newest(self) -> Candidate | None:
        return max(self.verified, key=lambda c: c.version, default=None)

    def look(self, directory: Path) -> None:
        """Look at names and sizes."""
        try:
            self.offers[directory], _ = find_whole(directory, deep=False)
        except CheckpointError as problem:
            self.unlisted.append(problem)
            self.skipped.append(str(problem))

    def read_newest(self) -> None:
        """Read what may be the newest whole one; go on as long as a newer one may lie elsewhere."""
        listed = [candidate for offered in self.offers.values() for candidate in offered]
        twofold = len(set(listed)) < len(listed)  # one rank may judge this copy and another one that: each reads all
        for directory, offered in sorted(self.offers.items(), key=lambda item: -_version(item[1])):
            share = self.shares[directory] = WHOLE if twofold else self.share(directory)
            every = self.older and share != WHOLE
            if not every and self.newest is not None and self.newest.version >= _version(offered):
                continue
            whole, reasons = find_whole(directory, enough=None if every else 1, share=share)
            self.skipped += reasons
            self.verified += whole
            unread = [c for c in offered if whole and c.version < whole[0].version] if not every else []
            self.offers[directory] = [*whole, *unread]

    def share_read(self, candidate: Candidate, directory: Path) -> Share:
        """What this rank has read of it, or reads before it loads it: a rank that shares with nobody reads all."""
        share = self.shares[directory]
        return share if share == WHOLE or candidate in self.verified else NOTHING

    def places(self) -> dict[Candidate, Path]:
        """Where the offers lie; what is in two places is taken from the preferred one."""
        places: dict[Candidate, Path] = {}
        for directory, offered in self.offers.items():
            for candidate in offered:
                places.setdefault(candidate, directory / candidate.name)
        return places


def _version(offered: list[Candidate]) -> int:
    return offered[0].version if offered else -1


def check_chosen(checkpoint: Path, chosen: Candidate, *, already_verified: bool, share: Share = WHOLE) -> None:
    """Make sure that ``checkpoint`` is what the ranks agreed on, and that ``share`` of it is whole.

    Raises:
        RestoreError: it is not; the text says what is wrong.
    """
    if manifest_digest(checkpoint) != chosen.manifest_digest:
        raise RestoreError(f"{checkpoint} is not the checkpoint that the ranks agreed on: its manifest has changed")
    problems = [] if already_verified else verify_checkpoint(checkpoint, share=share)
    if problems:
        raise RestoreError(f"the ranks agreed on {checkpoint}, which is not whole here: {'; '.join(problems[:5])}")


def checkpoint_bytes(checkpoint: Path) -> int:
    """Bytes of the pieces of a checkpoint, as its manifest says; 0: it cannot be read any more."""
    try:
        return sum(piece.size for piece in load_with_digest(checkpoint)[0].pieces)
    except CheckpointError:
        return 0
