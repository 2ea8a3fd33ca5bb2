"""The accelerator of the training thread, for the threads on which handlers run.

A new thread uses device 0, whatever device the other threads of its process use. And where training hangs in a
collective, all work queued behind it hangs too: a save has to use a stream of its own, which waits only for the last
update.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator
from typing import Any

log = logging.getLogger("ttp.handlers")

RUNTIMES = ("npu", "cuda")
"""Names of torch's runtimes; the first one in use is taken."""


class Device:
    """One device of a runtime with torch's interface. Make it at the start: it allocates a stream.

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
        """Note that the last write of an update has been queued. For the training thread; does not wait."""
        event = self._runtime.Event()
        event.record()
        self._updated = event

    @contextlib.contextmanager
    def borrowed(self, *, aside: bool) -> Iterator[None]:
        """Make the calling thread use the device. ``aside``: work queued inside waits only for the last update."""
        self._runtime.set_device(self.index)
        if not aside:
            yield
            return
        if self._updated is not None:
            self._side.wait_event(self._updated)
        with self._runtime.stream(self._side):
            yield


def of_this_thread() -> Device | None:
    """Return the device that the calling thread uses; None: this process uses none yet, or torch is not there."""
    torch: Any = sys.modules.get("torch")
    for name in RUNTIMES:
        runtime = getattr(torch, name, None)
        try:
            if runtime is not None and runtime.is_initialized():
                return Device(runtime, int(runtime.current_device()))
        except Exception:  # handlers then use the default device of a new thread
            log.exception("torch.%s does not say which device this process uses", name)
    return None
