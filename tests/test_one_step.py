"""``@ttp.one_step`` without a job is a plain call, and its wrong use raises errors that name the mistake."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from typing import Any

import pytest

import ttp
from ttp import session
from ttp.core.layout import Version
from ttp.errors import UsageError
from ttp.processor.gate.gate import Gate


class Joined:
    """The part of a processor that reports updates."""

    def __init__(self) -> None:
        self.gate = Gate()

    def update(self) -> None:
        self.gate.begin_update()
        self.gate.end_update()


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> Iterator[Joined]:
    monkeypatch.delenv("TTP_PORT", raising=False)
    session.reset()
    processor: Any = Joined()
    session.current().processor = processor
    yield processor
    session.reset()


def test_it_is_a_plain_call_where_ttp_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TTP_PORT", raising=False)

    @ttp.one_step
    def update(one: int, *, two: int = 2) -> int:
        """Adds."""
        return one + two

    assert (update(1), update(1, two=3)) == (3, 4)
    assert (update.__name__, update.__doc__, str(inspect.signature(update))) == (
        "update", "Adds.", "(one: 'int', *, two: 'int' = 2) -> 'int'",
    )  # fmt: skip


def test_methods_and_errors_pass_through(joined: Joined) -> None:
    class Trainer:
        done = 0

        @ttp.one_step
        def update(self, wrong: bool) -> int:
            if wrong:
                raise ValueError("a wrong turn")
            joined.update()
            self.done += 1
            return self.done

    trainer = Trainer()
    with pytest.raises(ValueError, match="a wrong turn"):
        trainer.update(True)
    assert (trainer.update(False), trainer.update(False), joined.gate.version) == (1, 2, 2)


def test_one_inside_of_another_is_refused(joined: Joined) -> None:
    @ttp.one_step
    def inner() -> None: ...

    @ttp.one_step
    def outer() -> None:
        inner()

    with pytest.raises(UsageError, match="decorate only the outer function"):
        outer()
    inner()  # it is forgotten that another one ran


@pytest.mark.parametrize("kind", ["generator", "coroutine", "object", "class"])
def test_what_is_no_plain_function_is_refused(kind: str) -> None:
    def generator() -> Iterator[int]:
        yield 1

    async def coroutine() -> None: ...

    class Update:
        async def __call__(self) -> None: ...

    given: Any = {"generator": generator, "coroutine": coroutine, "object": Update(), "class": Joined}[kind]
    with pytest.raises(UsageError, match="plain function that makes one update"):
        ttp.one_step(given)


def test_several_updates_in_one_call_are_told_of_once(joined: Joined, caplog: pytest.LogCaptureFixture) -> None:
    @ttp.one_step
    def updates(count: int) -> None:
        for _ in range(count):
            joined.update()

    with caplog.at_level(logging.WARNING, logger="ttp"):
        for count in (1, 0, 1):
            updates(count)
        assert not caplog.records
        for count in (2, 2):
            updates(count)
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "test_several_updates_in_one_call_are_told_of_once.<locals>.updates() is decorated with @ttp.one_step, and one "
        "call of it has finished 2 updates"
    ]
    assert joined.gate.version == Version(6)
