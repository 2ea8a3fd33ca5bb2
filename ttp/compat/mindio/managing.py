"""The process that starts the controller, and connects the cluster's manager (MindX, taskd) to it."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ttp.compat.mindio import tls_info as tls_settings
from ttp.compat.mindio.rank import THIS, check_rank, job_port, resolve, seconds
from ttp.config import Config
from ttp.errors import RET_ERROR, RET_OK, TtpError, UsageError
from ttp.launch.admission import admitted
from ttp.launch.controller_process import ensure_controller
from ttp.launch.ring import places
from ttp.launch.run_dir import prepare_run_dir
from ttp.mindio.handlers import Manager
from ttp.mindio.protocol.manager_messages import WAIT_S
from ttp.wire.address import target

log = logging.getLogger("ttp.compat.mindio")

ACTIONS = ("report_fault_ranks", "report_stop_complete", "report_strategies", "report_result")
START_S = 120.0
"""Seconds in which a new controller has to answer; a host on which many processes start at once is slow."""


class Managing:
    """The controller that this process has started, and the registered callbacks. There is one object per process."""

    def __init__(self) -> None:
        self.callbacks: dict[str, Callable[..., Any]] = {}
        self.described = False
        self.place: tuple[str, Config] | None = None
        self.manager: Manager | None = None

    def begin(self) -> None:
        """Attach to the controller, if it was started and all callbacks are registered."""
        if self.manager is not None or self.place is None or set(self.callbacks) != set(ACTIONS):
            return
        address, config = self.place
        assert config.port is not None
        run_dir = Path(tls_settings.run_dir_of(config.port))
        called: dict[str, Any] = {name: _fitting(func) for name, func in self.callbacks.items()}
        wait_s = seconds("MINDIO_WAIT_MINDX_TIME", WAIT_S, 1.0, 3600.0)
        self.manager = Manager(address, config.port, config.token, wait_s=wait_s, run_dir=run_dir, **called)
        self.manager.start()


HERE = Managing()


def describe(rank: int, world_size: int) -> None:
    """Record that ``tft_init_controller`` was called.

    Raises:
        ConfigError: ``rank`` is out of range.
    """
    check_rank(rank, world_size, lowest=-1)
    HERE.described = True


def start(address: str, port: int, enable_tls: bool, tls_info: str, decrypt: Callable[[str], str] | None) -> None:
    """Start a controller; see ``tft_start_controller``.

    Raises:
        ConfigError: address, port, or identity cannot be used; the text says why.
        UsageError: ``tft_init_controller`` was not called.
    """
    if not HERE.described:
        raise UsageError("tft_start_controller() was called before tft_init_controller()")
    address = resolve(address)
    port = job_port(port)
    run_dir = prepare_run_dir(tls_settings.run_dir_of(port))
    tls_settings.use(enable_tls, tls_info, run_dir, decrypt)
    config, address = admitted(replace(Config.from_env(), port=port), address)
    ensure_controller(address, config, run_dir, patience_s=START_S)
    HERE.place = address, config
    HERE.begin()


def stop() -> None:
    """Detach from the controller, so that it decides by itself again."""
    manager, HERE.manager, HERE.place = HERE.manager, None, None
    if manager is not None:
        manager.close()


def register(action: str, func: Callable[..., Any]) -> int:
    """Register a callback of the cluster's manager; see ``tft_register_mindx_callback``."""
    if action not in ACTIONS or not callable(func):
        log.error("tft_register_mindx_callback(%r, %r): give one of %s and a function", action, func, ACTIONS)
        return RET_ERROR
    HERE.callbacks[action] = func
    HERE.begin()
    return RET_OK


def attached() -> Manager:
    """Return the manager, to send its requests to the controller.

    Raises:
        UsageError: none is attached.
    """
    if HERE.manager is None:
        raise UsageError(f"no manager is attached: register callbacks for all of {ACTIONS}, and start a controller")
    return HERE.manager


def dump() -> None:
    """Have a checkpoint written now, also without a manager.

    Raises:
        TtpError: it is not written; the text says why.
    """
    if THIS.participant is not None and THIS.participant.in_handler:
        raise UsageError("called in a handler, which would block the checkpoint")
    if HERE.place is None:
        raise UsageError("no controller was started by this process")
    from ttp.cli.connection import Where, connected

    address, config = HERE.place
    port = config.port or 0
    around = places(Path(tls_settings.run_dir_of(port)), target(address, port))
    with connected(Where(address, port, config.token, around)) as client:
        saved = client.save("tft_notify_controller_dump", config.rescue_patience_s)
    if not saved.saved:
        raise TtpError(saved.text)


def _fitting(func: Callable[..., Any]) -> Callable[..., Any]:
    """Adapt a callback of older clients, which take fewer arguments (no error codes): drop surplus arguments."""
    try:
        parameters = inspect.signature(func).parameters.values()
    except (TypeError, ValueError):
        return func
    if any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters):
        return func
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    count = sum(p.kind in positional for p in parameters)
    return lambda *given: func(*given[:count])
