"""The streams of a rank to its controllers: each is closed at the end, and the machine hears of each that fails."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from tests.ports import free_port
from tests.processor.fake_source import no_thread
from tests.waiting import until
from ttp._version import __version__
from ttp.config import Config, RankEnv
from ttp.core import messages as m
from ttp.core.layout import Rank, Version
from ttp.core.rank import actions as act
from ttp.core.rank import events as ev
from ttp.errors import ConfigError
from ttp.processor.joining import Joining
from ttp.processor.link import connecting, second
from ttp.processor.link.connecting import ControllerLink
from ttp.processor.link.second import SecondStream
from ttp.processor.link.stream import Stream


class FakeStream:
    """Notes what is done with it, and keeps the functions to call, such as ``on_up``."""

    made: list[FakeStream]

    def __init__(self, *_: object, **calls: Any) -> None:
        self.open, self.calls = True, calls
        self.made.append(self)

    def start(self) -> None:
        """Begin to read."""

    def abort(self) -> None:
        self.open = False

    def finish(self, timeout_s: float) -> None:
        self.abort()


class WithoutThread(FakeStream):
    def start(self) -> None:
        raise RuntimeError("can't start new thread")


@pytest.fixture(autouse=True)
def made(monkeypatch: pytest.MonkeyPatch) -> list[FakeStream]:
    """Return the list of all streams that the link makes."""
    found: list[FakeStream] = []
    monkeypatch.setattr(FakeStream, "made", found, raising=False)
    monkeypatch.setattr(connecting, "Stream", FakeStream)
    monkeypatch.setattr(second, "Stream", FakeStream)
    return found


def link_of(tmp_path: Path, said: list[ev.Event]) -> ControllerLink:
    config = Config(port=1, relay="off", run_dir=str(tmp_path))
    env = RankEnv(0, 1, 0, "127.0.0.1", "job", 0)
    return ControllerLink(config, env, said.append, Joining(config, env, lambda: None), over=lambda: False)


@pytest.mark.parametrize("during", ["ensure_controller", "split", "Stream"])
def test_a_rank_that_leaves_while_it_connects_keeps_no_stream(
    during: str, made: list[FakeStream], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = link_of(tmp_path, [])
    step = getattr(connecting, during)

    def left_meanwhile(*args: Any, **kwargs: Any) -> Any:
        link.finish(timeout_s=0.0)
        return None if during == "ensure_controller" else step(*args, **kwargs)

    monkeypatch.setattr(connecting, during, left_meanwhile)
    link.connect(act.Connect(start_controller=during == "ensure_controller", address="127.0.0.1:1"))
    assert [stream for stream in made if stream.open] == []


def test_a_stream_that_ends_is_said_even_if_the_reason_cannot_be_found_out(
    made: list[FakeStream], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The diagnosis reads settings and files once more. Without the event the rank would never connect again."""

    def diagnose(*_: object) -> str:
        raise ConfigError("TTP_TLS_CERT=gone cannot be read")

    monkeypatch.setattr("ttp.wire.tls.diagnose", diagnose)
    said: list[ev.Event] = []
    link_of(tmp_path, said).connect(act.Connect(start_controller=False, address="127.0.0.1:1"))
    with pytest.raises(ConfigError):
        made[0].calls["on_down"]("UNAVAILABLE: nobody is there")
    assert [type(event) for event in said] == [ev.StreamDown]


