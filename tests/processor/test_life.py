"""The life of a rank: what remains of it in the process when it has left its job, or was refused."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import gc
import shutil
import signal
import socket
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import ttp
from tests.controller.conftest import Controller
from tests.processor.fake_source import FakeSource
from tests.waiting import until
from ttp import restoring, session
from ttp.config import RankEnv
from ttp.core.layout import Layout, Rank
from ttp.core.rank.events import RankTimeouts
from ttp.processor import processor
from ttp.processor.liveness import host_services
from ttp.processor.local_state.pages import Page, PageWriter, page_name, read_page
from ttp.store.history import read_word


class Adapter:
    """Stands for the objects of a training."""

    def __init__(self) -> None:
        self.source = FakeSource()


def join(save_dir: Path) -> Adapter:
    """Join the job of this environment with new objects."""
    current: Any = session.current()
    adapter = Adapter()
    current.start_processor(RankEnv.from_env(), Layout.data_parallel(1), adapter.source, save_dir)
    current.adapter = adapter
    return adapter


@pytest.fixture
def controller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Controller]:
    running = Controller(tmp_path)
    env = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "TTP_PORT": str(running.port)}
    for name, value in (env | {"TTP_RUN_DIR": str(tmp_path / "run")}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    session.reset()
    yield running
    session.reset()
    running.close()


def test_what_was_trained_can_be_freed_when_train_has_returned(controller: Controller, tmp_path: Path) -> None:
    kept: list[weakref.ref[Any]] = []

    @ttp.ttp_to_persist
    def train() -> None:
        adapter = join(tmp_path)
        kept.extend(map(weakref.ref, (adapter, adapter.source)))
        session.current().wrap_again = functools.partial(repr, adapter)

    train()
    until(lambda: gc.collect() >= 0 and not any(reference() for reference in kept))


class Paged(FakeSource):
    """Makes a page for its rank."""

    page: PageWriter

    def on_welcome(self, rank: Rank, incarnation: int, page_dir: Path) -> None:
        self.page = PageWriter(page_dir, rank, incarnation=incarnation)


@pytest.mark.parametrize("what", ["all", "page"])
def test_a_page_that_a_cleaner_removes_is_made_again(
    controller: Controller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Logging out with systemd's RemoveIPC empties shared memory while the job trains."""
    monkeypatch.setenv("TTP_HEARTBEAT_S", "0.05")
    source, current = Paged(), session.current()
    current.start_processor(RankEnv.from_env(), Layout.data_parallel(1), source, tmp_path)
    assert current.processor is not None
    place, incarnation = source.page.path.parent, current.processor.incarnation
    shutil.rmtree(place) if what == "all" else source.page.path.unlink()
    until(lambda: (place / page_name(0)).exists() and source.page.in_place())
    source.page.write(1, True, [b"state"])
    page = read_page(place, 0, 1, incarnation)
    assert isinstance(page, Page) and page.data == b"state"
    current.processor.close()
    current.end_launch()
    assert not place.exists()


