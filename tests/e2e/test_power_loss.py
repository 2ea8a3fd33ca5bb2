"""A power cut between any two system calls of a real job: start, save, commit, removal of the old checkpoint, incident
file.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.disks.bad_disk import BadDisk
from tests.disks.crash import Disk, Line, Loss, build, outcomes
from tests.e2e.conftest import Run
from tests.waiting import until
from ttp.cli.incident_reader import incident_files, read_incident
from ttp.cli.main import main
from ttp.store.catalog import scan
from ttp.store.choice import look_back


@pytest.mark.timeout(300)
def test_a_restart_finds_the_old_or_the_new_checkpoint(solo: Run, bad_disk: BadDisk, tmp_path: Path) -> None:
    assert "\nsaved 4" in solo(bad_disk.mountpoint, 4, SOLO_SAVE="4").stdout
    bad_disk.mark("begin")
    assert "\nsaved 7" in solo(bad_disk.mountpoint, 7, SOLO_SAVE="7", TTP_KEEP="1").stdout
    until(lambda: any(map(is_word_of_success, bad_disk.journal())))  # the controller may write it when the job is over
    recorded = bad_disk.journal()
    begin = list(recorded).index(["mark", "begin"])
    told = next(n for n in range(begin, len(recorded)) if is_word_of_success(recorded[n]))
    cuts = range(begin + 1, len(recorded) + 1)
    seen: list[int] = []
    for number, (tree, cut, committed) in enumerate(outcomes(recorded, cuts, lambda cut: cut > told, 3)):
        after = tmp_path / f"after{number}"
        build(tree, after)
        seen.append(newest_of(after, f"cut after line {cut}: {recorded[cut - 1][:3]}"))
        assert seen[-1] == 7 or not committed, f"success was declared too early: line {cut}"
        shutil.rmtree(after)
    assert set(seen) == {4, 7} and len(seen) > 60
    build(Disk(recorded).after(Loss.ALL), tmp_path / "end")
    assert main(["verify", str(tmp_path / "end")]) == 0
    assert [log.version for log in map(read_incident, incident_files(tmp_path / "end"))] == [7, 4]


def is_word_of_success(line: Line) -> bool:
    """Whether the line reports the second checkpoint. The first may be reported only after its job has ended."""
    records = line[3].splitlines() if line[0] == "write" else []
    return any(b'"kind": "committed"' in record and b'"version": 7' in record for record in records)


def newest_of(save_dir: Path, where: str) -> int:
    """Return the version that a restart loads, after checks: no debris is left, and every incident file is readable."""
    found = look_back(save_dir)
    assert found.candidates and found.candidates[0].version in (4, 7), where
    assert not [e for e in scan(save_dir) if e.kind == "checkpoint" and not e.whole], f"{where}: debris"
    for path in incident_files(save_dir):
        assert read_incident(path).unreadable <= 1, f"{where}: {path.name}"
    return int(found.candidates[0].version)
