"""Whether the ranks of a host use a relay, and the file by which they find it. The relay: ``ttp.launch.relay``.

A process that runs no relay does not import one.
"""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

from ttp.config import Config

AUTO_RANKS = 64
"""With ``TTP_RELAY=auto``, a job of at least so many ranks has relays, on hosts with more than one rank."""
TO_KEY = "ttp-to"
"""Metadata key of a rank's stream; its value is host:port of the controller that the rank wants."""
RELAYED = "through the relay of this host: "
"""Prefix of the reason with which a stream ends, unless an error in the relay itself ended it."""


def wanted(config: Config, world_size: int, here: int = 0) -> bool:
    """Return whether a host's ranks use a relay.

    Args:
        config: the job's settings.
        world_size: number of ranks of the job.
        here: number of ranks on this host; 0: unknown.
    """
    return config.relay == "on" or (config.relay == "auto" and world_size >= AUTO_RANKS and here != 1)


def host_of(config: Config) -> str:
    """Return the name that the ranks of this host have for it."""
    return config.host or socket.gethostname()


def file_of(config: Config, run_dir: Path) -> Path:
    """Return the file in which a relay writes its port and its pid."""
    return run_dir / f"relay-{host_of(config).replace('/', '_')[:100]}.json"


def relay_of(config: Config, run_dir: Path) -> tuple[int, int] | None:
    """Return the loopback port and the pid of this host's relay; None: there is none, or its process has ended."""
    try:
        found = json.loads(file_of(config, run_dir).read_text())
        port, pid = int(found["port"]), int(found["pid"])
        os.kill(pid, 0)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return port, pid
