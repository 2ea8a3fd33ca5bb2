"""Exit code 64 for a program that nobody decorates: what is wrong with it, a restart does not mend."""

from __future__ import annotations

import sys
from types import TracebackType

from ttp.errors import EXIT_BAD_CONFIG, ConfigError, RefusedError, UsageError
from ttp.processor.last_words import leave_word

_MISTAKES = (ConfigError, RefusedError, UsageError)


def tell_launcher_of_mistakes() -> None:
    """From now on an uncaught error that asks for another configuration ends this process with 64 instead of 1.

    To be called wherever such an error may follow: MindSpore's ``init()`` puts a hook of its own in the place of
    others.
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
