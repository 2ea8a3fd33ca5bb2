"""``ttp reshard`` with real MindSpore: the result equals plain slicing, or there is no result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.adapters.mindspore.reshard_worlds import (
    PP,
    S4,
    S8,
    S8O,
    STRATEGIES,
    TENSORS,
    Cut,
    Cuts,
    assert_cut,
    assert_same,
    load,
    run,
    save,
    write_strategy,
)
from ttp.errors import CheckpointError
from ttp.store.verify import verify_checkpoint

pytestmark = pytest.mark.xdist_group("mindspore-files")

# ------------------------------------------------------------------------------------- strategies that MindSpore wrote


def stock_strategy(name: str | None, path: Path) -> str | None:
    """Return a strategy in the form of MindSpore's functions: that of a pipeline is merged first."""
    if name is None or not (STRATEGIES / name).is_dir():
        return None if name is None else str(STRATEGIES / name)
    ms.merge_pipeline_strategys(str(STRATEGIES / name), str(path / "merged.ckpt"))
    return str(path / "merged.ckpt")


@pytest.mark.parametrize(
    ("source", "src", "dst", "cuts", "world_size"),
    [
        ("s8", "s8.ckpt", "s4.ckpt", S4, 4),
        ("s8", "s8.json", "s4.ckpt", S4, 4),
        ("s8o", "s8o.ckpt", "s4.ckpt", S4, 4),
        ("s8o", "s8o.ckpt", "s8.json", S8, 8),
        ("s4", "s4.ckpt", "s8o.ckpt", S8O, 8),
        ("s8o", "s8o.ckpt", None, None, 1),
        ("pp", "pp", "s4.ckpt", S4, 4),
        ("pp", "pp", None, None, 1),
    ],
)
def test_real_strategies_give_what_plain_slicing_and_stock_transform_checkpoints_give(
    source: str, src: str, dst: str | None, cuts: Cuts | None, world_size: int, tmp_path: Path, files: dict[str, Path]
) -> None:
    target, saved = tmp_path / "made", files[source]
    done = run(saved, target, STRATEGIES / src, STRATEGIES / dst if dst else None)
    assert done.world_size == world_size and done.version == 12
    assert_cut(target, TENSORS, cuts, range(world_size))
    assert verify_checkpoint(target) == []
    last = load(target, world_size - 1)
    assert last["cur_rank"] == world_size - 1 and last["note"] == "as it was" and last["global_step"] == [12]
    assert (last["epoch_num"], last["step_num"], last["loss_scale"]) == (3, 12, 8.0)
    for rank in range(len(list(saved.iterdir()))):  # texts make the stock function fail
        kept = {name: value for name, value in load(saved, rank).items() if name in TENSORS}
        (tmp_path / "plain" / f"rank_{rank}").mkdir(parents=True)
        listed = [{"name": name, "data": ms.Tensor(value)} for name, value in kept.items()]
        ms.save_checkpoint(listed, str(tmp_path / "plain" / f"rank_{rank}" / "net.ckpt"), integrated_save=False)
    strategies = stock_strategy(src, tmp_path), stock_strategy(dst, tmp_path)
    ms.transform_checkpoints(str(tmp_path / "plain"), str(tmp_path / "stock"), "stock", *strategies)
    for rank in range(world_size):
        assert_same(load(target, rank), load(tmp_path / "stock", rank))


def test_into_a_pipeline(files: dict[str, Path], tmp_path: Path) -> None:
    assert run(files["s8"], tmp_path / "made", STRATEGIES / "s8.ckpt", STRATEGIES / "pp").world_size == 8
    for stage, cuts in enumerate(PP):
        assert_cut(tmp_path / "made", TENSORS, cuts, range(4 * stage, 4 * stage + 4), first=4 * stage)
    assert not {"l3.w", "moments.l3.w"} & set(load(tmp_path / "made", 0))


