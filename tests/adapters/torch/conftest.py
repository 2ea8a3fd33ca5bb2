from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.optim.optimizer import _global_optimizer_pre_hooks as step_hooks

from tests.adapters.torch.fake_runtime import FakeRuntime
from tests.adapters.torch.stub_processor import starting
from ttp.processor import paged_source
from ttp.processor.local_state.pages import PageWriter

_dist: Any = dist


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a save wait shortly for a loop that may be about to step its schedule: none goes on meanwhile."""
    monkeypatch.setattr(paged_source, "POST_STEP_S", 0.02)


@pytest.fixture(autouse=True)
def steps_are_those_of_the_test() -> Iterator[None]:
    """Jobs of earlier tests, which live until they are collected as garbage, would look at each optimizer."""
    before = set(step_hooks)
    yield
    for number in step_hooks.keys() - before:
        del step_hooks[number]


@pytest.fixture
def device() -> FakeRuntime:
    """Return a made-up device."""
    return FakeRuntime()


@pytest.fixture
def start(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Return a function that makes and starts a ``Job``, a class of the test's module, under a stub processor."""
    with starting(request.module.Job, tmp_path) as start:
        yield start


@pytest.fixture
def server() -> Iterator[Any]:
    """Return a store to which others connect."""
    yield _dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def world_of_one() -> Iterator[None]:
    """Make the default process group of one rank."""
    dist.init_process_group("gloo", store=_dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def page(tmp_path: Path) -> Iterator[PageWriter]:
    """Return the page of rank 0."""
    writer = PageWriter(tmp_path / "pages", 0)
    yield writer
    writer.close()
