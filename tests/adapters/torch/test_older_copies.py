"""A second copy of a shard may be from an earlier moment of its version than the rest of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.adapters.torch.checkpoints import Net, adamw, train
from tests.adapters.torch.stub_processor import INCARNATION, StubProcessor, commit, join, leave, registered
from ttp.adapters.torch.restoring.restore import restore_into
from ttp.adapters.torch.saving.job_state import SETTINGS, JobState
from ttp.core.decide import How
from ttp.core.layout import Rank, Shard, Version
from ttp.core.messages import Commit, SaverOrder
from ttp.store.manifest import Manifest


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
    draft = processor.save_dir / ".draft-step_2-x"
    draft.mkdir(parents=True)

    def written(shards: tuple[Shard, ...], pages: tuple[Rank, ...]) -> list[Any]:
        order = SaverOrder(Rank(0), shards, How.AS_IS, pages, not shards)
        write: Any = adapter.source.write_pieces
        return list(write(order=order, version=2, draft=draft, generation=1, cancelled=lambda: False))

    train(model, optimizer, scheduler, 1)
    train(model, optimizer, None, 1)
    pieces = written(processor.layout.shards_of(Rank(0)), ())
    scheduler.step()
    pieces += written((), (Rank(0),))
    order = Commit(Rank(0), 1, "x", 1, Version(2), INCARNATION, draft.name, "", "", 3, tuple(pieces), ())
    path = commit(adapter.source, processor, order)
    leave(adapter)
    other, again, resumed = made()
    manifest = Manifest.load(path)
    assert restore_into(path, manifest, model=other, optimizer=again, scheduler=resumed).notes == ()
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
