"""Makes a program exit with 64 after a configuration error outside of ``train()``: a restart would not help."""

from __future__ import annotations

import sys
from types import TracebackType

from ttp.errors import EXIT_BAD_CONFIG, ConfigError, RefusedError, UsageError
from ttp.processor.last_words import leave_word

_MISTAKES = (ConfigError, RefusedError, UsageError)


def tell_launcher_of_mistakes() -> None:
    """Make uncaught configuration and usage errors end this process with 64 instead of 1, from now on.

    Call it before each place where such an error may occur: a framework may replace ``sys.excepthook``, as MindSpore's
    ``init()`` does, which undoes earlier calls.
    """
    before = sys.excepthook
    if isinstance(before, _Hook):
        return
    sys.excepthook = _Hook(before)


class _Hook:
    def __init__(self, before: object) -> None:
        self._before = before

    def __call__(self, kind: type[BaseException], problem: BaseException, trace: TracebackType | None) -> None:
        assert callable(self._before)
        self._before(kind, problem, trace)
        if isinstance(problem, _MISTAKES):
            leave_word(problem)
            raise SystemExit(EXIT_BAD_CONFIG)
