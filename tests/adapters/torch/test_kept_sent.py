"""Ranks restore in processes that go on: who kept its state sends it to who did not, or all read the checkpoint."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.adapters.torch.stub_processor import StubProcessor, join, leave, registered, save, save_together
from tests.adapters.torch.worlds import run_world
from ttp.adapters.torch.restoring import registered as restoring
from ttp.core.layout import Layout, Rank, Version
from ttp.processor.kept_state import KeptState
from ttp.store.manifest import MANIFEST, Manifest
from ttp.testing.digests import digest

LAYOUT = Layout.data_parallel(2)


def program(seed: int) -> tuple[Any, Any, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return model, optimizer, registered(model, optimizer)


def restored(directory: Path, rank: int, pages: tuple[int, ...] = (0, 1)) -> list[Any]:
    """Train, save, and restore with new objects. Rank 1 has been replaced by a new process, and so kept nothing.

    Args:
        directory: the directory of checkpoints and pages.
        rank: this rank.
        pages: the ranks of which rank 0 found the page.

    Returns:
        How this rank got its state, and whether it is the state that was saved.
    """
    restoring.TRANSFER_BYTES = 1
    model, optimizer, adapter = program(1)
    adapter.sharding(2)
    processor = StubProcessor(directory / "checkpoints", rank=rank, layout=LAYOUT)
    join(adapter, processor, directory / "pages", rank)
    torch.distributed.barrier()  # both pages are there
    model(torch.ones(4, 3)).square().sum().backward()
    optimizer.step()
    torch.distributed.barrier()
    mine = LAYOUT.shards_of(Rank(rank)) if rank == 0 else ()
    path = save_together(adapter, processor, 1, mine, pages=tuple(map(Rank, pages)) if rank == 0 else ())
    expected = [digest(model.state_dict()), digest(optimizer.state_dict())]
    adapter.source.inspect(Version(1))
    kept = KeptState()
    if rank == 0:
        kept.keep(adapter, "x")
    leave(adapter)
    model, optimizer, again = program(2)
    again.sharding(2)
    with torch.device("meta"):  # a program may set a default device: what a rank receives is on the host all the same
        assert again.load_going_on(path, rank, 2, kept, lambda: None) == 1
    return [
        kept.way.removeprefix("its state was ").partition(", in ")[0],
        [digest(model.state_dict()), digest(optimizer.state_dict())] == expected,
    ]


def with_and_without_its_page(directory: Path, rank: int) -> list[Any]:
    return [restored(directory / "with", rank), restored(directory / "without", rank, (0,))]


def test_a_new_process_gets_the_state_of_a_survivor_or_reads_the_checkpoint(tmp_path: Path) -> None:
    """Nobody reads tensors from the storage, which may be slower than the network of the job.

    But who finds no page of its own: its buffers are not in what it received, as the survivor's are of another rank.
    """
    survivor, newcomer = run_world(tmp_path, __name__, "with_and_without_its_page", 2)
    for kept, whole in survivor:
        assert whole and kept.startswith("kept (")
    (received, whole), (read, _) = newcomer
    assert whole and received == f"received from rank 0 {survivor[0][0].removeprefix('kept ')}"
    assert read == "read from the checkpoint (the checkpoint has no random streams and buffers of this rank)"


@pytest.mark.parametrize("disputed", [False, True])
def test_one_rank_alone_has_no_use_for_the_state_of_one_of_two(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, disputed: bool
) -> None:
    """Places differ in another world: all is read. That replicas differed at the save is said at the restore too."""
    model, optimizer, adapter = program(1)
    processor = StubProcessor(tmp_path / "checkpoints", layout=LAYOUT)
    join(adapter, processor, tmp_path / "pages")
    model(torch.ones(4, 3)).square().sum().backward()
    optimizer.step()
    path = save(adapter, processor, 1)
    adapter.source.inspect(Version(1))
    kept = KeptState()
    kept.keep(adapter, "x")
    leave(adapter)
    expected = digest(model.state_dict())
    if disputed:
        manifest = Manifest.load(path)
        (path / MANIFEST).write_text(dataclasses.replace(manifest, extra={"disputed": ["model"]}).to_json())
    model, optimizer, again = program(2)
    assert again.load_going_on(path, 0, 1, kept, lambda: None) == 1
    assert digest(model.state_dict()) == expected
    assert "read from the checkpoint (the checkpoint is of a job with another layout" in kept.way
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert any("replicas of model differed when version 1 was saved" in text for text in warned) is disputed
