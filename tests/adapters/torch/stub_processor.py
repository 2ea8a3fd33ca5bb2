"""A processor without a controller, with what a ``TorchAdapter`` needs of it, and the orders that a controller would
send.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from ttp.adapters.torch.adapter import TorchAdapter
from ttp.config import Config, RankEnv
from ttp.core.decide import How
from ttp.core.layout import Layout, Rank, Shard, Version
from ttp.core.messages import Commit, FaultKind, SaverOrder
from ttp.processor.gate.gate import Gate
from ttp.processor.saver import make_checkpoint

INCARNATION = 4


class StubProcessor:
    """A gate and a description of the job.

    Args:
        page_dir: where ranks show that they live; None: they share no memory.
    """

    def __init__(
        self,
        save_dir: Path,
        *,
        rank: int = 0,
        layout: Layout | None = None,
        page_dir: Path | None = None,
        **settings: Any,
    ) -> None:
        self.layout = layout or Layout.data_parallel(1)
        self.env = RankEnv(rank, self.layout.world_size, rank, "localhost", "run", 0)
        self.config = Config(**settings)
        self.save_dir, self.page_dir = save_dir, page_dir
        self.on_death: Callable[[], None] = lambda: None
        self.gate = Gate()
        self.begun: list[int] = []
        self.reported: list[str] = []
        self.written = 0
        self.mark = 0
        self.activity = ""
        self.goes_on = None

    def report(self, kind: FaultKind, text: str, detail: str = "") -> None:
        self.gate.mark_torn()  # harmless outside of an update
        self.reported.append(kind.value)

    def begin_update(self, again: bool = False) -> None:
        self.gate.begin_update(again)
        self.begun.append(self.gate.version + 1)

    def stand_between(self) -> None:
        self.gate.stand_between()

    def leave_update(self) -> None:
        self.gate.leave_update()

    def end_update(self) -> None:
        self.gate.end_update()


def join(adapter: TorchAdapter, processor: StubProcessor, pages: Path, rank: int = 0) -> None:
    """Do what joining a job does: the rank gets its page, and its updates are reported."""
    adapter.source.on_welcome(Rank(rank), INCARNATION, pages)
    stands_for: Any = processor
    adapter.attach(stands_for)


def leave(adapter: TorchAdapter) -> None:
    """Undo ``join``."""
    adapter.detach()
    adapter.capture.close(unlink=True)


def save(
    adapter: Any,
    processor: StubProcessor,
    version: int,
    how: How = How.AS_IS,
    *,
    pages: tuple[Rank, ...] = (),
    missing: tuple[Rank, ...] = (),
) -> Path:
    """Freeze, write everything, commit; return the path. Without ``pages`` this rank collects its own page."""
    processor.gate.close()
    draft = processor.save_dir / f".draft-step_{version}-x"
    draft.mkdir(parents=True)
    mine = Rank(processor.env.rank)
    order = SaverOrder(mine, processor.layout.shards_of(mine), how, pages or (mine,), True)
    pieces = adapter.source.write_pieces(
        order=order, version=Version(version), draft=draft, generation=1, cancelled=lambda: False
    )
    last = Commit(mine, 1, "x", 1, Version(version), INCARNATION, draft.name, "", "", 3, tuple(pieces), missing)
    return commit(adapter.source, processor, last)


def save_together(
    adapter: Any,
    processor: StubProcessor,
    version: int,
    shards: Iterable[Shard],
    how: How = How.AS_IS,
    *,
    pages: tuple[Rank, ...] = (),
) -> Path:
    """Let all ranks freeze and write, this one ``shards``; rank 0 commits. Returns the finished checkpoint's path."""
    import torch.distributed as dist

    processor.gate.close()
    draft = processor.save_dir / f".draft-step_{version}-x"
    draft.mkdir(parents=True, exist_ok=True)
    mine = Rank(processor.env.rank)
    pieces = adapter.source.write_pieces(
        order=SaverOrder(mine, tuple(shards), how, pages, mine == 0),
        version=Version(version),
        draft=draft,
        generation=1,
        cancelled=lambda: False,
    )
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, pieces)
    if mine == 0:
        found = tuple(piece for some in everyone for piece in some)
        last = Commit(mine, 1, "x", 1, Version(version), INCARNATION, draft.name, "", "", 3, found, ())
        commit(adapter.source, processor, last)
    dist.barrier()
    return processor.save_dir / f"tft_saved_checkpoints-step_{version}"


def commit(source: Any, processor: StubProcessor, order: Commit) -> Path:
    """Make a checkpoint of the saved pieces, as the processor's saver does, and return its path."""
    directory, env, layout = processor.save_dir, processor.env, processor.layout
    return make_checkpoint(directory, order, env, layout, source, lambda count: None)[0]


def two_shards(world_size: int = 2) -> Layout:
    return Layout(world_size, {Shard(f"s{r}"): (Rank(r),) for r in range(world_size)})
