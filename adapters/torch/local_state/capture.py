"""Writes the rank-local state of one version to the page of the rank: random streams, buffers, ``extra_state``.

No error reaches the training program: if a part cannot be captured, a warning is logged once, the part is left out from
then on, and the manifest names it (``problem``). The module ``image`` defines the layout of the bytes, and ``head``
captures all but the buffers. ``DevicePages`` writes the page if buffers have to come from devices, which takes longer.

``capture`` reads the state of every object. ``look_again``, at the gate, reads only objects whose state was seen to
change between two captures of one version. An image that the page holds already is not written again. See decision 30.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from torch import nn

from ttp.adapters.torch.device.accelerator import Runtime
from ttp.adapters.torch.device.arrivals import DevicePages
from ttp.adapters.torch.device.cuda import devices_of, runtimes_on
from ttp.adapters.torch.local_state.buffers import BufferSet, BufferTable, restore_buffers
from ttp.adapters.torch.local_state.extra_state import ExtraState
from ttp.adapters.torch.local_state.head import NOWHERE, Changed, Head
from ttp.adapters.torch.local_state.image import LocalState
from ttp.adapters.torch.local_state.rng import RngState
from ttp.adapters.torch.sharding.exchange import tells
from ttp.adapters.torch.tensor_memory import is_plain
from ttp.processor.local_state.pages import Buffer, Kept, PageWriter
from ttp.store.arrays import set_home

log = logging.getLogger("ttp.adapters.torch")

_LEARNING_UPDATES = 4
"""Number of first updates in which every extra state is read at the gate too, to learn which change before it."""
_MOVED_MIN = 2
"""In so many of them random streams have to move between the two captures until the log tells of it."""
_MOVED = (
    "random streams move between loss.backward() and optimizer.step(). A rank that dies there, after its gradients are "
    "exchanged, comes back with its streams as they were in the last backward pass, so its next random numbers differ "
    "from those of an unbroken run. Draw, or put streams back, before loss.backward(), or use a generator of your own"
)


class HostPages:
    """Writes images of a module whose buffers are on the host to the page of the rank, at once.

    Args:
        module: the module with the buffers; None: they cannot be captured.
        head: what precedes the buffers in an image.
        wrote: called with version and final after each write; may not raise.
    """

    arrived = 0

    def __init__(self, module: nn.Module | None, head: Head, wrote: Callable[[int, bool], None]) -> None:
        self._head, self._wrote = head, wrote
        self._buffers = None if module is None else BufferSet(module)
        self.table = BufferTable(nn.Module()) if self._buffers is None else self._buffers.table
        self.page: PageWriter | None = None
        self.provisional = NOWHERE

    def open(self, page: PageWriter) -> None:
        """Write to this page from now on."""
        self.page, self.provisional = page, NOWHERE

    def put(self, page: PageWriter, version: int, final: bool, *, learning: bool, same: bool = False) -> None:
        """Write the image to the page, unless that has it already: ``same`` if nothing was changed since."""
        known = self.provisional
        held = same and version == known[0]
        image, kept = known[1:]
        if not held:
            parts, kept = self.image()
            image = b"".join(parts)
            held = version == known[0] and image == known[1] and kept is known[2]
        self.provisional = NOWHERE if final else (version, image, kept)
        if (final and page.finish(version)) if held else page.write(version, final, (image,), kept):
            self._wrote(version, final)

    def image(self) -> tuple[list[Buffer], Sequence[Kept]]:
        """Return the parts of the image, some of them live memory; and large buffers and arrays, which it lacks."""
        buffers, kept = ((), ()) if self._buffers is None else self._buffers.capture()
        # The head comes after the buffers, because it describes those that were found.
        return [*self._head.parts(self.table), *buffers], self._head.with_apart(kept)

    def graphed(self) -> bool:
        """Return False: no CUDA graph is being captured."""
        return False

    def close(self) -> None:
        """Write nothing more."""
        self.page = None


class LocalCapture:
    """Captures the rank-local state and writes it to the rank's page.

    Args:
        module: the module whose buffers to capture.
        extra: the user's objects of ``extra_state``; None: there are none.
        page: the page to write to; may be given later with ``open_page``. Without a page nothing is captured.
        runtimes: the devices of the module, used by this object only; None: find them.
    """

    def __init__(
        self,
        module: nn.Module,
        extra: ExtraState | None = None,
        *,
        page: PageWriter | None = None,
        runtimes: Sequence[Runtime] | None = None,
    ) -> None:
        self._module = module
        devices = devices_of([*module.parameters(), *module.buffers()])
        if devices:
            set_home(devices[0])
        if runtimes is None:
            runtimes = runtimes_on(devices)
        self._streams = RngState(devices)
        self.extra = extra or ExtraState()
        self._head = head = Head(self._streams, self.extra)
        self._pages: HostPages | DevicePages = (
            DevicePages(module, runtimes, head, self._wrote) if runtimes else HostPages(module, head, self._wrote)
        )
        self._without_buffers = HostPages(None, head, self._wrote)  # takes over if buffers cannot be captured
        if page is not None:
            self.open_page(page)
        self._updates = 0
        self._final = True  # the last capture was a final one, or there was none
        self._streams_then = b""  # random streams at the last provisional capture; empty: not to be compared
        self._streams_at_gate = b""  # random streams at the gate, in the first updates
        self._looks = False  # whether all is read after torch's own step too: it moves streams, or changes buffers
        self._moved = 0  # how often they have moved between that capture and the gate
        self.on_changed: Changed | None = None
        """Called for each extra state that has changed since the last capture, unless that one and this one are final
        ones. May not raise."""
        self.on_written: Callable[[int, bool], None] | None = None
        """Called with version and final after each write of the page, on the thread that wrote it; may not raise."""

    # ------------------------------------------------------------------------------------------------ steady state

    def open_page(self, page: PageWriter) -> None:
        """Write to this page from now on. It is empty until the next ``capture``."""
        self._pages.open(page)

    def capture(self, version: int, final: bool, alone: bool = False) -> None:
        """Write the present state to the page, as that of ``version``. Never raises.

        Args:
            version: the version that the state belongs to.
            final: False for a provisional capture, before the update to that version: the rank may die in the update.
            alone: whether only torch's own code has run since ``look_again``: it changes no buffers outside of the
                weights, nor streams unless weights of another kind draw from them. Extra states are read all the same:
                one may show the weights.
        """
        pages = self._pages
        if pages.page is None or pages.graphed():
            return
        before, names = self._final, self._head.names
        changed = None if before and final else self.on_changed
        known = final and version == pages.provisional[0]
        moved = self._head.read(names, compare=known, changed=changed, late=before)
        self._final = final
        if final and self._updates < _LEARNING_UPDATES:
            drawn = known and alone and self._streams_at_gate != self._head.streams()
            self._looks = self._looks or drawn or _in_weights(pages.table, self._module)
            alone = False
        self._updates += final
        self._put(pages.page, version, final, same=alone and not (moved or self._looks))
        self._streams_then = b"" if final or self._updates >= _LEARNING_UPDATES else self._head.streams()

    def look_again(self, version: int) -> None:
        """Write the page again if state has changed since the provisional capture. Called at the gate. Never raises.

        Extra states that were never seen to change between the two captures are not read again.

        Args:
            version: the version that the next update makes.
        """
        pages, head = self._pages, self._head
        if pages.page is None:
            return
        known = version == pages.provisional[0]
        learning = not known or self._updates < _LEARNING_UPDATES
        names = head.names if learning else head.moving
        head.read(names, compare=known, changed=self.on_changed, late=self._final)
        self._compare_streams(known)
        self._streams_at_gate = head.streams() if learning else b""
        self._final = False
        self._put(pages.page, version, final=False)

    def _compare_streams(self, known: bool) -> None:
        """Warn if streams move between the provisional capture and the gate, in two of the first updates."""
        then, self._streams_then = self._streams_then, b""
        if known and then and then != self._head.streams():
            self._moved += 1
            if self._moved == _MOVED_MIN and tells():
                log.warning(_MOVED)

    def image(self) -> bytes | None:
        """Return the present state as an image (see ``image.decode``); None: it cannot all be captured in one image."""
        pages = self._pages
        if isinstance(pages, DevicePages) or pages.page is None or self.problem:
            return None
        self._head.read(self._head.names, compare=False)
        parts, kept = pages.image()
        return None if kept else b"".join(parts)

    def _put(self, page: PageWriter, version: int, final: bool, same: bool = False) -> None:
        """Write the image to the page, or have it written when it arrives from a device. Never raises."""
        try:
            self._pages.put(page, version, final, learning=self._updates <= _LEARNING_UPDATES, same=same)
        except Exception as problem:
            self._head.give_up("the model's buffers", problem)
            self._pages.close()
            self._pages = self._without_buffers
            self._pages.open(page)

    def _wrote(self, version: int, final: bool) -> None:
        if self.on_written is not None:
            self.on_written(version, final)

    @property
    def arrived(self) -> int:
        """Number of captures that have arrived from the devices, which may be behind their host."""
        return self._pages.arrived

    # ------------------------------------------------------------------------------------------------ save, restore

    @property
    def skipped(self) -> list[str]:
        """The names of buffers that cannot be captured, because their content is no plain memory."""
        return self._pages.table.skipped

    @property
    def problem(self) -> str:
        """A text for the manifest: which state is not captured, and why; empty: everything is captured."""
        problems = list(self._head.given_up.values())
        page = self._pages.page
        if page is not None and page.problem:
            problems.append(page.problem)
        if self.skipped:
            problems.append("uncaptured buffers (sparse, quantized or distributed): " + ", ".join(self.skipped))
        return "; ".join(problems)

    def restore(self, state: LocalState) -> list[str]:
        """Restore all rank-local state, random streams last. Returns notes for the log on state that only one side has.

        Raises:
            CheckpointError: the state does not fit the registered model or the objects of ``extra_state``.
        """
        notes = restore_buffers(self._module, state.buffers)
        notes += self.extra.restore(state.extra)
        if state.rng:
            notes += self._streams.restore(state.rng)
        else:
            notes.append("the random streams were not saved")
        return notes

    def close(self) -> None:
        """Stop capturing, and close the page."""
        page = self._pages.page
        self._pages.close()
        if page is not None:
            page.close()


def _in_weights(table: BufferTable, module: nn.Module) -> bool:
    """Return whether a buffer lies in the memory of a parameter (``weight.data``), so that a step changes it too."""
    plain = (parameter for parameter in module.parameters() if is_plain(parameter) and not parameter.is_meta)
    weights = {parameter.untyped_storage().data_ptr() for parameter in plain}
    return any(entry.tensor.untyped_storage().data_ptr() in weights for entry in (*table.small, *table.large))
