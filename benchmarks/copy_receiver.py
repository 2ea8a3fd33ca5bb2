"""The process that plays the other host in ``benchmarks.buddy``: it takes copies, and need not import torch."""

from __future__ import annotations

import time
from multiprocessing.connection import Connection
from pathlib import Path

from ttp.config import Config
from ttp.processor.copies.store import CopyStore
from ttp.processor.copies.transfer import Receiver


def take(answer: Connection, memory: str) -> None:
    """Receive copies into the directory ``memory``. Sends its port to ``answer``."""
    receiver = Receiver(Config(), "none")
    receiver.store = CopyStore(Path(memory), 1)
    answer.send(receiver.port)
    time.sleep(3600)
