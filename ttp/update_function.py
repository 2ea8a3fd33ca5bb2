"""``ttp.one_step``: decorate the function of one update, so that it can be called again inside the running loop.

With ``TTP_CONTINUITY=keep`` the ranks that survive a death leave ``train()``, and ``train()`` is called again. Ranks
that are in a decorated function need not leave ``train()``. If all surviving ranks can stay, they make new process
groups, register their objects with ttp as ranks of the next launch, restore the checkpoint that was just committed, and
call the function again with the same arguments. A new rank runs its program and meets them in ``wrap_optimizer()``.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

from ttp import session
from ttp.errors import UsageError
from ttp.processor import continuing
from ttp.processor.faults import is_collective_error
from ttp.processor.gate.gate import Halted

log = logging.getLogger("ttp")

P = ParamSpec("P")
R = TypeVar("R")


class _Thread(threading.local):
    inside = False  # a decorated function is running on this thread


_thread = _Thread()


def one_step(func: Callable[P, R]) -> Callable[P, R]:
    """Decorate the function that makes one update: forward, backward, ``optimizer.step()``, the schedule. ::

        @ttp.one_step
        def update(model, optimizer, batch):
            optimizer.zero_grad()
            loss = model(batch).mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

    With ``TTP_CONTINUITY=keep`` the loop around the function goes on when another rank dies, if that is possible: the
    function is called again with the same arguments, and an iterator among them gives the same items again. Changes
    that the function makes before ``optimizer.step()`` are undone if they concern the model or objects that
    ``wrap_optimizer()`` was given; the function must not write to its other arguments. In all other cases the function
    is called as if it were not decorated. See docs/continuity.md.

    Args:
        func: a function that finishes one update in each call, of any number of micro-batches, called in the loop of
            ``train()``.

    Raises:
        UsageError: ``func`` is not a plain function; or, at a call, another decorated function is running already.
    """
    if not callable(func) or isinstance(func, type) or is_suspended(func):
        raise UsageError(
            f"@ttp.one_step decorates a plain function that makes one update, and {func!r} is not one: a generator, a "
            "coroutine or a class cannot be called once for each update"
        )

    @functools.wraps(func)
    def update(*args: P.args, **kwargs: P.kwargs) -> R:
        if _thread.inside:
            raise UsageError(
                f"{_name(func)}() is decorated with @ttp.one_step, and was called inside of another such function: "
                "decorate only the outer function, which makes the whole update"
            )
        current = session.current()
        processor = current.processor
        _thread.inside = True
        try:
            if processor is None:
                return func(*args, **kwargs)
            adapter: Any = current.adapter
            if current.wrap_again is not None and processor.survivor is not None and hasattr(adapter, "repeating"):
                return _call(func, args, kwargs, current)
            begun = processor.gate.version
            result = func(*args, **kwargs)
            if processor.gate.version > begun + 1:
                _warn_of_several(_name(func), processor.gate.version - begun)
            return result
        finally:
            _thread.inside = False

    return update


def is_suspended(func: Callable[..., object]) -> bool:
    """Return whether calling the function only makes an object that runs later (a generator or coroutine)."""
    kinds = inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction
    called = func, getattr(type(func), "__call__", None)  # noqa: B004 - of an object, its method makes the coroutine
    return any(kind(each) for kind in kinds for each in called)


def _name(func: Callable[..., object]) -> str:
    return getattr(func, "__qualname__", repr(func))


@functools.cache
def _warn_of_several(name: str, count: int) -> None:
    """Warn once for each function."""
    log.warning(
        "%s() is decorated with @ttp.one_step, and one call of it has finished %d updates: decorate the function that "
        "makes one update. Training is not affected",
        name,
        count,
    )


# ---------------------------------------------------------------------------------------------------- calling it again


def _call(func: Callable[..., R], args: tuple[Any, ...], kwargs: dict[str, Any], current: session.Session) -> R:
    """Call the function. Call it again if another rank has died meanwhile and this rank can stay in its loop."""
    survivor, given = continuing.current(), _Given(args, kwargs, current)
    assert survivor is not None
    while True:
        adapter: Any = current.adapter
        assert current.processor is not None
        repeating, gate = adapter.repeating, current.processor.gate
        repeating.begin(gate.version, survivor.why_no_loop)
        try:
            if survivor.releasing:
                raise Halted  # between two calls
            result = func(*given.args, **given.kwargs)
        except Exception as problem:
            if not _released(current, survivor, problem):
                raise
            traceback.clear_frames(problem.__traceback__)
            if not _stays(current, survivor, given.refusal()):
                raise
            given.rewind()
            continue
        if gate.version > repeating.version + 1:
            _warn_of_several(_name(func), gate.version - repeating.version)
        repeating.end(gate.version)
        return result


def _released(current: session.Session, survivor: continuing.Continuing, problem: Exception) -> bool:
    """Return whether the call broke because another rank has died and this rank is to go on in its process."""
    if isinstance(problem, Halted):
        return survivor.releasing
    if not is_collective_error(problem) or (survivor.clock.runs and not survivor.releasing):
        return False
    if not survivor.releasing:
        current.report(problem)
    return survivor.releasing


def _stays(current: session.Session, survivor: continuing.Continuing, why_not: str) -> bool:
    """Become a rank of the next launch without leaving the loop, at the version at which the broken call began.

    Returns False if the loop has to be left.
    """
    adapter: Any = current.adapter
    start, processor = adapter.repeating, current.processor
    assert processor is not None and current.wrap_again is not None
    why_not = start.refusal() or why_not
    if processor.gate.version != start.version:
        why_not = f"it has made update {processor.gate.version} in the call that was broken"
    if not survivor.stays(start.version, why_not, processor, adapter):
        return False
    try:
        current.end_launch()
        start.reset()
        current.wrap_again()
        adapter = current.adapter
        adapter.repeating.go_on_from(start)
        adapter.start = start
        restored = current.restore()
        adapter.start = None
    except Exception as problem:
        survivor.leave(f"this rank could not stay in its loop: {problem!r}")
    if restored != start.version:
        survivor.leave(f"this rank stands before update {start.version + 1}, but the others restore step {restored}")
    log.info("its loop was not left: update %d is called again", restored + 1)
    return True


class _Given:
    """Keeps the arguments of a call, so that the call can be repeated. Iterators among them are recorded.

    Args:
        args: positional arguments.
        kwargs: keyword arguments.
        current: the session.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], current: session.Session) -> None:
        self._current = current
        self._replays: list[_Replay] = []
        self.args = tuple(map(self._recorded, args))
        self.kwargs = {name: self._recorded(value) for name, value in kwargs.items()}
        torch = sys.modules.get("torch")
        kind: Any = getattr(torch, "Tensor", ())
        self._versions = [(value, value._version) for value in (*args, *kwargs.values()) if _is_counted(value, kind)]

    def _recorded(self, value: Any) -> Any:
        if not isinstance(value, Iterator):
            return value
        self._replays.append(_Replay(value, self._current))
        return self._replays[-1]

    def refusal(self) -> str:
        """Return why the function cannot be called again with these arguments; empty if it can."""
        changed = any(value._version != version for value, version in self._versions)
        return "the function writes to its arguments" if changed else ""

    def rewind(self) -> None:
        """Let iterators begin again, so that the next call gets what the last one got."""
        for replay in self._replays:
            replay.rewind()


def _is_counted(value: Any, kind: Any) -> bool:
    """Return whether the argument is a tensor whose writes torch counts. Parameters are restored instead."""
    return isinstance(value, kind) and not value.requires_grad and not value.is_inference()


class _Replay:
    """An iterator that remembers the items it has given, and the random streams after each item.

    Args:
        source: the program's iterator.
        current: the session, whose adapter reads and sets the random streams.
    """

    def __init__(self, source: Iterator[Any], current: session.Session) -> None:
        self._source, self._current = source, current
        self._given: list[tuple[Any, bytes]] = []
        self._at = 0

    def __iter__(self) -> _Replay:
        return self

    def __next__(self) -> Any:
        adapter: Any = self._current.adapter
        if self._at == len(self._given):
            item = next(self._source)
            self._given.append((item, adapter.repeating.streams()))
        else:
            item, streams = self._given[self._at]
            adapter.repeating.set_streams(streams)
        self._at += 1
        return item

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def rewind(self) -> None:
        """Begin with the first item again."""
        self._at = 0
