"""A forked child of a rank is not the rank: its updates are its own."""

from __future__ import annotations

import os
import signal
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.adapters.torch.stub_processor import Loop
from ttp import session
from ttp.config import Config
from ttp.core.layout import Version
from ttp.processor.local_state.page_reader import newest_pages


def step(loop: Any) -> None:
    loop.model.weight.grad = torch.ones_like(loop.model.weight)
    loop.optimizer.step()


def step_in_a_child(loop: Any) -> int:
    """Return the exit code of a forked child that makes two updates, and counts its own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # later versions of Python warn of a fork beside threads
        child = os.fork()
    if not child:
        code = 9
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)  # pytest-timeout's handler cannot end this process
            signal.alarm(20)  # it must not wait at a gate that nobody opens
            torch.manual_seed(99)
            step(loop)
            loop.adapter.step_done()
            step(loop)
            code = 7 if loop.gate.version == 1 else 8
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("frozen", [False, True])
def test_updates_of_a_forked_child_are_not_those_of_the_rank(tmp_path: Path, frozen: bool) -> None:
    """Its pages are shared memory, and a closed gate opens for the rank only."""
    session.reset()
    model = torch.nn.Linear(2, 2, bias=False)
    loop: Any = Loop(tmp_path, model, torch.optim.SGD(model.parameters(), lr=0.1)).start(tmp_path)
    current: Any = session.Session(Config())
    current.adapter, current.processor = loop.adapter, loop.processor
    session._session = current
    try:
        step(loop)
        pages = newest_pages(tmp_path, 0, os.getpid(), 9)[1]
        if frozen:
            loop.gate.close()
        assert step_in_a_child(loop) == 7
        assert newest_pages(tmp_path, 0, os.getpid(), 9)[1] == pages and pages
        if frozen:
            loop.gate.open()
        step(loop)
        assert loop.gate.version == Version(2) and loop.processor.begun == [1, 2]
    finally:
        session.reset()
        loop.source.close()
