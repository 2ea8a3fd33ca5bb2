"""The state of a rank about which nothing is known but how often it was updated."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ttp.core.layout import Version
from ttp.core.messages import Piece, SaverOrder
from ttp.errors import UsageError
from ttp.mindio.protocol.messages import HANDLERS
from ttp.processor.source import StateSource


class HandlerSource(StateSource):
    """Is never asked to write: the handlers of the program save in rounds, not piece by piece."""

    framework = HANDLERS

    def gradient_ready(self) -> bool:
        """Who reports the beginning of an update has all that it needs for it."""
        return True

    def write_pieces(
        self, *, order: SaverOrder, version: Version, draft: Path, generation: int, cancelled: Callable[[], bool]
    ) -> list[Piece]:
        """Never."""
        raise UsageError("the handlers of this program save in rounds, not piece by piece")
