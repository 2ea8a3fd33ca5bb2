"""A rank that was released to go on in its process leaves its loop and enters it again."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from ttp.config import Config
from ttp.launch.again import Again
from ttp.processor import continuing
from ttp.processor.continuing import Continuing, TrainAgain, watched
from ttp.processor.gate.gate import Gate, Halted
from ttp.processor.processor import Processor


@pytest.fixture
def survivor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Continuing]:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    found = Continuing(Config(run_dir=str(tmp_path)), None, None)
    found.enter()
    yield found
    found.update_begins()


def of_launch(survivor: Continuing) -> Any:
    """Return the processor of a launch, as far as one that goes on uses it."""
    return SimpleNamespace(survivor=survivor, copying=None, gate=Gate(), source=None)


def test_it_is_on_its_way_until_an_update_has_passed_the_gate(survivor: Continuing, tmp_path: Path) -> None:
    """A training thread may reach the old gate only after the release."""
    old, new = of_launch(survivor), of_launch(survivor)
    old.gate.close()
    survivor.released(old, "incident")
    with pytest.raises(Halted):
        Processor.begin_update(old)
    survivor.update_begins()  # its training thread was about to enter the barrier before the update
    assert survivor.clock.runs and os.getpid() in Again(tmp_path).marks()
    survivor.releasing = False  # it is out of train()
    Processor.begin_update(new)
    assert not survivor.clock.runs and not Again(tmp_path).marks() and new.gate.updating


def test_a_second_release_before_the_first_update_stops_the_clock_of_the_first(survivor: Continuing) -> None:
    survivor.released(of_launch(survivor), "incident")
    before = survivor.clock._timer
    survivor.releasing = False
    survivor.released(of_launch(survivor), "another incident")
    assert before is not None and before.finished.is_set() and survivor.clock._timer is not before
    survivor.releasing = False


def test_a_rank_whose_mark_stays_makes_no_update(monkeypatch: pytest.MonkeyPatch, survivor: Continuing) -> None:
    """The launcher kills a rank that has its mark when its time is over, and the updates that it has made are lost."""
    left: list[str] = []
    monkeypatch.setattr(continuing, "end_process", lambda code, text, *_: left.append(text))
    survivor.released(of_launch(survivor), "incident")
    survivor.releasing = False
    with monkeypatch.context() as broken:
        broken.setattr(Path, "unlink", refuse)
        with pytest.raises(AssertionError):  # the process would have ended
            survivor.update_begins()
    assert "its mark for the launcher cannot be removed" in left[0]


def refuse(path: Path, *, missing_ok: bool) -> None:
    raise OSError(errno.EROFS, "the file system is read-only", str(path))


def test_a_collective_that_fails_while_the_rank_is_released_does_not_end_it(
    monkeypatch: pytest.MonkeyPatch, survivor: Continuing
) -> None:
    """The training thread meets the error as soon as the clock has been started on the processor's thread."""
    monkeypatch.setattr(continuing, "_continuing", survivor)
    monkeypatch.setattr(Continuing, "leave", lambda _self, why: pytest.fail(why))
    failed = []

    def start(_timer: threading.Timer) -> None:
        with pytest.raises(RuntimeError, match="Connection closed by peer"), watched():
            raise RuntimeError("Connection closed by peer")
        failed.append(True)

    monkeypatch.setattr(threading.Timer, "start", start)
    survivor.released(of_launch(survivor), "incident")
    assert failed
    survivor.releasing = False


class OutOfMemoryError(RuntimeError):
    """Has the name of torch's exception."""


@pytest.mark.parametrize(
    ("case", "problem", "again"),
    [
        ("a newcomer", OutOfMemoryError("CUDA out of memory"), True),
        ("a newcomer", RuntimeError("CUDA error: out of memory"), True),
        ("a newcomer", RuntimeError("CUDA error: device-side assert triggered"), False),
        ("a survivor", OutOfMemoryError("CUDA out of memory"), False),
        ("it has joined", OutOfMemoryError("CUDA out of memory"), False),
        ("train() has made groups", OutOfMemoryError("CUDA out of memory"), False),
        ("not switched on", OutOfMemoryError("CUDA out of memory"), False),
    ],
)
def test_a_newcomer_tries_again_until_the_device_of_the_dead_is_free(
    monkeypatch: pytest.MonkeyPatch, survivor: Continuing, case: str, problem: Exception, again: bool
) -> None:
    groups: Any = Mock(untouched=lambda: case != "train() has made groups")
    survivor._groups = groups
    survivor._newcomer, survivor._on_cuda = case != "a survivor", case != "not switched on"
    survivor.clock.runs = True
    monkeypatch.setattr(continuing, "_continuing", survivor)
    monkeypatch.setattr(continuing, "RETRY_S", 0.0)

    def leave(_self: Continuing, why: str) -> None:
        raise SystemExit(why)

    monkeypatch.setattr(Continuing, "leave", leave)
    survivor.enter()
    if case == "it has joined":
        survivor.wraps()
    with pytest.raises(TrainAgain if again else SystemExit), watched():
        raise problem
    if again:
        survivor.await_launcher()  # waits for nobody: it is the same rank of the same launch
    survivor.clock.runs = False


def test_a_forked_child_that_leaves_train_ends_neither_itself_nor_the_clock_of_its_parent(
    monkeypatch: pytest.MonkeyPatch, survivor: Continuing
) -> None:
    survivor.clock.runs, survivor.state.way = True, "kept"
    left: list[str] = []
    monkeypatch.setattr(survivor, "leave", left.append)
    monkeypatch.setattr(continuing, "_continuing", survivor)
    with watched():
        monkeypatch.setattr(os, "getpid", lambda: 1)  # as after os.fork()
    assert survivor.clock.runs
    with pytest.raises(ValueError, match="of the child"), watched():
        monkeypatch.setattr(os, "getpid", lambda: 2)
        raise ValueError("of the child")
    assert left == []
