"""Stock torch, without ttp, loads what ttp wrote: in one process, and in jobs of another world size."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.adapters.torch.checkpoints import Net, adamw, digest, train, write_checkpoint
from ttp.adapters.torch.saving.job_state import JobState

pytestmark = pytest.mark.xdist_group("stock")  # they share one checkpoint

PROGRAM = Path(__file__).with_name("checkpoints.py")
TIMEOUT_S = 120


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Return a checkpoint and the digest of its content."""
    torch.manual_seed(3)
    model = Net()
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    train(model, optimizer, scheduler, 3)
    path = tmp_path_factory.mktemp("stock") / "checkpoint"
    write_checkpoint(path, model, optimizer, JobState(version=3, scheduler=scheduler.state_dict()))
    for group in optimizer.param_groups:
        del group["initial_lr"]  # a job without a scheduler does not ask for it
    return path, digest(model.state_dict(), optimizer)


def test_a_job_of_another_world_size_gets_every_bit(checkpoint: tuple[Path, str]) -> None:
    """One of the same size is in test_convert.py."""
    path, expected = checkpoint
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(path), str(path.parent / f"store.{uuid.uuid4().hex}")],
        env=os.environ | {"PYTHONPATH": ""},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = [json.loads(line) for line in done.stdout.splitlines()]
    assert told == [[no_dist, expected] for no_dist in (False, False, True, True)]


def test_the_metadata_is_what_stock_torch_would_have_written(checkpoint: tuple[Path, str], tmp_path: Path) -> None:
    from torch.distributed.checkpoint import state_dict_saver
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    path, _ = checkpoint
    whole: dict[str, object] = {}
    planner: Any = _EmptyStateDictLoadPlanner
    _load_state_dict(whole, FileSystemReader(path), planner=planner(), no_dist=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state_dict_saver.save(whole, checkpoint_id=tmp_path / "again", no_dist=True)
    ours, stock = FileSystemReader(path).read_metadata(), FileSystemReader(tmp_path / "again").read_metadata()
    assert ours.state_dict_metadata == stock.state_dict_metadata
    assert ours.planner_data == stock.planner_data
    assert ours.storage_data.keys() == stock.storage_data.keys()
    assert vars(ours).get("version") == vars(stock).get("version")  # torch 2.7 has none


def test_stock_tools_convert_it_and_the_result_loads_without_pickle(
    checkpoint: tuple[Path, str], tmp_path: Path
) -> None:
    dcp_to_torch_save(checkpoint[0], tmp_path / "one.pt")
    state = torch.load(tmp_path / "one.pt", weights_only=True)
    assert state["ttp"] == {"version": 3, "optimizer": "torch.optim.adamw.AdamW"}
    assert state["scheduler"]["last_epoch"] == 3
    assert state["optim"]["param_groups"][1]["betas"] == (0.9, 0.999)
