"""Lists a ``save_dir``, finds the checkpoints that can be restored, and removes those that are too old.

A directory that cannot be read is never removed: it may belong to another program or a newer ttp, or become readable
later.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ttp.core.layout import Version
from ttp.core.restore_choice import NOT_TRIED
from ttp.core.restore_messages import Candidate
from ttp.errors import CheckpointError
from ttp.store import history, names, verify
from ttp.store.digest import Progress
from ttp.store.disk import Disk
from ttp.store.manifest import MANIFEST, ForeignCheckpointError, Manifest, load_with_digest
from ttp.store.room import Room
from ttp.store.share import WHOLE, Share
from ttp.store.walk import ATTEMPTS, NotTriedError, walk_back

_log = logging.getLogger("ttp.store")

SKIPPED_MAX = 50
"""Most reasons that are listed: a save_dir may hold many thousand directories that are no checkpoints."""

_read: set[tuple[Path, int]] = set()
"""Checkpoints that ``prune`` has read in this process and found whole, with the times of change of manifests in ns."""

Contents = dict[tuple[Version, str], list[tuple[Path, int, int]]]
"""Of each draft, by version and incident: each path with its size in bytes and its time of change in ns."""

Kind = Literal["checkpoint", "draft", "superseded", "foreign"]


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """One entry of a ``save_dir``.

    Args:
        path: the path of the entry.
        version: the version in its name; None if there is none.
        kind: ``checkpoint``: has a checkpoint's name and a manifest, even a damaged one. ``draft``: is being written or
            removed, or was left over from that. ``superseded``: its name was taken by another checkpoint of the same
            version. ``foreign``: not made by ttp; it has a version if it has a checkpoint's name.
        manifest: the manifest; None if there is none or it cannot be read.
        problem: why it is not whole, as far as names, manifest and sizes show; None for a whole checkpoint and for
            drafts.
        manifest_digest: digest of the manifest's file; empty without a manifest.
    """

    path: Path
    version: Version | None
    kind: Kind
    manifest: Manifest | None = None
    problem: str | None = None
    manifest_digest: str = ""

    @property
    def whole(self) -> bool:
        """Return whether this is a checkpoint, under its own or a superseded name, without a known problem."""
        return self.kind in ("checkpoint", "superseded") and self.problem is None


def scan(save_dir: Path) -> list[CatalogEntry]:
    """Return the entries of ``save_dir``, newest first and those without a version last; not the incidents' directory.

    Reads manifests and compares sizes, but reads no piece. A ``save_dir`` that does not exist counts as empty.

    Raises:
        CheckpointError: ``save_dir`` cannot be listed.
    """
    try:
        found = Disk().names(save_dir)
    except FileNotFoundError:
        return []
    except OSError as problem:
        raise CheckpointError(f"cannot list {save_dir}: {problem.strerror or problem}") from problem
    ours = (n for n in found if n != names.INCIDENTS and not n.startswith(names.PROBE_PREFIX))
    return sorted((look(save_dir / name) for name in ours), key=_newest_first)


def find_whole(
    save_dir: Path,
    *,
    attempts: int = ATTEMPTS,
    deep: bool = True,
    enough: int | None = None,
    progress: Progress | None = None,
    share: Share = WHOLE,
    entries: list[CatalogEntry] | None = None,
) -> tuple[list[Candidate], list[str]]:
    """Walk back from the newest checkpoint; return the whole ones, newest first, and why others were skipped.

    Deletes nothing. Each manifest and each piece is read at most once, and pieces only up to the first bad one.

    Args:
        save_dir: the directory of the checkpoints.
        attempts: how many checkpoints with a readable manifest to try.
        deep: whether to recompute the digest of every piece; otherwise only sizes are compared.
        enough: stop after this number of whole ones; None: only ``attempts`` limits.
        progress: called with the number of bytes newly read.
        share: the part of the pieces to read; other ranks read the rest. The sizes of all pieces are compared.
        entries: what ``scan`` has just returned; None: it is called.

    Raises:
        CheckpointError: ``save_dir`` cannot be listed.
    """
    entries = scan(save_dir) if entries is None else entries

    def open_one(entry: CatalogEntry) -> Candidate:
        manifest = sound(entry, progress, share) if deep else _promising(entry)
        return Candidate(manifest.version, entry.manifest_digest, entry.path.name)

    newest_first = list(restorable(entries))
    whole, skipped = walk_back(newest_first, open_one, attempts=attempts, enough=enough)
    if not whole and len(skipped) < len(newest_first):
        skipped.append(NOT_TRIED)
    return whole, _first(skipped + _unfinished(entries, whole))


def newest_whole(directory: Path, progress: Progress | None = None) -> tuple[Path, list[str]]:
    """Return the newest whole checkpoint of a ``save_dir``, and why newer ones were skipped.

    Raises:
        CheckpointError: there is none, or ``directory`` cannot be listed.
    """
    whole, skipped = find_whole(directory, enough=1, progress=progress)
    if not whole:
        raise CheckpointError("; ".join([f"there is no whole checkpoint in {directory}", *skipped]))
    return directory / whole[0].name, skipped


def sound(
    entry: CatalogEntry, progress: Progress | None = None, share: Share = WHOLE, *, fresh: bool = False
) -> Manifest:
    """Return the manifest of a checkpoint after recomputing its digests.

    Args:
        entry: the checkpoint.
        progress: called with the number of bytes newly read.
        share: the part of the pieces to read.
        fresh: see ``plain_file.chunks``.

    Raises:
        CheckpointError: the checkpoint is not whole; the text begins with its name.
        NotTriedError: it has no readable manifest, so no piece was read.
    """
    manifest = _promising(entry)
    for problem in verify.piece_problems(entry.path, manifest, progress, share, fresh=fresh):
        raise CheckpointError(f"{entry.path.name}: {problem}")
    return manifest


def _promising(entry: CatalogEntry) -> Manifest:
    if entry.manifest is None:
        raise NotTriedError(f"{entry.path.name}: {entry.problem}")
    if entry.problem is not None:
        raise CheckpointError(f"{entry.path.name}: {entry.problem}")
    return entry.manifest


def _first(reasons: list[str]) -> list[str]:
    more = len(reasons) - SKIPPED_MAX
    return [*reasons[:SKIPPED_MAX], *([f"and {more} more"] if more > 0 else [])]


def tidy(save_dir: Path, keep: int, newest: str, *, verified: bool) -> list[str]:
    """Remove checkpoints beyond ``keep``, and left-overs, and return the names removed. Never raises.

    At a restart (``verified``) warn if there is no room for another checkpoint then.

    If a checkpoint has to be removed, this takes as long as reading those to keep that no launch has restored and this
    process has not yet read, so no rank should wait for it. It may be interrupted anywhere and called again.

    Args:
        save_dir: the directory that holds the job's checkpoints.
        keep: number of whole checkpoints to keep.
        newest: name of the checkpoint that was committed or restored; it stays.
        verified: whether all digests of ``newest`` have just been verified.
    """
    known = {names.checkpoint_name(version) for version in history.sound_versions(save_dir)} - {newest}
    try:
        removed = prune(save_dir, keep, {newest}, Disk(), verified=known | ({newest} if verified else set()))
    except (OSError, CheckpointError, RecursionError) as problem:
        _log.warning("old files in %s could not be removed: %s", save_dir, str(problem))
        return []
    left = [name for name in removed if names.is_draft(name)]
    if old := [name for name in removed if name not in left]:
        _log.info("removed old checkpoints: %s", ", ".join(old))
    if left:
        _log.info("removed directories that interrupted saves or removals had left: %d", len(left))
    if verified:
        with contextlib.suppress(OSError, CheckpointError):  # the next checkpoint is about as large as this one
            Room.of(save_dir).check(Manifest.load(save_dir / newest).size)
    return removed


def drafts_left(save_dir: Path) -> Contents:
    """Return what the drafts in ``save_dir`` contain, by version and incident.

    If a draft has a manifest, only its name is missing: those of its incident are left out, as it may be the last copy.

    Raises:
        OSError: ``save_dir`` or a draft cannot be read.
    """
    found: Contents = {}
    whole, disk = set(), Disk()
    for name in disk.names(save_dir):
        draft, path = names.parse_draft_name(name), save_dir / name
        if draft is not None and not path.is_symlink():
            directories, files = disk.tree(path)
            states = ((inside, inside.lstat()) for inside in sorted([*directories, *files]))
            found.setdefault(draft, []).extend((inside, s.st_size, s.st_mtime_ns) for inside, s in states)
            whole |= {draft} if path / MANIFEST in files else set()
    return {draft: contents for draft, contents in found.items() if contents and draft not in whole}


def remove_unchanged(save_dir: Path, before: Contents) -> None:
    """Remove the drafts that contain the same as ``before``, which ``drafts_left`` returned. Never raises.

    Call it when that is longer ago than a save may take (``TTP_OT``). No clock is read: those of hosts and storage may
    differ. Each is renamed first, so that a commit from it, however late, fails as a whole.
    """
    try:
        left = [draft for draft, contents in drafts_left(save_dir).items() if before.get(draft) == contents]
        for draft in left:
            for path in [inside for inside, *_ in before[draft] if inside.parent == save_dir]:
                aside = path.rename(save_dir / names.removed_name(draft[0], time.time_ns()))
                Disk().remove_tree(aside)
    except OSError as problem:
        _log.warning("drafts in %s could not be removed: %s", save_dir, problem)
    else:
        _log.log(logging.INFO if left else logging.DEBUG, "removed what %d saves that failed had left", len(left))


def newest_name(save_dir: Path) -> Version:
    """Return the version of the newest checkpoint in ``save_dir``, even a damaged one; 0 if none is there.

    Reads no manifest. A directory that has the name of a checkpoint but no manifest is another program's.

    Raises:
        OSError: ``save_dir`` cannot be listed.
    """
    named = ((names.parse_checkpoint_name(path.name) or Version(0), path) for path in save_dir.iterdir())
    return next((version for version, path in sorted(named, reverse=True) if (path / MANIFEST).exists()), Version(0))


def prune(
    save_dir: Path,
    keep: int,
    protect: Collection[str] = (),
    disk: Disk | None = None,
    *,
    verified: Collection[str] = (),
) -> list[str]:
    """Remove drafts and checkpoints that are too old, and return the names removed.

    Before a checkpoint is removed, those to keep are read with all digests, once in a process. One that is damaged does
    not count, and the next one is read. That takes longer than a restore, so no rank should wait for this function.

    Too old are whole checkpoints beyond the ``keep`` newest, superseded ones older than all that stay, and drafts older
    than the newest whole checkpoint and than those in ``protect`` (a draft of that version or newer may still be
    written). Never removed: the last whole checkpoint, entries that cannot be read, foreign entries, and the names in
    ``protect``.

    Each is renamed to a draft before it is deleted, so that a half-deleted checkpoint never looks whole.

    Args:
        save_dir: the directory of the checkpoints.
        keep: number of whole checkpoints to keep, at least 1.
        protect: names in ``save_dir`` that stay.
        disk: makes the disk calls.
        verified: names of checkpoints whose digests have been verified; they are not read.

    Raises:
        CheckpointError: ``save_dir`` cannot be listed.
        OSError: an entry could not be renamed, and the next call deletes those that were renamed before; or one could
            not be deleted, and the others were.
    """
    disk = disk or Disk()
    victims = list(_too_old(scan(save_dir), max(keep, 1), protect, lambda e: e.path.name in verified or _is_sound(e)))
    taken = set(disk.names(save_dir)) if victims else set()
    doomed = [_set_aside(entry, taken, disk) for entry in victims]
    if doomed:
        disk.sync_directory(save_dir)
    problem: OSError | None = None
    for path in doomed:
        try:
            disk.remove_tree(path)
        except OSError as refused:  # such as a file of another user in an old draft
            problem = problem or refused
    if problem is not None:
        raise problem
    return [entry.path.name for entry in victims]


def look(path: Path) -> CatalogEntry:
    """Return the catalog entry of one path in a ``save_dir``. Reads its manifest and compares sizes."""
    name = path.name
    if (draft := names.parse_draft_name(name)) is not None:
        return CatalogEntry(path, draft[0], "draft")
    if (version := names.parse_superseded_name(name)) is not None:
        return _look_inside(path, version, "superseded")
    version = names.parse_checkpoint_name(name)
    if version is None:
        return CatalogEntry(path, None, "foreign", problem="not made by ttp")
    return _look_inside(path, version, "checkpoint")


def _look_inside(path: Path, version: Version, kind: Kind) -> CatalogEntry:
    try:
        manifest, digest = load_with_digest(path)
    except ForeignCheckpointError as problem:
        return CatalogEntry(path, version, "foreign" if kind == "checkpoint" else kind, problem=str(problem))
    except CheckpointError as problem:
        return CatalogEntry(path, version, kind, problem=str(problem))
    problems = verify.name_problems(path, manifest) or verify.size_problems(path, manifest)
    return CatalogEntry(path, version, kind, manifest, "; ".join(problems) or None, digest)


def _newest_first(entry: CatalogEntry) -> tuple[int, str, str]:
    return (-1 if entry.version is None else -entry.version - 2, entry.kind, entry.path.name)


def restorable(entries: list[CatalogEntry]) -> Iterator[CatalogEntry]:
    """Yield the entries that ``restore()`` may try, in the given order.

    These are the directories with a checkpoint's name. A superseded checkpoint is one of them if no checkpoint has its
    name: then the commit that should have replaced it was cut off.
    """
    published = {entry.version for entry in entries if entry.kind == "checkpoint"}
    for entry in entries:
        named = entry.kind in ("checkpoint", "foreign") and entry.version is not None
        if named or (entry.kind == "superseded" and entry.version not in published):
            yield entry


def _unfinished(entries: list[CatalogEntry], whole: list[Candidate]) -> list[str]:
    """Return why drafts newer than the newest of ``whole`` are not restored, as users ask about these steps."""
    newest = whole[0].version if whole else -1
    drafts = [e for e in entries if e.kind == "draft" and e.version is not None and e.version > newest]
    return [f"{entry.path.name}: a draft, never committed" for entry in drafts]


def _too_old(
    entries: list[CatalogEntry], keep: int, protect: Collection[str], is_sound: Callable[[CatalogEntry], bool]
) -> Iterator[CatalogEntry]:
    whole = [entry for entry in entries if entry.kind == "checkpoint" and entry.whole]
    bases = [*whole[:1], *(entry for entry in whole if entry.path.name in protect)]
    newest = min(map(_version, bases), default=-1)  # a job that could not restore a later one saves older versions
    sound = 0
    while _aged(entries, whole, keep) and sound < min(keep, len(whole)):
        if is_sound(whole[sound]):
            sound += 1
        else:
            del whole[sound]
    aged = _aged(entries, whole, keep)
    for entry in entries:
        stale = entry.kind == "draft" and _version(entry) < newest
        if (stale or entry in aged) and entry.path.name not in protect and not entry.path.is_symlink():
            yield entry


def _aged(entries: list[CatalogEntry], whole: list[CatalogEntry], keep: int) -> list[CatalogEntry]:
    """Return the whole entries that are older than the ``keep`` newest of ``whole``; none if ``whole`` is empty."""
    oldest_kept = _version(whole[:keep][-1]) if whole else -1
    return [entry for entry in entries if entry.whole and _version(entry) < oldest_kept]


def _is_sound(entry: CatalogEntry) -> bool:
    if (key := (entry.path, (entry.path / MANIFEST).stat().st_ctime_ns)) not in _read:
        try:
            sound(entry, fresh=True)  # the page cache does not show what happened on the way to the disk
        except (CheckpointError, NotTriedError) as problem:
            _log.error("an older checkpoint is kept, because a newer one is damaged: %s", problem)
            return False
        _read.add(key)
    return True


def _version(entry: CatalogEntry) -> int:
    return -1 if entry.version is None else entry.version


def _set_aside(entry: CatalogEntry, taken: set[str], disk: Disk) -> Path:
    if entry.kind == "draft":
        return entry.path
    free = next(n for n in range(len(taken) + 1) if names.removed_name(Version(_version(entry)), n) not in taken)
    target = entry.path.with_name(names.removed_name(Version(_version(entry)), free))
    disk.rename(entry.path, target)
    taken.add(target.name)
    return target
