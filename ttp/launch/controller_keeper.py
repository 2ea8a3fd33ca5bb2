"""Keeps a controller running on the first node for as long as the job runs."""

from __future__ import annotations

import contextlib
import logging
import subprocess
import threading
from pathlib import Path

from ttp.aside import aside
from ttp.config import Config
from ttp.errors import EXIT_PORT_TAKEN, TtpError
from ttp.launch.controller_process import EndsStopped, end_controller, ensure_controller, log_tail, stop_controller
from ttp.launch.presence import is_local, listens
from ttp.launch.ring import job_is_busy, places
from ttp.wire.address import target

logger = logging.getLogger("ttp.launch")

LOOK_S = 0.2
"""Seconds between two checks of the process. A dead controller is replaced within this plus its starting time."""
FOREIGN_LOOK_S = 1.0
"""Seconds between two checks of a controller that another process started."""
RETRY_S = 1.0


class ControllerKeeper:
    """Starts the controller, replaces it when it dies, ends it with the job.

    If a controller already serves (started by another agent on this host, or by an operator), it is used, and ``stop``
    leaves it running; it is replaced when it dies. A controller that a rank has started in place of this object's is
    ended with the job: otherwise it would keep the port, with the token of a job that is over.

    Args:
        config: port, token and bind address.
        run_dir: directory of the controller's log.
    """

    def __init__(self, config: Config, run_dir: Path) -> None:
        self._config = config
        self._run_dir = run_dir
        self._address = ""
        self._child: subprocess.Popen[bytes] | None = None
        self._stopped = EndsStopped()
        self._started = False  # this object has started at least one controller
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()  # one start at a time
        self._over = threading.Event()
        self._job_over = False  # the controller exited with 0 by itself: not replaced until workers start again

    def use(self, config: Config) -> None:
        """Start controllers with these settings from now on."""
        with self._lock:
            self._config = config

    def start(self, address: str) -> None:
        """Keep a controller serving at ``address`` until ``stop``. Call it before each start of workers.

        Raises:
            ConfigError: there is no controller and none can be started; the text says why.
        """
        with self._lock:
            self._address = address
            if self._child is None or self._child.poll() is not None:
                self._child = self._ensure()
            self._job_over = False
        if self._thread is None:
            with contextlib.suppress(RuntimeError):  # no room for another thread: each start of workers tries again
                self._thread = aside("ttp-controller-keeper", self._keep)

    def stop(self) -> None:
        """Stop keeping the controller. End it unless another agent or an operator started it before this object."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()
        if self._child is not None and self._child.poll() is None:
            stop_controller(self._child)
        elif self._started and self._config.port is not None and is_local(self._address):
            end_controller(self._address, self._config.port, self._config.token)

    def _ensure(self) -> subprocess.Popen[bytes] | None:
        child = ensure_controller(self._address, self._config, self._run_dir, owned=True, cancelled=self._over.is_set)
        self._started |= child is not None
        return child

    def _keep(self) -> None:
        while not self._over.wait(LOOK_S if self._child is not None else FOREIGN_LOOK_S):
            with self._lock:
                if not self._gone():
                    continue
                try:
                    self._child = self._ensure()
                    continue
                except TtpError as problem:
                    logger.error("%s: %s", self._without(), problem)
                except Exception:
                    logger.exception("cannot check or restart the controller")
            self._over.wait(RETRY_S)

    def _without(self) -> str:
        """Return what it means that the controller cannot be replaced."""
        assert self._config.port is not None
        around = places(self._run_dir, target(self._address, self._config.port))
        if job_is_busy(around, self._config.token):
            return "a standby controller leads the job, and this host has no controller to take over from it"
        return "no controller runs, so a failure now would lose steps"

    def _gone(self) -> bool:
        """Return whether the controller has ended and has to be replaced."""
        if self._child is None:
            assert self._config.port is not None
            return not self._job_over and not listens(self._address, self._config.port, FOREIGN_LOOK_S)
        code = self._child.poll()
        if code is None:
            self._stopped.look(self._child)
            return False
        self._child = None
        self._job_over = code == 0
        if code not in (0, EXIT_PORT_TAKEN):  # another process got the port first
            logger.warning(
                "the controller ended (exit code %d); a new one is started\n%s", code, log_tail(self._run_dir, lines=3)
            )
        return not self._job_over
