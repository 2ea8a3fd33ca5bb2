"""Give the threads on which handlers run the accelerator of the training thread.

A new thread uses device 0, whatever device the other threads of its process use. And if training hangs in a collective,
all work queued after it hangs too. So a save uses a separate stream, which waits only for the last update.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator
from typing import Any

log = logging.getLogger("ttp.handlers")

RUNTIMES = ("npu", "cuda")
"""Names of torch's device modules; the first one in use is taken."""


class Device:
    """A device with torch's interface. Create it early, as the constructor allocates a stream.

    Args:
        runtime: ``torch.cuda``, or a module with the same functions.
        index: index of the device.
    """

    def __init__(self, runtime: Any, index: int) -> None:
        self.index = index
        self._runtime = runtime
        self._side = getattr(runtime, "SyncLaunchStream", runtime.Stream)()
        self._updated: Any = None

    def updated(self) -> None:
        """Record that the last write of an update has been queued. The training thread calls this; it does not wait."""
        event = self._runtime.Event()
        event.record()
        self._updated = event

    @contextlib.contextmanager
    def borrowed(self, *, aside: bool) -> Iterator[None]:
        """Make the calling thread use the device.

        Args:
            aside: whether to queue work on the separate stream, which waits only for the last update.
        """
        self._runtime.set_device(self.index)
        if not aside:
            yield
            return
        if self._updated is not None:
            self._side.wait_event(self._updated)
        with self._runtime.stream(self._side):
            yield


def of_this_thread() -> Device | None:
    """Return the device that the calling thread uses; None if this process uses none yet, or has no torch."""
    torch: Any = sys.modules.get("torch")
    for name in RUNTIMES:
        runtime = getattr(torch, name, None)
        try:
            if runtime is not None and runtime.is_initialized():
                return Device(runtime, int(runtime.current_device()))
        except Exception:  # handlers then use the default device of a new thread
            log.exception("cannot find out which device of torch.%s this process uses", name)
    return None
