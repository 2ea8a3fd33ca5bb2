"""What the driver and the injection of faults do with a job that changes meanwhile. No job runs."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ttp.chaos.driver import Driver
from ttp.chaos.injection import HurtJob, MissedError, inject
from ttp.chaos.place import Place
from ttp.chaos.rank_connection import HOLD
from ttp.chaos.reading import parse
from ttp.chaos.script import Fault, Script
from ttp.chaos.switchboard import RankProcess
from ttp.chaos.vocabulary import Target

HOSTS: Any = SimpleNamespace()


@pytest.fixture
def ended(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Yield an ``nsenter`` whose launcher has ended."""
    (tmp_path / "nsenter").symlink_to("/bin/sleep")
    with subprocess.Popen([tmp_path / "nsenter", "60"]) as process:
        yield process
        process.kill()


def test_a_fault_for_a_launcher_that_has_ended_is_missed(ended: subprocess.Popen[bytes]) -> None:
    job = HurtJob(Script(), HOSTS, None, launchers={0: ended})
    for who in ("launcher", "template"):
        with pytest.raises(MissedError, match=who):
            inject(Fault("", "kill", Target(who)), job)


def test_the_time_that_all_ranks_are_held_begins_anew_after_a_rank_has_died(tmp_path: Path) -> None:
    script = parse("ranks_per_host = 1\n[[fault]]\nstep = 2\nphase = 'data'\nwho = 'rank 0'\nwhat = 'kill'\n")
    driver = Driver(script, tmp_path, Place(HOSTS, None, 1), {}, lambda _: None)
    rank = RankProcess(0, (0, 0), 1, False, lambda _: None, (2, HOLD))
    driver._job.rank_processes = {0: rank}
    driver._maybe_next_run()
    assert driver._held_since is not None
    driver._job.rank_processes = {}
    driver._maybe_next_run()
    assert driver._held_since is None
    driver._switchboard.close()
