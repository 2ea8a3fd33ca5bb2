"""``ttp.paused``: the activity that a rank reports."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

import ttp
from ttp import session
from ttp.api import ACTIVITY_MAX
from ttp.config import RankEnv
from ttp.core.layout import Layout
from ttp.errors import UsageError
from ttp.processor.source import StateSource


class Said:
    """Records what a processor would send."""

    def __init__(self) -> None:
        self.activity = ""
        self.heard: list[str] = []

    def say(self) -> None:
        self.heard.append(self.activity)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> Iterator[Said]:
    monkeypatch.delenv("TTP_PORT", raising=False)
    session.reset()
    processor: Any = Said()
    session.current().processor = processor
    yield processor
    session.reset()


def test_nested(said: Said) -> None:
    with ttp.paused("evaluation"), ttp.paused("evaluation"):
        assert said.heard == ["evaluation", "evaluation"]
        with ttp.paused("upload"):
            pass
    assert said.heard == ["evaluation", "evaluation", "upload", "evaluation", "evaluation", ""]


def test_an_exception_ends_it(said: Said) -> None:
    with pytest.raises(ZeroDivisionError), ttp.paused("evaluation"):
        raise ZeroDivisionError
    assert said.activity == ""


def test_a_decorator(said: Said) -> None:
    @ttp.paused("evaluation")
    def evaluate() -> str:
        return said.activity

    assert (evaluate(), evaluate(), said.activity) == ("evaluation", "evaluation", "")


def test_blocks_of_several_threads_end_in_any_order(said: Said) -> None:
    entered, leave = threading.Event(), threading.Event()

    def upload() -> None:
        with ttp.paused("upload"):
            entered.set()
            leave.wait(10)

    thread = threading.Thread(target=upload)
    with ttp.paused("evaluation"):
        thread.start()
        assert entered.wait(10)
        assert said.activity == "upload"
    assert said.activity == "upload", "the other one goes on"
    leave.set()
    thread.join(10)
    assert said.activity == ""


def test_without_a_processor_nothing_happens(said: Said) -> None:
    session.current().processor = None
    with ttp.paused("evaluation"):
        pass
    assert said.heard == []


def test_a_rank_that_joins_inside_of_the_block_says_it(said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    current, anything = session.current(), SimpleNamespace()
    current.processor = None
    monkeypatch.setattr(Said, "start", lambda _: None, raising=False)
    monkeypatch.setattr(Said, "report_preemption", print, raising=False)
    monkeypatch.setattr(Said, "wait_let_go", lambda *_: False, raising=False)
    monkeypatch.setattr(Said, "run_dir", Path(), raising=False)
    monkeypatch.setattr("ttp.processor.processor.Processor", lambda *_, **__: said)
    monkeypatch.setattr(session, "allow_journal", lambda *_: None)
    env = RankEnv(0, 1, 0, "127.0.0.1", "job", 0)
    with ttp.paused("compilation"):
        current.start_processor(env, Layout.data_parallel(1), cast("StateSource", anything), Path())
        assert said.activity == "compilation"
    assert said.heard == ["compilation", ""]
    current.end_launch()


def test_one_that_is_closed_meanwhile(said: Said) -> None:
    with ttp.paused("evaluation"):
        session.current().processor = None
    assert said.heard == ["evaluation"]


@pytest.mark.parametrize("nothing", ["", " \n", None, lambda: None])
def test_it_wants_a_word(said: Said, nothing: Any) -> None:
    with pytest.raises(UsageError, match=r'ttp\.paused\("evaluation"\)'), ttp.paused(nothing):
        pass
    assert said.heard == []


def test_the_word_is_one_short_line(said: Said) -> None:
    with ttp.paused("a\nb " + "c" * 1000):
        assert said.activity.startswith("a b ccc") and len(said.activity) == ACTIVITY_MAX
