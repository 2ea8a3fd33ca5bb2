"""Keeps a copy of the state from before an update, so that a rank can save that version (undo, docs/concepts.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ttp.adapters.mindspore.memory import Memory
from ttp.core.layout import Version
from ttp.errors import CheckpointError


class PreImage:
    """One copy of parameters and optimizer state, from before the last update.

    Args:
        memory: the parameters of the training network.
        names: names of the parameters that an update writes.
    """

    def __init__(self, memory: Memory, names: Sequence[str]) -> None:
        self._memory, self._names = memory, [name for name in names if name in memory.held]
        self._copies: dict[str, Any] = {}
        self.version: int | None = None
        """The version of the copy; None: there is no valid copy."""

    def take(self, version: int) -> None:
        """Copy the present state, which is that of ``version``. For the training thread, before the update begins."""
        self.version = None
        for name in self._names:
            array = self._memory.of(name).array
            if name not in self._copies:
                self._copies[name] = np.empty_like(array)
            np.copyto(self._copies[name], array)
        self.version = version

    def of(self, version: Version) -> Mapping[str, memoryview]:
        """Return the bytes of the state of ``version``, by name.

        Raises:
            CheckpointError: the copy is of another version.
        """
        if self.version != version:
            raise CheckpointError(f"version {version} cannot be saved by undo: the copy is of version {self.version}")
        return {name: memoryview(copy.reshape(-1).view(np.uint8)) for name, copy in self._copies.items()}

    def forget(self) -> None:
        """Invalidate the copy, after a restore has replaced the state."""
        self.version = None
