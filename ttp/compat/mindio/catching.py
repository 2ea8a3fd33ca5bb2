"""``tft_exception_handler``: report exceptions of the training function by the original's table, and call it again."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import os
import re
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from ttp.compat.mindio.rank import THIS
from ttp.compat.mindio.update_times import tft_can_do_uce_repair
from ttp.compat.mindio.values import AILMENTS, ERROR_CODE_MAX, RET_EXIT, ReportState
from ttp.errors import ConfigError
from ttp.mindio.handlers import NextAction
from ttp.processor.faults import describe, is_collective_error
from ttp.processor.last_words import write_error_file
from ttp.update_function import is_suspended

log = logging.getLogger("ttp.compat.mindio")

OTHER = "OTHER"
MEMORY = "HBM MULTI BIT ECC"
WHOLE, TORN = f"{MEMORY} can repair", f"{MEMORY} can't repair"
EXIT_DELAY_S = 10.0
"""Seconds that a rank without a repair waits for its release before it exits."""

Classify = Callable[[str], str]

_HBM_TIME = re.compile(r"time us= ?(\d+)")
_ERROR_CODE = re.compile(r"\bdevice error type\s*([0-9a-f]+)\b", re.IGNORECASE)


class Table:
    """Maps texts in exceptions to the states to report. The first pattern that is found in the text counts."""

    def __init__(self) -> None:
        self.states: dict[str, ReportState] = {
            "UCE ERROR": ReportState.RS_UCE,
            MEMORY: ReportState.RS_UNKNOWN,
            WHOLE: ReportState.RS_UCE,
            TORN: ReportState.RS_UCE_CORRUPTED,
            "FORCE STOP": ReportState.RS_NORMAL,
            "ARF FINISH": ReportState.RS_PREREPAIR_FINISH,
            "STEP FINISH": ReportState.RS_STEP_FINISH,
            "HCCL OP RETRY FAILED": ReportState.RS_HCCL_FAILED,
            "SUSPECT REMOTE ERROR": ReportState.RS_HCCL_FAILED,
            "UB LINK ERROR": ReportState.RS_HCCL_FAILED,
            "HCCS LINK ERROR": ReportState.RS_HCCL_FAILED,
            OTHER: ReportState.RS_UNKNOWN,
        }
        patterns = [key for key in self.states if key not in (OTHER, WHOLE, TORN)]
        self.patterns: dict[str, Classify] = {key: _itself(key) for key in patterns}
        self.patterns[MEMORY] = _memory

    def add(self, pattern: str, fault_type: str, handle: Classify) -> None:
        """Add a pattern; see ``tft_register_exception_handler``.

        Raises:
            ConfigError: ``pattern`` is not text, or ``fault_type`` is not the name of a ``ReportState``.
            TypeError: ``handle`` cannot be called.
        """
        if not isinstance(pattern, str):
            raise ConfigError(f"pattern {pattern!r} is not text")
        if fault_type not in list(ReportState.__members__):
            raise ConfigError(f"fault_type {fault_type!r} is not one of {', '.join(ReportState.__members__)}")
        if not callable(handle):
            raise TypeError(f"the handler of {pattern!r} cannot be called")
        self.states[pattern], self.patterns[pattern] = ReportState[fault_type], handle

    def classify(self, text: str) -> ReportState:
        """Return the state to report for an exception with this text."""
        for pattern, handle in self.patterns.items():
            if pattern in text:
                try:
                    kind = handle(text)
                except Exception:  # the program's own error must not hide the one that has to be reported
                    log.exception("the handler for %r raised: the fault counts as unknown", pattern)
                    kind = OTHER
                if kind not in list(self.states):  # it may have no hash
                    log.error("the handler for %r returned %r, which is not a known kind of fault", pattern, kind)
                    kind = OTHER
                return self._usable(self.states[kind])
        return ReportState.RS_UNKNOWN

    @staticmethod
    def _usable(state: ReportState) -> ReportState:
        return ReportState.RS_UNKNOWN if state in _REPAIRABLE and not THIS.enable_uce else state


_REPAIRABLE = (ReportState.RS_UCE, ReportState.RS_UCE_CORRUPTED, ReportState.RS_HCCL_FAILED, ReportState.RS_RETRY)


def _itself(key: str) -> Classify:
    return lambda text: key


def _memory(text: str) -> str:
    """Return ``WHOLE`` if replicas can repair the memory (an error after the last update began), else ``TORN``."""
    when = _HBM_TIME.search(text)
    whole = when is not None and tft_can_do_uce_repair(int(when[1]))
    return WHOLE if whole else TORN


TABLE = Table()


def tft_exception_handler(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate the training function: report its exceptions, and call it again after a repair.

    Handlers get the function's positional arguments as a list and may replace items in it; the next call gets the
    changed arguments.

    Raises:
        TypeError: ``func`` cannot be called, or calling it only makes a coroutine or a generator.
    """
    if not callable(func) or is_suspended(func):
        raise TypeError(
            f"tft_exception_handler() decorates a plain function, which may call asyncio.run(...) inside, not {func!r}"
        )

    @functools.wraps(func)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return _train(func, list(args), kwargs)

    return wrapper


