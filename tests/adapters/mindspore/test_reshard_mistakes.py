"""``ttp reshard`` on input from which only a wrong model could be made, or part of one."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest

from tests.adapters.mindspore.jobs import add_manifest
from tests.adapters.mindspore.reshard_worlds import (
    S4,
    S8,
    STRATEGIES,
    TENSORS,
    Cut,
    load,
    quiet,
    run,
    save,
    write_strategy,
)
from ttp.errors import CheckpointError, UsageError
from ttp.mindspore_files.ckpt_reader import index
from ttp.mindspore_files.optimizer_state import is_optimizer_state
from ttp.mindspore_files.reshard import Wish, reshard
from ttp.mindspore_files.reshard_fit import Plan, make_plan
from ttp.mindspore_files.reshard_rank import blocks, difference
from ttp.mindspore_files.reshard_source import open_newest
from ttp.mindspore_files.reshard_strategy import read_strategy
from ttp.store.digest import Watch
from ttp.store.manifest import MANIFEST

pytestmark = pytest.mark.xdist_group("mindspore-files")


@pytest.fixture
def s4(files: dict[str, Path]) -> Path:
    return files["s4"]


def test_one_slice_is_not_taken_for_the_whole_model(tmp_path: Path) -> None:
    """Nothing but the manifest tells that there were other slices."""
    source = save(tmp_path / "source", TENSORS, S8, [0])
    add_manifest(source, {f"slice_{rank}": (rank, rank + 4) for rank in range(4)})
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


def when(activity: str, do: Callable[[], object]) -> Watch:
    """Return a ``Watch`` that calls ``do`` when an activity begins."""

    def watch(what: str, _total: int | None) -> Callable[[int], None]:
        if what.startswith(activity):
            do()
        return lambda _count: None

    return watch


CHANGES: dict[str, Callable[[Path, Path], object]] = {
    "replaced": lambda file, other: other.replace(file),
    "removed": lambda file, _: file.unlink(),
    "touched": lambda file, _: os.utime(file, (1, 1)),
}


@pytest.mark.parametrize(
    ("change", "activity"), [("removed", "comparing"), *((change, "converting") for change in CHANGES)]
)
def test_nothing_is_made_of_a_source_that_changes_meanwhile(
    change: str, activity: str, s4: Path, tmp_path: Path
) -> None:
    source = shutil.copytree(s4, tmp_path / "source")
    file, other = source / "rank_1" / "net-3_12.ckpt", shutil.copy(s4 / "rank_2" / "net-3_12.ckpt", tmp_path / "other")
    for ranks in ((), (0,)):
        wish = Wish(source, tmp_path / "new" / "made", STRATEGIES / "s4.ckpt", ranks=ranks)
        with pytest.raises(CheckpointError, match=r"rank_1/net-3_12.ckpt (was changed while it was|cannot be) read"):
            reshard(wish, when(activity, lambda: CHANGES[change](file, Path(other))))
        assert not list(tmp_path.glob("new/*")), "neither a draft nor an empty directory"
        shutil.copytree(s4, source, dirs_exist_ok=True)
        shutil.copy(s4 / "rank_2" / "net-3_12.ckpt", other)


def test_some_ranks_appear_all_or_none(s4: Path, tmp_path: Path) -> None:
    """Even if another process makes one of them meanwhile. The drafts of other hosts are left alone."""
    target = tmp_path / "made"
    others = target / f".made.draft-{os.getpid()}"
    others.mkdir(parents=True)
    wish = Wish(s4, target, STRATEGIES / "s4.ckpt", STRATEGIES / "s4.ckpt", ranks=(1, 2))
    with pytest.raises(UsageError, match="rank_2 was created meanwhile"):
        reshard(wish, when("converting", lambda: (target / "rank_2" / "mine").mkdir(parents=True)))
    assert sorted(target.iterdir()) == [others, target / "rank_2"]


@pytest.mark.parametrize("ranks", [(), (1, 2)])
def test_what_a_killed_run_left_does_not_hinder_the_next(
    ranks: tuple[int, ...], s4: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill at the moment of the rename leaves at most empty directories and drafts."""
    wish = Wish(s4, tmp_path / "made", STRATEGIES / "s4.ckpt", STRATEGIES / "s4.ckpt", ranks=ranks)
    child = os.fork()
    if not child:
        monkeypatch.setattr(Path, "rename", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        try:
            reshard(wish, quiet)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert reshard(wish, quiet).ranks == (ranks or (0, 1, 2, 3))


def test_a_link_to_nothing_is_a_damaged_file(s4: Path, tmp_path: Path) -> None:
    source = shutil.copytree(s4, tmp_path / "source")
    for rank in range(4):
        newer = source / f"rank_{rank}" / "net-4_1.ckpt"
        newer.symlink_to("/nowhere" if rank == 0 else newer.with_name("net-3_12.ckpt"))
    done = run(source, tmp_path / "made", STRATEGIES / "s4.ckpt", None)
    assert any(note.startswith("passed over 4_1: ") for note in done.notes)


def test_it_is_said_what_to_do(s4: Path, tmp_path: Path) -> None:
    """With a ``save_dir`` of the original MindIO, whose checkpoints have no manifest, or with a damaged manifest."""
    step = shutil.copytree(s4, tmp_path / "saved" / "tft_saved_checkpoints-step_12")
    for source, target, why in (
        (step.parent, "made", r"give its directory, such as .*step_12"),
        (step, "tft_saved_checkpoints-step_13", "the source is of step 12: choose another name"),
    ):
        with pytest.raises((CheckpointError, UsageError), match=why):
            run(source, tmp_path / target, STRATEGIES / "s4.ckpt", None)
    (step / MANIFEST).write_text("{")
    with pytest.raises(CheckpointError, match="remove it, and give --src-strategy"):
        run(step, tmp_path / "made", STRATEGIES / "s4.ckpt", None)
    plain = tmp_path / "plain" / "rank_0"
    plain.mkdir(parents=True)
    ms.save_checkpoint([{"name": "w", "data": ms.Tensor([1.0])}], str(plain / "net.ckpt"))
    with pytest.raises(UsageError, match="the source does not tell its step: choose another name"):
        run(plain.parent, tmp_path / "tft_saved_checkpoints-step_1", None, None)


def test_nothing_is_written_into_a_checkpoint(s4: Path, tmp_path: Path) -> None:
    """Nor into the one that is chosen in a ``save_dir``."""
    saved = tmp_path / "saved"
    run(s4, saved / "tft_saved_checkpoints-step_12", STRATEGIES / "s4.ckpt", None)
    for source in (saved, saved / "tft_saved_checkpoints-step_12"):
        with pytest.raises(UsageError, match="step_12, a checkpoint, which is never changed"):
            run(source, saved / "tft_saved_checkpoints-step_12" / "out", None, None)


FIELD = np.arange(4 * 6 * 10, dtype=np.int16).reshape(4, 6, 10)


def planned(source: Path, src: Path | None, dst: Path) -> Plan:
    strategies = [None if path is None else read_strategy(path) for path in (src, dst)]
    return open_newest(source, quiet, lambda found: make_plan(found, *strategies, inference=False))


@pytest.mark.parametrize("size", [2, 16, 60, 130, 1000])
@pytest.mark.parametrize(
    ("old", "new"),
    [
        (Cut((2, 2), [0, 1, -1]), Cut((3,), [-1, 0, -1])),
        (Cut((2,), [-1, -1, 0]), Cut((2, 2), [0, -1, 1])),
        (Cut((5,), [-1, -1, 0]), Cut((2,), [-1, -1, 0])),
    ],
)
def test_a_tensor_is_cut_and_checked_in_parts_of_any_size(old: Cut, new: Cut, size: int, tmp_path: Path) -> None:
    src, dst = (write_strategy(tmp_path / f"{n}.ckpt", {"w": cut}) for n, cut in enumerate((old, new)))
    source = save(tmp_path / "source", {"w": FIELD}, {"w": old}, range(int(np.prod(old.devices))))
    plan = planned(source, src, dst)
    run(source, tmp_path / "made", src, dst)
    for rank in range(plan.devices):
        entry, (file,) = plan.of_rank(rank)["w"], (tmp_path / "made" / f"rank_{rank}").iterdir()
        assert b"".join(blocks(entry, rank, size)) == new.piece(FIELD, rank).tobytes()
        assert difference(entry, rank, index(file)["w"], lambda _count: None, size) is None
        data = file.read_bytes()
        at = index(file)["w"].chunks[0][0] + size % entry.piece_bytes
        file.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        assert "differ" in str(difference(entry, rank, index(file)["w"], lambda _count: None, size))


@pytest.mark.parametrize("shape", [(1, 1 << 21), (1 << 21,), (1 << 11, 1 << 10)])
def test_memory_does_not_grow_with_a_tensor(shape: tuple[int, ...], tmp_path: Path) -> None:
    """Neither with its length, nor with that of its rows in the source, of which the target has a few columns."""
    full, rows = {"w": np.arange(1 << 21).reshape(shape).astype(np.uint8)}, [-1] * len(shape)
    cut = {"w": Cut((32,), [*rows[:-1], 0])}
    source, dst = save(tmp_path / "source", full, {}, [0]), write_strategy(tmp_path / "dst.ckpt", cut)
    whole = write_strategy(tmp_path / "whole.ckpt", {"w": Cut((2,), rows)})
    run(source, tmp_path / "made", None, dst)
    for made, strategy in (("made", dst), ("source", whole)):
        entry = planned(source, None, strategy).of_rank(0)["w"]
        (file,) = (tmp_path / made / "rank_0").iterdir()
        found = index(file)["w"]
        tracemalloc.start()
        try:
            assert sum(map(len, blocks(entry, 0, 1 << 16))) == found.nbytes
            assert difference(entry, 0, found, lambda _count: None, 1 << 16) is None
            assert tracemalloc.get_traced_memory()[1] < 1 << 20
        finally:
            tracemalloc.stop()
