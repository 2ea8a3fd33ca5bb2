"""The scheduler of a job under test: start its launchers, restart them when all have ended, and observe controllers."""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from ttp.chaos import launching
from ttp.chaos.injection import HurtJob, heal_all
from ttp.chaos.place import Place
from ttp.chaos.script import Script
from ttp.inbox import Inbox
from ttp.launch.warm.starter import STATUS_FILE

_REASON = re.compile(r"((?:restarts are cold|ranks do not go on in their processes): .*)")
GIVE_UP_S = 5.0
"""Seconds for the launchers to end after the first one has ended; then their hosts are taken away."""


class Launches:
    """Starts and restarts one job.

    Args:
        script: the script of the job.
        folder: the folder of the job.
        place: hosts, disk and port of the job.
        job: gets the processes of launchers and observers.
        socket_path: the socket to which ranks connect.
        inbox: gets the lines of the observers.
    """

    def __init__(
        self, script: Script, folder: Path, place: Place, job: HurtJob, socket_path: Path, inbox: Inbox[Any]
    ) -> None:
        self.of_run = 0
        """Number of launches since the current run began."""
        self._script, self._folder, self._place, self._job = script, folder, place, job
        self._socket_path, self._inbox = socket_path, inbox
        self._token = secrets.token_hex(16)
        self._count = 0
        self._left_at: float | None = None

    @property
    def save_dir(self) -> Path:
        """The directory to which the job saves."""
        return (self._place.disk.path if self._place.disk is not None else self._folder) / "checkpoints"

    @property
    def save_dirs(self) -> list[Path]:
        """The directories of the job's checkpoints: its ``save_dir`` and its fallback directory."""
        return [self.save_dir, self._folder / launching.FALLBACK]

    def can_fork(self) -> bool:
        """Return whether the template process of every host is ready to fork ranks."""
        with contextlib.suppress(OSError, ValueError, LookupError):
            states = [json.loads((self._run_dir(n) / STATUS_FILE).read_text()) for n in range(self._script.hosts)]
            return all(state["state"] == "ready" for state in states)
        return False

    def _run_dir(self, host: int) -> Path:
        return self._folder / f"run-{host}"

    def start(self) -> None:
        """Start the launchers on all hosts; hosts that were taken away are replaced first."""
        script, hosts = self._script, self._place.hosts
        places = self._folder, self.save_dir, self._socket_path
        env = launching.environment(script, *places, self._count, port=self._place.port, token=self._token)
        for host in range(script.hosts):
            hosts.power_on(host)
            if host not in self._job.observers:
                self._observe(host)
        self._job.dead.clear()
        self._job.hurt.clear()
        if script.hosts > 1:
            env["GLOO_SOCKET_IFNAME"] = "eth0"
        for host in range(script.hosts):
            command = launching.command(script, host, hosts.addresses[0])
            env["TTP_RUN_DIR"] = str(self._run_dir(host))
            self._job.launchers[host] = hosts.start(host, command, env, self._folder / f"launcher-{host}.log")
        self._count, self.of_run, self._left_at = self._count + 1, self.of_run + 1, None

    def again(self) -> None:
        """Start the job once more. Several hosts are all replaced, because some may be out of reach."""
        if self._script.hosts > 1:
            for host in range(self._script.hosts):
                self._place.hosts.power_off(host)
            self.close()
        heal_all(self._job)
        self.start()

    def over(self) -> bool:
        """Return whether all launchers have ended, or ``GIVE_UP_S`` have passed since the first one ended."""
        running = [host for host, process in self._job.launchers.items() if process.poll() is None]
        if not running:
            return True
        alive = self._script.hosts - len(self._job.dead)
        if len(running) == alive:
            return False
        self._left_at = self._left_at or time.monotonic()
        return time.monotonic() > self._left_at + GIVE_UP_S

    def wait(self, timeout_s: float) -> bool:
        """Wait up to ``timeout_s`` seconds for all launchers to end, and return whether they have."""
        deadline = time.monotonic() + timeout_s
        with contextlib.suppress(subprocess.TimeoutExpired):
            for process in self._job.launchers.values():
                process.wait(max(0.1, deadline - time.monotonic()))
            return True
        return False

    def reasons(self) -> list[str]:
        """Return the reasons that launchers have logged for starting ranks as new interpreters, or all ranks anew."""
        logs = [self._folder / f"launcher-{host}.log" for host in range(self._script.hosts)]
        return [line[1] for log in logs if log.exists() for line in _REASON.finditer(log.read_text(errors="replace"))]

    def codes(self) -> list[int | None]:
        """Return the exit code of each host's launcher; None while it runs."""
        return [process.poll() for process in self._job.launchers.values()]

    # -------------------------------------------------------------------------------------------------------- observers

    def _observe(self, host: int) -> None:
        """Start an observer of the controller on a host, which may lead or stand by."""
        command = [sys.executable, "-m", "ttp.chaos.observe", "127.0.0.1", str(self._place.port)]
        env = launching.clean_environment() | {"TTP_TOKEN": self._token, "GRPC_VERBOSITY": "NONE"}
        observer = self._place.hosts.listen(host, command, env)
        self._job.observers[host] = observer
        threading.Thread(target=self._read, args=(host, observer), name="chaos-observer", daemon=True).start()

    def _read(self, host: int, observer: subprocess.Popen[str]) -> None:
        assert observer.stdout is not None
        for line in observer.stdout:
            self._inbox.put({**json.loads(line), "host": host})

    def close(self) -> None:
        """Kill the observers. The launchers end with their hosts."""
        for observer in self._job.observers.values():
            observer.kill()
            observer.wait()
        self._job.observers.clear()
