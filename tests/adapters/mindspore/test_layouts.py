"""Replica groups from MindSpore's parallel modes and strategy files."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.adapters.mindspore.reshard_worlds import STRATEGIES
from ttp.adapters.mindspore import layouts
from ttp.core.layout import REPLICATED, Rank, Shard
from ttp.errors import ConfigError
from ttp.mindspore_files.group_info import write_group_info

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


def test_group_infos_of_all_ranks_are_a_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for rank in range(4):
        (tmp_path / f"rank_{rank}").mkdir()
        write_group_info(tmp_path / f"rank_{rank}" / "group_info.pb", (rank % 2, rank % 2 + 2))
    pattern = f"{tmp_path}/rank_{{rank}}/group_info.pb"
    groups = found("semi_auto_parallel", monkeypatch, strategy=pattern)
    assert groups == {"slice_0": (0, 2), "slice_1": (1, 3)}
    write_group_info(tmp_path / "rank_3" / "group_info.pb", (2, 3))
    with pytest.raises(ConfigError, match=r"the file of rank 1 says that the ranks \[1, 3\] hold the same, and their"):
        found("semi_auto_parallel", monkeypatch, strategy=pattern)
    (tmp_path / "rank_2" / "group_info.pb").unlink()
    with pytest.raises(ConfigError, match=r"rank_2/group_info.pb cannot be read"):
        found("semi_auto_parallel", monkeypatch, strategy=pattern)


def test_a_compiled_network_knows_its_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """As MindSpore keeps it: device matrix, tensor map, shape of the slice, field, even, group of optimizer shards."""
    monkeypatch.setattr("mindspore.train._utils.get_rank", lambda: 0)
    monkeypatch.setattr(layouts, "parallel_mode", lambda: "semi_auto_parallel")
    network = SimpleNamespace(
        parameter_layout_dict={
            "l1.w": [[2, 4], [-1, 0], [784, 16], 0, True, ""],
            "l2.w": [[2, 4], [0, -1], [16, 64], 0, True, ""],
            "l3.w": [[2, 4], [-1, -1], [64, 16], 0, True, ""],
        }
    )
    groups = layouts.layout_of(network.parameter_layout_dict, [], 8, replicas=None, strategy=None).groups
    assert dict(groups) == {f"slice_{r}": (r, r + 4) for r in range(4)}
    with pytest.raises(ConfigError, match=r"does not contain rank 8: .* one stage of a pipeline"):
        layouts.layout_of(network.parameter_layout_dict, [], 16, replicas=None, strategy=None)
    network.parameter_layout_dict = None
    with pytest.raises(ConfigError, match=r"the network is not compiled yet: give TFTRegister\(..., strategy=FILE\)"):
        layouts.layout_of(network.parameter_layout_dict, [], 8, replicas=None, strategy=None)


def test_a_strategy_file_is_a_layout_and_a_directory_is_that_of_a_pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    def groups(name: str) -> dict[Shard, tuple[Rank, ...]]:
        monkeypatch.setattr(layouts, "parallel_mode", lambda: "semi_auto_parallel")
        return dict(layouts.layout_of(None, [], 8, replicas=None, strategy=STRATEGIES / name).groups)

    assert groups("s8.ckpt") == groups("s8.json") == {f"slice_{r}": (r, r + 4) for r in range(4)}
    with pytest.raises(ConfigError, match=r"\[0\] has no replica"):
        groups("s8o.ckpt")
    with pytest.raises(ConfigError, match=r"\[0\] has no replica"):
        groups("pp")  # its two stages of four ranks have none, and all eight ranks are spoken of
    with pytest.raises(ConfigError, match="does not contain rank 4"):
        groups("s4.ckpt")
    with pytest.raises(ConfigError, match=r"strategy=.*is no strategy file of MindSpore"):
        groups("group_info.pb")


def test_ranks_that_hold_the_same_slices_of_everything_are_replicas() -> None:
    redundancy = {"w": ((0, 4), (1, 5), (2, 6), (3, 7)), "bias": (tuple(range(8)),), "v": ((0, 1, 4, 5), (2, 3, 6, 7))}
    redundancy["accu_grads.w"] = tuple((rank,) for rank in range(8))  # empty between updates, and not saved
    groups = layouts.of_redundancy(redundancy, 8).groups
    assert dict(groups) == {f"slice_{r}": (r, r + 4) for r in range(4)}


def test_a_strategy_of_another_job_is_refused() -> None:
    with pytest.raises(ConfigError, match="contains rank 4, and the job has 4 ranks"):
        layouts.of_redundancy({"w": ((0, 4), (1, 5))}, 4)
    with pytest.raises(ConfigError, match="does not contain rank 2"):
        layouts.of_redundancy({"w": ((0, 1),)}, 4)
