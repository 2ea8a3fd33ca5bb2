"""The chaos world: Linux namespaces in which ``ttp chaos`` and its jobs run, so that nothing can be left behind.

Network, mounts and processes of the tested jobs belong to one tree of namespaces. When its first process ends, for
whatever reason, the kernel ends all others, removes the network and unmounts the file systems. The first process dies
with the process that the user started. This needs Linux, ``iproute2`` and ``util-linux``, and root or a system that
lets users create namespaces.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

INSIDE = "CHAOS_WORLD"
TOOLS = ("ip", "bridge", "mount", "nsenter", "setpriv", "sh", "unshare")
SOCKETS = Path("/run")
"""Directory for sockets inside a world: invisible outside, and inherited by hosts."""
PACKAGES = "iproute2, mount and util-linux"
_NAMESPACES = ("--net", "--mount", "--pid", "--ipc", "--uts", "--fork", "--kill-child=KILL", "--mount-proc")


def inside() -> bool:
    """Return whether this process runs in a chaos world."""
    return os.environ.get(INSIDE) == "1"


def obstacle() -> str:
    """Return why no chaos world can be created here, in words; empty if one can."""
    if not sys.platform.startswith("linux"):
        return "namespaces are a feature of Linux"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} not found (install {PACKAGES})"
    bridge = "ip link add b0 type bridge && mount -t tmpfs none /dev/shm && unshare --net true"
    trial = subprocess.run(_command(["sh", "-c", bridge]), capture_output=True, text=True, check=False)
    if trial.returncode:
        said = (trial.stderr.strip().splitlines() or ["no reason given"])[-1]
        return f"this user may not create namespaces ({said}); root may"
    return ""


def enter(arguments: Sequence[str], module: str = "ttp") -> int:
    """Run ``python -m MODULE ARGUMENTS`` inside a new chaos world and return its exit code.

    When this function returns, the world and all its processes are gone.
    """
    command = _command([sys.executable, "-m", module, *arguments])
    process = subprocess.Popen(command, env={**os.environ, INSIDE: "1"})
    signal.signal(signal.SIGTERM, _interrupted)
    try:
        return process.wait()
    except KeyboardInterrupt:  # the terminal has interrupted the child too; otherwise it is killed below
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        return 128 + signal.SIGINT
    finally:
        process.kill()
        process.wait()


def _interrupted(_signum: int, _frame: object) -> None:
    raise KeyboardInterrupt


def _command(command: Sequence[str]) -> list[str]:
    user = () if os.geteuid() == 0 else ("--user", "--map-root-user")
    return ["setpriv", "--pdeathsig", "KILL", "unshare", *user, *_NAMESPACES, *command]


def settle() -> None:
    """Set up a new world from inside: its loopback interface, a directory for sockets, and SIGTERM handling."""
    run("ip", "link", "set", "lo", "up")
    run("mount", "-t", "tmpfs", "chaos", str(SOCKETS))
    signal.signal(signal.SIGTERM, _interrupted)  # the first process of a PID namespace gets only signals it handles


def run(*command: str, timeout_s: float = 20) -> str:
    """Run a command and return its standard output.

    Raises:
        OSError: the command failed; the text has its error output.
    """
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return done.stdout
