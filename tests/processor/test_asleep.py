"""A thread that sleeps in torch is told from one that waits for something else, or computes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ttp.processor.liveness import asleep

PATIENCE_S = 30.0
_future: Any = torch.futures.Future


def in_torch(end: threading.Event) -> None:
    done = _future()
    threading.Thread(target=lambda: (end.wait(), done.set_result(0))).start()
    done.wait()


def through_c(end: threading.Event) -> None:
    done = _future()
    threading.Thread(target=lambda: (end.wait(), done.set_result(0))).start()
    torch._C.Future.wait(done)


def elsewhere(end: threading.Event) -> None:
    end.wait()


def computing(end: threading.Event) -> None:
    while not end.is_set():
        torch.rand(1 << 22).sort()  # as long as the line says .wait(


@pytest.mark.parametrize(
    ("does", "sleeps"), [(in_torch, True), (through_c, True), (elsewhere, False), (computing, False)]
)
def test_only_a_thread_that_sleeps_in_torch_is_found(
    monkeypatch: pytest.MonkeyPatch, does: Callable[[threading.Event], None], sleeps: bool
) -> None:
    monkeypatch.setattr(asleep, "LOOK_S", 0.1)
    end, found, looks = threading.Event(), threading.Event(), iter(range(20))
    thread = threading.Thread(target=does, args=(end,))
    thread.start()
    watched = thread.ident or 0, thread.native_id or 0
    asleep.watch(watched, lambda: next(looks, -1) >= 0 and not found.is_set(), found.set)
    try:
        assert found.wait(PATIENCE_S if sleeps else 1.5) == sleeps
    finally:
        end.set()
        thread.join()


def test_a_thread_that_sleeps_again_and_again_makes_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    counts, left = iter(["1", "2", "", "2", "3", "3"]), list[str]()
    for name, value in {"LOOK_S": 0.0, "_POLL_S": 0.0, "aside": lambda _, job: job()}.items():
        monkeypatch.setattr(asleep, name, value)
    monkeypatch.setattr(asleep, "_sleep", lambda *_: next(counts))
    asleep.watch((1, 1), lambda: not left, lambda: left.append(next(counts, "none")))
    assert left == ["none"], "only the last two are equal"


@pytest.mark.parametrize(
    ("module", "waits"),
    [("torch.distributed.distributed_c10d", True), ("torch.utils.data.dataloader", False), ("x", False)],
)
def test_a_thread_that_waits_for_data_does_not_wait_for_a_rank(module: str, waits: bool) -> None:
    code = SimpleNamespace(co_filename="", co_name="get")
    frame: Any = SimpleNamespace(f_globals={"__name__": module}, f_code=code, f_lineno=1)
    assert asleep._in_torch(frame) is waits
