"""A source of state without any framework: pieces are small files with the version."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ttp.config import Config, RankEnv
from ttp.core.layout import Layout, Version
from ttp.core.messages import Piece, SaverOrder
from ttp.processor.processor import Processor
from ttp.processor.source import StateSource


class FakeSource(StateSource):
    framework = "fake"
    counts_bytes = True

    def write_pieces(
        self, *, order: SaverOrder, version: Version, draft: Path, generation: int, cancelled: Callable[[], bool]
    ) -> list[Piece]:
        size = (draft / f"piece_{order.rank}_{generation}").write_text(str(version))
        return [Piece(f"piece_{order.rank}_{generation}", size, "", "shard", s, order.rank) for s in order.shards]


def alone(source: FakeSource, directory: Path) -> Processor:
    """Return the processor of a job of one rank, whose machine has an incident."""
    env = RankEnv(0, 1, 0, "127.0.0.1", "job", 0)
    made = Processor(Config(port=1, run_dir=str(directory)), env, Layout.data_parallel(1), source, str(directory))
    made._machine._rescue.incident = "i"
    return made


def no_thread(*_: object) -> None:
    """Stand for ``Thread.start`` on a host that has no room for another thread."""
    raise RuntimeError("can't start new thread")
