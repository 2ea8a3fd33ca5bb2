"""The errors that ttp raises, by who must act on them, and the exit codes of a job.

Exceptions of grpc, the operating system and the frameworks are converted to these at the edges and nowhere else. An
expected failure inside the core is a value or an event, never an exception.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from types import TracebackType
from typing import ParamSpec

_P = ParamSpec("_P")

EXIT_TRAINED = 0
EXIT_BAD_CONFIG = 64
EXIT_NOT_SAVED = 70
EXIT_SAVED = 75
EXIT_PORT_TAKEN = 98
"""Exit code of ``python -m ttp.controller`` if its port is in use, for its launcher; ``ttp controller`` has 64."""
RET_OK, RET_ERROR = 0, 1
"""What functions of the original return, whose interface has no exceptions."""
GARBLED = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError)
"""What code raises that reads data of another form than it expects."""


class TtpError(Exception):
    """Base of every error that ttp raises on purpose."""


class ConfigError(TtpError):
    """The operator must act: a wrong environment value, a port in use, a layout that does not fit."""


class DirectoryInUseError(ConfigError):
    """Another job that runs now saves to the same directory."""


class UsageError(TtpError):
    """The caller must act: a function was called at the wrong time or with the wrong object."""


class CheckpointError(TtpError):
    """A checkpoint cannot be used: it lacks a piece, a digest does not match, it belongs to another model."""


class OtherModelError(CheckpointError, UsageError):
    """The checkpoint belongs to another model or optimizer. A restart would not help: ranks exit with 64."""


class RestoreError(CheckpointError):
    """The ranks could not agree on one checkpoint to restore; the text says why. Another start may help."""


class StorageAwayError(RestoreError):
    """Some ranks do not see the checkpoints at a restart. Their storage may come back in a moment."""


class RefusedError(TtpError):
    """The controller refused this process: wrong protocol, wrong token, rank taken, fenced."""


class SeatTakenError(RefusedError):
    """Another process holds this rank; this one may be a subprocess that has inherited the environment of the rank."""


def strerror_of(problem: BaseException) -> object:
    """Return the words of the operating system for an error, without number and path."""
    return getattr(problem, "strerror", None) or problem


class ToldAs:
    """In its ``with`` block, converts exceptions to an error of ttp, whose text ends with the reason.

    Args:
        error: the class of the error to raise.
        text: what went wrong.
        kinds: the classes of exceptions that are converted.
        reason: returns the reason for an exception.
    """

    def __init__(
        self,
        error: type[Exception],
        text: str,
        *kinds: type[BaseException],
        reason: Callable[[BaseException], object] = str,
    ) -> None:
        self._error, self._text, self._kinds, self._reason = error, text, kinds, reason

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(
        self, _kind: type[BaseException] | None, problem: BaseException | None, _trace: TracebackType | None
    ) -> None:
        """Convert the exception that leaves the block, if it is of one of the kinds."""
        if isinstance(problem, self._kinds):
            raise self._error(f"{self._text}: {self._reason(problem)}") from problem


def told_by_code(
    log: logging.Logger, *kinds: type[Exception]
) -> Callable[[Callable[_P, int | None]], Callable[_P, int]]:
    """Make a function that raises one of these exceptions log it and return 1; without one it returns 0 for None.

    A call with too few arguments, or with unknown ones, raises TypeError as usual.
    """

    def decorate(function: Callable[_P, int | None]) -> Callable[_P, int]:
        form = inspect.signature(function)

        @functools.wraps(function)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> int:
            form.bind(*args, **kwargs)
            try:
                return function(*args, **kwargs) or RET_OK
            except kinds as problem:
                log.error("%s: %s", function.__name__, problem)
                return RET_ERROR

        return call

    return decorate
