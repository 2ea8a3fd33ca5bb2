"""Whether a directory of checkpoints has room for one more."""

from __future__ import annotations

import logging
import math
import os
from dataclasses import dataclass
from pathlib import Path

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
            text = "%s has %.0f MiB free, but a checkpoint needs some %.0f MiB: free some, or none can be saved there"
            _log.warning(text, self.save_dir, self.free / 2**20, needed / 2**20)
