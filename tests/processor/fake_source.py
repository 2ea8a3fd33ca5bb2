"""A source of state without any framework: pieces are small files that say the version."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ttp.core.layout import Rank, Version
from ttp.core.messages import Commit, Piece, SaverOrder, ShardDigest


class FakeSource:
    """See ``ttp.processor.source.StateSource``."""

    framework = "fake"
    counts_bytes = True
    writes_parts = False
    on_device = False
    has_preimage = False
    saved_elsewhere = ""

    def gradient_ready(self) -> bool:
        return False

    def redo(self, version: Version) -> bool:
        return False

    def inspect(self, version: Version) -> tuple[tuple[ShardDigest, ...], tuple[str, ...]]:
        return (), ()

    def watch_pages(self, changed: Callable[[int, bool], None]) -> None:
        pass

    def settled(self) -> bool:
        return True

    def device_version(self, version: Version, patience_s: float) -> Version | None:
        return version

    def write_pieces(
        self, *, order: SaverOrder, version: Version, draft: Path, generation: int, cancelled: Callable[[], bool]
    ) -> list[Piece]:
        size = (draft / f"piece_{order.rank}_{generation}").write_text(str(version))
        return [Piece(f"piece_{order.rank}_{generation}", size, "", "shard", s, order.rank) for s in order.shards]

    def finalise(self, directory: Path, order: Commit) -> list[Piece]:
        return []

    def on_welcome(self, rank: Rank, incarnation: int, page_dir: Path) -> None:
        pass

    def close(self) -> None:
        pass
