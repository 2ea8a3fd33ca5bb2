"""A power cut between any two system calls of a real job: start, save, commit, removal of the old, incident file."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.disks.bad_disk import BadDisk
from tests.disks.crash import Disk, Line, Loss, Tree, build, fingerprint
from tests.e2e.conftest import Run
from ttp.cli.incident_reader import incident_files, read_incident
from ttp.cli.main import main
from ttp.store.catalog import scan
from ttp.store.choice import look_back

LOSSES = [(loss, 0) for loss in Loss if loss is not Loss.SOME] + [(Loss.SOME, seed) for seed in range(3)]


@pytest.mark.timeout(300)
def test_a_restart_finds_the_old_or_the_new_checkpoint(solo: Run, bad_disk: BadDisk, tmp_path: Path) -> None:
    assert "\nsaved 4" in solo(bad_disk.mountpoint, 4, SOLO_SAVE="4").stdout
    bad_disk.mark("begin")
    assert "\nsaved 7" in solo(bad_disk.mountpoint, 7, SOLO_SAVE="7", TTP_KEEP="1").stdout
    recorded = bad_disk.journal()
    seen: list[int] = []
    for number, (tree, cut, committed) in enumerate(outcomes(recorded)):
        after = tmp_path / f"after{number}"
        build(tree, after)
        seen.append(newest_of(after, f"cut after line {cut}: {recorded[cut - 1][:3]}"))
        assert seen[-1] == 7 or not committed, f"success was declared too early: line {cut}"
        shutil.rmtree(after)
    assert set(seen) == {4, 7} and len(seen) > 60
    build(Disk(recorded).after(Loss.ALL), tmp_path / "end")
    assert main(["verify", str(tmp_path / "end")]) == 0
    assert [log.version for log in map(read_incident, incident_files(tmp_path / "end"))] == [7, 4]


def outcomes(recorded: Sequence[Line]) -> Iterator[tuple[Tree, int, bool]]:
    """Each different disk that a cut may leave, the line before the cut, and whether the controller told of success."""
    begin = list(recorded).index(["mark", "begin"])
    known: set[tuple[bool, int]] = set()
    committed = False
    for cut in range(begin + 1, len(recorded) + 1):
        line = recorded[cut - 1]
        committed |= line[0] == "write" and any(map(tells_of_success, line[3].splitlines()))
        disk = Disk(recorded[:cut])
        for loss, seed in LOSSES:
            tree = disk.after(loss, seed)
            if (key := (committed, fingerprint(tree))) not in known:
                known.add(key)
                yield tree, cut, committed
    assert committed


def tells_of_success(record: bytes) -> bool:
    """Of the second checkpoint: the controller may write down the first one when that job is over already."""
    return b'"kind": "committed"' in record and b'"version": 7' in record


def newest_of(save_dir: Path, where: str) -> int:
    """The version that a restart goes on with; there is no debris, and every incident file can be read."""
    found = look_back(save_dir)
    assert found.candidates and found.candidates[0].version in (4, 7), where
    assert not [e for e in scan(save_dir) if e.kind == "checkpoint" and not e.whole], f"{where}: debris"
    for path in incident_files(save_dir):
        assert read_incident(path).unreadable <= 1, f"{where}: {path.name}"
    return int(found.candidates[0].version)
