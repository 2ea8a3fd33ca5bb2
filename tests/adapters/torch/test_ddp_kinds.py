"""Kinds of DistributedDataParallel whose reducer ttp leaves alone, and what it says of each. The world has one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.adapters.torch.test_data_parallel import Ddp, layers
from ttp.adapters.torch.sharding import ddp_buckets
from ttp.adapters.torch.sharding.ddp_buckets import BucketWatch, apply_bucket_layout, missing_layout, why_not_renewed

pytestmark = pytest.mark.usefixtures("world_of_one")

_dist: Any = dist
LAYOUT = "2 3, 1 0"


def mixed() -> Any:
    from torch.nn.parallel.distributed import _MixedPrecision

    return Ddp(layers(), mixed_precision=_MixedPrecision(reduce_dtype=torch.float32))


def in_python() -> Any:
    ddp = Ddp(layers())
    ddp._use_python_reducer = True  # as the compiler sets it when ddp is made: it needs inductor
    return ddp


def hooked() -> Any:
    ddp = Ddp(layers())
    ddp._register_builtin_comm_hook(_dist.BuiltinCommHookType.FP16_COMPRESS)
    return ddp


@pytest.mark.parametrize(
    ("make", "what", "why"),
    [
        (hooked, "a communication hook", None),
        (lambda: Ddp(layers(), static_graph=True), "static_graph", None),
        (mixed, "mixed_precision", "with mixed_precision= keeps state"),
        (in_python, "the Python reducer", "Python reducer of compiled"),
    ],
)
def test_a_reducer_with_a_state_of_its_own_is_not_reset_or_gets_no_layout_that_it_could_not_keep(
    make: Callable[[], Any], what: str, why: str | None
) -> None:
    """A call of the step function would begin with gradients that half of a backward pass has left in it.

    Why a layout is not applied is said at the restore, and the module is left as it is.
    """
    ddp = make()
    assert why_not_renewed(ddp) == f"the reducer of DistributedDataParallel with {what} cannot be reset"
    before = ddp.reducer
    assert why is None or (why in str(apply_bucket_layout(ddp, LAYOUT)) and ddp.reducer is before)


def test_a_plain_one_is_reset_but_not_while_ranks_may_run_out_of_batches() -> None:
    ddp = Ddp(layers())
    assert why_not_renewed(ddp) == ""
    with ddp.join():
        assert why_not_renewed(ddp).endswith("with join() cannot be reset")


def test_a_torch_that_asks_otherwise_for_its_buckets_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A later version may not use the answer: the bits would differ, and nobody would know."""
    ddp = Ddp(layers())
    monkeypatch.setattr(Ddp, "_ddp_init_helper", lambda *_: None)
    assert "chooses its buckets in another way" in str(apply_bucket_layout(ddp, LAYOUT))


def trained(ddp: Any, watch: BucketWatch, updates: int = 2) -> Any:
    for _ in range(updates):
        ddp(torch.ones(1, 4)).sum().backward()
        watch.update_finished()
    return watch.layout


def shown(ddp: Any) -> Any:
    ddp(torch.ones(1, 4)).sum().backward()
    return ddp._get_ddp_logging_data().get("rebuilt_per_bucket_param_indices")


@pytest.mark.parametrize("last", ["0", "1"])
def test_the_layout_is_told_before_torch_shows_it(last: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is computed as torch computes it, also if ``DDP_SET_LAST_BUCKET_CAP`` lets the limits begin with the last."""
    monkeypatch.setenv("DDP_SET_LAST_BUCKET_CAP", last)
    ddp = Ddp(layers(), bucket_cap_mb=0.0001)
    found = trained(ddp, BucketWatch(ddp), 1)
    shown(ddp)
    assert found == shown(ddp) and "," in found


def test_a_static_graph_goes_on_with_a_restored_layout() -> None:
    """Its first backward pass tells nothing: a static graph reduces all parameters at its end."""
    ddp = Ddp(layers(), static_graph=True, bucket_cap_mb=0.0001)
    watch = BucketWatch(ddp)
    assert trained(ddp, watch, 1) is None
    found = trained(ddp, watch, 1)
    again = Ddp(layers(), static_graph=True, bucket_cap_mb=0.0001)
    assert apply_bucket_layout(again, found) is None and again.reducer is not None
    for _ in range(3):
        again(torch.ones(1, 4)).sum().backward()
    assert ddp_buckets.bucket_layout(again) == found


def test_what_never_changes_its_layout_is_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 3)
    assert missing_layout(Ddp(layers(), find_unused_parameters=True)) is None
    assert "no bucket layout" in str(missing_layout(Ddp(layers())))
