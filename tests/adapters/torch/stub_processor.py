"""A processor without a controller, with what a ``TorchAdapter`` needs of it, and the orders that a controller would
send.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from tests.making import making
from ttp.adapters.torch.adapter import TorchAdapter
from ttp.config import Config, RankEnv
from ttp.core.decide import How
from ttp.core.layout import Layout, Rank, Shard, Version
from ttp.core.messages import Commit, FaultKind, Piece, SaverOrder
from ttp.processor.gate.gate import Gate
from ttp.processor.rank_job import RankJob
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
        self.gate, self.broken = Gate(), False
        self.begun: list[int] = []
        self.reported: list[str] = []
        self.written = 0
        self.mark = 0
        self.activity = ""
        self.survivor = None

    def report(self, kind: FaultKind, text: str, detail: str = "") -> None:
        self.gate.mark_torn()  # harmless outside of an update
        self.reported.append(kind.value)

    def set_base_version(self, version: Version) -> None:
        self.gate.set_version(version)

    def begin_update(self, again: bool = False) -> None:
        self.gate.begin_update(again)
        self.begun.append(self.gate.version + 1)

    def stand_between(self) -> None:
        self.gate.stand_between()

    def leave_update(self) -> None:
        self.gate.leave_update()

    def end_update(self) -> None:
        self.gate.end_update()


class Stateful:
    """An object of ``extra_state`` that counts the calls of its methods."""

    def __init__(self, **state: Any) -> None:
        self.state, self.asked, self.loaded = state, 0, 0

    def state_dict(self) -> dict[str, Any]:
        self.asked += 1
        return dict(self.state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state, self.loaded = state, self.loaded + 1


class Loop:
    """A training loop under a stub processor; ``seen`` is for what a subclass remembers of its versions."""

    def __init__(self, directory: Path, model: Any, optimizer: Any, **parts: Any) -> None:
        self.model, self.optimizer, self.seen = model, optimizer, list[Any]()
        self.adapter: Any = registered(model, optimizer, **parts)
        self.processor: Any = StubProcessor(directory)
        self.source: Any = self.adapter.source
        self.gate = self.processor.gate

    def start(self, pages: Path) -> Any:
        join(self.adapter, self.processor, pages)
        self.seen.append(self.facts())
        return self

    def facts(self) -> Any:
        """Return what has to come back."""

    def backward(self) -> None:
        """Make the gradients of the next step."""
        for each in self.adapter._given:
            each.zero_grad()
        self.model(torch.randn(6, 4)).square().mean().backward()

    def save(self, version: int, how: How = How.AS_IS) -> Path:
        return save(self.adapter, self.processor, version, how)

    def load(self, path: Path) -> Any:
        """Return the version of the checkpoint that this program goes on from."""
        return self.adapter.load(path, 0, 1, protected=False)


@contextlib.contextmanager
def starting(kind: Callable[..., Any], root: Path) -> Iterator[Callable[..., Any]]:
    """Yield a function that makes a ``Loop`` of this kind and starts it."""

    def start(*given: Any, **options: Any) -> Any:
        return kind(root / "checkpoints", *given, **options).start(root / "pages")

    with making(start, lambda loop: loop.source.close()) as started:
        yield started


def registered(model: Any, optimizer: Any, **parts: Any) -> TorchAdapter:
    """Register objects as ``wrap_optimizer`` does. What is not given is None."""
    return TorchAdapter(optimizer, model=model, **{"scheduler": None, "extra_state": None, "scaler": None} | parts)


def join(adapter: TorchAdapter, processor: StubProcessor, pages: Path, rank: int = 0) -> None:
    """Do what joining a job does: the rank gets its page, and its updates are reported."""
    adapter.source.on_welcome(Rank(rank), INCARNATION, pages)
    stands_for: Any = processor
    adapter.attach(stands_for)


def leave(adapter: TorchAdapter) -> None:
    """Undo ``join``."""
    adapter.detach()
    adapter.capture.close()


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
    mine = Rank(processor.env.rank)
    pieces = write(adapter, processor, version, processor.layout.shards_of(mine), how, pages=pages or (mine,))
    return commit(adapter, processor, version, pieces, missing)


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
    first = processor.env.rank == 0
    everyone: list[Any] = [None] * dist.get_world_size()
    pieces = write(adapter, processor, version, shards, how, pages=pages, job_state=first)
    dist.all_gather_object(everyone, pieces)
    if first:
        commit(adapter, processor, version, [piece for some in everyone for piece in some])
    dist.barrier()
    return processor.save_dir / f"tft_saved_checkpoints-step_{version}"


def write(
    adapter: Any,
    processor: StubProcessor,
    version: int,
    shards: Iterable[Shard],
    how: How = How.AS_IS,
    *,
    pages: tuple[Rank, ...] = (),
    job_state: bool = True,
    generation: int = 1,
) -> list[Piece]:
    """Write what this rank adds to the draft of ``version``."""
    draft = processor.save_dir / f".draft-step_{version}-x"
    draft.mkdir(parents=True, exist_ok=True)
    order = SaverOrder(Rank(processor.env.rank), tuple(shards), how, pages, job_state)
    given: dict[str, Any] = {"order": order, "version": Version(version), "draft": draft, "generation": generation}
    return list(adapter.source.write_pieces(**given, cancelled=lambda: False))


def commit(
    adapter: Any, processor: StubProcessor, version: int, pieces: Iterable[Piece], missing: tuple[Rank, ...] = ()
) -> Path:
    """Make a checkpoint of the written pieces, as the processor's saver does, and return its path."""
    mine, draft = Rank(processor.env.rank), f".draft-step_{version}-x"
    order = Commit(mine, 1, "x", 1, Version(version), INCARNATION, draft, "", "", 3, tuple(pieces), missing)
    job = RankJob(Config(), processor.env, processor.layout, adapter.source, processor.save_dir)
    return make_checkpoint(processor.save_dir, order, job, lambda count: None)[0]


def two_shards(world_size: int = 2) -> Layout:
    return Layout(world_size, {Shard(f"s{r}"): (Rank(r),) for r in range(world_size)})
