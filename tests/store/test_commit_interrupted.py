"""A commit that two ranks make, or that a power cut ends at any point: a checkpoint exists whole, or not at all."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.disks.plug import Loss, Moment, PluggedDisk, PowerCut
from tests.store.conftest import CASES
from ttp.core.layout import Rank
from ttp.core.messages import Commit
from ttp.errors import CheckpointError
from ttp.processor.local_state.local_piece import ranks_kept
from ttp.store import names
from ttp.store.catalog import scan, tidy
from ttp.store.disk import Disk
from ttp.store.manifest import Manifest
from ttp.store.verify import verify_checkpoint

if TYPE_CHECKING:
    from tests.store.conftest import World


# ------------------------------------------------------------------------------------------------------- two committers


def test_two_committers_at_each_point_of_each_other(world: World) -> None:
    """Before the n-th disk call of one committer, another one of a later generation does all of its work."""
    for at in itertools.count():
        shutil.rmtree(world.save_dir, ignore_errors=True)
        world.write_draft(12, generation=1)
        world.write_draft(12, generation=2)
        disk = Interrupted(at, lambda: world.commit(world.order(12, rank=2, generation=2)))
        path, size = world.commit(world.order(12, rank=1, generation=1), disk)
        assert any(world.holds(path, 12, "first", generation) for generation in (1, 2)), at
        assert size == Manifest.load(path).size
        assert [p.name for p in world.save_dir.iterdir()] == [path.name], at
        if not disk.happened:
            assert at > 20
            break


class Interrupted(PluggedDisk):
    def __init__(self, at: int, event: Any) -> None:
        super().__init__()
        self._at, self._event = at, event
        self.happened = False

    def _call(self, name: str, do: Any, do_half: Any = None) -> Any:
        if len(self.calls) == self._at:
            self.happened = True
            self._event()
        return super()._call(name, do, do_half)


def test_many_committers_at_once(world: World) -> None:
    world.write_draft(12)
    results: list[Path] = []
    start = threading.Barrier(6)

    def run(rank: int) -> None:
        start.wait()
        results.append(world.commit(world.order(12, rank=rank))[0])

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 6
    assert world.holds(results[0], 12, "first")


# -------------------------------------------------------------------------------------------------------- pull the plug


READS = ("names", "tree", "size")
HALVES = ("write", "remove_tree")


def prepare(world: World, occupied: bool) -> None:
    """Make old checkpoints, perhaps one with the same name, left-overs to prune, and the draft."""
    template = world.save_dir.with_name("template")
    if not template.exists():
        for version in (4, 6, 8):
            world.make(version)
        if occupied:
            world.make(12, "another")
        world.write_draft(2, "forgotten")
        world.write_draft(12)
        world.save_dir.rename(template)
    shutil.rmtree(world.save_dir, ignore_errors=True)
    shutil.copytree(template, world.save_dir)


def order_of(world: World, rank: int = 1) -> Commit:
    return replace(world.order(12, rank=rank), keep=2)


def was(occupied: bool) -> tuple[int, str]:
    """Return version and incident of the newest checkpoint before the commit."""
    return (12, "another") if occupied else (8, "first")


@pytest.fixture
def at_one_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fix the time in manifests, so that disks can be compared. No decision depends on it."""
    monkeypatch.setattr("ttp.store.commit.time.time", lambda: 1.7e9)


@pytest.fixture(scope="module")
def looked_at() -> set[object]:
    """Return the set of what was checked: disks after a cut, and cuts; many cuts leave the same disk."""
    return set()


def fingerprint(directory: Path) -> frozenset[tuple[str, bytes, int]]:
    """Return names, contents, and the number of names of each file."""
    found = {str(path.relative_to(directory)): path for path in directory.rglob("*")}
    return frozenset(
        (name, path.read_bytes() if path.is_file() else b"", path.stat().st_nlink) for name, path in found.items()
    )


each_case = pytest.mark.parametrize(  # in a group: those of a case share what they have looked at
    ("occupied", "lacks"),
    [pytest.param(*case, marks=pytest.mark.xdist_group(f"interrupted, {name}")) for name, case in CASES.items()],
    ids=CASES.keys(),
)


