"""What a rank that has not joined can tell, and what it adds to a checkpoint once it has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.adapters.torch.checkpoints import Net, adamw, train
from tests.adapters.torch.stub_processor import Loop, StubProcessor, commit, join, leave, registered, write
from ttp.adapters.torch.restoring.restore import restore_into
from ttp.adapters.torch.saving.job_state import SETTINGS, JobState
from ttp.adapters.torch.saving.piece_index import items_of
from ttp.core.layout import Rank, Version
from ttp.core.stripes import split
from ttp.store.manifest import Manifest


def test_before_a_rank_has_joined_it_is_of_no_version() -> None:
    model = nn.Linear(3, 1)
    source = registered(model, torch.optim.SGD(model.parameters())).source
    assert source.inspect(Version(0)) == ((), ()) and not source.has_preimage and not source.gradient_ready()


@pytest.mark.parametrize("number", [1, 2])
def test_a_part_has_a_file_of_its_own_with_its_share_of_the_bytes(tmp_path: Path, number: int) -> None:
    """Two replicas on two hosts write one each, side by side."""
    model = nn.Linear(3, 1)
    job = Loop(tmp_path, model, torch.optim.SGD(model.parameters())).start(tmp_path / "pages")
    model(torch.ones(2, 3)).sum().backward()
    job.optimizer.step()
    job.gate.close()
    shard = split(job.processor.layout.shards_of(Rank(0))[0], 2)[number - 1]
    (piece,) = write(job.adapter, job.processor, 1, (shard,), job_state=False, generation=3)
    assert (piece.file, piece.shard) == (f"__0_3_{number}of2.distcp", shard)
    names = {item.key for item in items_of([piece])}
    assert ("model.weight" in names) is (number == 2) and ("optim.param_groups.0.lr" in names) is (number == 1)
    leave(job.adapter)


def test_a_copy_from_before_the_schedules_step_gets_the_rates_that_belong_to_the_schedule(tmp_path: Path) -> None:
    """The shard may come from a second copy, made right after the update, and the schedule from a live rank."""

    def made() -> Any:
        model = Net()
        optimizer = adamw(model)
        return model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    model, optimizer, scheduler = made()
    adapter = registered(model, optimizer, scheduler=scheduler)
    processor = StubProcessor(tmp_path / "c")
    join(adapter, processor, tmp_path / "pages")
    train(model, optimizer, scheduler, 1)
    train(model, optimizer, None, 1)
    pieces = write(adapter, processor, 2, processor.layout.shards_of(Rank(0)), job_state=False)
    scheduler.step()
    pieces += write(adapter, processor, 2, (), pages=(Rank(0),))
    path = commit(adapter, processor, 2, pieces)
    leave(adapter)
    other, again, resumed = made()
    manifest = Manifest.load(path)
    assert restore_into(path, manifest, model=other, optimizer=again, scheduler=resumed)[1] == []
    assert [group["lr"] for group in again.param_groups] == [group["lr"] for group in optimizer.param_groups]
    assert resumed.get_last_lr() == scheduler.get_last_lr() == [0.001 / 4, 0.01 / 4]


GROUPS = [{"lr": 1.0, "params": ["a"]}, {"lr": 2.0, "params": ["b"]}]


@pytest.mark.parametrize(
    ("groups", "kept", "expected"),
    [
        (GROUPS, [{"lr": 3.0}, {"new": 1}], [{"lr": 3.0, "params": ["a"]}, GROUPS[1]]),
        (GROUPS, [{"lr": 3.0}], GROUPS),
        (GROUPS, None, GROUPS),
        ({"a": {"lr": 1.0}}, [{"lr": 3.0}], {"a": {"lr": 1.0}}),
    ],
    ids=["those of a group", "other groups", "none", "by name"],
)
def test_settings_that_do_not_belong_to_these_groups_are_ignored(groups: Any, kept: Any, expected: Any) -> None:
    """A checkpoint may be of another version of ttp, or converted from a file."""
    assert JobState(1, extra={SETTINGS: kept}).with_settings(groups) == expected
