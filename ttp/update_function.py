"""``ttp.one_step``: the function of one update."""

from __future__ import annotations

import functools
import inspect
import logging
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from ttp import session
from ttp.errors import UsageError

log = logging.getLogger("ttp")

P = ParamSpec("P")
R = TypeVar("R")


class _Thread(threading.local):
    inside = False  # a call of a decorated function runs


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

    It says where an update begins and ends: the loop around it is what ttp need not leave. Everything else about the
    function stays as it is, with ttp and without.

    Args:
        func: it finishes one update in each call, of any number of micro-batches. Called in the loop of ``train()``.

    Raises:
        UsageError: it is no plain function; or, when it is called, it is called inside of another one.
    """
    if not callable(func) or isinstance(func, type) or _is_suspended(func):
        raise UsageError(
            f"@ttp.one_step decorates the plain function that makes one update, and {func!r} is none: a generator, a "
            "coroutine or a class cannot be called once for each update"
        )

    @functools.wraps(func)
    def update(*args: P.args, **kwargs: P.kwargs) -> R:
        if _thread.inside:
            raise UsageError(
                f"{_name(func)}() is decorated with @ttp.one_step, and was called inside of another such function: "
                "decorate the outer one alone, which makes the whole update"
            )
        processor = session.current().processor
        _thread.inside = True
        try:
            if processor is None:
                return func(*args, **kwargs)
            begun = processor.gate.version
            result = func(*args, **kwargs)
            if processor.gate.version > begun + 1:
                _warn_of_several(_name(func), processor.gate.version - begun)
            return result
        finally:
            _thread.inside = False

    return update


def _is_suspended(func: Callable[..., object]) -> bool:
    """Whether a call of it only makes an object that runs later."""
    kinds = inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction
    return any(kind(func) for kind in kinds)


def _name(func: Callable[..., object]) -> str:
    return getattr(func, "__qualname__", repr(func))


@functools.cache
def _warn_of_several(name: str, count: int) -> None:
    """Once for each function."""
    log.warning(
        "%s() is decorated with @ttp.one_step, and one call of it has finished %d updates: decorate the function that "
        "makes one. Nothing else comes of this",
        name,
        count,
    )
