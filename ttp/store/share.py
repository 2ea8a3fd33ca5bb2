"""Shares the verification of a checkpoint among the ranks of a job, so that together they read all of it once.

A rank offers a checkpoint for the restore if its own share is whole, and the ranks choose one that all of them offer.
So each byte is read by one rank instead of by every rank; else 1,000 ranks would read a petabyte of a 1 TB checkpoint.
Ranks that do not see the same files (a disk in each host) share only with ranks that do.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from ttp.core.messages import Piece
from ttp.store.mounts import mount_of

_NETWORK = (
    *("afs", "beegfs", "ceph", "cifs", "gfs2", "glusterfs", "gpfs", "lustre", "nfs", "nfs4", "ocfs2", "orangefs"),
    *("panfs", "pvfs2", "smb3", "wekafs"),
)
_FUSE = ("ceph", "ceph-fuse", "gcsfuse", "glusterfs", "juicefs", "moosefs", "s3fs", "seaweedfs", "sshfs")
SEEN_BY_ALL_HOSTS = frozenset((*_NETWORK, *(f"fuse.{name}" for name in _FUSE)))
"""Types of file systems on which all hosts see the same files."""


@dataclass(frozen=True, slots=True)
class Share:
    """One of ``count`` equal parts of the reading.

    Args:
        index: which of the parts, from 0.
        count: 1: the share is everything; 0: the share is nothing.
    """

    index: int = 0
    count: int = 1

    def of(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Return the pieces of this share. Each piece is in exactly one share; all shares have about as many bytes."""
        if self.count <= 1:
            return list(pieces) if self.count else []
        loads = [(0, index) for index in range(self.count)]
        mine: list[Piece] = []
        for piece in sorted(pieces, key=lambda piece: (-piece.size, piece.file)):  # the largest first (Graham 1969)
            load, index = loads[0]
            heapq.heapreplace(loads, (load + piece.size, index))
            if index == self.index:
                mine.append(piece)
        return mine


WHOLE = Share()
NOTHING = Share(0, 0)


def everything(directory: Path) -> Share:
    """Return the share of a rank that reads all pieces of the checkpoints in ``directory`` by itself."""
    return WHOLE


def share_of(directory: Path, rank: int, world_size: int, environ: Mapping[str, str]) -> Share:
    """Return the share of the checkpoints in ``directory`` that a rank of a job reads.

    On a file system that all hosts share, a rank shares with all ranks; elsewhere with the ranks of its host, or it
    reads everything if ``LOCAL_RANK`` and ``LOCAL_WORLD_SIZE`` are not set.

    Args:
        directory: the directory of the checkpoints.
        rank: the rank.
        world_size: number of ranks of the job.
        environ: the environment of the rank.
    """
    if _file_system(directory) in SEEN_BY_ALL_HOSTS:
        return Share(rank, world_size)
    place, count = environ.get("LOCAL_RANK", ""), environ.get("LOCAL_WORLD_SIZE", "")
    numbers = all(text.isascii() and text.isdigit() for text in (place, count))
    if not numbers or not int(place) < int(count) <= world_size:
        return WHOLE
    return Share(int(place), int(count))


def _file_system(directory: Path) -> str:
    """Return the type of the file system of ``directory``, as ``mount`` names it; empty if it is unknown."""
    try:
        mount = mount_of(directory)
        return next((p.fstype for p in reversed(psutil.disk_partitions(all=True)) if Path(p.mountpoint) == mount), "")
    except OSError:
        return ""
