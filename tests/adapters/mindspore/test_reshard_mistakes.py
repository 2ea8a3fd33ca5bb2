"""``ttp reshard`` on input from which only a wrong model could be made, or part of one."""

from __future__ import annotations

import itertools
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest

from tests.adapters.mindspore.reshard_worlds import S4, S8, STRATEGIES, TENSORS, Cut, load, run, save, write_strategy
from ttp.core.layout import Rank, Shard, Version
from ttp.core.messages import Piece
from ttp.errors import CheckpointError
from ttp.mindspore_files.optimizer_state import is_optimizer_state
from ttp.store.digest import digest_file
from ttp.store.manifest import MANIFEST, Manifest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what importing MindSpore warns of is not ours
    import mindspore  # noqa: F401 - before the tests, whose warnings are errors

pytestmark = pytest.mark.xdist_group("mindspore-files")


@pytest.fixture(scope="module")
def s4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("s4"), TENSORS, S4, range(4))


def test_one_slice_is_not_taken_for_the_whole_model(tmp_path: Path) -> None:
    """Nothing but the manifest tells that there were other slices."""
    source = save(tmp_path / "source", TENSORS, S8, [0])
    (file,) = (source / "rank_0").iterdir()
    piece = Piece(f"rank_0/{file.name}", *digest_file(file), "shard", "slice_0", Rank(0))
    groups = {Shard(f"slice_{rank}"): (Rank(rank), Rank(rank + 4)) for rank in range(4)}
    manifest = Manifest(Version(12), "job", 0, "", "", "", 8, groups, "mindspore", 0.0, (piece,))
    (source / MANIFEST).write_text(manifest.to_json())
    with pytest.raises(CheckpointError, match=r"no whole file of slice_1 \(ranks 1,5\), .*: give --src-strategy"):
        run(source, tmp_path / "made", None, None)


TIED = Cut((2,), [0, -1])


@pytest.mark.parametrize("second", [TIED, Cut((2,), [-1, 0])])
def test_a_tensor_of_two_stages_is_compared_if_both_cut_it_alike(second: Cut, tmp_path: Path) -> None:
    emb = np.arange(256, dtype=np.float32).reshape(16, 16)
    for stage, cut in enumerate((TIED, second)):
        write_strategy(tmp_path / "pp" / f"{stage}.ckpt", {"emb": cut}, stage)
        save(tmp_path / "source", {"emb": emb + 100 * stage}, {"emb": cut}, [2 * stage, 2 * stage + 1], first=2 * stage)
    if second == TIED:
        with pytest.raises(CheckpointError, match="emb should be equal on ranks 0,2 but differs"):
            run(tmp_path / "source", tmp_path / "made", tmp_path / "pp", None)
        return
    done = run(tmp_path / "source", tmp_path / "made", tmp_path / "pp", None)
    assert any("emb is cut in 2 ways by the stages" in note for note in done.notes)
    assert load(tmp_path / "made", 0)["emb"].tobytes() == emb.tobytes()


def test_a_part_that_only_another_stage_has_is_taken_from_there(tmp_path: Path) -> None:
    emb = np.arange(256, dtype=np.float32).reshape(16, 16)
    for stage in (0, 1):
        write_strategy(tmp_path / "pp" / f"{stage}.ckpt", {"emb": TIED}, stage)
        save(tmp_path / "source", {"emb": emb}, {"emb": TIED}, [3 * stage], first=2 * stage)
    run(tmp_path / "source", tmp_path / "made", tmp_path / "pp", None)
    assert load(tmp_path / "made", 0)["emb"].tobytes() == emb.tobytes()


def test_inference_leaves_out_no_weight(s4: Path, tmp_path: Path) -> None:
    """Such as with the strategy of the first stage alone. Unknown state of a known weight is no weight."""
    less = write_strategy(tmp_path / "less.ckpt", {"l1.w": S4["l1.w"], "l3.w": S4["l3.w"]})
    with pytest.raises(CheckpointError, match=r"l2.w is in the files but not in the target's .*all stages"):
        run(s4, tmp_path / "made", STRATEGIES / "s4.ckpt", less, inference=True)
    cuts = {"w": Cut((2,), [0]), "own_state.w": Cut((2,), [0])}
    tensors = {name: np.arange(32, dtype=np.float32) for name in cuts}
    source, strategy = save(tmp_path / "s", tensors, cuts, range(2)), write_strategy(tmp_path / "src.ckpt", cuts)
    weights = write_strategy(tmp_path / "dst.ckpt", {"w": cuts["w"]})
    done = run(source, tmp_path / "made", strategy, weights, inference=True)
    assert "own_state.w is not in the target's strategy: left out" in done.notes


def test_what_every_rank_gets_whole_is_noted(s4: Path, tmp_path: Path) -> None:
    run(s4, tmp_path / "full", STRATEGIES / "s4.ckpt", None)
    less = write_strategy(tmp_path / "less.ckpt", {name: cut for name, cut in S4.items() if "l2.w" not in name})
    done = run(tmp_path / "full", tmp_path / "made", None, less)
    assert "no strategy describes 2 tensors (l2.w, moments.l2.w): every rank gets them whole" in done.notes


@pytest.mark.parametrize("name", ["mu_l.w", "eta_l.w", "max_exp_avg_sq.l.w", "momentum_buf.l.w", "ax.l.w", "step_t"])
def test_state_of_every_optimizer_is_known(name: str) -> None:
    assert is_optimizer_state(name, {"l.w"}) and not is_optimizer_state("mu_head.w", {"l.w"})


def test_breakpoints_are_taken_last_and_keep_their_step(s4: Path, tmp_path: Path) -> None:
    """MindSpore writes them after an exception; a folder may hold several beside a whole file."""
    source = shutil.copytree(s4, tmp_path / "source")
    for rank, number in itertools.product(range(4), (13, 14)):
        shutil.copy(source / f"rank_{rank}/net-3_12.ckpt", source / f"rank_{rank}/net-3_{number}_breakpoint.ckpt")
    for name in ("ttp_rank_0-3_12.ckpt", "ttp_rank_0-3_14.ckpt"):
        run(source, tmp_path / name, STRATEGIES / "s4.ckpt", None)
        assert [file.name for file in (tmp_path / name / "rank_0").iterdir()] == [name]
        for rank in range(4):
            (source / f"rank_{rank}/net-3_12.ckpt").unlink(missing_ok=True)
