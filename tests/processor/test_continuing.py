"""A rank that goes on in its process: why it cannot, how it leaves its loop and enters it again, and how it ends."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import psutil
import pytest

from ttp.config import Config
from ttp.core.layout import Version
from ttp.core.rank import staying
from ttp.launch.again import Again, NextLaunch
from ttp.processor import continuing
from ttp.processor.continuing import Continuing, TrainAgain, watched
from ttp.processor.gate.gate import Gate, Halted
from ttp.processor.processor import Processor

TORCH: Any = SimpleNamespace(framework="torch", on_device=False)
FOLLOWING = NextLaunch(1, (1,), "127.0.0.1", 4711, released=True)


class Left(BaseException):
    """The process has ended with 75."""


@pytest.fixture
def groups() -> Any:
    """Return process groups whose ranks all stay in their loops before update 6."""
    return Mock(meet=Mock(return_value=[staying.stay(Version(5))] * 2), why_not=lambda: "", aborts=False)


@pytest.fixture
def survivor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, groups: Any) -> Iterator[Continuing]:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "TTP_CONTINUITY": "keep"}.items():
        monkeypatch.setenv(name, value)

    def end(_code: int, text: str, *_: object) -> None:
        raise Left(text)

    monkeypatch.setattr(continuing, "end_process", end)
    found = Continuing(Config(run_dir=str(tmp_path)), groups, None)
    monkeypatch.setattr(found, "_await", lambda launch: FOLLOWING)
    monkeypatch.setattr("ttp.adapters.torch.regroup.self_test", lambda: "")
    monkeypatch.setattr(continuing, "_continuing", found)
    Again(tmp_path).serve(os.getppid())
    yield found
    found.releasing = False  # ends the thread that would end this process if a later test sleeps in torch
    found.clock.stop() if found.clock.runs else None


def of_launch(survivor: Continuing, **source: Any) -> Any:
    """Return the processor of a launch, as far as one that goes on uses it."""
    made = SimpleNamespace(framework="torch", on_device=False, why_not_abort=lambda _: "", **source)
    env = SimpleNamespace(rank=0)
    return SimpleNamespace(survivor=survivor, copying=None, gate=Gate(), env=env, source=made, close=Mock())


def release(survivor: Continuing, processor: Any) -> None:
    survivor.enter()
    survivor.released(processor, "incident")


# ------------------------------------------------------------------------------------------------ whether it can go on


def test_why_a_process_cannot_go_on_is_said_once_when_it_joins(
    survivor: Continuing, groups: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise a user would learn only after a death that all ranks are restarted."""
    survivor.enter()
    assert survivor.why_not(TORCH) == "" and continuing.able(TORCH) is survivor
    device: Any = SimpleNamespace(framework="torch", on_device=True)
    assert "TTP_KEEP_CUDA=1" in survivor.why_not(device)
    survivor.refuse("a stream of its own")
    survivor.refuse("another reason")
    assert continuing.able(TORCH) is None
    assert [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING] == [
        "this process will not go on after a failure of another: a stream of its own"
    ]
    survivor._refused, groups.why_not = "", Mock(side_effect=AttributeError("torch has changed"))
    assert continuing.able(TORCH) is None and "torch has changed" in caplog.text
    survivor._groups = None
    assert survivor.why_not(TORCH) == "torch was imported after @ttp_to_persist was applied"


