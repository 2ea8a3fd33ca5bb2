"""Writes captures of device buffers to the page when they have arrived on the host."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from ttp.adapters.torch.device.staging import Staged
from ttp.inbox import Inbox

log = logging.getLogger("ttp.adapters.torch")

Write = Callable[[int, bool, "bytes | None", Staged], None]


class ArrivalWriter:
    """A thread that writes captures to the page, in order, each when it has arrived. It sleeps in the driver meanwhile.

    Args:
        write: writes a page, given version, final, the bytes that precede the buffers (None: the page holds all of the
            capture already), and the capture.
        release: takes back the memory of a capture.
    """

    def __init__(self, write: Write, release: Callable[[Staged], None]) -> None:
        self._write = write
        self._release = release
        self._given = self._done = 0
        self.arrived = 0
        """Number of captures that have arrived: as long as it grows, the device is working."""
        self._inbox: Inbox[tuple[int, bool, bytes | None, Staged] | None] = Inbox()
        self._thread = threading.Thread(target=self._run, name="ttp-pages", daemon=True)
        self._thread.start()

    @property
    def idle(self) -> bool:
        """Whether all captures have arrived, and this thread does nothing until the next one is handed over."""
        return self._given == self._done

    def put(self, version: int, final: bool, head: bytes | None, staged: Staged) -> None:
        """Hand over a capture. For the training thread."""
        self._given += 1
        self._inbox.put((version, final, head, staged))

    def close(self) -> None:
        """End the thread when its inbox is empty. Does not wait for a device that hangs."""
        self._inbox.put(None)
        self._thread.join(timeout=1.0)

    def _run(self) -> None:
        while (item := self._inbox.get()) is not None:
            staged = item[3]
            try:
                if staged.ready is not None:
                    staged.ready.synchronize()
                self.arrived += 1
                self._write(*item)
            except Exception as problem:  # the device is broken, and the capture lost
                log.debug("a capture of device buffers did not arrive: %s", problem)
            self._release(staged)
            self._done += 1
