"""The real system calls of a save and a commit, and a power cut between any two of them.

``test_commit_interrupted`` cuts the power at each call of ``Disk``. Here a FUSE file system records every request of
the kernel. So calls that bypass ``Disk`` are seen too, and bytes that were never synced are lost.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Sequence
from typing import TYPE_CHECKING

import pytest

from tests.disks.bad_disk import BadDisk, Rule
from tests.disks.crash import Line, build, outcomes
from tests.store.conftest import CASES
from ttp.core.layout import Version
from ttp.store.catalog import tidy
from ttp.store.names import checkpoint_name
from ttp.store.writable import check_writable

if TYPE_CHECKING:
    from tests.store.conftest import World

LACKS = {"link": Rule(("LINK",), error=errno.EOPNOTSUPP), "exchange": Rule(("RENAME2",), error=errno.EINVAL)}


@pytest.fixture
def recorded(world: World, bad_disk: BadDisk, occupied: bool, lacks: tuple[str, ...]) -> Sequence[Line]:
    """Return the kernel's requests: a new save_dir, old checkpoints, a save, a commit, and an old one removed."""
    on_disk = type(world)(bad_disk.mountpoint / "checkpoints")
    check_writable(str(on_disk.save_dir))
    for version in (6, 8):
        on_disk.save(version)
        on_disk.finish(version)
    if occupied:
        on_disk.save(12, "another")
        on_disk.finish(12, "another")
    bad_disk.rules(*(LACKS[call] for call in lacks))
    bad_disk.mark("begin")
    on_disk.save(12)
    bad_disk.mark("saved")
    on_disk.finish(12)
    bad_disk.mark("committed")
    assert tidy(on_disk.save_dir, 2, checkpoint_name(Version(12)), verified=False)
    return bad_disk.journal()


@pytest.mark.parametrize(("occupied", "lacks"), CASES.values(), ids=CASES.keys())
def test_a_power_cut_between_any_two_system_calls(recorded: Sequence[Line], world: World, occupied: bool) -> None:
    after = type(world)(world.save_dir.with_name("after") / "checkpoints")
    seen = 0
    begin, end = recorded.index(["mark", "begin"]), recorded.index(["mark", "committed"])
    for tree, cut, committed in outcomes(recorded, range(begin, len(recorded) + 1), lambda cut: cut > end, 4):
        build(tree, after.save_dir.parent)
        was = (12, "another") if occupied else (8, "first")
        after.check_reader(was, f"cut after line {cut}: {recorded[cut - 1][:3]}", committed=committed)
        shutil.rmtree(after.save_dir.parent)
        seen += 1
    assert seen > 60
