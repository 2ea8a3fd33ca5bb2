"""ZeRO-1 as shards: which rank writes what, and every element is restored in a world of any size."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.adapters.torch.worlds import run_world
from ttp.adapters.torch.sharding.zero_sharding import partitions

WORKER = "tests.adapters.torch.zero_saves"
Told = Callable[[str, int], list[dict[str, Any]]]

pytestmark = pytest.mark.xdist_group("zero")  # they share one run

PARAMETERS = {f"{layer}.{kind}" for layer in ("image", "wide", "middle", "exact") for kind in ("weight", "bias")} | {
    "scale",
    "nothing",
}
"""Those that the optimizer was given."""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    """Return a function that gives what each rank of a world has returned in a case."""
    directory = tmp_path_factory.mktemp("zero")
    ranks = {size: run_world(directory, WORKER, "everything", size) for size in (4, 3, 2)}
    return lambda case, world: [rank[case] for rank in ranks[world]]


def test_a_partition_is_the_shard_of_the_ranks_that_have_it(told: Told) -> None:
    ranks = told("replicated", 4)
    assert {json.dumps(rank["groups"]) for rank in ranks} == {
        json.dumps({"common": [0, 1, 2, 3], "model-0": [0, 2], "model-1": [1, 3]})
    }
    assert set(ranks[0]["writes"]["model-0"]) | set(ranks[1]["writes"]["model-1"]) == PARAMETERS
    assert not set(ranks[0]["writes"]["model-0"]) & set(ranks[1]["writes"]["model-1"])
    assert [rank["writes"]["common"] for rank in ranks] == [["frozen.bias", "frozen.weight"]] * 4
    assert len(ranks[0]["files"]) == 3


def test_after_a_torn_exchange_every_element_comes_back_from_copies_in_different_columns(told: Told) -> None:
    assert [rank["differences"] for rank in told("replicated", 4)] == [[]] * 4


def test_copies_look_alike_whatever_they_have_received_of_others(told: Told) -> None:
    looks = [rank["looks"] for rank in told("replicated", 4)]
    assert looks[0] == looks[2] and looks[1] == looks[3] and all(map(all, (look.values() for look in looks)))
    assert [rank["bad"] for rank in told("replicated", 4)] == [[]] * 4, "NaN in what others update is theirs"


def test_an_update_is_undone_from_the_own_partition_alone(told: Told) -> None:
    assert told("undone", 4) == [{"differences": [], "kept": True, "ready": True}] * 4


def test_after_an_update_by_order_no_rank_enters_an_exchange_until_it_is_released(told: Told) -> None:
    by_order = {"ready": True, "admitted": True, "version": 4, "entered": False, "settled": True}
    ranks = told("redone", 4)
    assert [{**by_order, **rank} for rank in ranks[:2]] == ranks[:2] and ranks[0].items() >= by_order.items()
    assert [rank["version"] for rank in ranks] == [4, 4, 3, 3]
    assert [(rank["left"], rank["differences"]) for rank in ranks] == [(True, [])] * 4, "then all go on together"


def test_torchs_own_is_saved_and_the_missing_copies_are_said_once(told: Told) -> None:
    ranks = told("torch", 4)
    assert ranks[0]["groups"] == {"common": [0, 1, 2, 3], **{f"model-{rank}": [rank] for rank in range(4)}}
    assert [rank["differences"] for rank in ranks] == [[[], [], []]] * 4, "into itself, ReplicatedOptimizer, AdamW"
    assert [len(rank["said"]) for rank in ranks] == [1, 0, 0, 0]
    assert "use ttp.adapters.torch.ReplicatedOptimizer" in ranks[0]["said"][0] and "buddy=True" in ranks[0]["said"][0]


@pytest.mark.parametrize(
    ("world", "case"),
    [(4, "plain"), (3, "replicated"), (3, "plain"), (2, "replicated"), (2, "torch"), (2, "to plain"), (2, "one shard")],
)
def test_other_worlds_and_plain_optimizers_read_each_others_checkpoints(told: Told, world: int, case: str) -> None:
    ranks = told(case, world)
    assert [rank["differences"] for rank in ranks] == [[]] * world
    if "moments" in ranks[0]:
        assert {name for rank in ranks for name in rank["moments"]} == PARAMETERS


def test_groups_of_ranks_are_copies_where_gradients_are_reduced_over_all(told: Told) -> None:
    ranks = told("refused", 4)
    assert ranks[3]["hosts"] == {"common": [0, 1, 2, 3], "model-0": [0, 2], "model-1": [1, 3]}
    for case, cure in {
        "unconnected": "use the group of all data-parallel ranks",
        "layout": "call wrap_optimizer() without layout=",
        "world": "call init_process_group() before wrap_optimizer()",
    }.items():
        assert all(cure in rank[case] for rank in ranks), case


def test_who_has_nothing_of_its_own_has_what_everybody_has() -> None:
    layout, mine = partitions([b"one", b"two", b"-", b"one"], 2)
    assert mine is None and layout.shards_of(layout.groups["common"][2]) == ("common",)  # type: ignore[index]
    assert layout.groups == {"common": (0, 1, 2, 3), "model-0": (0, 3), "model-1": (1,)}


def test_one_partition_is_plain_replication() -> None:
    layout, mine = partitions([b"all"] * 3, 1)
    assert layout.groups == {"model": (0, 1, 2)} and mine == "model"
