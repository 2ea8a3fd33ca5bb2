"""A rank that keeps second copies, without a job around it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from tests.processor.fake_source import FakeSource
from ttp.core import messages as m
from ttp.core.layout import Rank, Version
from ttp.processor.copies.store import Copy, CopyStore
from ttp.processor.source import Cancelled
from ttp.store.digest import digest_bytes
from ttp.testing.scenario import grid

LAYOUT = grid(2, 1)
ME, OTHER = Rank(0), Rank(1)
PATIENCE_S = 30.0


class Source(FakeSource):
    """Writes a shard, a page and a job state, and stops half-way if told to."""

    def __init__(self) -> None:
        self.calls: list[m.SaverOrder] = []
        self.started = threading.Event()
        self.go_on = threading.Event()
        self.go_on.set()
        self.problem: OSError | None = None
        self.deaf = False

    def write_pieces(
        self, *, order: m.SaverOrder, version: Version, draft: Path, generation: int, cancelled: Callable[[], bool]
    ) -> list[m.Piece]:
        self.calls.append(order)
        self.started.set()
        assert self.go_on.wait(PATIENCE_S)
        if cancelled() and not self.deaf:
            raise Cancelled
        if self.problem is not None:
            raise self.problem
        wanted = [("shard", str(s)) for s in order.shards]
        wanted += [("rank_local", "")] * bool(order.pages) + [("job", "")] * order.job_state
        return [piece(draft, f"{kind}_{order.rank}_{generation}.bin", kind, shard, version) for kind, shard in wanted]


def piece(draft: Path, file: str, kind: str, shard: str, version: int) -> m.Piece:
    data = f"{kind} {shard} of version {version} ".encode() * 100
    (draft / file).write_bytes(data)
    return m.Piece(file, len(data), digest_bytes(data), kind, shard, ME, "a table")


def kept(store: CopyStore, rank: Rank = ME, version: int = 10) -> Copy:
    draft = store.begin(rank, Version(version))
    pieces = [piece(draft, "a.bin", "shard", "s0", version), piece(draft, "b.bin", "job", "", version)]
    return store.finish(draft, rank, Version(version), pieces)


def held(store: CopyStore) -> list[tuple[int, int]]:
    return [(copy.of, copy.version) for copy in store.held()]


def never() -> None:
    pass
