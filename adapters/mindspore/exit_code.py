"""Makes an undecorated program exit with 64 after a configuration error, which a restart would not cure."""

from __future__ import annotations

import sys
from types import TracebackType

from ttp.errors import EXIT_BAD_CONFIG, ConfigError, RefusedError, UsageError
from ttp.processor.last_words import leave_word

_MISTAKES = (ConfigError, RefusedError, UsageError)


def tell_launcher_of_mistakes() -> None:
    """Make uncaught configuration and usage errors end this process with 64 instead of 1, from now on.

    Call it wherever such an error may follow, because MindSpore's ``init()`` replaces ``sys.excepthook`` by its own.
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
