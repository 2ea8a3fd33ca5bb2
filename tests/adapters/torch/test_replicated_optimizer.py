"""ReplicatedOptimizer computes what the plain optimizer does, with less memory and with copies of each shard."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from tests.adapters.torch.worlds import run_world
from ttp.adapters.torch.sharding.partition import ShardPlacement, assign
from ttp.adapters.torch.sharding.replicated_optimizer import ReplicatedOptimizer, _crowded
from ttp.errors import ConfigError

WORKER = "tests.adapters.torch.zero_worlds"
Told = Callable[..., list[dict[str, Any]]]

pytestmark = pytest.mark.xdist_group("zero")  # they share one run


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    """Return a function that gives what each rank of a world has returned in a case."""
    ranks = {size: run_world(tmp_path_factory.mktemp("zero"), WORKER, "everything", size) for size in (4, 5)}
    return lambda case, world=4: [rank[case] for rank in ranks[world]]


@pytest.mark.parametrize(
    ("case", "world"), [("2 copies", 4), ("1 copy", 4), ("3 copies", 4), ("cut into pieces", 4), ("2 copies", 5)]
)
def test_losses_weights_and_moments_are_those_of_the_plain_optimizer(told: Told, case: str, world: int) -> None:
    ranks = told(case, world)
    assert [(rank["equal"], rank["moments"]) for rank in ranks] == [(True, True)] * world


@pytest.mark.parametrize(("case", "world", "shards"), [("2 copies", 4, 2), ("1 copy", 4, 4), ("2 copies", 5, 2)])
def test_every_state_is_kept_once_in_each_set_of_shards(told: Told, case: str, world: int, shards: int) -> None:
    ranks = told(case, world)
    (plain,) = {rank["bytes_plain"] for rank in ranks}
    assert sum(rank["bytes"] for rank in ranks[:shards]) == plain
    assert max(rank["bytes"] for rank in ranks) < plain * 0.7
    kept = [rank["mine"] for rank in ranks]
    assert all(kept[rank] == kept[rank % shards] for rank in range(world)), "shard of rank r is r % shards"
    assert len({name for names in kept for name in names}) == sum(len(names) for names in kept[:shards])


def test_as_many_copies_as_leave_one_shard_are_plain_replication(told: Told) -> None:
    assert all(rank["bytes"] == rank["bytes_plain"] and rank["collectives"] == 0 for rank in told("3 copies"))


@pytest.mark.parametrize(("case", "world"), [("2 copies", 4), ("1 copy", 4), ("2 copies", 5)])
def test_an_exchange_writes_into_parameters_of_other_shards_only(told: Told, case: str, world: int) -> None:
    assert [rank["own written"] for rank in told(case, world)] == [False] * world


def test_all_parameters_travel_together_unless_they_are_large(told: Told) -> None:
    assert {rank["collectives"] for rank in told("2 copies")} == {1}
    assert min(rank["collectives"] for rank in told("cut into pieces")) > 20


def test_the_bits_are_those_of_torchs_zero_redundancy_optimizer(told: Told) -> None:
    assert told("torch") == [{"equal": True}] * 4


def test_inner_optimizers_of_every_kind(told: Told) -> None:
    assert told("inner kinds") == [{"foreach": True, "fused": True, "tensor": True}] * 4


def test_param_groups_closures_and_state_dictionaries(told: Told) -> None:
    for rank in told("groups and state"):
        assert all(rank.values()), rank


def test_what_the_inner_optimizer_writes_into_its_groups_is_seen_outside(told: Told) -> None:
    assert told("written by inner") == [{"seen": [1, 2, 3, 4], "lr": 4.0}] * 4


def test_a_scaler_skips_the_step_of_all(told: Told) -> None:
    assert told("scaler") == [{"same": [True, False], "scale": 2.0}] * 4


def test_more_shards_than_parameters(told: Told) -> None:
    ranks = told("few parameters")
    assert [rank["states"] for rank in ranks] == [1, 0, 0, 0]
    assert len({json.dumps(rank["value"]) for rank in ranks}) == 1 and ranks[0]["value"][0] < 0.9
    assert {tuple(rank["named"]) for rank in ranks} == {("only",)}


def test_a_process_group_is_a_world_of_its_own(told: Told) -> None:
    ranks = told("within a group")
    assert [rank["ranks"] for rank in ranks] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [rank["held"] for rank in ranks] == [[3], [3], [2], [2]]
    assert [rank["values"] for rank in ranks] == [[[g, g], [g, g, g]] for g in (1.0, 2.0, 1.0, 2.0)]


@pytest.mark.parametrize(
    ("mistake", "cure"),
    [
        ("copies", "start more ranks, or set replicas=4 or less"),
        ("zero", "must be at least 1"),
        ("lbfgs", "LBFGS cannot be sharded by parameter"),
        ("gaps", "call .contiguous()"),
        ("unlike", "ranks [1] gave ReplicatedOptimizer other parameters"),
    ],
)
def test_mistakes_are_refused_with_the_cure(told: Told, mistake: str, cure: str) -> None:
    assert all(cure in rank[mistake] for rank in told("mistakes"))


def test_a_death_in_the_exchange_leaves_the_update_of_the_others_whole(tmp_path: Path) -> None:
    ranks = run_world(tmp_path, WORKER, "torn_exchange")
    assert [rank and rank["whole"] for rank in ranks] == [True, None, True, True]
    assert ranks[0]["raised"], "otherwise this shows nothing"


def test_without_a_process_group() -> None:
    with pytest.raises(ConfigError, match="init_process_group"):
        ReplicatedOptimizer([torch.nn.Parameter(torch.zeros(1))], torch.optim.SGD)


# ------------------------------------------------------------------------------------------------------- numbers only


@given(st.integers(1, 40), st.data())
def test_every_block_has_every_shard_and_every_shard_its_copies(size: int, data: st.DataObject) -> None:
    replicas = data.draw(st.integers(1, size))
    placement = ShardPlacement(size, replicas)
    blocks = {placement.block_of(rank) for rank in range(size)}
    assert sorted(rank for block in blocks for rank in block) == list(range(size))
    for rank in range(size):
        block = placement.block_of(rank)
        assert rank in block and len(block) < 2 * placement.shards
        assert {placement.shard_of(r) for r in block} == set(range(placement.shards))
    for shard in range(placement.shards):
        holders = placement.holders(shard)
        assert len(holders) >= replicas and all(placement.shard_of(rank) == shard for rank in holders)
    assert sum(len(placement.holders(shard)) for shard in range(placement.shards)) == size


@given(st.lists(st.integers(0, 1000)), st.integers(1, 9))
def test_shards_are_balanced(sizes: list[int], count: int) -> None:
    loads = [0] * count
    shards = assign(sizes, loads)
    assert loads == [sum(s for s, where in zip(sizes, shards, strict=True) if where == shard) for shard in range(count)]
    assert max(loads) <= sum(sizes) / count + max(sizes, default=0)


def test_a_second_helping_is_balanced_with_the_first() -> None:
    loads = [0, 0]
    assert assign([5, 9], loads) == [1, 0]
    assert assign([1, 3], loads) == [1, 1] and loads == [9, 9]


@pytest.mark.parametrize(
    ("hosts", "crowded"),
    [("aabb", False), ("aaaa", False), ("abab", True), ("aaab", True), ("abcd", False)],
)
def test_copies_that_share_a_host_are_noticed(hosts: str, crowded: bool) -> None:
    assert (_crowded(ShardPlacement(4, 2), list(map(ord, hosts))) is not None) is crowded