def test_a_full_file_is_cut_again(files: dict[str, Path], tmp_path: Path) -> None:
    full, again = tmp_path / "full", tmp_path / "again"
    run(files["s8"], full, STRATEGIES / "s8.ckpt", None)
    run(full, again, None, STRATEGIES / "s8o.ckpt")
    assert_cut(again, TENSORS, S8O, range(8))


def test_for_inference_only_weights_are_kept(files: dict[str, Path], tmp_path: Path) -> None:
    weights = {name: cut for name, cut in S4.items() if not name.startswith("moments.")}
    strategy = write_strategy(tmp_path / "infer.ckpt", weights)
    run(files["s8"], tmp_path / "made", STRATEGIES / "s8.ckpt", strategy, inference=True)
    assert set(load(tmp_path / "made", 0)) == {*weights, "note"}
    assert_cut(tmp_path / "made", TENSORS, weights, range(4))
    with pytest.raises(CheckpointError, match=r"moments.l1.w is in the files but not in .* --inference"):
        run(files["s8"], tmp_path / "training", STRATEGIES / "s8.ckpt", strategy)


# -------------------------------------------------------------------------------------------- what MindSpore cannot do


@st.composite
def layouts(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Any], int, int]:
    """Draw the number of devices, a matrix's tensor map, and the number of parts of optimizer parallelism."""
    devices = tuple(draw(st.lists(st.sampled_from([1, 2, 2, 3]), min_size=1, max_size=3)))
    free = draw(st.permutations(range(len(devices))))
    first = draw(st.integers(0, min(2, len(free))))
    second = draw(st.integers(first, len(free)))
    cuts = [sorted(free[:first], reverse=draw(st.booleans())), list(free[first:second])]
    tensor_map: list[Any] = [cut if len(cut) > 1 else cut[0] if cut else -1 for cut in cuts]
    count = int(np.prod(devices))
    alike = [r for r in range(count) if Cut(devices, tensor_map)._slice(r) == Cut(devices, tensor_map)._slice(0)]
    size = draw(st.sampled_from([n for n in range(1, len(alike) + 1) if len(alike) % n == 0]))
    step = alike[1] - alike[0] if size > 1 else 0
    return devices, tensor_map, size if size > 1 else 0, step


@settings(max_examples=8)
@example(old=((6,), [-1, 0], 0, 0), new=((4,), [-1, 0], 0, 0), pipeline=False, dtype="f2")  # no common divisor
# Two axes cut in the opposite order of the devices, with optimizer parallelism, which MindSpore converts wrongly:
@example(old=((2, 2, 2), [0, 1], 2, 4), new=((4,), [-1, 0], 0, 0), pipeline=False, dtype="f4")
@given(old=layouts(), new=layouts(), pipeline=st.booleans(), dtype=st.sampled_from(["f4", "f2", "i8", "u1"]))
def test_any_strategy_to_any_other(
    old: Any, new: Any, pipeline: bool, dtype: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("any")
    random = np.random.default_rng(1)
    tensors = {name: random.integers(0, 250, (216, 216)).astype(dtype) for name in ("a", "moments.a")}
    tensors["s"] = np.array(7, dtype)
    had, wanted = ({"a": Cut(*c), "moments.a": Cut(*c), "s": Cut(c[0], [])} for c in (old, new))
    devices = int(np.prod(old[0]))
    save(path / "old", tensors, had, range(devices))
    src, dst = write_strategy(path / "o", had), write_strategy(path / "n" / "0.ckpt", wanted)
    stages = [wanted]
    if pipeline:
        stages = [{"a": wanted["a"]}, {"moments.a": wanted["moments.a"], "s": wanted["s"]}]
        for stage, cuts in enumerate(stages):
            write_strategy(path / "n" / f"{stage}.ckpt", cuts, stage)
    run(path / "old", path / "new", src, dst.parent)
    count = int(np.prod(new[0]))
    for stage, cuts in enumerate(stages):
        assert_cut(path / "new", tensors, cuts, range(stage * count, stage * count + count), first=stage * count)
