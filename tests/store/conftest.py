"""Fixtures: a small world of ranks, drafts and save orders."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.disks.bad_disk import BadDisk, why_not
from ttp.core.layout import Rank, Shard, Version
from ttp.core.messages import Commit, Piece
from ttp.processor.local_state.local_piece import Pages, lent, write_local_piece
from ttp.store import durable, names, verify
from ttp.store.catalog import scan
from ttp.store.choice import look_back
from ttp.store.commit import NewCheckpoint
from ttp.store.digest import HashingFile, Progress, digest_bytes, digest_file
from ttp.store.disk import Disk
from ttp.store.verify import verify_checkpoint

CASES: dict[str, tuple[bool, tuple[str, ...]]] = {
    "free": (False, ()),
    "free, no links": (False, ("link",)),
    "occupied": (True, ()),
    "occupied, no links": (True, ("link",)),
    "occupied, no exchange": (True, ("exchange",)),
    "occupied, neither": (True, ("link", "exchange")),
}
"""Commits of step 12: whether another incident has committed it, and calls that the file system lacks."""
GROUPS = {Shard("a"): (Rank(0), Rank(1)), Shard("b"): (Rank(2), Rank(3))}


@dataclass
class World:
    """A save_dir, filled as the ranks of a job of two shards do."""

    save_dir: Path

    def order(self, version: int, incident: str = "first", *, rank: int = 1, generation: int = 1) -> Commit:
        return Commit(
            rank=Rank(rank),
            term=1,
            incident=incident,
            generation=generation,
            version=Version(version),
            incarnation=4,
            draft=names.draft_name(Version(version), incident),
            cause="rank 0 died",
            reason="all healthy ranks are at it",
            keep=100,
            pieces=self.pieces(version, incident, generation),
            missing_pages=(Rank(0),),
        )

    def contents(self, version: int, incident: str, generation: int = 1) -> dict[str, bytes]:
        told = f"{version} {incident} {generation} ".encode()
        return {
            f"__0_{generation}.distcp": told + b"shard a" * 50,
            f"__1_{generation}.distcp": told + b"shard b" * 70,
            f"rank_2/local_{generation}.msgpack": told,
            f"job_{generation}.msgpack": b"",
        }

    def pieces(self, version: int, incident: str, generation: int = 1) -> tuple[Piece, ...]:
        shards = ["a", "b", "", ""]
        contents = self.contents(version, incident, generation).items()
        return tuple(
            Piece(file, len(data), digest_bytes(data), "shard" if shard else "job", shard, Rank(2), '{"names":["w"]}')
            for shard, (file, data) in zip(shards, contents, strict=True)
        )

    def write_draft(self, version: int, incident: str = "first", generation: int = 1) -> Path:
        draft = self.save_dir / names.draft_name(Version(version), incident)
        for file, data in self.contents(version, incident, generation).items():
            (draft / file).parent.mkdir(parents=True, exist_ok=True)
            (draft / file).write_bytes(data)
        (draft / "__0_0.distcp").write_bytes(b"of a saver that died")
        return draft

    def save(
        self, version: int, incident: str = "first", generation: int = 1, progress: Progress | None = None
    ) -> Path:
        """Write as savers do: pieces, their names, and nothing else."""
        draft = self.save_dir / names.draft_name(Version(version), incident)
        draft.mkdir(exist_ok=True)
        contents = self.contents(version, incident)
        for file, data in contents.items():
            (draft / file).parent.mkdir(exist_ok=True)
            if file.startswith("__"):
                piece = HashingFile(draft / file, progress)
                piece.write(data)
                piece.sync_and_close()
            else:
                durable.write_durably(draft / file, data)
        for directory in sorted({(draft / file).parent for file in contents}, reverse=True):
            durable.sync_directory(directory)
        return draft

    def finish(self, version: int, incident: str = "first", disk: Disk | None = None, **changes: Any) -> Path:
        """Commit what ``save`` has written; ``changes`` are changes of the order."""
        return self.commit(replace(self.order(version, incident), **changes), disk)[0]

    @staticmethod
    def finalise(directory: Path) -> Sequence[Piece]:
        (directory / ".metadata.tmp").write_bytes(b"left over")
        durable.write_durably(directory / ".metadata", b"all tensors")
        return [Piece(".metadata", 11, digest_bytes(b"all tensors"), "metadata", "", Rank(1))]

    def commit(self, order: Commit, disk: Disk | None = None, **changes: Any) -> tuple[Path, int]:
        facts: dict[str, Any] = {"run_id": "job", "world_size": 4, "groups": GROUPS, "framework": "torch"}
        facts |= {"finalise": self.finalise, "disk": disk or Disk(), **changes}
        return NewCheckpoint(self.save_dir, order, **facts).commit()

    def make(self, version: int, incident: str = "first", **changes: Any) -> Path:
        """Make a committed checkpoint; ``changes`` are changes of the order."""
        self.write_draft(version, incident)
        path, _ = self.commit(replace(self.order(version, incident), **changes))
        return path

    def make_side(self, side: str, incident: str, ranks: Sequence[int], disk: Disk | None = None) -> Path:
        """Commit version 12 as one side of a parted job does, with the pages of ``ranks``; the first is provisional."""
        draft = self.write_draft(12, side)
        pages = Pages({Rank(rank): f"of rank {rank}".encode() for rank in ranks}, (Rank(ranks[0]),), {})
        piece = write_local_piece(draft, "rank_local_1_1.msgpack", pages, Rank(ranks[0]))
        order = self.order(12, side)
        pieces, missing = (*order.pieces, piece), tuple(Rank(rank) for rank in range(4) if rank not in ranks)
        return self.commit(replace(order, incident=incident, pieces=pieces, missing_pages=missing), disk, lend=lent)[0]

    def check_reader(self, was: tuple[int, str], where: object, *, committed: bool = False) -> None:
        """Check a restore now: the newest whole checkpoint is the new one, or ``was``, which still exists."""
        found = look_back(self.save_dir)
        assert found.candidates, f"{where}: nothing is whole"
        entries = scan(self.save_dir)
        made = {e.path: self.makers(e.path, e.version or 0, "first", "another") for e in entries if e.whole}
        assert all(made.values()), (where, made)
        allowed = [(12, "first"), *([] if committed else [was])]
        assert made[found.where[found.candidates[0]]][0] in allowed, (where, made)
        assert [was] in made.values(), f"{where}: the old one is gone"
        assert not [e for e in entries if e.kind == "checkpoint" and not e.whole], f"{where}: debris"

    def holds(self, path: Path, version: int, incident: str, generation: int = 1) -> bool:
        """Return whether ``path`` is exactly the checkpoint that this incident makes."""
        return bool(self.makers(path, version, incident, generation=generation))

    def makers(self, path: Path, version: int, *incidents: str, generation: int = 1) -> list[tuple[int, str]]:
        """Return the version with each of these incidents that makes exactly the checkpoint ``path``."""
        files = (Path(place) / name for place, _, inside in os.walk(path) for name in inside)
        found = {file.relative_to(path).as_posix(): file.read_bytes() for file in files if file.is_file()}
        if found.pop("manifest.json", None) is None:
            return []
        expected = ((i, self.contents(version, i, generation) | {".metadata": b"all tensors"}) for i in incidents)
        return [(version, i) for i, files in expected if found == files and not verify_checkpoint(path)]


@pytest.fixture
def digested(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Return the list of pieces whose digest is computed, in order."""
    read: list[Path] = []

    def spy(path: Path, progress: Progress | None, *, fresh: bool = False) -> tuple[int, str]:
        read.append(path)
        return digest_file(path, progress, fresh=fresh)

    monkeypatch.setattr(verify, "digest_file", spy)
    return read


@pytest.fixture(scope="session")
def mounts() -> None:
    """Skip the test if this process may not mount."""
    if reason := why_not():
        pytest.skip(reason)


@pytest.fixture
def bad_disk(mounts: None, tmp_path: Path) -> Iterator[BadDisk]:
    """A ``tests.disks.bad_disk`` that records its requests."""
    with BadDisk(tmp_path / "mount", tmp_path / "directory", journal=True) as disk:
        yield disk


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """Return a world in memory if possible: it has thousands of small files, and no test needs a real disk."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield World(tmp_path / "checkpoints")
        return
    with tempfile.TemporaryDirectory(prefix="ttp-test-", dir=memory) as directory:
        yield World(Path(directory) / "checkpoints")