@each_case
@pytest.mark.usefixtures("at_one_time")
@pytest.mark.parametrize(
    ("moment", "loss"),  # before a call is after the one before it: once is enough
    [(Moment.BEFORE, Loss.NOTHING), *itertools.product((Moment.DURING, Moment.AFTER), Loss)],
    ids=lambda value: value.name,
)
def test_the_plug_is_pulled_at_each_call(
    world: World, looked_at: set[object], occupied: bool, lacks: tuple[str, ...], loss: Loss, moment: Moment
) -> None:
    prepare(world, occupied)
    unbroken = PluggedDisk(lacks=lacks)
    world.commit(order_of(world), unbroken)
    assert len(unbroken.calls) > 20
    for at, call in enumerate([*unbroken.calls, "end"]):
        if call in READS or (moment is Moment.DURING and call not in (*HALVES, "end")):
            continue  # nothing to see that AFTER the call before it does not show
        if (occupied, lacks, moment, at, loss) in looked_at:
            continue
        prepare(world, occupied)
        disk = PluggedDisk(at, moment, lacks=lacks)
        made = None
        with contextlib.suppress(PowerCut):
            made, _ = world.commit(order_of(world), disk)
        alike = set(Loss) - disk.losses
        disk.lose(loss)
        assert (made is not None) == (call == "end")
        check_left(world, looked_at, occupied, lacks, made, at)
        looked_at |= {(occupied, lacks, moment, at, each) for each in alike}


def check_left(
    world: World, looked_at: set[object], occupied: bool, lacks: tuple[str, ...], made: Path | None, at: int
) -> None:
    """Check what a commit has left behind, which has ``made`` a checkpoint, or none."""
    left = (occupied, lacks, made is not None, fingerprint(world.save_dir))
    if left in looked_at:
        return
    world.check_reader(was(occupied), at)
    assert made is None or world.holds(made, 12, "first"), "success was declared too early"
    check_retry(world, occupied, lacks, at)
    looked_at.add(left)  # not before: a second try of a test that failed looks again


def check_retry(world: World, occupied: bool, lacks: tuple[str, ...], at: int) -> None:
    """Let another rank commit after the first one is gone."""
    try:
        path, _ = world.commit(order_of(world, rank=3), PluggedDisk(lacks=lacks))
    except CheckpointError as problem:
        assert occupied and "link" in lacks and "missing" in str(problem), (
            at,
            problem,
        )  # see commit.py: its pieces are in the new one
        world.check_reader(was(occupied), at)
        return
    assert world.holds(path, 12, "first"), at
    world.check_reader(was(occupied), at)
    tidy(world.save_dir, 2, path.name, verified=False)
    assert not [entry for entry in scan(world.save_dir) if entry.kind == "draft"], at


@each_case
@pytest.mark.usefixtures("at_one_time")
def test_the_disk_refuses_at_each_call_and_the_process_lives(
    world: World, looked_at: set[object], occupied: bool, lacks: tuple[str, ...]
) -> None:
    """The result is an error or a success, and a reported success is a whole checkpoint."""
    for at in itertools.count():
        prepare(world, occupied)
        disk = PluggedDisk(at, problem=OSError(errno.EIO, "Input/output error"), lacks=lacks)
        made = None
        try:
            made, _ = world.commit(order_of(world), disk)
        except CheckpointError as problem:
            assert "Input/output error" in str(problem)
        check_left(world, looked_at, occupied, lacks, made, at)
        if len(disk.calls) <= at:
            break


