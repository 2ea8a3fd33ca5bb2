"""The layout of DistributedDataParallel's buckets is saved and applied, so a resumed job has the bits of an unbroken
one.
"""

from __future__ import annotations

import functools
import json
import types
from pathlib import Path
from typing import Any

import pytest

from tests.adapters.torch.worlds import run_world

pytestmark = pytest.mark.xdist_group("buckets")  # they share runs of four ranks

WORKER = "tests.adapters.torch.ddp_worker"
STEPS = 14

ONE_BUCKET: dict[str, Any] = {}
SMALL_BUCKETS: dict[str, Any] = {"bucket_cap_mb": 0.03}
ACCUMULATING: dict[str, Any] = {"bucket_cap_mb": 0.03, "accumulate": 2}
STATIC: dict[str, Any] = {"bucket_cap_mb": 0.03, "static_graph": True}


def run(directory: Path, wait_for: tuple[int, ...] = (), **job: Any) -> Any:
    """Run one launch of the job to its end and return what rank 0 returned.

    The world has four ranks: two add in the same order whatever the layout, because a + b = b + a.
    """
    ranks = run_world(directory, WORKER, "run", env={"JOB": json.dumps(job)}, wait_for=wait_for)
    assert len({rank and rank["digest"] for rank in ranks}) == 1, "the ranks differ from each other"
    return ranks[0]


class Runs:
    """An unbroken run of one kind that saved some versions, and runs resumed from these."""

    def __init__(self, directory: Path, kind: dict[str, Any], save_at: tuple[int, ...]) -> None:
        self.directory, self.kind = directory, kind
        self.unbroken = run(directory, steps=STEPS, save_at=save_at, save_to=str(directory), **kind)

    @functools.cache  # noqa: B019 - it lives as long as the module's fixture
    def resumed(self, version: int, **job: Any) -> Any:
        return run(self.directory, steps=STEPS, load=str(self.directory / str(version)), **self.kind, **job)

    def check(self, version: int) -> None:
        resumed = self.resumed(version)
        assert resumed["digest"] == self.unbroken["digest"]
        assert resumed["shown"] == self.unbroken["shown"]
        assert resumed["notes"] == []


@pytest.fixture(scope="module")
def small_buckets(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("small"), SMALL_BUCKETS, (1, 2, 10))


@pytest.mark.parametrize("version", [*(pytest.param(v, marks=pytest.mark.slow) for v in (1, 2)), 10])
@pytest.mark.supports("the module inside DDP as model=")
def test_a_resumed_job_has_the_bits_of_an_unbroken_one(small_buckets: Runs, version: int) -> None:
    small_buckets.check(version)


def test_a_network_that_the_loop_freezes_between_its_turns(small_buckets: Runs) -> None:
    """The loop of a GAN trains one of two networks at a time, and begins with both frozen."""
    resumed = small_buckets.resumed(10, frozen=True)
    assert (resumed["notes"], resumed["digest"]) == ([], small_buckets.unbroken["digest"])


def test_without_the_layout_the_bits_differ_and_restore_says_so(small_buckets: Runs) -> None:
    resumed = small_buckets.resumed(10, forget_layout=True)
    assert resumed["digest"] != small_buckets.unbroken["digest"]
    assert resumed["notes"] == ["the next steps may differ in the last bits from an unbroken run: forgotten"]


def test_the_layout_is_known_after_the_first_update_and_stays_known_after_a_resume(small_buckets: Runs) -> None:
    first, second, *others = small_buckets.unbroken["layouts"]
    assert (first, {second, *others}) == (None, {small_buckets.unbroken["shown"]})
    assert "," in second
    assert small_buckets.unbroken["previous"] == small_buckets.unbroken["layouts"][:-1], "for an update that is undone"
    assert set(small_buckets.resumed(10)["layouts"]) == {second}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "version"), [(ONE_BUCKET, 10), (ACCUMULATING, 1)], ids=["one bucket", "no_sync"])
def test_other_kinds_of_data_parallel_jobs_too(tmp_path: Path, kind: dict[str, Any], version: int) -> None:
    Runs(tmp_path, kind, (version,)).check(version)


@pytest.mark.slow
def test_a_static_graph_is_exact_from_its_second_version_on_and_restore_says_so(tmp_path: Path) -> None:
    runs = Runs(tmp_path, STATIC, (1, 2))
    runs.check(2)
    assert "no bucket layout" in runs.resumed(1)["notes"][0]


@pytest.mark.slow
def test_a_thread_saves_while_the_main_thread_hangs_in_the_all_reduce(small_buckets: Runs, tmp_path: Path) -> None:
    saving: dict[str, Any] = {"hang_at": 5, "save_to": str(tmp_path)}
    assert run(tmp_path, (0,), steps=STEPS, **saving, **SMALL_BUCKETS) is None
    resumed = run(tmp_path, steps=STEPS, load=str(tmp_path / "5"), **SMALL_BUCKETS)
    assert resumed["digest"] == small_buckets.unbroken["digest"]


def test_nothing_of_torch_is_replaced_while_a_layout_is_applied() -> None:
    """DDP's own constructor runs; only its query for the bucket layout gets another answer."""
    from torch.nn.parallel import distributed

    from ttp.adapters.torch.sharding import ddp_buckets

    asked: Any = types.FunctionType(_construct.__code__, vars(distributed), "construct")
    assert ddp_buckets._asking(lambda *_: "ours", asked)() == ("ours", distributed.dist.Reducer)  # type: ignore[attr-defined]
    assert asked() != "ours"


def _construct() -> Any:
    try:
        return dist._compute_bucket_assignment_by_size([], [], []), dist.Reducer  # type: ignore[name-defined]  # noqa: F821
    except RuntimeError as problem:  # torch's own wants tensors
        return problem
