"""A process with ``GIB`` of memory, a sentinel and a socket that waits to be killed. Started by ``benchmarks.detect``.

Usage: ``python -m benchmarks.victim DIRECTORY RANK PORT GIB``.
"""

from __future__ import annotations

import signal
import socket
import sys
from pathlib import Path

from ttp.processor.liveness.sentinel import Sentinel


def main(directory: Path, rank: int, port: int, gib: float) -> None:
    ballast = b"\1" * int(gib * 2**30)
    sentinel = Sentinel(directory, rank, "victim", 1)
    assert sentinel.wait_placed(30)
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(b"r")
        signal.pause()
    assert ballast


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
