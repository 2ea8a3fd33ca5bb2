"""The state source of a program whose own handlers save."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from ttp.core.layout import Layout, Version
from ttp.core.messages import Piece, SaverOrder
from ttp.errors import UsageError
from ttp.mindio.protocol.messages import HANDLERS, ReplicaSet
from ttp.processor.source import StateSource, promise

log = logging.getLogger("ttp.handlers")

UNTOLD_LOOKS = 5
"""A program that has trained a step declares its replica sets before it is asked so often, once a heartbeat."""


class HandlerSource(StateSource):
    """A state source that is never used to write, because the program's handlers save in rounds."""

    framework = HANDLERS
    saved_elsewhere = "saved by the program's handlers"
    sets: tuple[ReplicaSet, ...] = ()
    _asked = 0

    def promise(self, layout: Layout, save_dir: Path) -> str:
        """Return a promise from the sets of this rank, as the layout is a placeholder. Without sets there is none."""
        if self.sets:
            copies = min(group.copies for group in self.sets)
            on = f"the state of rank 0 on {copies} of {layout.world_size} ranks"
            return promise(on, copies == 1, self.saved_elsewhere)
        self._asked += 1
        if self._asked == UNTOLD_LOOKS:
            log.warning(
                "NOT PROTECTED: no replica sets were declared (tft_set_optimizer_replica): no step can be saved"
            )
        return ""

    def gradient_ready(self) -> bool:
        """Return True: a program that reports the start of an update has its gradient."""
        return True

    def write_pieces(
        self, *, order: SaverOrder, version: Version, draft: Path, generation: int, cancelled: Callable[[], bool]
    ) -> list[Piece]:
        """Always raise ``UsageError``."""
        raise UsageError("the handlers of this program save in rounds, not piece by piece")
