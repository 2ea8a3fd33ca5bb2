"""``mindio_ttp.controller_ttp``: functions for the cluster's manager. They return 0 if accepted, else 1."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from ttp.compat.mindio import managing
from ttp.compat.mindio.controller_ttp import ttp_logger
from ttp.compat.mindio.framework_ttp.ttp_decorator import (
    tft_destroy_controller,
    tft_init_controller,
    tft_register_decrypt_handler,
    tft_start_controller,
)
from ttp.errors import TtpError, told_by_code

__all__ = [
    "tft_destroy_controller",
    "tft_init_controller",
    "tft_notify_controller_change_strategy",
    "tft_notify_controller_dump",
    "tft_notify_controller_on_global_rank",
    "tft_notify_controller_prepare_action",
    "tft_notify_controller_stop_train",
    "tft_query_high_availability_switch",
    "tft_register_decrypt_handler",
    "tft_register_mindx_callback",
    "tft_start_controller",
    "ttp_logger",
]

GLOBAL_RANK_TIMES = range(1, 3601)

_answers = told_by_code(logging.getLogger("ttp.compat.mindio"), TtpError, ValueError, TypeError)


def tft_register_mindx_callback(action: str, func: Callable[..., Any]) -> int:
    """Register ``func`` as the callback for ``action``, one of ``managing.ACTIONS``; all four are needed."""
    return managing.register(action, func)


@_answers
def tft_notify_controller_stop_train(
    fault_ranks: Mapping[int, int], stop_type: str = "stop", timeout: int | None = None
) -> int:
    """Stop all ranks for a repair (``"stop"``), or pause them at the end of a step (``"pause"``).

    Args:
        fault_ranks: rank -> kind of its fault: 0 memory, 1 process, 2 network.
        stop_type: ``"stop"`` or ``"pause"``.
        timeout: seconds after which a pause ends by itself; None for ``MINDIO_WAIT_MINDX_TIME``.
    """
    return managing.attached().stop_train(fault_ranks, stop_type, timeout)


@_answers
def tft_notify_controller_on_global_rank(fault_ranks: Mapping[int, int], time: int = 1) -> int:
    """Report the failed ranks, and ask for strategies. ``time``, from 1 to 3600: seconds to wait for the choice of one.

    ``MINDIO_WAIT_MINDX_TIME`` seconds are waited for in any case.
    """

    manager = managing.attached()
    if time not in GLOBAL_RANK_TIMES:
        raise ValueError(f"time {time!r} is not from 1 to 3600 seconds")
    return manager.on_global_rank(fault_ranks, time)


@_answers
def tft_notify_controller_prepare_action(action: str, fault_ranks: Mapping[int, int] | None = None) -> int:
    """Announce that new processes for these ranks start on other hosts (``"hot switch"``), or withdraw that
    (``"stop switch"``).
    """
    return managing.attached().prepare_action(action, fault_ranks)


@_answers
def tft_notify_controller_change_strategy(strategy: str, params: str = "") -> int:
    """Choose a strategy: retry, recover, migration, downgrade, upgrade, dump, exit or continue."""
    return managing.attached().change_strategy(strategy, params)


@_answers
def tft_notify_controller_dump() -> None:
    """Have a checkpoint written now, and return when it is written. Training continues."""
    managing.dump()


def tft_query_high_availability_switch() -> bool:
    """Return whether a controller answers and a rank has joined it."""
    return managing.HERE.manager is not None and managing.HERE.manager.high_availability()
