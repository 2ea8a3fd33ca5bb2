"""Whether a directory of checkpoints has room for one more."""

from __future__ import annotations

import logging
import math
import os
from dataclasses import dataclass
from pathlib import Path

LARGE = 1 << 30
"""Bytes of a checkpoint from which the log says how fast the storage has to be."""

_log = logging.getLogger("ttp.store")


@dataclass(frozen=True, slots=True)
class Room:
    """The free space of a directory of checkpoints.

    Args:
        save_dir: the directory.
        free: free bytes of its file system; infinity if it does not tell.
    """

    save_dir: Path
    free: float

    @classmethod
    def of(cls, save_dir: Path) -> Room:
        """Ask the file system of ``save_dir``.

        Raises:
            OSError: it refuses.
        """
        stat = os.statvfs(save_dir)
        return cls(save_dir, stat.f_bavail * stat.f_frsize if stat.f_blocks else math.inf)

    def check(self, needed: int) -> None:
        """Warn if a checkpoint of some ``needed`` bytes does not fit."""
        if self.free < needed:
            text = "%s has %s free, but a checkpoint needs some %s: free some, or none can be saved there"
            _log.warning(text, self.save_dir, size_text(self.free), size_text(needed))

    def tell_needs(self, shards: int, patience_s: float, size: int) -> None:
        """Warn if a checkpoint does not fit, and log how fast the storage has to be for a large one.

        Args:
            shards: number of shards in a checkpoint.
            patience_s: seconds that a save may take.
            size: bytes of one shard.
        """
        self.check(size * shards)
        if size * shards >= LARGE:
            _log.info(
                "a checkpoint has some %.1f GiB. To save it within TTP_OT (%g s) after a failure, the storage has to "
                "take %.0f MiB/s from all ranks together: if it is slower, raise TTP_OT, or the save is given up",
                size * shards / 2**30,
                patience_s,
                size * shards / 2**20 / patience_s,
            )


def size_text(size: float) -> str:
    """Return bytes as ``812 B``, ``1.5 kB``, ``3.2 GB``; powers of 1000, as disks are sold."""
    if size < 1000:
        return f"{int(size)} B"
    units = ["kB", "MB", "GB", "TB"]
    size /= 1000
    while size >= 999.95 and len(units) > 1:
        size /= 1000
        units.pop(0)
    return f"{size:.1f} {units[0]}"
