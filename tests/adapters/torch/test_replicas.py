"""Two real replicas: the comparison of their digests, and the barrier before an update."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.adapters.torch.stub_processor import StubProcessor
from tests.adapters.torch.worlds import run_world
from ttp.adapters.torch.loop.barrier import UpdateBarrier, needs_barrier
from ttp.core.layout import Layout, Rank, Shard
from ttp.errors import ConfigError

WORKER = "tests.adapters.torch.replica_worker"

pytestmark = pytest.mark.xdist_group("replicas")  # they share one run


@pytest.fixture(scope="module", params=["one host", "two hosts"])
def hosts(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory, hosts: str) -> list[Any]:
    """Return what each rank returned, by case."""
    return run_world(tmp_path_factory.mktemp("replicas"), WORKER, "everything", 2, {"HOSTS": hosts})


def test_replicas_look_alike_after_many_updates(told: list[Any]) -> None:
    one, other = (rank["digests"] for rank in told)
    assert one["seen"] and one["seen"] == other["seen"]
    assert one["statistics"] != other["statistics"], "otherwise this shows nothing"
    assert one["bad"] == other["bad"] == []


def test_until_a_bit_of_one_flips(told: list[Any]) -> None:
    one, other = (rank["digests"] for rank in told)
    assert one["flipped"] == one["seen"] != other["flipped"]


def test_with_several_shards_no_update_begins_before_every_rank_can_make_it(told: list[Any], hosts: str) -> None:
    shared = 2 if hosts == "one host" else 1
    assert [rank["barrier"] for rank in told] == [{"early": [False], "shared": shared}] * 2


def test_with_one_shard_or_undo_nobody_waits(told: list[Any]) -> None:
    assert [rank["no_barrier"] for rank in told] == [{"one shard": True, "undo": True}] * 2


def test_frozen_in_the_barrier_it_makes_the_update_without_the_others_when_told_to(
    told: list[Any],
) -> None:
    assert told[1]["admitted"] == {"parked": True, "ready": True, "admitted": True, "version": 1}
    assert told[0]["admitted"] == {"version": 1}


def test_a_death_at_the_barrier_leaves_the_survivor_at_the_gate_with_its_gradient(tmp_path: Path, hosts: str) -> None:
    ready = {"reported": ["collective"], "parked": True, "ready": True, "phase": "idle", "version": 0}
    told = run_world(tmp_path, WORKER, "death", 2, {"HOSTS": hosts})
    assert told == [None, {**ready, "raised": True, "redone": 1}]


def test_where_a_barrier_is_needed() -> None:
    ranks = (Rank(0), Rank(1))
    several = Layout(2, {Shard("a"): ranks, Shard("b"): ranks[:1]})
    assert needs_barrier(several, None)
    assert not needs_barrier(several, "preimage")
    assert not needs_barrier(Layout.data_parallel(2), None)
    assert not needs_barrier(Layout(2, {Shard("a"): ranks, Shard("b"): ranks}), None), "they are always together"


@pytest.mark.parametrize(("ranks", "found"), [(0, "is not initialised"), (3, "has 3 ranks")])
def test_without_a_process_group_of_all_ranks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ranks: int, found: str
) -> None:
    there = SimpleNamespace(is_available=lambda: True, is_initialized=lambda: ranks > 0, get_world_size=lambda: ranks)
    monkeypatch.setattr("ttp.adapters.torch.loop.barrier.dist", there)
    with pytest.raises(ConfigError, match=rf"{found}: call init_process_group\(\) before wrap_optimizer"):
        UpdateBarrier(2, (), StubProcessor(tmp_path))