@pytest.mark.parametrize(("mode", "decorated"), [("keep", True), ("keep", False), ("warm", False)])
def test_that_no_rank_can_go_on_outside_of_train_is_said(
    survivor: Continuing, mode: str, decorated: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TTP_CONTINUITY", mode)
    if not decorated:
        monkeypatch.setattr(continuing, "_continuing", None)
    assert continuing.able(TORCH, in_train=decorated and mode != "keep") is None
    said = "of another: wrap_optimizer() was called outside of train(), the function with @ttp_to_persist"
    assert (said in caplog.text) is (mode == "keep")
    caplog.clear()
    other: Any = SimpleNamespace(framework="mindspore", on_device=False)
    assert continuing.able(other, in_train=False) is None
    assert ("only torch programs can go on so far" in caplog.text) is (mode == "keep")
    assert "outside of train()" not in caplog.text


def test_a_rank_goes_on_only_under_the_launcher_that_has_started_it(
    survivor: Continuing, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Another process between them, such as a shell, is the one that the launcher knows."""
    survivor.enter()
    above = psutil.Process(os.getppid()).ppid()
    monkeypatch.setattr(os, "getppid", lambda: above)
    assert continuing.able(TORCH) is None and "use ttp run --continuity keep" in caplog.text
    Again(tmp_path).serve(above)
    assert continuing.able(TORCH) is survivor


def test_whether_the_launcher_lives_is_known_although_the_run_directory_hangs(
    survivor: Continuing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is asked for each answer to a freeze, which would not come: nothing of this rank could be saved."""
    survivor.enter()
    assert continuing.able(TORCH) is survivor
    monkeypatch.setattr(Path, "read_text", Mock(side_effect=AssertionError("hangs")))
    assert survivor.why_no_longer() == ""
    monkeypatch.setattr(os, "getppid", lambda: 1)
    assert survivor.why_no_longer() == "its launcher has ended"


def test_a_program_whose_process_groups_cannot_be_replaced_trains_and_is_restarted(
    survivor: Continuing, groups: Any
) -> None:
    groups.enter = Mock(side_effect=RuntimeError("no such function in torch"))
    survivor.enter()
    assert "no such function in torch" in survivor.why_not(TORCH)
    survivor._next, survivor._thread = FOLLOWING, None
    with pytest.raises(Left, match=r"this rank could not go on: .*; the job is saved, and all ranks are restarted"):
        survivor.enter()


def test_settings_that_cannot_be_used_are_left_for_the_join_to_refuse(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(continuing, "_continuing", None)
    for name, value in {"TTP_CONTINUITY": "keep", "TTP_PORT": "4711", "TTP_OT": "soon"}.items():
        monkeypatch.setenv(name, value)
    continuing.prepare()
    assert continuing.current() is None and not caplog.records
    for name, value in {"TTP_OT": "9", "RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TTP_RUN_DIR", str(tmp_path))
    with monkeypatch.context() as broken:
        broken.setattr(continuing, "_groups", Mock(side_effect=AttributeError("torch has changed")))
        continuing.prepare()
    assert continuing.current() is None and "torch has changed" in caplog.text
    monkeypatch.setattr(continuing, "_groups", lambda **_: None)
    continuing.prepare()
    assert continuing.current() is not None


# ------------------------------------------------------------------------------------------------------ in its loop


def test_ranks_that_all_stay_get_new_groups_and_a_new_launch(survivor: Continuing, groups: Any) -> None:
    processor, adapter = of_launch(survivor), Mock()
    release(survivor, processor)
    assert survivor.stays(Version(5), "", processor, adapter)
    assert not survivor.releasing and processor.close.called and adapter.detach.called
    groups.renew.assert_called_once_with(1, all_of_them=True)
    assert groups.meet.call_args.args[-1] == staying.stay(Version(5))


@pytest.mark.parametrize(("on_device", "why_not"), [(False, "the function writes to its arguments"), (True, "")])
def test_one_rank_that_cannot_stay_has_all_leave_their_loops(
    survivor: Continuing, groups: Any, on_device: bool, why_not: str
) -> None:
    """It tells the others why."""
    processor = of_launch(survivor)
    processor.source.on_device = on_device
    release(survivor, processor)
    groups.meet = Mock(side_effect=lambda *said: [said[-1], staying.stay(Version(5))])
    assert not survivor.stays(Version(5), why_not, processor, Mock())
    assert groups.meet.call_args.args[-1] == staying.leave(why_not or "its state is on a device")
    assert not processor.close.called and not groups.renew.called


def test_a_rank_that_does_not_meet_the_others_ends(survivor: Continuing, groups: Any) -> None:
    processor = of_launch(survivor)
    release(survivor, processor)
    groups.meet = Mock(side_effect=TimeoutError("nobody came"))
    with pytest.raises(Left, match="this rank could not go on: TimeoutError"):
        survivor.stays(Version(5), "", processor, Mock())


def test_a_newcomer_gets_its_groups_when_it_wraps_its_optimizer(survivor: Continuing, groups: Any) -> None:
    """Until then it makes the process groups of its program, and the others are in their loops."""
    survivor._next = FOLLOWING
    groups.meet = Mock(side_effect=lambda *said: [staying.stay(Version(5)), said[-1]])
    survivor.enter()
    assert groups.meet.call_args.args[-1] == staying.SEAT and not groups.renew.called
    survivor.wraps()
    groups.renew.assert_called_once_with(1, all_of_them=True)
    groups.wrapped.assert_called_once()
    survivor._next, survivor._agreed = FOLLOWING, continuing._Agreed.STAY
    groups.renew = Mock(side_effect=RuntimeError("Connection refused"))
    with pytest.raises(Left, match=r"could not go on: .*Connection refused"):
        survivor.wraps()


def test_a_survivor_that_left_its_loop_meets_the_others_when_it_enters_train_again(
    survivor: Continuing, groups: Any
) -> None:
    processor = of_launch(survivor)
    release(survivor, processor)
    with pytest.raises(TrainAgain):
        survivor.out(Halted(), processor, None)
    survivor.await_launcher()
    groups.meet = Mock(return_value=[staying.leave(""), staying.SEAT])
    survivor.enter()
    groups.renew.assert_called_once_with(1, all_of_them=False)


# ---------------------------------------------------------------------------------------------------- errors on the way


def test_an_error_that_is_not_the_death_of_another_rank_ends_the_process(survivor: Continuing) -> None:
    processor = of_launch(survivor)
    release(survivor, processor)
    with pytest.raises(Left, match=r"rank 0 raised ValueError: mine while it was to go on"):
        survivor.out(ValueError("mine"), processor, None)


def test_connections_that_cannot_be_broken_end_the_process(survivor: Continuing, groups: Any) -> None:
    """Its training thread would wait in a collective until the time limit."""
    groups.let_go = Mock(side_effect=RuntimeError("no such group"))
    with pytest.raises(Left, match="the connections of this rank cannot be broken: RuntimeError: no such group"):
        release(survivor, of_launch(survivor))
    survivor.releasing = False


def test_train_that_is_called_again_and_restores_nothing_ends_the_process(survivor: Continuing) -> None:
    """The rank would be at step 0, and the others where the job was saved."""
    release(survivor, of_launch(survivor))
    survivor.releasing = False
    with pytest.raises(Left, match="has ended without restoring anything"), watched():
        pass
    survivor.state.way = "kept"
    with watched():
        pass
    assert not survivor.clock.runs, "no update was left to make"


def test_a_launcher_that_announces_nothing_is_not_awaited_for_ever(survivor: Continuing) -> None:
    survivor._patience_s = -1.0
    with pytest.raises(Left, match="the launcher has not announced the next launch"):
        Continuing._await(survivor, 1)


def test_a_launcher_that_was_killed_is_not_awaited(survivor: Continuing, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has told that it can start the dead rank alone, and did not live to do so."""
    monkeypatch.setattr(os, "getppid", lambda: 1)
    with pytest.raises(Left, match="its launcher has ended; the job is saved"):
        Continuing._await(survivor, 1)


# -------------------------------------------------------------------------------------- from the release to the update


def test_it_is_on_its_way_until_an_update_has_passed_the_gate(survivor: Continuing, tmp_path: Path) -> None:
    """A training thread may reach the old gate only after the release. This program has no process groups."""
    survivor._groups = None
    old, new = of_launch(survivor), of_launch(survivor)
    old.gate.close()
    release(survivor, old)
    with pytest.raises(Halted):
        Processor.begin_update(old)
    survivor.update_begins()  # its training thread was about to enter the barrier before the update
    assert survivor.clock.runs and os.getpid() in Again(tmp_path).marks()
    survivor.releasing = False  # it is out of train()
    Processor.begin_update(new)
    assert not survivor.clock.runs and not Again(tmp_path).marks() and new.gate.updating
    survivor.update_begins()  # of the next update: no clock runs


def test_a_second_release_before_the_first_update_stops_the_clock_of_the_first(survivor: Continuing) -> None:
    release(survivor, of_launch(survivor))
    before = survivor.clock._timer
    survivor.releasing = False
    survivor.released(of_launch(survivor), "another incident")
    assert before is not None and before.finished.is_set() and survivor.clock._timer is not before
    survivor.releasing = False


def test_a_rank_whose_mark_stays_makes_no_update(monkeypatch: pytest.MonkeyPatch, survivor: Continuing) -> None:
    """The launcher kills a rank that has its mark when its time is over, and the updates that it has made are lost."""
    release(survivor, of_launch(survivor))
    survivor.releasing = False
    with monkeypatch.context() as broken:
        broken.setattr(Path, "unlink", Mock(side_effect=OSError(errno.EROFS, "the file system is read-only")))
        with pytest.raises(Left, match="its mark for the launcher cannot be removed"):
            survivor.update_begins()


def test_a_collective_that_fails_while_the_rank_is_released_does_not_end_it(
    monkeypatch: pytest.MonkeyPatch, survivor: Continuing
) -> None:
    """The training thread meets the error as soon as the clock has been started on the processor's thread."""
    failed = []

    def start(_timer: threading.Timer) -> None:
        with pytest.raises(RuntimeError, match="Connection closed by peer"), watched():
            raise RuntimeError("Connection closed by peer")
        failed.append(True)

    monkeypatch.setattr(threading.Timer, "start", start)
    release(survivor, of_launch(survivor))
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
    monkeypatch: pytest.MonkeyPatch, survivor: Continuing, groups: Any, case: str, problem: Exception, again: bool
) -> None:
    groups.untouched = lambda: case != "train() has made groups"
    survivor._newcomer, survivor._on_cuda = case != "a survivor", case != "not switched on"
    survivor.clock.runs = True
    monkeypatch.setattr(continuing, "RETRY_S", 0.0)
    survivor.enter()
    if case == "it has joined":
        survivor.wraps()
    with pytest.raises(TrainAgain if again else Left), watched():
        raise problem
    if again:
        survivor.await_launcher()  # waits for nobody: it is the same rank of the same launch
    survivor.clock.runs = False


def test_a_forked_child_that_leaves_train_ends_neither_itself_nor_the_clock_of_its_parent(
    monkeypatch: pytest.MonkeyPatch, survivor: Continuing
) -> None:
    survivor.enter()
    survivor.clock.runs, survivor.state.way = True, "kept"
    with watched():
        monkeypatch.setattr(os, "getpid", lambda: 1)  # as after os.fork()
    assert survivor.clock.runs
    with pytest.raises(ValueError, match="of the child"), watched():
        monkeypatch.setattr(os, "getpid", lambda: 2)
        raise ValueError("of the child")
