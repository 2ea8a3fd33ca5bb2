"""Writes images of a module with buffers on devices to the page, each when its buffers have arrived on the host."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from torch import nn

from ttp.adapters.torch.device.accelerator import Runtime
from ttp.adapters.torch.device.staging import DeviceBuffers, Staged
from ttp.adapters.torch.local_state.head import NOWHERE, Head
from ttp.inbox import Inbox
from ttp.processor.local_state.pages import PageWriter

log = logging.getLogger("ttp.adapters.torch")

_Capture = tuple[int, bool, "bytes | None", Staged]
"""Version; final; the head of the image (None: the page holds all of the capture already); and the buffers."""


class DevicePages:
    """Writes images to the page of the rank, behind the devices. All methods are for the training thread.

    A thread writes them in order, each when it has arrived. It sleeps in the driver meanwhile.

    Args:
        module: the module with the buffers.
        runtimes: the devices of the module.
        head: what precedes the buffers in an image.
        wrote: called with version and final after each write, on the thread that writes; may not raise.
    """

    def __init__(
        self, module: nn.Module, runtimes: Sequence[Runtime], head: Head, wrote: Callable[[int, bool], None]
    ) -> None:
        self._head, self._wrote = head, wrote
        self._buffers = DeviceBuffers(module, runtimes)
        self.table, self.graphed = self._buffers.table, self._buffers.graphed
        self.page: PageWriter | None = None
        self._given = self._done = 0  # number of captures that were handed over, and that the thread is done with
        self.arrived = 0
        """Number of captures that have arrived: as long as it grows, the device is working."""
        self._inbox: Inbox[_Capture | None] = Inbox()
        self._thread: threading.Thread | None = None
        self._newest = -1  # the version of the last capture that has arrived
        self._at_once = -1  # the version whose pages were written at once, before the capture had arrived
        self.provisional = NOWHERE
        """Version, head and large arrays of the provisional page."""

    def open(self, page: PageWriter) -> None:
        """Write to this page from now on."""
        self.page, self.provisional, self._at_once = page, NOWHERE, -1

    def put(self, page: PageWriter, version: int, final: bool, *, learning: bool, same: bool = False) -> None:
        """Begin to copy the buffers from the devices, and have the image written when they arrive.

        Nothing is copied if nothing has changed since the provisional capture (``same``: that is known). The first
        updates copy nevertheless, to learn whether a buffer changes without torch's counting it (``learning``).
        """
        buffers, head = self._buffers, self._head
        known, self.provisional, at_once, self._at_once = self.provisional, NOWHERE, self._at_once, -1
        here = version == known[0] and not known[2]
        if here and (same or (buffers.known_unchanged() and head.joined(self.table) == known[1])):
            if final:
                self._hand_over((version, final, None, Staged(ready=buffers.event())))
            else:
                self.provisional, self._at_once = known, at_once
            return
        staged = buffers.capture(learning=learning)
        if staged is None:
            return  # the device hangs, so it will finish no new version
        image = head.joined(self.table)  # after the capture, because it describes the buffers that were found
        staged.unwritten = staged.unwritten and version == known[0]
        apart = head.with_apart(())
        staged.kept += [(stamp, bytes(data)) for stamp, data in apart]  # the page is written later: no live memory
        if not final:
            self.provisional = version, image, apart
            if buffers.bare and (version == at_once or self._given == self._done):
                # No device is behind, so no older page is needed: this one is written before gradients leave.
                staged.in_page = page.write(version, False, (image,), staged.kept)
                self._at_once = version if staged.in_page else -1
        self._hand_over((version, final, image, staged))

    def _hand_over(self, capture: _Capture) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="ttp-pages", daemon=True)
            self._thread.start()
        self._given += 1
        self._inbox.put(capture)

    def _run(self) -> None:
        while (capture := self._inbox.get()) is not None:
            staged = capture[3]
            try:
                if staged.ready is not None:
                    staged.ready.synchronize()
                self.arrived += 1
                self._write(*capture)
            except Exception as problem:  # the device is broken, and the capture lost
                log.debug("a capture of device buffers did not arrive: %s", problem)
            self._buffers.release(staged)
            self._done += 1

    def _write(self, version: int, final: bool, head: bytes | None, staged: Staged) -> None:
        page = self.page
        if page is None:
            return
        if head is not None:
            self._buffers.learn(staged)
            self._newest = version
            written = staged.in_page or page.write(version, final, [head, *staged.parts], staged.kept)
        else:
            written = version == self._newest and page.finish(version)
        if written:
            self._wrote(version, final)

    def close(self) -> None:
        """Write nothing more, and end the thread when its inbox is empty. Does not wait for a device that hangs."""
        self.page = None
        if self._thread is not None:
            self._inbox.put(None)
            self._thread.join(timeout=1.0)