def _train(func: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> Any:
    THIS.handlers.args = args
    while True:
        try:
            result = func(*args, **kwargs)
        except RuntimeError as problem:
            _wait_for_repair(problem)
        except KeyboardInterrupt as problem:
            THIS.leave(problem)
            raise
        except SystemExit as leaving:
            if leaving.code in (None, 0):
                THIS.leave()
            else:
                _report_unknown(leaving)
            raise
        except BaseException as problem:
            _report_unknown(problem)
            raise
        else:
            THIS.leave()
            return result


def _wait_for_repair(problem: RuntimeError) -> None:
    """Report an error and wait for the repair. Return if the function may be called again; else raise or exit."""
    if THIS.participant is None:
        _report_unknown(problem)
        raise problem
    text = str(problem)
    state = TABLE.classify(text)
    if state is ReportState.RS_UNKNOWN and THIS.enable_arf and is_collective_error(problem):
        THIS.report_lost_peer(describe(problem))
        _await_repair(problem)
        return
    log.warning("the training function raised %s: %s", state.name, text.splitlines()[0] if text else "")
    expected = {
        ReportState.RS_PREREPAIR_FINISH: THIS.joined.rebooted,
        ReportState.RS_STEP_FINISH: THIS.joined.moves,
        ReportState.RS_UNKNOWN: False,
    }
    if state not in AILMENTS or not expected.get(state, True):
        _report_unknown(problem)
        raise problem
    code = _ERROR_CODE.search(text)
    THIS.report(state.value, code[1][:ERROR_CODE_MAX] if code else "", describe(problem))
    _await_repair(problem, clean=state not in expected)


def _await_repair(problem: RuntimeError, *, clean: bool = True) -> None:
    """Wait for the repair.

    Args:
        problem: the exception that the training function raised.
        clean: whether the device is cleaned first; it is not for a new rank and after the end of a step.
    """
    if clean and THIS.joined.wait_next_action() is NextAction.EXIT:
        _leave(problem)
    _empty_cache(problem)
    if THIS.joined.wait_repair_action() is NextAction.EXIT:
        _leave(problem)


def _report_unknown(problem: BaseException) -> None:
    """Log and report an unknown error. The process ends in this call, unless there is no controller.

    Before ``tft_start_processor`` and after ``tft_destroy_processor`` there is nothing to report to.
    """
    log.error("the training function raised %s", describe(problem), exc_info=problem)
    write_error_file(problem)
    if THIS.participant is not None:
        THIS.report(ReportState.RS_UNKNOWN.value, text=f"raised {describe(problem)}")


def _leave(problem: RuntimeError) -> NoReturn:
    """End the process, because there will be no repair: by the release, or after ``EXIT_DELAY_S`` by itself."""
    write_error_file(problem)
    time.sleep(EXIT_DELAY_S)
    os._exit(RET_EXIT)


def _empty_cache(problem: BaseException | None) -> None:
    """Free the device memory of the ended loop, which the repair may need; the exception holds the loop's variables."""
    while problem is not None:
        traceback.clear_frames(problem.__traceback__)
        problem = problem.__context__
    gc.collect()
    torch: Any = sys.modules.get("torch")
    for name in ("npu", "cuda"):
        device = getattr(torch, name, None)
        with contextlib.suppress(Exception):
            if device is not None and device.is_available():
                device.empty_cache()
