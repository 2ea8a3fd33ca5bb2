"""Finds the checkpoints that one rank can restore, and checks the one that all ranks agreed on before it is loaded."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from ttp.core.layout import Version
from ttp.core.restore_choice import fallback_note, none_whole_note
from ttp.core.restore_messages import Candidate, Reading
from ttp.errors import CheckpointError, RestoreError
from ttp.store.catalog import CatalogEntry, find_whole, scan
from ttp.store.held import Held
from ttp.store.history import Launch, read_launches
from ttp.store.manifest import MANIFEST, Manifest, manifest_digest
from ttp.store.share import NOTHING, WHOLE, Share, everything
from ttp.store.verify import verify_checkpoint

if TYPE_CHECKING:
    from ttp.config import RankEnv

log = logging.getLogger("ttp.store")

CLOCKS_S = 60.0
"""Seconds by which the clock of the storage may be behind."""


@dataclass(frozen=True, slots=True)
class Found:
    """The checkpoints that one rank can restore.

    Args:
        candidates: the checkpoints, newest first.
        skipped: why checkpoints were skipped; also a note of the candidates in the fallback directory.
        verified: candidates whose digests this rank recomputed for its share.
        where: the path of each candidate, as all directories use the same names.
        readings: the share of each candidate that this rank reads, in the order of ``candidates``.
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

    This rank's share of the newest whole checkpoint is read. Older ones, which are rarely chosen, are offered without
    reading if their files have the right sizes; an older one that is chosen after all is read before it is loaded.

    A directory that cannot be listed is skipped, with the reason, if another one has a whole checkpoint.

    Args:
        save_dir: the preferred directory.
        fallback_dir: the fallback directory, if there is one.
        share: returns this rank's share of the reading in a directory.
        older: also read this rank's share of older checkpoints.
        later: read no piece now, because the chosen checkpoint is read and verified completely when it is loaded.

    Raises:
        CheckpointError: a directory cannot be listed, or the log of its launches cannot be read, and no whole
            checkpoint is known.
    """
    search = _Search(share, older)
    memory = Held.of(save_dir)
    others = fallback_dir, memory.memory if memory.usable else None
    directories = [save_dir, *filter(None, others)]
    for directory in directories:
        search.look(directory)
    if later:
        search.shares = dict.fromkeys(search.offers, WHOLE)
    else:
        search.read_newest()
    if search.newest is None and not (later and any(search.offers.values())):
        if search.unlisted:
            raise search.unlisted[0]
        return Found(skipped=(*search.skipped, *_none_whole(search.entries)))
    where = search.places()
    candidates = sorted(where, key=lambda c: (c.version, c in search.verified), reverse=True)
    in_fallback = [c for c in candidates if where[c].parent == fallback_dir]
    notes = [fallback_note(str(fallback_dir), in_fallback)] if in_fallback else []
    readings = tuple(_reading(where[c], search.share_read(c, where[c].parent)) for c in candidates)
    return Found(tuple(candidates), (*search.skipped, *notes), frozenset(search.verified), where, readings)


def _none_whole(entries: Mapping[Path, Iterable[CatalogEntry]]) -> list[str]:
    """Return a note if there are checkpoints in these directories, of which none is whole.

    A directory with a checkpoint's name but without a manifest is one if a launch has committed it.
    """
    named = [entry for entry in chain.from_iterable(entries.values()) if entry.version]
    found = [entry for entry in named if entry.kind == "checkpoint"]
    if foreign := [entry for entry in named if entry.kind == "foreign"]:
        committed = {Path(launch.path).name for directory in entries for launch in read_launches(directory)}
        found += [entry for entry in foreign if entry.path.name in committed]
    newest = max((entry.version or Version(0) for entry in found), default=Version(0))
    return [none_whole_note(newest)] if newest else []


def _reading(checkpoint: Path, share: Share) -> Reading:
    """Return the report of this rank's share. The manifest's times distinguish a shared file from copies of it."""
    try:
        status = (checkpoint / MANIFEST).stat()
    except OSError:
        return Reading("", share.index, share.count)
    return Reading(f"{status.st_mtime_ns}.{status.st_ctime_ns}", share.index, share.count)


@dataclass(slots=True)
class _Search:
    """A search through several directories; the first is preferred if two have the same checkpoint."""

    share: Callable[[Path], Share]
    older: bool
    offers: dict[Path, list[Candidate]] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    verified: list[Candidate] = field(default_factory=list)
    unlisted: list[CheckpointError] = field(default_factory=list)
    shares: dict[Path, Share] = field(default_factory=dict)
    entries: dict[Path, list[CatalogEntry]] = field(default_factory=dict)
    """What is in each directory, so that no manifest is parsed twice: one of ten thousand pieces takes seconds."""

    @property
    def newest(self) -> Candidate | None:
        return max(self.verified, key=lambda c: c.version, default=None)

    def look(self, directory: Path) -> None:
        """List the checkpoints in ``directory`` that are whole by their names, manifests and sizes."""
        try:
            self.entries[directory] = entries = scan(directory)
            self.offers[directory], _ = find_whole(directory, deep=False, entries=entries)
        except CheckpointError as problem:
            self.unlisted.append(problem)
            self.skipped.append(str(problem))

    def read_newest(self) -> None:
        """Read the newest checkpoint of each directory, as long as it may be newer than the newest one read so far."""
        listed = [candidate for offered in self.offers.values() for candidate in offered]
        twofold = len(set(listed)) < len(listed)  # ranks may read different copies, so each rank reads all of one
        for directory, offered in sorted(self.offers.items(), key=lambda item: -_version(item[1])):
            share = self.shares[directory] = WHOLE if twofold else self.share(directory)
            every = self.older and share != WHOLE
            if not every and (newest := self.newest) is not None and newest.version >= _version(offered):
                newer = [entry for entry in self.entries[directory] if (entry.version or 0) > newest.version]
                self.skipped += find_whole(directory, deep=False, entries=newer)[1]
                continue
            enough = None if every else 1
            whole, reasons = find_whole(directory, enough=enough, share=share, entries=self.entries[directory])
            self.skipped += reasons
            self.verified += whole
            unread = [c for c in offered if whole and c.version < whole[0].version] if not every else []
            self.offers[directory] = [*whole, *unread]

    def share_read(self, candidate: Candidate, directory: Path) -> Share:
        """Return the share that this rank has read, or reads before loading; a rank that does not share reads all."""
        share = self.shares[directory]
        return share if share == WHOLE or candidate in self.verified else NOTHING

    def places(self) -> dict[Candidate, Path]:
        """Return the path of each offered checkpoint, in the preferred directory if two have it."""
        places: dict[Candidate, Path] = {}
        for directory, offered in self.offers.items():
            for candidate in offered:
                places.setdefault(candidate, directory / candidate.name)
        return places


def _version(offered: list[Candidate]) -> int:
    return offered[0].version if offered else -1


def check_chosen(checkpoint: Path, chosen: Candidate, *, already_verified: bool, share: Share = WHOLE) -> None:
    """Check that ``checkpoint`` is the one that the ranks agreed on, and that ``share`` of it is whole.

    Args:
        checkpoint: path of the checkpoint.
        chosen: the candidate that the ranks agreed on.
        already_verified: whether this rank has verified it; then no piece is read.
        share: the part of the pieces to read.

    Raises:
        RestoreError: one of the two is not so; the text says what is wrong.
    """
    if manifest_digest(checkpoint) != chosen.manifest_digest:
        raise RestoreError(f"{checkpoint} is not the checkpoint that the ranks agreed on: its manifest has changed")
    problems = [] if already_verified else verify_checkpoint(checkpoint, share=share)
    if problems:
        raise RestoreError(f"the ranks agreed on {checkpoint}, which is not whole here: {'; '.join(problems[:5])}")


def checkpoint_bytes(checkpoint: Path) -> int:
    """Return the bytes of all pieces of a checkpoint, from its manifest; 0 if the manifest cannot be read."""
    found = Manifest.load_or_none(checkpoint)
    return 0 if found is None else found.size


def warn_of_new_beginning(save_dir: Path, env: RankEnv, began_in: str, began_unix_s: float) -> None:
    """Warn, on the first rank, that a restart has found no checkpoint, or that one may not find any.

    Args:
        save_dir: the directory without checkpoints.
        env: the place of this rank.
        began_in: the working directory of the program when it began; empty: not known.
        began_unix_s: when that was.
    """
    if env.rank:
        return
    if not env.launch:
        with contextlib.suppress(OSError):  # the working directory was removed
            inside = began_in and save_dir.is_relative_to(now := Path.cwd()) and now != Path(began_in)
            if inside and _is_new(now, began_unix_s):
                log.warning(
                    "the program has changed its working directory from %s to %s, which is new, and save_dir is in "
                    "there (%s). If each launch changes to another one (hydra.job.chdir), a restart finds no "
                    "checkpoint, and begins with step 1: give an absolute save_dir, the same at each start",
                    began_in,
                    now,
                    save_dir,
                )
        return
    log.warning(
        "start %s of this job finds no checkpoint in %s: training begins with step 1. %s",
        env.launch + 1,
        save_dir,
        _before(save_dir, env),
    )


def _before(save_dir: Path, env: RankEnv) -> str:
    """Return, as a sentence, why a restart may find no checkpoint."""
    own: list[Launch] = []
    with contextlib.suppress(CheckpointError):
        own = [launch for launch in read_launches(save_dir) if launch.run_id == env.run_id]
    if own and own[-1].code is None and own[-1].incarnation > env.launch:
        own.pop()  # this launch
    if not own:
        return (
            "If the job has saved before, save_dir had another name then: give it one that is the same at each start, "
            "without a time in it"
        )
    if own[-1].version is not None:
        return f"But the launch before saved version {own[-1].version} here: was it moved or removed?"
    ended = ", and has not recorded its end" if own[-1].code is None else f": {own[-1].text}"
    return f"The launch before saved nothing here{ended}"


def _is_new(directory: Path, unix_s: float) -> bool:
    """Return whether nothing in ``directory`` is clearly older than ``unix_s``, so that this launch has made it."""
    return all(entry.lstat().st_mtime > unix_s - CLOCKS_S for entry in directory.iterdir())


def warn_of_lost_steps(found: tuple[Candidate, ...], chosen: Candidate) -> None:
    """Warn that other ranks lack the newest checkpoint that this rank found, so the job goes back further."""
    if found and found[0].version > chosen.version:
        log.warning(
            "this rank could restore step %s, but another rank could not (its log says why): the job goes back to "
            "step %s. The steps between them are trained again; to avoid that, stop now and repair the newer "
            "checkpoint, or make it visible to all hosts",
            found[0].version,
            chosen.version,
        )