def test_a_problem_that_lasts_is_logged_once(
    made: list[FakeStream], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With a broken certificate, for example, an attempt fails every few seconds."""
    monkeypatch.setattr(connecting, "aside", lambda name, job: None)
    link = link_of(tmp_path, [])
    link._joining.joined(__version__)
    for times in (1, 2):
        for _ in range(3):
            link.connect(act.Connect(start_controller=False, address="127.0.0.1:1"))
            made[-1].calls["on_down"]("UNAVAILABLE: bad certificate")
        assert caplog.text.count("bad certificate") == times
        made[-1].calls["on_up"]()


def test_a_controller_of_another_ttp_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With one protocol they work together, but not as either of them was tested."""
    link = link_of(tmp_path, [])
    for _ in range(2):
        link._joining.joined("0.0.1")
    (said,) = caplog.messages
    assert said.endswith(f"runs ttp {__version__}, its controller ttp 0.0.1: install the same ttp on every host")


@pytest.mark.parametrize("within_s", [None, 60.0])
def test_a_stream_that_nobody_accepts_was_never_up(within_s: float | None) -> None:
    """The log repeated the same problem with each attempt, as if there had been a stream in between."""
    said, down = list[str](), threading.Event()

    def ends(_: str) -> None:
        said.append("down")
        down.set()

    calls: Any = {"on_up": lambda: said.append("up"), "on_order": said.append, "on_down": ends, "within_s": within_s}
    stream = Stream("127.0.0.1", free_port(), "", **calls)
    stream.start()
    assert down.wait(60) and said == ["down"]
    stream.abort()


def test_a_second_stream_without_a_thread_is_said_to_be_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(second, "Stream", WithoutThread)
    monkeypatch.setattr(second, "aside", lambda name, job: job())
    said: list[ev.Event] = []
    aside = SecondStream("", said.append, lambda: None)
    aside.perform(act.ConnectAside("127.0.0.1:1", 1.0))
    assert [type(event) for event in said] == [ev.AsideDown], "else the rank never asks another stand-in"


def test_a_second_stream_is_closed_even_if_no_thread_can_be_started(
    made: list[FakeStream], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a rank could not leave the job in good order."""

    aside = SecondStream("", lambda _: None, lambda: None)
    with monkeypatch.context() as patch:
        patch.setattr(second, "aside", lambda name, job: job())
        aside.perform(act.ConnectAside("127.0.0.1:1", 1.0))
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    aside.perform(act.CloseAside())
    assert [stream.open for stream in made] == [False]


class ClosesMeanwhile(int):
    """The number of a stream: another thread closes the stream while this number is compared."""

    closer: threading.Thread

    def __eq__(self, other: object) -> bool:
        same = isinstance(other, int) and int(self) == int(other)
        self.closer.start()
        self.closer.join(0.2)
        return same

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = int.__hash__


def test_a_second_stream_that_is_closed_while_it_is_made_does_not_stay(
    made: list[FakeStream], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("aside", "aside_or_here"):
        monkeypatch.setattr(second, name, lambda name, job: job())
    aside, number = SecondStream("", lambda _: None, lambda: None), ClosesMeanwhile(1)
    monkeypatch.setattr(aside, "_numbers", iter((number, 2)))
    number.closer = threading.Thread(target=lambda: aside.perform(act.CloseAside()))
    aside.perform(act.ConnectAside("127.0.0.1:1", 1.0))
    number.closer.join()
    assert [stream.open for stream in made] == [False]


def test_nobody_waits_while_a_second_stream_that_is_not_wanted_any_more_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Closing a stream may take long, and ``perform`` is called on the thread that serves the controller."""

    class SlowToClose(FakeStream):
        def abort(self) -> None:
            other = threading.Thread(target=lambda: aside.perform(act.CloseAside()), daemon=True)
            other.start()
            other.join(2)
            waits.append(other.is_alive())

    jobs: list[Any] = []
    waits: list[bool] = []
    monkeypatch.setattr(second, "Stream", SlowToClose)
    monkeypatch.setattr(second, "aside", lambda name, job: jobs.append(job))
    aside = SecondStream("", lambda _: None, lambda: None)
    aside.perform(act.ConnectAside("127.0.0.1:1", 1.0))
    aside.perform(act.CloseAside())
    jobs[0]()
    assert waits == [False]


def test_orders_do_not_wait_for_the_name_service(
    made: list[FakeStream], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stream's reader says that the stream is up, and then reads the first orders."""
    aside: list[Any] = []
    asked: list[str] = []

    def found(host: str, port: int) -> tuple[str, ...]:
        asked.append(host)
        return (f"ipv4:{host}:{port}",)

    monkeypatch.setattr(connecting, "aside", lambda name, job: aside.append(job))
    monkeypatch.setattr(connecting, "peers", found)
    said: list[ev.Event] = []
    link = link_of(tmp_path, said)
    link.connect(act.Connect(start_controller=False, address="slow:1"))
    made[0].calls["on_up"]()
    assert (asked, [type(event) for event in said]) == ([], [ev.StreamUp])
    link.connect(act.Connect(start_controller=False, address="next:1"))
    made[1].calls["on_up"]()
    for look in reversed(aside):
        look()
    assert link._peers == ("ipv4:next:1",), "a late answer is about a stream that has ended"


class Reading(FakeStream):
    """A stream that notes what is sent, and asks its relay."""

    def __init__(self, *places: object, **calls: Any) -> None:
        super().__init__(*places, **calls)
        self.sent: list[m.Report] = []

    def send(self, report: m.Report) -> None:
        self.sent.append(report)

    def ask(self, answer: Callable[[float], None]) -> None:
        answer(2.5)


BEAT = m.Heartbeat(Rank(0), Version(1), m.Phase.IDLE)


@pytest.mark.parametrize("still", [False, True])
def test_a_relay_that_stands_still_is_left_at_the_next_heartbeat(
    made: list[FakeStream], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, still: bool
) -> None:
    """Its streams stay open, so nothing else tells that no report arrives. The next stream needs no relay."""
    monkeypatch.setattr(connecting, "Stream", Reading)
    monkeypatch.setattr(connecting, "aside", lambda name, job: job())
    said: list[ev.Event] = []
    link, ended = link_of(tmp_path, said), list[int]()
    choice: Any = SimpleNamespace(
        port=lambda: 4711, stands_still=lambda: still, ended=lambda relay, why: ended.append(relay)
    )
    link._relay_choice = choice
    link.perform(act.Send(BEAT))  # there is no stream yet
    link.perform(act.Connect(start_controller=False, address="127.0.0.1:1"))
    (stream,) = made
    link.perform(act.Send(m.Goodbye(Rank(0), m.GoodbyeReason.DONE, Version(1))))
    assert stream.open
    link.perform(act.Send(BEAT))
    assert stream.open != still
    link.perform(act.LookAtController())
    assert said == [ev.Looked(2.5)], "the relay knows how long it has heard nothing of the controller"
    stream.calls["on_up"]()
    stream.calls["on_down"]("UNAVAILABLE: the relay is gone")
    assert ended == [4711] and isinstance(said[-1], ev.StreamDown)


def test_a_relay_that_does_not_answer_knows_nothing() -> None:
    """The rank asks again with its next look."""
    said = list[float | None]()
    stream = Stream("127.0.0.1", 1, "", on_up=Mock(), on_order=Mock(), on_down=Mock(), relay=1)
    stream.ask(said.append)
    until(lambda: said == [None])
    stream.abort()


def test_after_the_end_no_second_stream_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An order that is carried out late would leave a stream that nobody closes."""
    link, performed = link_of(tmp_path, []), list[object]()
    monkeypatch.setattr(link._second, "perform", performed.append)
    link.perform(act.CloseAside())
    link.finish(timeout_s=0.0)
    assert len(performed) == 2
    link.perform(act.CloseAside())
    assert len(performed) == 2


@pytest.mark.parametrize("joined", [False, True])
def test_a_setting_that_cannot_be_used_is_raised_in_the_program_or_logged_if_it_has_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, joined: bool
) -> None:
    """A certificate may be removed while the job trains."""

    def fail(*_: object, **__: object) -> None:
        raise ConfigError("TTP_TLS_CERT=gone cannot be read")

    monkeypatch.setattr(connecting, "Stream", fail)
    said: list[ev.Event] = []
    link, failed = link_of(tmp_path, said), list[Exception]()
    monkeypatch.setattr(link._joining, "failed", failed.append)
    if joined:
        link._joining.joined(__version__)
    link.connect(act.Connect(start_controller=False, address="127.0.0.1:1"))
    assert bool(failed) != joined and ("TTP_TLS_CERT=gone" in caplog.text) == joined
    assert [type(event) for event in said] == [ev.StreamDown]


def test_a_rank_without_tls_in_a_job_with_it_fails_to_join_at_once(
    made: list[FakeStream], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would otherwise try until its patience is over."""
    link, failed = link_of(tmp_path, []), list[Exception]()
    monkeypatch.setattr(link._joining, "failed", failed.append)
    monkeypatch.setattr("ttp.wire.tls.diagnose", lambda *_: "the controller speaks TLS: set TTP_TLS_CERT")
    link.connect(act.Connect(start_controller=False, address="127.0.0.1:1"))
    made[0].calls["on_down"]("UNAVAILABLE: Socket closed")
    assert [str(problem) for problem in failed] == ["the controller speaks TLS: set TTP_TLS_CERT"]
