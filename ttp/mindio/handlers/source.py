"""The state of a rank about which nothing is known but how often it was updated."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ttp.core.layout import Rank, Version
from ttp.core.messages import Commit, Piece, SaverOrder, ShardDigest
from ttp.errors import UsageError
from ttp.mindio.protocol.messages import HANDLERS

NOT_HERE = "the handlers of this program save in rounds, not piece by piece"


class HandlerSource:
    """A ``StateSource`` that is never asked to write."""

    framework = HANDLERS
    counts_bytes = False
    writes_parts = False
    on_device = False
    has_preimage = False
    saved_elsewhere = ""

    def gradient_ready(self) -> bool:
        """Who reports the beginning of an update has all that it needs for it."""
        return True

    def redo(self, version: Version) -> bool:
        """See ``StateSource``: no device is behind its host here."""
        return False

    def inspect(self, version: Version) -> tuple[tuple[ShardDigest, ...], tuple[str, ...]]:
        """Nothing is known of the state."""
        return (), ()

    def watch_pages(self, changed: Callable[[int, bool], None]) -> None:
        """There are no pages."""

    def settled(self) -> bool:
        """The program says itself when an update is finished."""
        return True

    def device_version(self, version: Version, patience_s: float) -> Version | None:
        """The program ends an update when it has ended."""
        return version

    def write_pieces(
        self, *, order: SaverOrder, version: Version, draft: Path, generation: int, cancelled: Callable[[], bool]
    ) -> list[Piece]:
        """Never."""
        raise UsageError(NOT_HERE)

    def finalise(self, directory: Path, order: Commit) -> list[Piece]:
        """Never."""
        raise UsageError(NOT_HERE)

    def on_welcome(self, rank: Rank, incarnation: int, page_dir: Path) -> None:
        """Rank-local state is the handlers' business."""

    def close(self) -> None:
        """Nothing to give up."""
