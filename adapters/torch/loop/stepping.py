"""Tells whether ``optimizer.step()`` still runs. When it raises, torch calls no hook, so the stack is read."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from types import FrameType

from torch.optim import Optimizer

_WRAPPER = Optimizer.profile_hook_step(lambda _self: None).__code__
"""The code that calls the hooks and ``step()``, the same for all classes; its variable ``self`` is the optimizer."""

_USUAL = 3
"""How many frames above ``entered`` the wrapper is when nothing is compiled: behind the hook and its caller."""

_NEAR = 8
"""The most frames that may lie between the wrapper and the function that looks for it."""


class Stepping:
    """Counts the calls of ``step()`` that run: a subclass that calls ``super().step()`` fires the hooks twice.

    Args:
        optimizers: whose calls are counted.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = tuple(optimizers)
        self._thread = 0
        self._shows = True  # the wrapper is seen on the stack; a compiled step() has another function there
        self.depth = 0
        """Number of calls that have begun and not ended, as far as the hooks know."""

    def entered(self) -> None:
        """Note that ``step()`` begins."""
        if not self.depth:
            self._thread = threading.get_ident()
            self._shows = sys._getframe(_USUAL).f_code is _WRAPPER or _is_near(sys._getframe())
        self.depth += 1

    def returned(self) -> int:
        """Note that a call of ``step()`` has returned; returns how many calls still run."""
        if self.depth:
            self.depth -= 1
        return self.depth

    def was_left(self, *, entering: bool = False) -> bool:
        """Return whether calls were left by an exception; they are forgotten then. May be called on any thread.

        The stack does not show a compiled ``step()``. Then another call of ``step()`` is taken for one inside of it,
        and any other event, which ``step()`` itself does not cause, for a sign that the program has left it.

        Args:
            entering: the caller is the hook of another call of ``step()``, which is on the stack already.
        """
        if not self.depth:
            return False
        running = self._running() - entering if self._shows else self.depth * entering
        if running >= self.depth:
            return False
        self.depth = max(0, running)
        return True

    def _running(self) -> int:
        frame: FrameType | None = sys._current_frames().get(self._thread)
        found = 0
        while frame is not None:
            if frame.f_code is _WRAPPER and any(frame.f_locals.get("self") is known for known in self._optimizers):
                found += 1
            frame = frame.f_back
        return found


def _is_near(frame: FrameType | None) -> bool:
    """Return whether the wrapper is among the nearest callers of a hook."""
    for _ in range(_NEAR):
        if frame is None or frame.f_code is _WRAPPER:
            return frame is not None
        frame = frame.f_back
    return False
