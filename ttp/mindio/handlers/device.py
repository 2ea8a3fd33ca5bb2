"""The accelerator of the training thread, for the threads on which handlers run.

A thread begins on device 0, whatever the others of its process use. And where training hangs in a collective, what is
queued behind it hangs too: a save has to go round it, on a stream of its own, behind nothing but the last update.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator
from typing import Any

log = logging.getLogger("ttp.handlers")

RUNTIMES = ("npu", "cuda")
"""Of torch, the first that is in use."""


class Device:
    """One device of a runtime with torch's interface. To be made at start: it takes a stream.

    Args:
        runtime: ``torch.cuda``, or what is like it.
        index: of the device.
    """

    def __init__(self, runtime: Any, index: int) -> None:
        self.index = index
        self._runtime = runtime
        self._side = getattr(runtime, "SyncLaunchStream", runtime.Stream)()
        self._updated: Any = None

    def updated(self) -> None:
        """Training thread, when the last write of an update has been queued. Does not wait."""
        event = self._runtime.Event()
        event.record()
        self._updated = event

    @contextlib.contextmanager
    def borrowed(self, *, aside: bool) -> Iterator[None]:
        """The calling thread uses it; ``aside``: what is queued inside waits for the last update and nothing else."""
        self._runtime.set_device(self.index)
        if not aside:
            yield
            return
        if self._updated is not None:
            self._side.wait_event(self._updated)
        with self._runtime.stream(self._side):
            yield


def of_this_thread() -> Device | None:
    """The device that the calling thread uses; None: nothing of this process uses one yet, or torch is not there."""
    torch: Any = sys.modules.get("torch")
    for name in RUNTIMES:
        runtime = getattr(torch, name, None)
        try:
            if runtime is not None and runtime.is_initialized():
                return Device(runtime, int(runtime.current_device()))
        except Exception:  # handlers then use what a new thread begins with
            log.exception("torch.%s does not say which device this process uses", name)
    return None
