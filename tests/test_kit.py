"""The findings of the kit when something is wrong; tests/programs shows that it finds nothing otherwise."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ttp.testing.digests import digest
from ttp.testing.kit import Job, Kill, Report, Row, _Lives, start_python, stop_controllers

KILLED = Kill("backward", rank=1)


def test_the_digest_of_a_state_has_all_its_bits() -> None:
    """As text an array is rounded, and a long one lacks its middle."""
    values, last = np.zeros(2000), np.ones(3)
    other, near = values.copy(), last.copy()
    other[1000], near[0] = 1.0, np.nextafter(1.0, 2.0)
    lists = ([1, 2], (1, 3), [[1], 2])
    states = [values, other, last, near, values.astype(np.float32), np.zeros((2, 1000)), near[0], *lists]
    assert len({digest({"state": each}) for each in states}) == len(states)
    assert digest([1, 2]) == digest((1, 2)) and digest(values) == digest(values.copy())


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (Row(KILLED, (0, 0), 4, 0), "0 0"),  # it was never killed
        (Row(KILLED, (-9, 75), 4, 0), "-9 75"),  # somebody else was
        (Row(KILLED, (75, -9), None, 0), "-"),
        (Row(KILLED, (75, -9), 4, 1), "1"),
    ],
)
def test_a_kill_that_was_not_survived_is_told(row: Row, said: str) -> None:
    report = Report((Row(KILLED, (75, -9), 3, 0), row), (), "the logs")
    with pytest.raises(AssertionError, match="the logs"):
        report.check()
    assert said in str(report).splitlines()[2].split("backward")[1]


def test_a_difference_is_told() -> None:
    report = Report((Row(KILLED, (75, -9), 3, 0),), ("rank 0: model differs",), "")
    with pytest.raises(AssertionError, match="rank 0: model differs"):
        report.check()
    Report(report.rows, (), "").check()


ENDS = """
import signal
signal.signal(signal.SIGTERM, lambda *_: print("written"))
print("runs", flush=True)
signal.pause()
"""


def test_a_controller_may_write_the_end_of_its_incident_before_it_ends(tmp_path: Path) -> None:
    """All other processes of the job are killed."""
    env = os.environ | {"TTP_RUN_DIR": str(tmp_path / "run0")}
    job = [
        subprocess.Popen([sys.executable, "-c", ENDS, name], env=env, stdout=subprocess.PIPE)
        for name in ("ttp.controller", "a rank")
    ]
    for process in job:
        assert process.stdout is not None and process.stdout.readline() == b"runs\n"
    stop_controllers(tmp_path)
    assert [process.communicate(timeout=60)[0] for process in job] == [b"written\n", b""]


def test_a_checkpoint_that_was_there_already_counts_for_its_life(tmp_path: Path) -> None:
    """A rank that is killed in its first step of a life may leave the others where they began."""
    incidents = tmp_path / "hurt" / "checkpoints" / "incidents"
    lives = _Lives(Job("", []), tmp_path / "hurt", (1, 2), start_python, 1, protected=True)
    incidents.mkdir(parents=True)
    for number, (kind, version) in enumerate([("committed", 3), ("nothing_new", 3), ("committed", 5)]):
        (incidents / f"{number}.jsonl").write_text(json.dumps({"kind": kind, "version": version}) + "\n")
    assert lives.saved() == [3, 3, 5]