@pytest.mark.parametrize("refused", ["os.posix_fallocate", "ttp.processor.local_state.page_dir.PageDirectory.renew"])
def test_a_page_that_cannot_be_made_again_is_tried_once(
    controller: Controller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    """It is looked for at each heartbeat, which an error here would delay."""
    source, current, removed = Paged(), session.current(), list[str]()
    current.start_processor(RankEnv.from_env(), Layout.data_parallel(1), source, tmp_path)
    assert current.processor is not None
    monkeypatch.setattr(refused, Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    monkeypatch.setattr(host_services.log, "warning", lambda text, *_: removed.append(text))
    source.page.path.unlink()
    for _ in range(3):
        current.processor.host.look_after(source)
    assert len([text for text in removed if "removed by another program" in text]) == 1
    current.processor.close()
    current.end_launch()


@pytest.mark.parametrize("fails", ["promise", "on_welcome"])
def test_an_adapter_that_raises_stops_no_heartbeat(
    controller: Controller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    """A rank without heartbeats counts as silent, and the healthy job would be saved and ended."""
    monkeypatch.setenv("TTP_HEARTBEAT_S", "0.05")
    source, current = Paged(), session.current()
    current.start_processor(RankEnv.from_env(), Layout.data_parallel(1), source, tmp_path)
    assert current.processor is not None
    monkeypatch.setattr(source, fails, Mock(side_effect=ZeroDivisionError))
    source.page.path.unlink()

    def finish(version: int) -> None:
        assert current.processor is not None
        current.processor.begin_update()
        current.processor.end_update()
        until(lambda: controller.status().ranks[0].version == version)

    for version in (1, 2, 3):
        finish(version)
    current.processor.close()
    current.end_launch()


def test_a_train_whose_error_nobody_heard_keeps_neither_signals_nor_objects(
    controller: Controller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the program catches the error, SIGTERM has to end it as before, also in a train() that follows."""
    monkeypatch.setattr(processor, "timeouts", lambda *_: RankTimeouts(alone_s=0.1, start_controller_after=99))
    before = signal.getsignal(signal.SIGTERM)
    kept: list[weakref.ref[Any]] = []

    @ttp.ttp_to_persist
    def train() -> None:
        kept.append(weakref.ref(join(tmp_path)))
        controller.close()
        raise ValueError

    with pytest.raises(ValueError):
        train()
    assert signal.getsignal(signal.SIGTERM) is before
    until(lambda: gc.collect() >= 0 and kept[0]() is None)


def test_a_rank_that_waits_long_for_the_end_of_the_others_says_so(
    controller: Controller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The data of a rank may end before that of the others, which then wait for it in a collective, without a word."""
    monkeypatch.setattr(session, "TELL_S", 0.0)
    caplog.set_level("INFO", "ttp")
    leave = processor.Processor.leave

    def wait(self: Any, reason: Any) -> None:
        until(lambda: any("train() has returned here after 0 updates" in each.message for each in caplog.records))
        leave(self, reason)

    monkeypatch.setattr(processor.Processor, "leave", wait)

    @ttp.ttp_to_persist
    def train() -> None:
        join(tmp_path)

    train()


def test_a_rank_that_is_no_number_is_named_without_a_controller_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "")
    with pytest.raises(ttp.ConfigError, match="RANK='' is not valid"):
        restoring.place(None)


def test_trainings_of_one_process_that_share_a_directory_are_told(
    controller: Controller, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    @ttp.ttp_to_persist
    def train(save_dir: Path) -> None:
        model = torch.nn.Linear(2, 2)
        ttp.wrap_optimizer(torch.optim.SGD(model.parameters()), model=model, save_dir=save_dir)

    train(tmp_path / "one")
    monkeypatch.setattr(session.Session, "register", lambda *_, **__: None)  # the controller has ended with its job
    train(tmp_path / "two")
    assert "an earlier training" not in caplog.text
    train(tmp_path / "one")
    assert f"an earlier training of this process has used {tmp_path / 'one'} as well" in caplog.text


@pytest.mark.parametrize(("first", "told"), [(True, 1), (False, 0)])
def test_a_second_training_that_begins_at_a_restart_is_no_news(
    first: bool, told: int, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first training was killed, and resumed, before the second one had saved anything."""
    stands_for: Any = Mock(env=RankEnv(0, 1, 0, "localhost", "run", 1))
    restore = restoring.Restoring(Mock(), tmp_path, None, stands_for, first=first)
    chosen: Any = Mock()
    chosen.name = ""
    nothing = Mock(candidates=(), where={}, verified=()), chosen
    monkeypatch.setattr(restore, "_find_in_time", lambda: nothing)
    assert restore.restore() == 0
    assert sum("finds no checkpoint" in record.message for record in caplog.records) == told


def test_a_rank_that_cannot_join_raises_and_leaves_no_threads(
    controller: Controller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The port belongs to something else than a controller."""
    before = set(threading.enumerate())
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("TTP_PORT", str(server.getsockname()[1]))
        threading.Thread(target=_answer, args=(server,), daemon=True).start()
        with pytest.raises(ttp.ConfigError, match="is in use by"):
            join(tmp_path)
        assert "is in use by" not in caplog.text, "the log would show what was raised a second time"
        until(lambda: not [t.name for t in set(threading.enumerate()) - before if t.name.startswith("ttp-")], 5)
        server.shutdown(socket.SHUT_RDWR)


def _answer(server: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while True:
            client, _ = server.accept()
            with client:
                client.recv(100)
                client.sendall(b"HTTP/1.0 400 no\r\n\r\n")


def test_a_program_that_finds_its_seat_taken_says_nothing_in_the_name_of_the_job(
    controller: Controller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A subprocess of a rank has its environment; its error would count as the end of the job."""
    monkeypatch.setenv("TTP_SAVE_DIR", str(tmp_path / "ck"))
    controller.rank(0, world_size=1, run_id="none")
    with pytest.raises(SystemExit, match="64"):
        ttp.ttp_to_persist(join)(tmp_path)
    assert read_word(tmp_path / "ck") is None


def test_an_asynchronous_train_is_refused_before_it_trains_unprotected(controller: Controller) -> None:
    @ttp.ttp_to_persist(exit_on_bad_config=False)
    async def train() -> None:
        raise AssertionError

    with pytest.raises(ttp.UsageError, match="plain function"):
        asyncio.run(train())
