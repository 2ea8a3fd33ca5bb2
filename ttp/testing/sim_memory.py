"""Checkpoints that a simulated host holds in memory until they are durable on the toy storage; see decision 63."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ttp.core import messages as m
from ttp.core.layout import Version

if TYPE_CHECKING:
    from ttp.testing.simulation import Simulation

MEMORY = "/memory"
WAIT_S = 0.05
WRITES_S = (0.02, 0.3, 2.0, 8.0)
"""Seconds from a commit to memory until the checkpoint is durable; one value is drawn for each."""


class HostMemory:
    """The memory of a job's only host, and the writer that copies checkpoints from there to the storage.

    Args:
        world: the simulation.
    """

    def __init__(self, world: Simulation) -> None:
        self.held: set[Version] = set()
        """Versions that ranks can restore from memory and that are not durable."""
        self.made = 0
        self._world = world
        self._of: set[tuple[str, Version]] = set()

    def look(self) -> tuple[str, Version]:
        """Return what a frozen rank reports: the directory in memory for a checkpoint (empty while one is held), and
        the newest held version (0 if there is none).
        """
        return ("" if self.held else MEMORY), max(self.held, default=Version(0))

    def committed(self, order: m.Commit) -> None:
        """Record a commit, to memory or to the storage."""
        version = order.version
        if order.directory != MEMORY:
            self.held = {held for held in self.held if held > version}
            return
        self.made += 1
        self.held.add(version)
        self._of.add((order.incident, version))
        self._world.after(self._world.rng.choice(WRITES_S), self._durable, version)

    def _durable(self, version: Version) -> None:
        self._world.trace("writer", f"step {version} is durable")
        self.held.discard(version)

    def brings(self, order: m.Commit) -> bool:
        """Return whether this commit waits for the writer, because its pieces come from memory and not from ranks."""
        written = self._world.storage.drafts.get(f"{order.directory}/{order.draft}", {})
        if order.directory == MEMORY or (order.pieces and {piece.file for piece in order.pieces} <= written.keys()):
            return False
        return not order.pieces or (order.incident, order.version) in self._of
