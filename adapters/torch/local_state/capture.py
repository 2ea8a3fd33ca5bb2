"""Writes the rank-local state of one version to the page of the rank: random streams, buffers, ``extra_state``.

No error reaches the training program: if a part cannot be captured, a warning is logged once, the part is left out from
then on, and the manifest names it (``problem``). The module ``image`` defines the layout of the bytes.

``capture`` reads the state of every object. ``look_again``, at the gate, reads only objects whose state was seen to
change between two captures of one version. An image that the page holds already is not written again. See decision 30.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Collection, Sequence

from torch import nn

from ttp.adapters.torch.device.accelerator import Runtime
from ttp.adapters.torch.device.arrivals import ArrivalWriter
from ttp.adapters.torch.device.cuda import devices_of, runtimes_on
from ttp.adapters.torch.device.staging import DeviceBuffers, Staged
from ttp.adapters.torch.local_state.buffers import BufferSet, restore_buffers
from ttp.adapters.torch.local_state.extra_state import ExtraState
from ttp.adapters.torch.local_state.image import LocalState, encode_head
from ttp.adapters.torch.local_state.rng import RngState
from ttp.processor.local_state.pages import Buffer, Kept, PageWriter
from ttp.store.arrays import set_home

log = logging.getLogger("ttp.adapters.torch")

_LEARNING_UPDATES = 4
"""Number of first updates in which every extra state is read at the gate too, to learn which change before it."""

_Section = tuple[bytes, Sequence[Kept]]
"""An encoded extra state, and its large arrays."""

_NOWHERE: tuple[int, bytes, Sequence[Kept]] = (-1, b"", ())
"""Stands for version, image and large parts of a provisional page if there is none."""

_GIVEN_UP: _Section = (b"", ())
"""The section of an extra state that cannot be captured, or was not captured yet."""


def _never() -> bool:
    return False


def _always() -> bool:
    return True


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
        self._page = page
        devices = devices_of([*module.parameters(), *module.buffers()])
        if devices:
            set_home(devices[0])
        self._streams = RngState(devices)
        self._rng: RngState | None = self._streams
        self.extra = extra or ExtraState()
        self._names = self.extra.changing
        self._lengths = struct.Struct(f"<{1 + len(self._names)}Q")
        if runtimes is None:
            runtimes = runtimes_on(devices)
        self._host = BufferSet(module) if not runtimes else None
        self._device = DeviceBuffers(module, runtimes) if runtimes else None
        self._arrivals: ArrivalWriter | None = None
        self._arrived = -1  # the version of the last capture that has arrived
        self._at_once = -1  # the version whose pages were written at once, before the capture had arrived
        self._head: tuple[tuple[int, ...], bytes] = ((-1,), b"")
        self._sections: dict[str, _Section] = dict.fromkeys(self._names, _GIVEN_UP)
        self._kept: tuple[list[Sequence[Kept]], Sequence[Kept]] = ([], ())
        self._in_page = _NOWHERE
        self._parts: list[Buffer] = []  # the parts of the image, mostly live memory
        self._has_kept = False  # there are large buffers or arrays, which are not among the parts
        self._first_section = 0  # position of the first extra state among the parts
        self._stands: Callable[[], bool] = _never  # whether the parts still cover all state but the buffers
        self._buffers_stand: Callable[[], bool] = _never  # whether the parts still cover all buffers
        self._moving: set[str] = set()  # extra states that were seen to change between the captures of one version
        self._updates = 0
        self._given_up: dict[str, str] = {}
        self.on_written: Callable[[int, bool], None] | None = None
        """Called with version and final after each write of the page, on the thread that wrote it; may not raise."""

    # ------------------------------------------------------------------------------------------------ steady state

    def open_page(self, page: PageWriter) -> None:
        """Write to this page from now on. It is empty until the next ``capture``."""
        self._page, self._in_page, self._at_once = page, _NOWHERE, -1

    def capture(self, version: int, final: bool) -> None:
        """Write the present state to the page, as that of ``version``. Never raises.

        Args:
            version: the version that the state belongs to.
            final: False for a provisional capture, before the update to that version: the rank may die in the update.
        """
        if self._page is None or (self._device is not None and self._device.graphed()):
            return
        if self._names:
            self._ask(self._names, compare=final and version == self._in_page[0])
        self._updates += final
        self._put(self._page, version, final)

    def look_again(self, version: int) -> None:
        """Write the page again if state has changed since the provisional capture. Called at the gate. Never raises.

        Extra states that were never seen to change between the two captures are not read again.

        Args:
            version: the version that the next update makes.
        """
        page = self._page
        if page is None:
            return
        known = version == self._in_page[0]
        if not known or self._updates < _LEARNING_UPDATES:
            self._ask(self._names, compare=known)
        elif self._moving:
            self._ask(self._moving, compare=False)
        self._put(page, version, final=False)

    def image(self) -> bytes | None:
        """Return the present state as an image (see ``image.decode``); None: it cannot all be captured in one image."""
        if self._host is None or self._page is None or self.problem:
            return None
        self._ask(self._names, compare=False)
        if not (self._stands() and self._buffers_stand()):
            self._assemble()
        return None if self._has_kept else b"".join(self._parts)

    def _ask(self, names: Collection[str], *, compare: bool) -> None:
        """Read extra states; with ``compare``, remember which of them have changed since the last read."""
        for name in names:
            before = self._sections[name]
            section = self._sections[name] = self._capture_extra(name)
            if section[1] is not before[1] or len(section[0]) != len(before[0]):
                self._stands = _never  # the layout of the image changes
            elif section[0] != before[0]:
                if self._parts:
                    self._parts[self._first_section + self._names.index(name)] = section[0]
            else:
                continue
            if compare:
                self._moving.add(name)

    def _put(self, page: PageWriter, version: int, final: bool) -> None:
        """Write the image to the page, or have it written when it arrives from a device. Never raises."""
        try:
            if self._device is not None:
                self._stage(page, self._device, version, final)
                return
            host = self._host
            if host is None or not (self._stands() and self._buffers_stand()):
                kept = self._assemble()
            elif self._has_kept:
                kept = self._with_apart(host.capture_large())
            else:
                kept = ()
            image, known = b"".join(self._parts), self._in_page
            self._in_page = _NOWHERE if final else (version, image, kept)
            if version != known[0] or image != known[1] or kept is not known[2]:
                written = page.write(version, final, (image,), kept)
            else:  # the page holds this image already
                written = final and page.finish(version)
            if written and self.on_written is not None:
                self.on_written(version, final)
        except Exception as problem:
            self._host = self._device = None
            self._stands = _never
            self._give_up("buffers", "the model's buffers", problem)

    def _assemble(self) -> Sequence[Kept]:
        """Collect all parts of the image anew. Returns the large buffers and arrays, which are not parts of it.

        As long as all parts are live memory, or bytes that only ``_ask`` replaces, the next capture can use the same
        parts, whose content is then the new one.
        """
        parts, kept = self._host.capture() if self._host is not None else ([], ())
        kept = self._with_apart(kept)
        small = self._small()  # after the capture, because its header describes the buffers that were found
        self._first_section = len(small) - len(self._sections)
        self._parts = [*small, *parts]
        self._has_kept = bool(kept)
        self._stands = _always if self._rng is None else self._rng.standing() or _never
        if self._host is not None:
            self._buffers_stand = self._host.table.is_current if self._host.is_live else _never
        return kept

    def _small(self) -> list[Buffer]:
        """Return the parts of the image that precede the buffers. Some of them are live memory."""
        rng = self._capture_rng()
        sections = [section for section, _ in self._sections.values()]
        return [self._described(), self._lengths.pack(sum(map(len, rng)), *map(len, sections)), *rng, *sections]

    def _with_apart(self, kept: Sequence[Kept]) -> Sequence[Kept]:
        """Return large buffers and large arrays of extra states together; the same list as before if none changed."""
        lists = [kept, *(apart for _, apart in self._sections.values() if apart)]
        if len(lists) == 1:
            return kept
        known, joined = self._kept
        if len(lists) != len(known) or any(a is not b for a, b in zip(lists, known, strict=True)):
            self._kept = lists, (joined := [part for one in lists for part in one])
        return joined

    def _capture_rng(self) -> list[Buffer]:
        if self._rng is not None:
            try:
                return self._rng.capture()
            except Exception as problem:
                self._rng = None
                self._give_up("rng", "the random streams", problem)
        return []

    def _capture_extra(self, name: str) -> _Section:
        if name not in self._given_up:
            try:
                return self.extra.capture(name)
            except Exception as problem:
                self._give_up(name, f"extra_state {name!r}", problem)
        return _GIVEN_UP

    def _described(self) -> bytes:
        """Return header and description of the image, made anew only if buffers or large arrays were replaced."""
        holder = self._host or self._device
        layout = holder.table.layout if holder is not None else 0
        apart = [len(kept) for _, kept in self._sections.values()]
        sizes = [len(data) for _, kept in self._sections.values() for _, data in kept] if any(apart) else []
        facts = (layout, *apart, *sizes)
        if self._head[0] != facts:
            infos = holder.table.infos if holder is not None else ()
            several = [[len(data) for _, data in kept] for _, kept in self._sections.values()] if sizes else []
            self._head = (facts, encode_head(self._names, infos, several))
        return self._head[1]

    def _stage(self, page: PageWriter, device: DeviceBuffers, version: int, final: bool) -> None:
        """Begin to copy the buffers from the device, and hand the rest of the image to the thread that writes it.

        Nothing is copied if nothing has changed since the provisional capture. The first updates copy nevertheless, to
        learn whether a buffer changes without torch's counting it.
        """
        known, self._in_page, at_once, self._at_once = self._in_page, _NOWHERE, self._at_once, -1
        same = version == known[0] and not known[2] and device.stands()
        if same and b"".join(self._small()) == known[1]:
            if final:
                self._hand_over(device, version, final, None, Staged(ready=device.event()))
            else:
                self._in_page, self._at_once = known, at_once
            return
        staged = device.capture(learning=self._updates <= _LEARNING_UPDATES)
        if staged is None:
            return  # the device hangs, so it will finish no new version
        head = b"".join(self._small())  # after the capture, because its header describes the buffers that were found
        staged.stands = staged.stands and version == known[0]
        apart = [part for _, apart in self._sections.values() for part in apart]
        staged.kept += [(stamp, bytes(data)) for stamp, data in apart]  # the page is written later: no live memory
        if not final:
            self._in_page = version, head, apart
            if device.bare and (version == at_once or self._arrivals is None or self._arrivals.idle):
                # No device is behind, so no older page is needed: this one is written before gradients leave.
                staged.in_page = page.write(version, False, (head,), staged.kept)
                self._at_once = version if staged.in_page else -1
        self._hand_over(device, version, final, head, staged)

    def _hand_over(self, device: DeviceBuffers, version: int, final: bool, head: bytes | None, staged: Staged) -> None:
        if self._arrivals is None:
            self._arrivals = ArrivalWriter(self._write_arrived, device.release)
        self._arrivals.put(version, final, head, staged)

    def _write_arrived(self, version: int, final: bool, head: bytes | None, staged: Staged) -> None:
        page, device = self._page, self._device
        if page is None or device is None:
            return
        if head is not None:
            device.learn(staged)
            self._arrived = version
            written = staged.in_page or page.write(version, final, [head, *staged.parts], staged.kept)
        else:
            written = version == self._arrived and page.finish(version)
        if written and self.on_written is not None:
            self.on_written(version, final)

    def _give_up(self, part: str, what: str, problem: Exception) -> None:
        if part not in self._given_up:
            self._given_up[part] = f"{what} could not be captured ({type(problem).__name__}: {problem})"
            log.warning("%s; training goes on, but a resumed run will not have this state", self._given_up[part])

    @property
    def arrived(self) -> int:
        """Number of captures that have arrived from the devices, which may be behind their host."""
        return 0 if self._arrivals is None else self._arrivals.arrived

    # ------------------------------------------------------------------------------------------------ save, restore

    @property
    def skipped(self) -> list[str]:
        """The names of buffers that cannot be captured, because their content is no plain memory."""
        holder = self._host or self._device
        return [] if holder is None else holder.table.skipped

    @property
    def problem(self) -> str:
        """A text for the manifest: which state is not captured, and why; empty: everything is captured."""
        problems = list(self._given_up.values())
        page = self._page
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
        page, self._page = self._page, None
        if self._arrivals is not None:
            self._arrivals.close()
        if page is not None:
            page.close()
