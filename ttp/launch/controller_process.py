"""Finds, starts and stops the controller process, for launchers and for the processor of rank 0.

Several processes may start a controller at the same time. The controller that gets the port wins; the others exit with
code 98. The winner may still be starting, or may end before it serves. So a process whose controller lost keeps probing
the port, and starts another controller later, until its time is over.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from ttp.config import Config
from ttp.errors import EXIT_PORT_TAKEN, ConfigError, ToldAs
from ttp.launch.own_module import own_module
from ttp.launch.presence import PROBE_S, Presence, controller_pid, is_local, listeners, listens, port_owner, probe
from ttp.launch.proc_files import is_stopped
from ttp.launch.run_dir import make_private
from ttp.polling import poll
from ttp.wire.address import why_unknown
from ttp.wire.tls import diagnose

logger = logging.getLogger("ttp.launch")

LOG_FILE = "controller.log"
COMMAND = own_module("ttp.controller")

STRANGER_S = 10.0
"""Seconds for which a program may listen on the port and not answer, or refuse the job's token, before that is an
error. On a busy host a controller needs seconds to start, and one of an earlier launch needs seconds to end."""
RETRY_MIN_S = 0.2
RETRY_MAX_S = 2.0
"""Longest wait in seconds, after a lost start, for the winner to serve before another controller is started."""
KEPT_S = 30 * 86400.0
"""Seconds without ranks after which a controller with an owner ends by itself. Ranks may prepare data for hours before
they connect; normally its owner ends it with the job."""
LOADS_S, LOOK_S = 300.0, 5.0
"""Most seconds beyond the patience that a controller may take until it answers, and those between two looks. On a busy
host, or from a slow file system, Python takes minutes to import: no setting is wrong then."""
STOPPED_S, STOPPED_LOOK_S = 5.0, 1.0
"""Seconds for which a controller is stopped (SIGSTOP) before it is killed, because ranks that fail meanwhile are not
saved; and most seconds that one look adds to them: the launcher may have been stopped with it."""
END_S = 10.0
"""Seconds that a controller may take to end."""
TAIL_LINES = 15
TAIL_BYTES = 1 << 16


def start_controller(
    config: Config, run_dir: Path, *, owned: bool = False, orphan_s: float | None = None, save_dir: str = ""
) -> subprocess.Popen[bytes]:
    """Start a controller in its own session, logging to ``run_dir/controller.log``. Does not wait.

    Args:
        config: settings with its port, the address to bind to, and the job's token. The token is passed in the
            environment: arguments are visible to everyone.
        run_dir: directory of its log; created when missing.
        owned: whether it belongs to this process: it waits for ranks for ``KEPT_S``, and may end with this process.
        orphan_s: seconds without owner and ranks after which the controller ends.
        save_dir: directory for incident files; empty: those that processes of this host allow (``allow_journal``).

    Raises:
        ConfigError: the log cannot be written, or the interpreter not be started.
    """
    command = [*COMMAND, "--port", str(config.port), "--bind", config.bind, "--run-dir", str(run_dir)]
    if owned:
        command += ["--owner-pid", str(os.getpid()), "--abandoned-s", str(KEPT_S)]
    if orphan_s is not None:
        command += ["--orphan-s", str(orphan_s)]
    with ToldAs(ConfigError, f"cannot start the controller, run directory {run_dir}", OSError):
        make_private(run_dir)
        log = os.open(run_dir / LOG_FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, "TTP_TOKEN": config.token, **({"TTP_SAVE_DIR": save_dir} if save_dir else {})},
            )
        finally:
            os.close(log)


def stop_controller(child: subprocess.Popen[bytes], patience_s: float = END_S) -> None:
    """End the controller and wait until it has ended. After ``patience_s`` seconds it is killed.

    SIGINT ends a controller that serves as soon as it has written its journal; on SIGTERM alone it would first wait
    until its ranks have left. A controller that has just begun needs SIGTERM: a process that a shell starts in the
    background ignores SIGINT until it installs its own handler.
    """
    child.send_signal(signal.SIGINT)
    child.send_signal(signal.SIGTERM)
    try:
        child.wait(patience_s)
    except subprocess.TimeoutExpired:
        logger.warning("the controller (pid %d) ignores SIGINT and is killed", child.pid)
        child.kill()
        child.wait()


def end_controller(address: str, port: int, token: str) -> None:
    """Send SIGINT to this machine's controller at that port, if one serves, and wait until the port is free.

    Returns after ``END_S`` seconds even if the controller still listens.
    """
    pid = controller_pid(address, port, token)
    if pid is None:
        return
    try:
        os.kill(pid, signal.SIGINT)
    except (ProcessLookupError, PermissionError) as problem:
        logger.warning("the controller at %s:%d (pid %d) could not be ended: %s", address, port, pid, problem)
        return
    poll(lambda: not listens(address, port, 1.0), END_S, 0.05)


def log_size(run_dir: Path) -> int:
    """Return the size of the controller's log in bytes: the next controller appends to it."""
    try:
        return (run_dir / LOG_FILE).stat().st_size
    except OSError:
        return 0


