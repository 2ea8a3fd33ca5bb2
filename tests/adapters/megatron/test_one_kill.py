"""One real job of megatron-core, TP2 x DP2 in two instances: a rank is killed, and the checkpoint is used in all ways.

A real SIGKILL and a real controller. The tests share the job, because every world of ranks costs seconds.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.adapters.megatron.jobs import DP4, KILLED_AT, SCALED, TP2_DP2, Job, assert_equal, assert_whole
from tests.adapters.megatron.nursery import Nursery
from ttp.adapters.torch.convert.conversion import convert
from ttp.store.manifest import Manifest

pytestmark = [pytest.mark.xdist_group("megatron"), pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def killed(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Job:
    job = Job(nursery, tmp_path_factory.mktemp("tp2"), TP2_DP2 | SCALED)
    job.kill([1], "reduced")
    assert job.versions() == [job.checkpoint.name]
    return job


@pytest.fixture(scope="module")
def unhurt(killed: Job) -> dict[str, torch.Tensor]:
    return killed.unhurt()


@pytest.mark.supports("FP8 extra state in Megatron")
def test_the_job_goes_on_as_if_nothing_had_happened(killed: Job, unhurt: dict[str, torch.Tensor]) -> None:
    """In its second launch ttp is installed as in Megatron-LM's own training loop."""
    assert killed.live(1, through="install") == [0] * 4, killed.story()
    killed.assert_resumed_as_unhurt()


def test_one_rank_of_two_slices_and_two_instances_holds_each_shard_twice(killed: Job) -> None:
    manifest = Manifest.load(killed.checkpoint)
    assert manifest.framework == "megatron"
    assert dict(manifest.groups) == {"dense-tp0": (0, 2), "dense-tp1": (1, 3)}
    assert {piece.writer for piece in manifest.pieces if piece.kind == "shard"} <= {0, 2, 3}


def test_it_is_restored_without_tensor_parallelism(killed: Job, unhurt: dict[str, torch.Tensor]) -> None:
    assert_equal(unhurt, killed.state("tp1", DP4 | SCALED, ttp_from=str(killed.save_dir)))
    for name in ("groups", "schedule", "extra_states"):
        assert killed.summary("tp1", 0)[name] == killed.summary("unhurt", 0)[name]


def test_megatron_itself_reads_it(killed: Job, unhurt: dict[str, torch.Tensor]) -> None:
    assert_equal(unhurt, killed.state("stock", stock_from=str(killed.checkpoint)))
    assert json.loads((killed.checkpoint / "metadata.json").read_text())["sharded_backend"] == "torch_dist"
    for rank in range(4):
        mine, stock = killed.summary("unhurt", rank), killed.summary("stock", rank)
        for name in ("weights", "main", "moments", "schedule", "extra_states"):
            assert stock[name] == mine[name], (rank, name)
        assert killed.after("stock", rank)["args"] == killed.after("unhurt", rank)["args"]
    assert "('step', 3)" in killed.summary("stock", 0)["groups"]


def test_one_file_of_it_has_the_names_of_the_model(killed: Job, unhurt: dict[str, torch.Tensor]) -> None:
    """One file of a TP2 x DP2 job has every element, with the names of the model on one rank."""
    convert(killed.checkpoint, killed.directory / "all.pt", "torch", watch=lambda _what, _total: lambda _count: None)
    state = torch.load(killed.directory / "all.pt", weights_only=True)
    assert_whole(unhurt, state)
    assert next(iter(state["model"])) == "decoder.final_layernorm.bias"
    weight = state["model"]["decoder.layers.1.mlp.linear_fc1.weight"]
    assert torch.equal(weight, unhurt["decoder.layers.mlp.linear_fc1.weight"][1])
    groups = state["optim"]["param_groups"]
    named = [name for group in groups for name in group["params"]]
    assert sorted(named) == sorted(state["model"])
    assert {group["wd_mult"] for group in groups if "decoder.final_layernorm.bias" in group["params"]} == {0.0}
    assert {float(values["step"]) for values in state["optim"]["state"].values()} == {3.0}


def test_a_plain_optimizer_of_torch(nursery: Nursery, tmp_path: Path) -> None:
    """Megatron's layers draw their dropout from its tracker, whoever makes the updates."""
    unbroken, job = (Job(nursery, tmp_path / name, {"distributed": False}) for name in ("unbroken", "killed"))
    assert unbroken.live(0, through="plain", ranks=2) == [0, 0], unbroken.story()
    # There is no barrier: only its gradient of this step shows that the survivor has made the update before.
    fault = {"ranks": [1], "step": KILLED_AT, "phase": "reduced"}
    assert job.live(0, through="plain", ranks=2, fault=fault) == [75, -9], job.story()
    assert job.live(1, through="plain", ranks=2) == [0, 0], job.story()
    assert job.starts() in ([0, KILLED_AT], [0, KILLED_AT + 1])
    for rank in range(2):
        ends = [json.loads((one.directory / f"result{rank}.json").read_text()) for one in (unbroken, job)]
        assert {name for name, value in ends[0].items() if value != ends[1][name]} == set()
