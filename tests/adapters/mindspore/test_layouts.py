"""Replica groups, as MindSpore's parallel modes and its strategy files tell them."""

from __future__ import annotations

import pytest

from ttp.adapters.mindspore import layouts
from ttp.core.layout import REPLICATED
from ttp.errors import ConfigError

pytestmark = pytest.mark.xdist_group("mindspore")


class Parameter:
    def __init__(self, name: str, own: bool) -> None:
        self.name, self.layerwise_parallel = name, own


def found(mode: str, monkeypatch: pytest.MonkeyPatch, **given: object) -> dict[str, tuple[int, ...]]:
    monkeypatch.setattr(layouts, "parallel_mode", lambda: mode)
    parameters = [Parameter("w", True), Parameter("b", False)]
    arguments: dict[str, object] = {"replicas": None, "strategy": None} | given
    return dict(layouts.layout_of(None, parameters, 4, **arguments).groups)  # type: ignore[arg-type] # as they come


def test_data_parallel_is_one_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    assert found("data_parallel", monkeypatch) == {REPLICATED: (0, 1, 2, 3)}


def test_layerwise_parallel_parameters_are_shards_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = found("hybrid_parallel", monkeypatch, replicas=[[0, 2], [3, 1]])
    assert groups == {"slice_0": (0, 2), "slice_1": (1, 3)}


def test_slices_that_nobody_explains_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"1 parameters are layerwise_parallel \(w.*replicas=\[\[0, 2\], \[1, 3\]\]"):
        found("hybrid_parallel", monkeypatch)


@pytest.mark.parametrize(
    ("groups", "why"),
    [
        ([[0, 1], [2]], "each of the 4 ranks"),
        ([[0, 1, 2], [2, 3]], "each of the 4 ranks"),
        ([[0, 1, 2], [3]], r"\[3\] has no replica"),
        ([[0, 1], [2, 4]], "each of the 4 ranks"),
    ],
)
def test_groups_that_do_not_fit_are_refused(groups: list[list[int]], why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=why):
        found("hybrid_parallel", monkeypatch, replicas=groups)


def test_ranks_that_hold_the_same_slices_of_everything_are_replicas() -> None:
    redundancy = {"w": ((0, 4), (1, 5), (2, 6), (3, 7)), "bias": (tuple(range(8)),), "v": ((0, 1, 4, 5), (2, 3, 6, 7))}
    groups = layouts.of_redundancy(redundancy, 8).groups
    assert dict(groups) == {f"slice_{r}": (r, r + 4) for r in range(4)}


def test_a_strategy_of_another_job_is_refused() -> None:
    with pytest.raises(ConfigError, match="speaks of rank 4, and the job has 4 ranks"):
        layouts.of_redundancy({"w": ((0, 4), (1, 5))}, 4)
    with pytest.raises(ConfigError, match="says nothing of rank 2"):
        layouts.of_redundancy({"w": ((0, 1),)}, 4)