def log_tail(run_dir: Path, since: int = 0, lines: int = TAIL_LINES) -> str:
    """Return the last lines of the controller's log after its first ``since`` bytes; empty when there are none."""
    return tail(run_dir / LOG_FILE, since, lines)


def tail(path: Path, since: int = 0, lines: int = TAIL_LINES) -> str:
    """Return the last lines of a file after its first ``since`` bytes; empty when there are none."""
    try:
        with path.open("rb") as log:
            log.seek(max(since, os.fstat(log.fileno()).st_size - TAIL_BYTES))
            text = log.read(TAIL_BYTES).decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-lines:])


def wait_until_serving(address: str, port: int, token: str, timeout_s: float) -> bool:
    """Wait until a controller of this job answers at ``address:port``; False after ``timeout_s`` seconds."""
    return poll(lambda: probe(address, port, token) == "controller", timeout_s, 0.05)


def ensure_controller(
    address: str,
    config: Config,
    run_dir: Path,
    *,
    owned: bool = False,
    patience_s: float = 30.0,
    cancelled: Callable[[], bool] = lambda: False,
) -> subprocess.Popen[bytes] | None:
    """Make sure that a controller of this job serves at ``address`` on its port, which ``config`` has.

    Starts one if no process listens there and ``address`` belongs to this machine; otherwise waits for one.
    ``cancelled`` is called again and again; the attempt ends as soon as it returns True. For ``run_dir`` and ``owned``
    see ``start_controller``.

    Returns:
        The process that was started and serves; None if another controller serves, or if the attempt was cancelled.

    Raises:
        ConfigError: something else listens there, or none serves after ``patience_s`` seconds, although none is being
            loaded; the text says what to do.
    """
    assert config.port is not None
    start = _Start(address, config.port, config, run_dir, owned)
    began_s = time.monotonic()
    deadline_s = began_s + patience_s
    last_s = deadline_s + LOADS_S
    try:
        while time.monotonic() < last_s:
            if cancelled():
                start.give_up()
                return None
            presence = probe(address, config.port, config.token)
            if presence == "controller":
                return start.finished()
            start.complain(presence)
            if start.wanted(presence):
                start.begin()
            time.sleep(0.05)
            if start.end_if_stopped():
                continue
            if time.monotonic() >= deadline_s:
                if not start.loads():
                    break
                deadline_s = time.monotonic() + LOOK_S
        raise ConfigError(start.timed_out(time.monotonic() - began_s))
    except BaseException:
        start.give_up()
        raise


class EndsStopped:
    """Kills a controller that stays stopped (SIGSTOP)."""

    def __init__(self) -> None:
        self._looked_s = self._stopped_s = 0.0

    def look(self, child: subprocess.Popen[bytes]) -> bool:
        """Look at the controller. Return whether it was killed now."""
        before_s, self._looked_s = self._looked_s, time.monotonic()
        passed_s = min(self._looked_s - before_s, STOPPED_LOOK_S)
        if not is_stopped(child.pid):
            self._stopped_s = 0.0
            return False
        self._stopped_s += passed_s
        if self._stopped_s < STOPPED_S:
            return False
        logger.warning("the controller (pid %d) is stopped (SIGSTOP?) and could not lead a save: killing it", child.pid)
        self._stopped_s = 0.0
        child.kill()
        return True


