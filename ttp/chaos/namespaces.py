"""Hosts made of Linux namespaces: each has its own address, processes, shared memory and name, on a common bridge."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from ttp.chaos.hosts import commands, logged, piped
from ttp.chaos.world import run

_INIT = (
    "trap '' CHLD; ip link set lo up; hostname {name}; "  # ignored children are not left as zombies
    "mount -t tmpfs -o size=50% chaos /dev/shm; mount --bind {names} /etc/hosts; echo up; exec sleep infinity"
)


class Namespaces:
    """The hosts of a job inside this chaos world. Process ids are those of the world, not those inside the hosts.

    Args:
        network: number of the job's network, unique among the running jobs.
        count: number of hosts.
        folder: folder for the hosts' ``/etc/hosts`` and log.
    """

    def __init__(self, network: int, count: int, folder: Path) -> None:
        self.addresses = [f"10.77.{network}.{host + 1}" for host in range(count)]
        self.names = [f"chaos{network}-{host}" for host in range(count)]
        self._bridge = f"cb{network}"
        self._ports = [f"cp{network}x{host}" for host in range(count)]
        self._inits: list[subprocess.Popen[str] | None] = [None] * count
        self._pids = [0] * count
        self._names_file = folder / "hosts"
        self._log = folder / "hosts.log"
        lines = ["127.0.0.1 localhost", *(f"{a} {n}" for a, n in zip(self.addresses, self.names, strict=True))]
        self._names_file.write_text("\n".join(lines) + "\n")
        run("ip", "link", "add", self._bridge, "type", "bridge")
        run("ip", "link", "set", self._bridge, "up")
        for host in range(count):
            self.power_on(host)

    def start(self, host: int, command: Sequence[str], env: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
        """See ``Hosts.start``."""
        inside = self.enter(host, "--net", "--uts", "--mount", "--pid", "--ipc")
        return logged([*inside, f"--wd={log.parent}", *command], env, log)

    def listen(self, host: int, command: Sequence[str], env: Mapping[str, str]) -> subprocess.Popen[str]:
        """See ``Hosts.listen``."""
        return piped([*self.enter(host, "--net"), *command], env)

    def processes(self, host: int) -> list[psutil.Process]:
        """See ``Hosts.processes``."""
        wanted = _namespace(self._pids[host]) if self._pids[host] else ""
        found = [p for p in psutil.process_iter() if wanted and _namespace(p.pid) == wanted]
        return [p for p in found if p.pid != self._pids[host]]

    def power_off(self, host: int) -> None:
        """See ``Hosts.power_off``. The link goes down first, because a host without power sends nothing more."""
        with contextlib.suppress(OSError):
            run("ip", "link", "set", self._ports[host], "down")
        init = self._inits[host]
        if init is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pids[host], signal.SIGKILL)
            init.wait()
        self._inits[host], self._pids[host] = None, 0
        with contextlib.suppress(OSError):
            run("ip", "link", "del", self._ports[host])

    def power_on(self, host: int) -> None:
        """See ``Hosts.power_on``."""
        if self._inits[host] is not None:
            self.join(host)
            return
        script = _INIT.format(name=self.names[host], names=self._names_file)
        flags = ("--net", "--uts", "--mount", "--pid", "--ipc", "--fork", "--kill-child=KILL", "--mount-proc")
        with self._log.open("ab") as log:
            init = subprocess.Popen(
                ["unshare", *flags, "sh", "-c", script],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        assert init.stdout is not None
        with init.stdout:
            said = init.stdout.readline()
        if said != "up\n":
            raise OSError(f"host {host} of a chaos job could not be created; see {self._log}")
        self._inits[host], self._pids[host] = init, psutil.Process(init.pid).children()[0].pid
        self._plug_in(host)

    def _plug_in(self, host: int) -> None:
        port, pid = self._ports[host], str(self._pids[host])
        run("ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", pid)
        run("ip", "link", "set", port, "master", self._bridge, "up")
        inside = ["nsenter", "--target", pid, "--net", "ip"]
        run(*inside, "address", "add", f"{self.addresses[host]}/24", "dev", "eth0")
        run(*inside, "link", "set", "eth0", "up")

    def cut(self, host: int, *, carrier: bool) -> None:
        """See ``Hosts.cut``."""
        if carrier:
            run("bridge", "link", "set", "dev", self._ports[host], "state", "0")
        else:
            run("ip", "link", "set", self._ports[host], "down")

    def join(self, host: int) -> None:
        """See ``Hosts.join``."""
        if self._inits[host] is None:
            return
        run("ip", "link", "set", self._ports[host], "up")
        run("bridge", "link", "set", "dev", self._ports[host], "state", "3")

    def leftovers(self, host: int) -> list[str]:
        """See ``Hosts.leftovers``."""
        files = [path.name for path in Path(f"/proc/{self._pids[host]}/root/dev/shm").iterdir()]
        return [*commands(self.processes(host)), *(f"/dev/shm/{name}" for name in sorted(files))]

    def close(self) -> None:
        """See ``Hosts.close``."""
        for host in range(len(self.names)):
            self.power_off(host)
        with contextlib.suppress(OSError):
            run("ip", "link", "del", self._bridge)

    def enter(self, host: int, *which: str) -> list[str]:
        """Return the ``nsenter`` command that enters these namespaces of a host; the command to run follows it."""
        return ["nsenter", "--target", str(self._pids[host]), *which]


def _namespace(pid: int) -> str:
    try:
        return str(Path(f"/proc/{pid}/ns/pid").readlink())
    except OSError:
        return ""
