"""The commit: turns the pieces that savers have written into a checkpoint, completely or not at all.

Theory of operation
-------------------
Savers have written pieces into the draft and synced them. One rank, the committer, turns them into a checkpoint. The
order of the steps is the contract: all that the rename makes visible is durable before the rename, so after a power cut
at any moment either the old checkpoint or the new one exists.

1. **Claim.** The committer makes its own directory, ``<draft>@g<generation>-r<rank>``, and hard-links every piece that
   the order lists into it, after checking the piece's size. Pieces that the order does not list stay in the draft.
2. **Finalise.** The adapter adds the framework's own files, such as torch's ``.metadata``.
3. **Manifest.** The manifest is written; then the names of all these files are made durable.
4. **Rename** to the final name, which appears complete or not at all; then the names in ``save_dir`` are made durable.
5. **Check** the directory that now has the final name: its manifest, and the size of every piece. Only then is the
   commit a success, and only then is the draft removed; a failure to remove it does not undo the success.

Checkpoints beyond ``keep`` are removed later, when no rank waits (``catalog.tidy``), and only after the digests of the
new checkpoint have been read back from the storage. So if its bytes were damaged on the way, the last good one stays.

Two committers of one incident may work at the same time, if one was declared lost by mistake. They write no common
file. One of them wins the rename to the final name; the other one finds the checkpoint there and succeeds too. So a
repeated order is harmless as well.

If a checkpoint of another incident has the final name, the two are exchanged atomically, and the old one stays as
``.superseded-step_12-<n>``. If that is of the same launch, the new one first takes over the rank-local state that only
the old one has; but if the old one has all that the new one has, and more, it stays. Where the file system cannot
exchange, two renames are used; a reader between them finds the old checkpoint under that name (``catalog``), and so
does another committer, which takes the state from there. Where the file system cannot link, the pieces are moved.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ttp.core import stripes
from ttp.core.layout import Rank, Shard
from ttp.core.messages import Commit, Piece
from ttp.errors import CheckpointError, ToldAs
from ttp.store import names, verify
from ttp.store.digest import digest_bytes
from ttp.store.disk import OCCUPIED, UNSUPPORTED, Disk
from ttp.store.manifest import MANIFEST, Manifest, safe_path
from ttp.store.plain_file import read_plain

_log = logging.getLogger("ttp.store")

Finalise = Callable[[Path], Sequence[Piece]]
"""Adds framework files to the given directory, durably, and returns them as pieces. It may be called repeatedly."""

Lend = Callable[[Sequence[Piece], Sequence[Piece]], Mapping[Rank, Piece]]
"""Takes the pieces of two checkpoints of one version and launch. Returns, for each rank whose rank-local state only the
second one has, the piece that has it, listed as a piece that has no other state."""


@dataclass(frozen=True, slots=True)
class NewCheckpoint:
    """The checkpoint that an order to commit asks for: the pieces in ``save_dir/order.draft``.

    Args:
        save_dir: the directory that holds the job's checkpoints.
        order: the controller's order; its incident is unique among all jobs that ever used ``save_dir``.
        run_id: the job.
        world_size: number of ranks of the job.
        groups: replica groups of the job; every shard must be in some piece.
        framework: name of the adapter.
        finalise: see ``Finalise``.
        lend: see ``Lend``.
        disk: makes the disk calls.
        manifest: the manifest to write, from a copy of this checkpoint elsewhere; None: it is made from the order.
    """

    save_dir: Path
    order: Commit
    run_id: str
    world_size: int
    groups: Mapping[Shard, Sequence[Rank]]
    framework: str
    finalise: Finalise
    lend: Lend = lambda _ours, _theirs: {}
    disk: Disk = field(default_factory=Disk)
    manifest: Manifest | None = None

    @property
    def final(self) -> Path:
        """The path of the checkpoint."""
        return self.save_dir / names.checkpoint_name(self.order.version)

    def commit(self) -> tuple[Path, int]:
        """Make the checkpoint exist. May be repeated, by this rank or another: one of the same incident is success.

        Returns:
            The checkpoint's path and the bytes of all its pieces.

        Raises:
            CheckpointError: there is no checkpoint: a piece is missing or has another size, the disk refused, or a
                newer incarnation of the job has committed this version. All earlier checkpoints still exist.
        """
        self._check_order()
        with ToldAs(CheckpointError, f"version {self.order.version} cannot be committed", OSError):
            if self._committed() is None:
                self._make()
            self.disk.sync_directory(self.save_dir)  # another rank may have renamed it and died before its sync
        manifest = self._committed()
        if manifest is None:
            raise CheckpointError(f"{self.final} was committed and is damaged now: another program has changed it")
        self._tidy()
        return self.final, manifest.size

    def _check_order(self) -> None:
        draft = self.order.draft
        if names.parse_draft_name(draft) is None or "@" in draft:
            raise CheckpointError(f"{draft!r} is not the name of a draft")
        files = [piece.file for piece in self.order.pieces]
        unsafe = [file for file in files if not safe_path(file)]
        if unsafe or len(set(files)) != len(files):
            raise CheckpointError(f"version {self.order.version} cannot be committed: bad list of pieces {files}")
        absent = stripes.lacking(self.groups.keys(), {Shard(piece.shard) for piece in self.order.pieces})
        if absent:
            raise CheckpointError(f"version {self.order.version} cannot be committed: no piece of shards {absent}")

    def _make(self) -> None:
        claim = self.save_dir / names.claim_name(self.order.draft, self.order.generation, self.order.rank)
        try:
            self._assemble(claim)
            self._publish(claim)
        except Exception as problem:
            if self._committed() is None:
                raise
            # The other rank has removed this rank's claim.
            _log.info("%s was already committed by another rank (here: %s)", self.final, problem)

    # ---------------------------------------------------------------------------------------------------- assembling

    def _assemble(self, claim: Path) -> None:
        self._gather(claim)
        pieces = self._merge(self.finalise(claim))
        if problems := self._size_problems(claim, pieces):
            raise CheckpointError(f"version {self.order.version} cannot be committed: {'; '.join(problems)}")
        directories = self._drop_unlisted(claim, {piece.file for piece in pieces})
        self.disk.write(claim / MANIFEST, (self.manifest or self._manifest(pieces)).to_json().encode())
        for directory in directories:
            self.disk.sync_directory(directory)

    def _gather(self, claim: Path) -> None:
        """Put the ordered pieces into ``claim``; at any time one directory keeps all pieces for another committer."""
        source = self._source()
        if source == claim:
            return
        if source.name != self.order.draft:  # a committer moved the pieces there and failed
            self.disk.rename(source, claim)
            return
        self.disk.remove_tree(claim)  # from an earlier try of this rank; the draft has all pieces
        self.disk.make_directory(claim)
        try:
            for piece in self.order.pieces:
                target = claim / piece.file
                if target.parent != claim:
                    self.disk.make_directory(target.parent)
                self.disk.link(source / piece.file, target)
        except OSError as problem:
            if problem.errno not in UNSUPPORTED:
                raise
            self.disk.remove_tree(claim)
            self.disk.rename(source, claim)

    def _source(self) -> Path:
        """Return the directory that holds all pieces: the draft, or a claim to which they were moved."""
        draft = self.save_dir / self.order.draft
        problems = self._size_problems(draft, self.order.pieces)
        if not problems:
            return draft
        for claim in self._claims():
            if not self._size_problems(claim, self.order.pieces):
                return claim
        raise CheckpointError(f"version {self.order.version} cannot be committed: {'; '.join(problems)}")

    def _merge(self, added: Sequence[Piece]) -> tuple[Piece, ...]:
        pieces = {piece.file: piece for piece in self.order.pieces}
        for piece in added:
            if not safe_path(piece.file) or pieces.setdefault(piece.file, piece) != piece:
                raise CheckpointError(f"the adapter's {piece.file!r} is not a new file inside the checkpoint")
        return tuple(pieces[file] for file in sorted(pieces))

    def _drop_unlisted(self, claim: Path, listed: set[str]) -> list[Path]:
        """Remove the files that no piece names; return the directories left, the deepest first."""
        directories, files = self.disk.tree(claim)
        for file in files:
            if file.relative_to(claim).as_posix() not in listed:
                self.disk.remove(file)
        return directories

    def _manifest(self, pieces: tuple[Piece, ...]) -> Manifest:
        return Manifest(
            version=self.order.version,
            run_id=self.run_id,
            incarnation=self.order.incarnation,
            incident=self.order.incident,
            cause=self.order.cause,
            reason=self.order.reason,
            world_size=self.world_size,
            groups={shard: tuple(ranks) for shard, ranks in self.groups.items()},
            framework=self.framework,
            created_unix_s=time.time(),
            pieces=pieces,
            missing_pages=tuple(self.order.missing_pages),
            extra={"disputed": list(self.order.disputed)} if self.order.disputed else {},
        )

    # ---------------------------------------------------------------------------------------------------- publishing

    def _publish(self, claim: Path) -> None:
        self._borrow(claim)  # from what is set aside, should nothing have the final name
        try:
            self.disk.rename(claim, self.final)
        except OSError as problem:
            if problem.errno not in OCCUPIED:
                raise
            if self._committed() is None:
                self._check_not_fenced()
                self._borrow(claim)  # from what may have got the name since
                self._supersede(claim)

    def _check_not_fenced(self) -> None:
        """Refuse to replace a checkpoint of a later incarnation, unless that is damaged.

        Incarnations of one run id do not always grow: a job that is started again with the same id, after its
        controllers have ended, counts anew. It makes this version again only if it could not restore the checkpoint.
        """
        there = Manifest.load_or_none(self.final)
        if there is None or there.run_id != self.run_id or there.incarnation <= self.order.incarnation:
            return
        if self._is_whole(there):
            raise CheckpointError(
                f"version {self.order.version} was committed by incarnation {there.incarnation} of this job;"
                f" this is incarnation {self.order.incarnation}, which is over"
            )

    def _borrow(self, claim: Path) -> None:
        """Take over the rank-local state that only another checkpoint of this version and launch has.

        That has the final name, or was set aside by a committer that died between its two renames.
        """
        aside = (n for n in self.disk.names(self.save_dir) if names.parse_superseded_name(n) == self.order.version)
        for name in (self.final.name, *aside):
            self._borrow_from(self.save_dir / name, claim)

    def _borrow_from(self, place: Path, claim: Path) -> None:
        there = Manifest.load_or_none(place)
        if there is None or not self._is_ours(there):
            return
        ours = Manifest.load(claim)
        lent = self.lend(ours.pieces, there.pieces)
        added: dict[str, Piece] = {}
        for piece in dict.fromkeys(lent.values()):
            try:
                data = read_plain(place / piece.file)
            except OSError:
                continue  # it is gone or damaged: what this checkpoint has does not depend on it
            if digest_bytes(data) == piece.digest:
                name = f"{piece.digest[-16:]}_{Path(piece.file).name}"  # of no other piece
                self.disk.write(claim / name, data)
                added[piece.file] = replace(piece, file=name)
        if not added:
            return
        missing = [rank for rank in ours.missing_pages if rank not in lent or lent[rank].file not in added]
        fuller = replace(ours, pieces=(*ours.pieces, *added.values()), missing_pages=tuple(missing))
        self.disk.remove(claim / MANIFEST)
        self.disk.write(claim / MANIFEST, fuller.to_json().encode())
        self.disk.sync_directory(claim)

    def _supersede(self, claim: Path) -> None:
        """Exchange the new checkpoint with the one that has the final name; the old one is kept as superseded."""
        aside = self._free_superseded()
        self.disk.rename(claim, aside)
        try:
            self.disk.exchange(aside, self.final)
            kept = aside
        except OSError as problem:
            if problem.errno not in UNSUPPORTED:
                raise
            kept = self._free_superseded()
            self.disk.rename(self.final, kept)
            self.disk.sync_directory(self.save_dir)  # so that a power cut cannot keep only the next rename
            self.disk.rename(aside, self.final)
        _log.warning("%s was another checkpoint; it is kept as %s", self.final, kept.name)

    def _free_superseded(self) -> Path:
        taken = set(self.disk.names(self.save_dir))
        candidates = (names.superseded_name(self.order.version, n) for n in range(len(taken) + 1))
        return self.save_dir / next(name for name in candidates if name not in taken)

    # ---------------------------------------------------------------------------------------------------- afterwards

    def _committed(self) -> Manifest | None:
        """Return the manifest of this incident's checkpoint under the final name; None if there is no whole one.

        Where the network parts the job, each side saves the version, and a side that holds one rank must not win: one
        that lacks a page which this one has will not do, and one with more will do if it is of another incident of this
        launch. Its digests must be right: an earlier launch with these numbers may have made it, and none could restore
        it.
        """
        manifest = Manifest.load_or_none(self.final)
        if manifest is None or not self._is_ours(manifest):
            return None
        fuller = len(self.order.missing_pages) - len(manifest.missing_pages)  # so many pages more than this one
        if fuller < 0 or self.lend(manifest.pieces, self.order.pieces):
            return None
        if manifest.incident == self.order.incident:
            return None if verify.size_problems(self.final, manifest) else manifest
        good = fuller > 0 and "disputed" not in manifest.extra and self._is_whole(manifest)
        return manifest if good else None

    def _is_ours(self, manifest: Manifest) -> bool:
        """Return whether a checkpoint is of this version and launch."""
        numbers = (manifest.run_id, manifest.incarnation, manifest.version, manifest.world_size)
        return numbers == (self.run_id, self.order.incarnation, self.order.version, self.world_size)

    def _is_whole(self, manifest: Manifest) -> bool:
        """Read what has the final name, and return whether its digests are right."""
        return next(verify.piece_problems(self.final, manifest, self.disk.progress), None) is None

    def _tidy(self) -> None:
        """Remove the draft and the claims. The checkpoint exists: a failure here is logged and changes nothing."""
        try:
            for left in (self.save_dir / self.order.draft, *self._claims()):
                self.disk.remove_tree(left)
        except (OSError, RecursionError) as problem:  # RecursionError: directories nested too deep
            _log.warning("%s is committed, but old files could not be removed: %s", self.final, str(problem))

    def _claims(self) -> list[Path]:
        found = self.disk.names(self.save_dir)
        return [self.save_dir / name for name in found if name.startswith(f"{self.order.draft}@")]

    def _size_problems(self, directory: Path, pieces: Sequence[Piece]) -> list[str]:
        found = ((piece, self.disk.size(directory / piece.file)) for piece in pieces)
        return [verify.describe(piece.file, size, piece.size) for piece, size in found if size != piece.size]