class _Start:
    """One attempt of ``ensure_controller``: the process that it started, and what it found at the port."""

    def __init__(self, address: str, port: int, config: Config, run_dir: Path, owned: bool) -> None:
        self._address, self._port, self._config, self._run_dir, self._owned = address, port, config, run_dir, owned
        self._child: subprocess.Popen[bytes] | None = None
        self._lost = 0
        self._not_before = 0.0
        self._log_size = 0
        self._stranger_since: float | None = None
        self._stopped = EndsStopped()

    def wanted(self, presence: Presence) -> bool:
        """Return whether a controller has to be started now."""
        due = time.monotonic() >= self._not_before
        return presence == "nobody" and due and self._child is None and is_local(self._address)

    def begin(self) -> None:
        self._log_size = self._log_size if self._lost else log_size(self._run_dir)
        self._child = start_controller(self._config, self._run_dir, owned=self._owned)

    def end_if_stopped(self) -> bool:
        """Kill the started process if it was stopped. Return whether it was: another one has to be started."""
        if self._child is None or not self._stopped.look(self._child):
            return False
        self._child.wait()
        self._child = None
        return True

    def loads(self) -> bool:
        """Return whether a controller was started that does not listen on its port yet, or is too busy to answer."""
        if self._child is None:
            return False
        pids = listeners(self._port)  # of a socket that was made just now the owner may be unknown
        mine = not pids.isdisjoint({self._child.pid, None})
        return not pids or (mine and listens(self._address, self._port, PROBE_S))

    def finished(self) -> subprocess.Popen[bytes] | None:
        """Return the started process if it is the controller that serves; else end it and return None."""
        if self._child is None or self._child.poll() is not None:
            return None
        serving = controller_pid(self._address, self._port, self._config.token)
        if serving in (None, self._child.pid):
            return self._child
        self.give_up()
        return None

    def give_up(self) -> None:
        if self._child is not None and self._child.poll() is None:
            stop_controller(self._child)

    def complain(self, presence: Presence) -> None:
        """Raise ``ConfigError`` if waiting longer cannot help."""
        code = None if self._child is None else self._child.poll()
        if code is not None:
            self._child = None
            if code != EXIT_PORT_TAKEN:
                raise ConfigError(
                    f"the controller cannot start (exit code {code}):\n{log_tail(self._run_dir, self._log_size)}"
                )
            self._not_before = time.monotonic() + min(RETRY_MAX_S, RETRY_MIN_S * 2**self._lost)
            self._lost += 1
        self._complain_about_stranger(presence)

    def _complain_about_stranger(self, presence: Presence) -> None:
        """Raise ``ConfigError`` if something that is no controller of this job has kept the port for ``STRANGER_S``."""
        now = time.monotonic()
        if presence not in ("other", "refused") or self._child is not None:
            self._stranger_since = None
        elif self._stranger_since is None:
            self._stranger_since = now
        elif now - self._stranger_since >= STRANGER_S:
            if encryption := diagnose(self._address, self._port, ""):
                raise ConfigError(encryption)
            raise ConfigError(f"port {self._port} of {self._address} is {self._used(presence)}")

    def _used(self, presence: Presence) -> str:
        if presence == "refused":
            return (
                f"used by the controller of another job{self._owner()}: choose another TTP_PORT. If both are one job, "
                "give all of its processes the same TTP_TOKEN"
            )
        return (
            f"in use by a program that does not answer as a ttp controller{self._owner()}: choose another TTP_PORT, "
            "or, if it is a controller of this job that was stopped or hangs, kill it: another one is started"
        )

    def timed_out(self, waited_s: float) -> str:
        where = f"{self._address}:{self._port}"
        if self._lost:
            return (
                f"no controller serves at {where}: within {waited_s:.0f} s the port was taken {self._lost} times by "
                f"something that does not answer.\n{log_tail(self._run_dir, self._log_size)}"
            )
        if self._child is not None:
            return (
                f"the controller runs but does not answer at {where} within {waited_s:.0f} s; check TTP_BIND.\n"
                f"{log_tail(self._run_dir, self._log_size)}"
            )
        if not is_local(self._address):
            why = why_unknown(self._address) or "; the first node should run it"
            return f"no controller answers at {where} within {waited_s:.0f} s{why}"
        return f"the server at {where} does not answer within {waited_s:.0f} s{self._owner()}"

    def _owner(self) -> str:
        owner = port_owner(self._port) if is_local(self._address) else None
        return f" ({owner})" if owner else ""
