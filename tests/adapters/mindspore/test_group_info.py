"""``group_info.pb`` and strategy files: read as MindSpore reads them, refused when damaged."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.adapters.mindspore.reshard_worlds import S8, S8O, STRATEGIES, Cut, write_strategy
from ttp.errors import CheckpointError, UsageError
from ttp.mindspore_files.group_info import GroupInfo, parse_group_info, read_group_info, write_group_info
from ttp.mindspore_files.redundancy import groups_of_stages, parameter_groups, replicas_of
from ttp.mindspore_files.strategy_file import Stage, parse_strategy, read_stages

pytestmark = pytest.mark.xdist_group("mindspore-files")  # importing MindSpore takes seconds: once


def test_mindspore_reads_what_is_written(tmp_path: Path) -> None:
    import mindspore

    path = tmp_path / "group_info.pb"
    for replicas in ([0], [4, 0], range(300)):
        write_group_info(path, replicas, {"world": [0, 1, 2]})
        assert mindspore.restore_group_info_list(str(path)) == sorted(replicas)
        assert read_group_info(path) == GroupInfo(tuple(sorted(replicas)), {"world": (0, 1, 2)})


def test_what_mindspores_own_code_writes_is_read() -> None:
    from mindspore.train.node_strategy_pb2 import ParallelGroupMap

    document = ParallelGroupMap()
    group = document.parallel_group_item.add()
    group.group_name = "2-16453000547691086251"
    group.parallel_group_ranks.dim.extend([0, 4])
    document.ckpt_restore_rank_list.dim.extend([0, 4, 200])
    assert parse_group_info(document.SerializeToString()) == GroupInfo((0, 4, 200), {group.group_name: (0, 4)})


def test_no_ranks_are_not_written(tmp_path: Path) -> None:
    for ranks in ([], [-1], [1 << 40]):
        with pytest.raises(UsageError, match="at least one"):
            write_group_info(tmp_path / "g.pb", ranks)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", [b"", b"\x00", b"hello", b"\x0a\xff", b"\x12\x00"])
def test_what_is_none_is_refused(text: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.pb"
    path.write_bytes(text)
    with pytest.raises(CheckpointError, match=str(path)):
        read_group_info(path)
    with pytest.raises(CheckpointError, match=str(path)):
        read_stages(path)


def test_absent_files_are_refused(tmp_path: Path) -> None:
    for read in (read_group_info, read_stages):
        with pytest.raises(CheckpointError, match="No such file"):
            read(tmp_path / "no")


def damaged(whole: bytes, seed: int) -> bytes:
    """Return ``whole`` with flipped bits, cut off, doubled, or overwritten in part."""
    draw = random.Random(seed)
    data = bytearray(whole)
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(data)) if data else 0
        kind = draw.randrange(5)
        if kind == 0 and data:
            data[at] ^= 1 << draw.randrange(8)
        elif kind == 1:
            del data[at:]
        elif kind == 2:
            data[at:at] = data[: draw.randrange(20)]
        elif kind == 3 and data:
            data[at] = draw.choice([0x00, 0x7F, 0x80, 0xFF])
        else:
            data[at : at + 3] = draw.randbytes(draw.randrange(6))
    return bytes(data)


def test_thousands_of_damaged_files_are_read_or_refused(tmp_path: Path) -> None:
    """The decoder raises nothing but ValueError, which its caller turns into one sentence."""
    write_group_info(tmp_path / "g.pb", [0, 4], {"näme": [0, 4]})
    whole: list[tuple[bytes, Callable[[bytes], Any]]] = [
        ((tmp_path / "g.pb").read_bytes(), parse_group_info),
        (write_strategy(tmp_path / "s.ckpt", S8O).read_bytes(), parse_strategy),
        ((STRATEGIES / "s8.json").read_bytes(), parse_strategy),
    ]
    refused = 0
    for seed in range(6000):
        data, parse = whole[seed % 3]
        try:
            found = parse(damaged(data, seed))
            if isinstance(found, list):
                groups_of_stages(found)
        except (ValueError, CheckpointError) as problem:
            assert not isinstance(problem, UnicodeError), problem
            refused += 1
    assert refused > 3000


# ----------------------------------------------------------------------------------------------------------- redundancy


def mindspores(path: Path, first: int) -> dict[str, set[tuple[int, ...]]]:
    from mindspore.train._utils import get_parameter_redundancy

    found = get_parameter_redundancy(str(path), initial_rank=first)
    return {name: {tuple(ranks) for ranks in groups} for name, groups in found.items()}


def ours(stage: Stage) -> dict[str, set[tuple[int, ...]]]:
    return {name: set(groups) for name, groups in parameter_groups(stage).items()}


CASES = {
    "s8": (S8, 0),
    "s8 with optimizer shards": (S8O, 0),
    "second stage": (S8, 1),
    "fourth stage, sharded": (S8O, 3),
    "one axis": ({"w": Cut((4,), [0, -1]), "b": Cut((4,), [-1])}, 1),
    "three axes": ({"w": Cut((2, 3, 4), [0, 2]), "v": Cut((2, 3, 4), [1, -1]), "b": Cut((2, 3, 4), [-1])}, 2),
    "all that is left": ({"w": Cut((4, 2), [-1, 0], -1, 2)}, 0),
}


@pytest.mark.parametrize("name", CASES)
def test_the_same_groups_as_mindspore(name: str, tmp_path: Path) -> None:
    layouts, stage = CASES[name]
    path = write_strategy(tmp_path / "s.ckpt", layouts, stage)
    (found,) = read_stages(path)
    assert found.number == stage
    assert ours(found) == mindspores(path, found.first_rank)


@settings(max_examples=60)
@given(st.data())
def test_the_same_groups_as_mindspore_for_any_cut(data: st.DataObject) -> None:
    import tempfile

    devices = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    free = data.draw(st.permutations(range(len(devices))))
    axes = [axis if data.draw(st.booleans()) else -1 for axis in free[: data.draw(st.integers(1, len(devices)))]]
    with tempfile.TemporaryDirectory() as folder:
        path = write_strategy(Path(folder) / "s.ckpt", {"w": Cut(tuple(devices), axes)}, data.draw(st.integers(0, 3)))
        (found,) = read_stages(path)
        assert ours(found) == mindspores(path, found.first_rank)


def test_stages_of_a_pipeline_in_a_directory(tmp_path: Path) -> None:
    for stage in (0, 1):
        write_strategy(tmp_path / f"strategy_{4 * stage}.ckpt", {f"l{stage}": Cut((2, 2), [-1, 0])}, stage)
    whole, parameters = groups_of_stages(read_stages(tmp_path))
    assert whole == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert parameters["l1"] == ((4, 6), (5, 7))
    write_strategy(tmp_path / "strategy_5.ckpt", {"l1": Cut((4,), [0])}, 1)
    with pytest.raises(CheckpointError, match="stage 1 differently"):
        read_stages(tmp_path)


def test_merged_stages_are_the_stages_of_the_directory(tmp_path: Path) -> None:
    import mindspore

    mindspore.merge_pipeline_strategys(str(STRATEGIES / "pp"), str(tmp_path / "merged.ckpt"))
    assert read_stages(tmp_path / "merged.ckpt") == read_stages(STRATEGIES / "pp")
    assert [stage.first_rank for stage in read_stages(tmp_path / "merged.ckpt")] == [0, 4]


@pytest.mark.parametrize(
    "layout",
    [
        Cut((2, 4), [-1, 0], 3, 4),  # two ranks cannot share in three parts
        Cut((2, 4), [-1, 0], 2, 1),  # neighbours of a step hold other slices
        Cut((2, 2), [-1, -1], 2, 2),
    ],
)
def test_a_strategy_that_contradicts_itself_is_refused(layout: Cut, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="contradicts itself"):
        read_stages(write_strategy(tmp_path / "s.ckpt", {"w": layout}))


def test_whom_a_rank_may_load_from() -> None:
    groups = {"a": ((0, 2), (1, 3)), "b": ((0, 1, 2, 3),), "accu_grads.a": ((0,), (1,), (2,), (3,))}
    assert replicas_of(2, groups) == (0, 2)
    assert replicas_of(0, {**groups, "c": ((0, 1), (2, 3))}) == (0,)
    assert replicas_of(9, groups) == ()