@pytest.mark.usefixtures("at_one_time")
@pytest.mark.parametrize(
    "lacks",
    [
        pytest.param(lacks, id=name, marks=pytest.mark.xdist_group(f"both sides, {name}"))
        for name, lacks in {"exchange": (), "no exchange": ("exchange",)}.items()
    ],
)
@pytest.mark.parametrize(
    ("refused", "loss"),
    [(OSError(errno.ENOSPC, "No space left on device"), Loss.NOTHING), *((None, loss) for loss in Loss)],
    ids=["full", *(loss.name for loss in Loss)],
)
def test_a_second_try_keeps_the_pages_of_both_sides_of_a_parted_job(
    world: World, looked_at: set[object], refused: OSError | None, lacks: tuple[str, ...], loss: Loss
) -> None:
    """Wherever the later side's commit ends, and whatever it had borrowed by then."""

    def later_side(disk: PluggedDisk) -> list[int]:
        path = world.make_side("the other half", "second", (2, 3), disk)
        assert not verify_checkpoint(path)
        return ranks_kept(Manifest.load(path).pieces)

    world.make_side("one half", "first", (0, 1))
    world.save_dir.rename(half := world.save_dir.with_name("half"))
    for at in itertools.count():
        if (lacks, refused is None, at, loss) in looked_at:
            continue
        shutil.rmtree(world.save_dir, ignore_errors=True)
        shutil.copytree(half, world.save_dir)
        disk = PluggedDisk(at, Moment.BEFORE, refused, lacks)
        try:
            assert later_side(disk) == [0, 1, 2, 3], at
        except (PowerCut, CheckpointError):
            alike = set(Loss) - disk.losses
            disk.lose(loss)
            if (left := (lacks, fingerprint(world.save_dir))) not in looked_at:
                assert later_side(PluggedDisk(lacks=lacks)) == [0, 1, 2, 3], at
            looked_at |= {left, *((lacks, refused is None, at, each) for each in alike)}
        if len(disk.calls) <= at:
            assert at > 20
            break


class WithoutOrder(PluggedDisk):
    """A disk that may keep the later of two unsynced renames, and lose the earlier one."""

    def __init__(self) -> None:
        super().__init__(lacks=("exchange",))
        self.left: set[Path] = set()

    def rename(self, source: Path, target: Path) -> None:
        assert target not in self.left, "what was renamed away is gone, should that be lost"
        super().rename(source, target)
        self.left.add(source)

    def sync_directory(self, directory: Path) -> None:
        super().sync_directory(directory)
        self.left = {path for path in self.left if path.parent != directory}


def test_the_old_one_has_its_other_name_for_good_before_the_new_one_takes_its_place(world: World) -> None:
    world.make(12, "another")
    world.write_draft(12)
    path, _ = world.commit(world.order(12), WithoutOrder())
    assert world.holds(path, 12, "first")
    assert len([entry for entry in scan(world.save_dir) if entry.whole]) == 2


def test_every_call_of_the_disk_can_be_hit() -> None:
    methods = {name for name in vars(Disk) if not name.startswith("_")} - {"progress"}
    assert methods <= set(vars(PluggedDisk))


def test_the_real_disk_syncs_everything_it_renames(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    monkeypatch.setattr("ttp.store.durable.sync_directory", lambda path: synced.append(Path(path)))
    world.write_draft(12)
    path, _ = world.commit(world.order(12))
    claim = world.save_dir / names.claim_name(world.order(12).draft, 1, Rank(1))
    assert synced == [claim, claim / "rank_2", claim, world.save_dir], "the adapter syncs, too"
    assert path.is_dir()


def test_the_manifest_is_readable_by_people_and_stable(world: World) -> None:
    text = (world.make(12) / "manifest.json").read_text()
    document = json.loads(text)
    assert list(document) == sorted(document)
    assert document["format_version"] == 1
    assert document["pieces"][0]["contents" if document["pieces"][0]["shard"] else "file"]
    assert text.count("\n") > 20


def test_links_that_run_out_in_the_middle_are_done_without(world: World) -> None:
    world.write_draft(12)
    unbroken = PluggedDisk()
    world.commit(world.order(12), unbroken)
    third = [at for at, call in enumerate(unbroken.calls) if call == "link"][2]
    shutil.rmtree(world.save_dir)
    world.write_draft(12)
    path, _ = world.commit(world.order(12), PluggedDisk(third, problem=OSError(errno.EMLINK, "Too many links")))
    assert world.holds(path, 12, "first")
