"""Which ranks hold the same shards, found from real models: FSDP2, FSDP1, tensor parallel, pipeline stages, and
mixtures. Every checkpoint of one kind is read into the others, element by element.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load

from tests.adapters.torch.worlds import run_world

WORKER = "tests.adapters.torch.shard_worker"
ALL = [0, 1, 2, 3]
COLUMNS = {"model-0": [0, 2], "model-1": [1, 3]}
SINGLE = {f"model-{rank}": [rank] for rank in ALL}

pytestmark = [pytest.mark.xdist_group("worlds"), pytest.mark.timeout(600)]


SOURCES = ["ddp", "hsdp", "tp+dp", "pp+dp", "fsdp1"]
TARGETS = ["ddp", "fsdp", "hsdp", "tp", "tp+dp", "tp+hsdp", "pp+dp", "mixed", "fsdp1"]
SPAN = [("ddp", "fsdp1"), ("hsdp", "pp+dp"), ("tp+dp", "ddp"), ("pp+dp", "tp+hsdp"), ("fsdp1", "hsdp")]
SPAN += [("hsdp", "tp+dp"), ("tp+dp", "hsdp"), ("hsdp", "mixed"), ("tp+dp", "tp+dp")]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def world(saved: Path) -> list[dict[str, Any]]:
    (saved / "pairs.json").write_text(json.dumps(SPAN))
    return run_world(saved, "tests.adapters.torch.shard_states", "everything")


@pytest.fixture(scope="module")
def told(world: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [rank["layouts"] for rank in world]


@pytest.mark.parametrize(
    ("kind", "groups"),
    [
        ("ddp", {"model": ALL}),
        ("by hand", {"model": ALL}),
        ("fsdp", {**SINGLE, "common": ALL}),
        ("hsdp", {**COLUMNS, "common": ALL}),
        ("hsdp 1xN", {**SINGLE, "common": ALL}),
        ("mixed", {**COLUMNS, "common": ALL}),
        ("fsdp1", {**COLUMNS, "common": ALL}),
        ("tp", {**SINGLE, "common": ALL}),
        ("tp+dp", {**COLUMNS, "common": ALL}),
        ("pp+dp", {"model-0": [0, 1], "model-1": [2, 3]}),
        (
            "tp+hsdp",
            {
                **{"model-0": [0, 1], "model-1": [0], "model-2": [1]},
                **{"model-3": [2, 3], "model-4": [2], "model-5": [3], "common": ALL},
            },
        ),
    ],
)
def test_every_rank_finds_the_same_groups(told: list[dict[str, Any]], kind: str, groups: dict[str, list[int]]) -> None:
    """The worker has compared every chunk with the whole model."""
    assert [rank[kind]["groups"] for rank in told] == [groups] * 4


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "hsdp", "fsdp1", "tp+hsdp", "pp+dp"])
def test_every_parameter_is_in_one_shard_of_a_rank(told: list[dict[str, Any]], kind: str) -> None:
    everything: set[str] = set()
    for rank in told:
        names = [name for listed in rank[kind]["written"].values() for name in listed]
        assert len(names) == len(set(names))
        everything.update(names)
    assert everything == set(told[0]["by hand"]["written"]["model"])


def test_a_layout_that_the_user_names(told: list[dict[str, Any]]) -> None:
    for rank, said in enumerate(told):
        here, there = f"inner-{rank % 2}", f"inner-{1 - rank % 2}"
        written = said["explicit"]["written"]
        assert written[here] == [f"inner.expert{rank % 2}.{key}" for key in ("bias", "weight")]
        assert written[there] == [] and "embed.weight" in written["dense"]
        assert said["explicit"]["elsewhere"] == [f"inner.expert{1 - rank % 2}.{key}" for key in ("bias", "weight")]


def test_stages_that_call_different_things_by_one_name(told: list[dict[str, Any]]) -> None:
    for said in told:
        assert "rank 0 and rank 2 hold parameters of the same names" in said["clash"]


# ------------------------------------------------------------------------------------------------- saving and restoring


def assert_equal(found: list[list[dict[str, Any]]], pairs: list[tuple[str, str]]) -> None:
    for rank in found:
        assert [tuple(told["pair"]) for told in rank] == pairs
        assert {str(told["pair"]): told["wrong"] for told in rank if told["wrong"]} == {}
        assert all(told["count"] > 4 and told["rates"] == [1e-2, 3e-3] for told in rank)


def restored(saved: Path, pairs: list[tuple[str, str]], world: int) -> None:
    (saved / "pairs.json").write_text(json.dumps(pairs))
    assert_equal(run_world(saved, WORKER, "restore_all", size=world), pairs)


@pytest.mark.supports("extra states of modules")
def test_an_extra_state_is_that_of_one_rank(told: list[dict[str, Any]]) -> None:
    """Not a mixture of several, and no reason to refuse the save."""
    assert [said["seen"][0] for said in told] == [[3, 3, 3, 3]] * 4


def test_a_buffer_that_is_cut_is_saved(told: list[dict[str, Any]]) -> None:
    assert [said["seen"][1] for said in told] == [[0, 1, 2, 3, 4]] * 4


def test_counts_for_parameters_of_other_ranks_do_not_replace_theirs(told: list[dict[str, Any]]) -> None:
    for said in told:
        before, after = said["counted"]
        assert before == after and set(before) == {2.0}


def test_state_of_another_shape_than_its_parameter_is_distributed_as_before(told: list[dict[str, Any]]) -> None:
    """Adam-mini keeps a number for each row. As plain tensors these cannot be added to the gradients."""
    for said in told:
        before, after = said["smaller"]
        assert before == after
        assert {"(Replicate(), Shard(dim=0))", "(Replicate(), Replicate())"} <= {placements for placements, _ in before}


def test_the_average_of_a_sharded_model_is_restored_into_a_whole_one(told: list[dict[str, Any]]) -> None:
    for said in told:
        alike, other = said["averaged"]
        assert alike is True
        assert "extra_state['ema'].load_state_dict() refused what was saved (RuntimeError" in other


def test_a_job_of_another_kind(world: list[dict[str, Any]]) -> None:
    assert_equal([rank["restored"] for rank in world], SPAN)


def test_replica_groups_alone_do_not_make_layouts_the_same(world: list[dict[str, Any]]) -> None:
    """In tensor parallelism ranks have to draw the same random numbers, and in FSDP other ones."""
    for rank in world:
        same = [tuple(told["pair"]) for told in rank["restored"] if told["same"]]
        assert same == [("fsdp1", "hsdp"), ("hsdp", "mixed"), ("tp+dp", "tp+dp")]


@pytest.mark.usefixtures("world")
def test_a_smaller_world(saved: Path) -> None:
    restored(saved, [("hsdp", "ddp"), ("ddp", "fsdp"), ("tp+dp", "fsdp")], world=2)


@pytest.mark.slow
@pytest.mark.usefixtures("world")
def test_every_kind_into_every_kind(saved: Path) -> None:
    restored(saved, [(source, target) for source in SOURCES for target in TARGETS], world=4)


@pytest.mark.slow
@pytest.mark.usefixtures("world")
@pytest.mark.parametrize(
    ("size", "targets"), [(6, ["ddp", "hsdp", "fsdp", "fsdp1"]), (8, ["hsdp", "tp+hsdp", "tp+dp", "pp+dp", "fsdp1"])]
)
def test_a_larger_world(saved: Path, size: int, targets: list[str]) -> None:
    """Some shards are empty there."""
    restored(saved, [(source, target) for source in SOURCES for target in targets], world=size)


@pytest.mark.slow
@pytest.mark.parametrize(
    "chain",
    [
        [("ddp", 4), ("ddp", 2), ("ddp", 6)],
        [("hsdp", 4), ("hsdp 1xN", 4), ("hsdp", 8)],
        [("pp+dp", 4), ("tp+dp", 4), ("fsdp1", 2), ("tp+hsdp", 8)],
    ],
    ids=str,
)
def test_job_after_job(tmp_path: Path, chain: list[tuple[str, int]]) -> None:
    """Each resumes from the checkpoint of the one before, on other ranks: DDP 4, 2, 6; HSDP 2x2, 1x4, 4x2."""
    before = 0
    for number, (kind, size) in enumerate(chain, 1):
        (tmp_path / "link.json").write_text(json.dumps([kind, before, 2 * number]))
        for told in run_world(tmp_path, WORKER, "link", size=size):
            if before:
                assert told["wrong"] == [] and told["rates"] == [1e-2, 3e-3], (kind, size, told)
                assert told["count"] > 4 and told["moved"] > 4, (kind, size, told)
        before = 2 * number


@pytest.mark.usefixtures("world")
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("kind", SOURCES)
def test_stock_torch_reads_it_in_a_plain_process(saved: Path, kind: str) -> None:
    from tests.adapters.torch.shard_worker import adamw, net

    whole: dict[str, Any] = {}
    for rank in ALL:
        whole |= torch.load(saved / f"{kind}.{rank}.pt", weights_only=True)
    model = net()
    optimizer = adamw(model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    flat = StateDictOptions(flatten_optimizer_state_dict=kind == "pp+dp")
    weights, moments = get_state_dict(model, optimizer, options=flat)
    state: dict[str, Any] = {"model": weights, "optim": moments}
    load(state, checkpoint_id=saved / kind / "tft_saved_checkpoints-step_2", no_dist=True)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state["optim"], options=flat)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, whole[f"model.{name}"])
        for key, value in optimizer.state[parameter].items():
            assert torch.equal(value, whole[f"optim.{name}.{key}"]), (name, key)
    assert [group["lr"] for group in optimizer.param_groups] == [1e-2, 3e-3]
