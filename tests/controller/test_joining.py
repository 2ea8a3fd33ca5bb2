"""A rank that cannot join, or is refused late, says so, trains on, and does not wait."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from tests.controller.conftest import Controller
from tests.ports import free_port
from tests.processor.fake_source import FakeSource
from tests.waiting import until
from ttp.config import Config, RankEnv
from ttp.core import messages as m
from ttp.core.layout import Layout, Rank, Version
from ttp.errors import RestoreError, TtpError
from ttp.launch.presence import probe
from ttp.mindio.handlers.handler_source import HandlerSource
from ttp.mindio.protocol.messages import ReplicaSet
from ttp.processor import joining as module
from ttp.processor.processor import Processor

ENV = RankEnv(rank=1, world_size=2, local_rank=1000, master_addr="127.0.0.1", run_id="job", launch=0)


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Processor]:
    """Let rank 1 of two train without a controller after a short time."""
    monkeypatch.setattr(module, "JOIN_PATIENCE_S", 0.2)
    config = Config(port=free_port(), run_dir=str(tmp_path / "rank"), token="right")
    processor = Processor(config, ENV, Layout.data_parallel(2), FakeSource(), str(tmp_path))
    processor.start()
    yield processor
    processor.close()


def test_an_error_of_the_adapters_close_is_told_and_the_rest_is_closed(
    alone: Processor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(alone.source, "close", Mock(side_effect=OSError("the device is gone")))
    closed = Mock(wraps=alone.host.close)
    monkeypatch.setattr(alone.host, "close", closed)
    alone.close()
    assert "could not close" in caplog.text and "the device is gone" in caplog.text and closed.called


def test_it_is_refused_after_training_has_begun(alone: Processor, start: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "ttp.processor")
    alone.begin_update()
    alone.end_update()
    start("--port", str(alone.config.port), token="wrong", wait=False)
    until(lambda: "UNPROTECTED until the job is restarted" in caplog.text)
    assert caplog.text.count("until the job is restarted") == 1
    alone.begin_update()
    alone.end_update()
    assert alone.gate.version == 2, "it trains on"
    alone.report(m.FaultKind.EXCEPTION, "an error of the program")
    alone.wait_released()  # returns: nobody comes
    alone.leave(m.GoodbyeReason.LEFT)
    with pytest.raises(TtpError, match="token"):
        alone.agree_on_restore((), (), ())


def test_restore_without_a_controller_names_the_cause(alone: Processor) -> None:
    """A controller that loads slowly looks the same: the job has to be started again, so this is no error of 64."""
    with pytest.raises(RestoreError, match=rf"no controller at 127.0.0.1:{alone.config.port} .* MASTER_ADDR, TTP_PORT"):
        alone.agree_on_restore((), (), ())


SHARD = "protected: 1 rank, 1 shard on one rank only; "
ALONE = "when a rank fails whose shards other ranks hold too, or when a rank is told to end or raises an error"


def handlers(*sets: ReplicaSet) -> HandlerSource:
    source = HandlerSource()
    source.sets = sets
    return source


@pytest.mark.parametrize(
    ("source", "copies", "when", "how"),
    [
        (FakeSource(), SHARD, ALONE, "saved in /saves"),
        (
            handlers(ReplicaSet((Rank(0),), 1)), "protected: the state of rank 0 on 1 of 1 ranks; ", ALONE,
            "saved by the program's handlers",
        ),
        (handlers(), "NOT PROTECTED: no replica sets were declared", "", ": no step can be saved"),
    ],
)  # fmt: skip
def test_it_says_once_that_it_is_protected(
    source: Any, copies: str, when: str, how: str, tmp_path: Path, start: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "ttp.processor")
    controller = start(token="right")
    config = Config(port=controller.port, run_dir=str(tmp_path / "rank"), token="right", heartbeat_s=0.05)
    env = replace(ENV, rank=0, world_size=1)
    processor = Processor(config, env, Layout.data_parallel(1), source, "/saves")
    processor.start()
    try:
        until(lambda: [rank.version for rank in controller.status().ranks] == [0])
        assert "protected" not in caplog.text, "nothing is trained yet"
        for version in 1, 2:
            processor.begin_update()
            processor.end_update()
            until(lambda: controller.status().ranks[0].version == version)  # noqa: B023 - called here
        until(lambda: "protected" in caplog.text.lower())
        (told,) = [said for said in map(logging.LogRecord.getMessage, caplog.records) if "protected" in said.lower()]
        assert told.startswith(copies + when) and told.endswith(how)
    finally:
        processor.close()


def test_a_launch_waits_as_long_as_the_one_before_is_saved(
    tmp_path: Path, controller: Controller, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise it trains unprotected, and its restore() says that there is no controller."""
    monkeypatch.setattr(module, "JOIN_PATIENCE_S", 1.5)
    before = controller.job()
    before[0].say(m.Fault(Rank(0), Rank(0), m.FaultKind.EXCEPTION, "an error"))
    incident = before[1].expect(m.Freeze).incident
    config = Config(port=controller.port, run_dir=str(tmp_path / "rank"))
    processor = Processor(config, replace(ENV, launch=1), Layout.data_parallel(2), FakeSource(), str(tmp_path))
    starting = threading.Thread(target=processor.start)
    starting.start()
    try:
        until(lambda: "rank 1 waits to join: the last incarnation of this job is still being saved" in caplog.text)
        assert starting.is_alive() and "UNPROTECTED" not in caplog.text
        for rank in before:
            rank.say(m.Frozen(Rank(rank.number), incident, Version(0), m.Phase.IDLE, final=True))
            rank.expect(m.Release)
            rank.drop()
        starting.join(30)
        assert processor.incarnation == 2
    finally:
        processor.close()
        starting.join()


def test_a_launch_says_that_it_waited_for_a_process_of_an_earlier_start(
    tmp_path: Path, controller: Controller, caplog: pytest.LogCaptureFixture
) -> None:
    old = controller.rank(1, incarnation=1, resume=True, term_seen=1, version=Version(7))
    old.expect(m.Welcome)
    config = Config(port=controller.port, run_dir=str(tmp_path / "rank"))
    processor = Processor(config, replace(ENV, rank=0), Layout.data_parallel(2), FakeSource(), str(tmp_path))
    starting = threading.Thread(target=processor.start)
    starting.start()
    try:
        old.expect(m.Freeze)  # nobody else has come: what it holds is saved, unless it dies
        assert starting.is_alive()
        old.drop()
        starting.join(30)
        (told,) = [said.getMessage() for said in caplog.records if said.levelno == logging.WARNING]
        assert told.startswith("rank 0 had to wait: rank 1 on host (pid 101) of an earlier start of this job is here")
    finally:
        processor.close()
        starting.join()


def test_a_controller_is_known_however_slow_the_name_service_is(
    controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gRPC asks it too, and gets no answer in time here. Taken for a stranger, the controller would end its job."""
    stock = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda _, *asked: stock("127.0.0.1", *asked))
    assert probe("slow.invalid", controller.port, controller.token) == "controller"
