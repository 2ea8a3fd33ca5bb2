"""What a rank that has not joined can tell, and the parts of a shard that it writes once it has."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.adapters.torch.stub_processor import Loop, leave, registered
from ttp.adapters.torch.saving.piece_index import items_of
from ttp.core.decide import How
from ttp.core.layout import Rank, Version
from ttp.core.messages import SaverOrder
from ttp.core.stripes import split


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
    (tmp_path / "draft").mkdir()
    (piece,) = job.source.write_pieces(
        order=SaverOrder(Rank(0), (shard,), How.AS_IS, (), False),
        version=Version(1),
        draft=tmp_path / "draft",
        generation=3,
        cancelled=lambda: False,
    )
    assert (piece.file, piece.shard) == (f"__0_3_{number}of2.distcp", shard)
    names = {item.key for item in items_of([piece])}
    assert ("model.weight" in names) is (number == 2) and ("optim.param_groups.0.lr" in names) is (number == 1)
    leave(job.adapter)
