"""Signals while a launcher starts its workers."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest

from ttp.config import Config
from ttp.launch.held_signals import signals_held
from ttp.launch.warm.starter import WarmStarter


class SignalError(Exception):
    """The launcher got a signal."""


@pytest.fixture(autouse=True)
def handled() -> Any:
    def handler(*_: object) -> None:
        raise SignalError

    before = signal.signal(signal.SIGTERM, handler)
    yield
    assert signal.signal(signal.SIGTERM, before) is handler


def test_the_handler_is_called_after_the_block() -> None:
    done = False
    with pytest.raises(SignalError), signals_held():
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        done = True
    assert done


def test_one_that_comes_while_the_handlers_are_put_back_does_not_leave_the_others_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    handlers, put = {how: signal.getsignal(how) for how in (signal.SIGTERM, signal.SIGINT)}, signal.signal

    def put_back(how: int, handler: Any) -> Any:
        found = put(how, handler)
        if handler is handlers[signal.SIGTERM]:
            monkeypatch.undo()
            os.kill(os.getpid(), signal.SIGTERM)
        return found

    with pytest.raises(SignalError), signals_held():
        monkeypatch.setattr(signal, "signal", put_back)
    assert {how: signal.getsignal(how) for how in handlers} == handlers


def test_a_signal_while_torch_starts_workers_leaves_none_behind(tmp_path: Path) -> None:
    """torch itself knows a worker only when all have started."""
    api: Any = pytest.importorskip("torch.distributed.elastic.multiprocessing.api")
    from ttp.launch.warm.torch_workers import forking

    def start(script: str) -> subprocess.Popen[bytes]:
        handler = api.get_subprocess_handler("sh", ("-c", script), {}, None, None, 0, None)
        return handler.proc  # type: ignore[no-any-return] # torch has no types here

    before = set(psutil.Process().children())
    with pytest.raises(SignalError), forking(WarmStarter(Config(continuity="off"), tmp_path)):
        for script in ("sleep 60", 'kill -TERM "$PPID"; sleep 60', *["sleep 60"] * 20):
            start(script)
    assert not set(psutil.Process().children()) - before
