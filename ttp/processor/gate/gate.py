"""The gate in front of every optimizer update: one atomic check-and-set.

"If frozen, stop here; else I am updating" is decided under one lock. If the gate checked first and set later, a rank
could pass the gate, acknowledge a freeze as clean at version n, and then start the update: the save would read a torn
copy.

In the steady state ``begin_update`` and ``end_update`` take an uncontended lock and store two words: no system call, no
allocation that grows.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from ttp.core.layout import Version
from ttp.core.messages import Phase

POLL_S = 5e-5
"""Seconds between two checks of a training thread that waits for the gate to open after a redone update."""


def _nothing() -> None:
    """Do nothing: no other thread has to be woken."""


@dataclass(frozen=True, slots=True)
class GateState:
    """The version and phase that the gate guards, at one moment.

    Args:
        version: finished updates.
        phase: IDLE, UPDATING, TORN or DONE.
        parked: the training thread stands at the closed gate.
        closure: how often the gate was opened before. Two equal states can be treated as one moment, because while the
            gate stays closed no field returns to an earlier value.
        near: the training thread waits for its peers with its final gradient; when the gate closes it stops waiting
            and comes to the gate.
    """

    version: Version
    phase: Phase
    parked: bool
    closure: int = 0
    near: bool = False


class Halted(Exception):  # noqa: N818 - no error: it makes the training thread leave its loop
    """Raised in the training thread at a halted gate, to make it leave its loop instead of waiting."""


class Gate:
    """Guards one copy of the state. ``begin_update`` and ``end_update`` are for the training thread.

    Args:
        on_quiet: called, possibly on the training thread, when the state has become stable under a closed gate.
            Must not block.
        on_left: called on the training thread when that leaves the closed gate by an exception although an update was
            ordered, which it does not make. Must not block.
    """

    __slots__ = (
        "_admitted", "_between", "_closure", "_done", "_halted", "_lock", "_near", "_on_left", "_on_quiet", "_opened",
        "_parked", "_torn", "_wake", "closed", "left", "redone", "updating", "version",
    )  # fmt: skip

    def __init__(self, on_quiet: Callable[[], None] = _nothing, on_left: Callable[[], None] = _nothing) -> None:
        self.version = Version(0)
        self._lock = threading.Lock()
        self._opened = threading.Event()
        self._on_quiet, self._on_left = on_quiet, on_left
        self.closed = False
        """Whether updates may not start. The training thread reads it without the lock, and checks again under it."""
        self._closure = 0
        self._admitted = False
        self.updating = False
        """Whether an update is running. For the training thread, which alone sets it."""
        self._between = False
        self.left = False
        """Whether the last update was left by an exception that the program has caught. For the training thread."""
        self._torn = False
        self._parked = False
        self._near = False
        self._wake: Callable[[], None] = _nothing
        self._done = False
        self._halted = False
        self.redone = False
        """True if the running update, or else the last one, was a redo: ordered by the controller, at a closed gate."""

    # --------------------------------------------------------------------------------------------- training thread

    def begin_update(self, again: bool = False) -> None:
        """Pass the gate, or wait until it opens.

        If the update before never ended, an exception has left it. What it wrote stays in the copy, and this update
        builds on it. The number of the update that was left counts as used, so that this rank stays at the same version
        as the ranks that did not fail.

        Args:
            again: this is the update that was left, made again with the same gradient: it keeps its number.

        Raises:
            Halted: see ``halt``.
        """
        while True:
            with self._lock:
                if self.updating:
                    self._leave()
                if self._halted:
                    self._parked = False
                    raise Halted
                if not self.closed or self._admitted:
                    if self.left and not again:
                        self.version = Version(self.version + 1)
                    self.redone = self._admitted
                    self.updating, self._admitted, self.left, self._between = True, False, False, False
                    return
                self._parked = True
                self._opened.clear()
            self._stand()

    def stand_aside(self) -> bool:
        """Wait at the gate while it is closed. This rank has its final gradient; other ranks may not have theirs yet.

        Returns:
            True if this rank was admitted to make the update without waiting for the others.

        Raises:
            Halted: see ``halt``.
        """
        while True:
            with self._lock:
                if self._halted:
                    raise Halted
                if self._admitted or not self.closed:
                    return self._admitted
                self._parked = True
                self._opened.clear()
            self._stand()

    def _stand(self) -> None:
        """Stand at the closed gate until it opens, or an update is ordered."""
        try:
            self._on_quiet()
            self._opened.wait()
        except BaseException:  # of a signal handler of the program
            self._leaves_gate()
            raise
        finally:
            self._parked = False

    def _leaves_gate(self) -> None:
        """Note that an exception takes the training thread away from the closed gate: it makes no ordered update."""
        with self._lock:
            ordered, self._admitted, self._parked = self._admitted, False, False
        if ordered:
            self._on_left()
            self._on_quiet()

    def nearby(self, wake: Callable[[], None] = _nothing) -> contextlib.AbstractContextManager[None]:
        """Return a context manager around the wait of the training thread, with its final gradient, for its peers.

        Args:
            wake: called by the thread that closes the gate, so that the training thread stops waiting and calls
                ``stand_aside``. Must not block. May still be called once after the training thread has left the block.
        """
        return _Nearby(self, wake)

    def stay_redone(self) -> None:
        """Wait after a redone update until the gate opens.

        Raises:
            Halted: see ``halt``.
        """
        while self.redone and self.closed:
            if self._halted:
                raise Halted
            time.sleep(POLL_S)

    def stand_between(self) -> None:
        """Note that the training thread is between two optimizer steps of one update, perhaps for a long time.

        The copy does not change, and belongs to no version. Under a closed gate it counts as torn, and only the copy
        from before the update can be saved. ``begin_update`` continues the update.
        """
        with self._lock:
            self.updating, self._between = False, True
            closed = self.closed
        if closed:
            self._on_quiet()

    def end_update(self, version: Version | None = None) -> None:
        """Note that the update is finished. The copy is of the next version, or of ``version`` if that is given."""
        with self._lock:
            self.version = Version(self.version + 1) if version is None else version
            self.updating = self.left = False
            closed = self.closed
        if closed:
            self._on_quiet()

    def leave_update(self) -> None:
        """Note that a caught exception has left the update: the copy is torn until a later update is finished."""
        with self._lock:
            if self.updating or self._between:
                self._leave()
            closed = self.closed
        if closed:
            self._on_quiet()

    def _leave(self) -> None:
        self.updating, self._between, self.left = False, False, True

    def mark_torn(self) -> None:
        """Note that an exception has left the update. Does nothing if no update is running."""
        with self._lock:
            if self.updating:
                self._torn = True
        self._on_quiet()

    def mark_overwritten(self) -> None:
        """Note that the copy is being overwritten: it has no version until ``revive``."""
        with self._lock:
            self._torn = True

    def mark_done(self) -> None:
        """Note that train() has returned: no update follows."""
        with self._lock:
            self._done = True

    # ----------------------------------------------------------------------------------------------- processor thread

    def set_version(self, version: Version) -> None:
        """Note that the state was restored to ``version``."""
        with self._lock:
            self.version = version

    def close(self) -> GateState:
        """Let no update start.

        Returns:
            The state. It does not change any more, unless its phase is UPDATING: then ``on_quiet`` is called at the end
            of the update.
        """
        with self._lock:
            self.closed = True
            state, wake = self._state(), self._wake
        wake()
        return state

    def admit(self) -> bool:
        """Let the training thread make one update, if it stands at the closed gate. Returns whether it does."""
        with self._lock:
            if not (self.closed and self._parked) or self._torn or self.left or self._between:
                return False
            self._admitted = True
            self._opened.set()
            return True

    def halt(self) -> None:
        """Make the training thread leave its loop: ``begin_update`` raises ``Halted`` at the gate."""
        with self._lock:
            self._halted = True
            self._opened.set()

    def revive(self, version: Version) -> None:
        """Note that the copy was repaired and is of ``version``, before the training thread enters its loop again."""
        with self._lock:
            self.version = version
            self.updating = self.left = self._between = self._torn = self._halted = self._admitted = False

    def open(self) -> None:
        """Let updates start again. A thread that waits at the gate no longer counts as parked, even before it wakes."""
        with self._lock:
            self.closed = self._admitted = self._halted = self._parked = False
            self._closure += 1
            self._opened.set()

    def state(self) -> GateState:
        """Return the present state. It may be outdated at once unless the gate is closed."""
        with self._lock:
            return self._state()

    def _state(self) -> GateState:
        if self._torn or self.left or (self._between and self.closed):
            phase = Phase.TORN
        elif self.updating or self._between or self._admitted:  # an admitted thread may begin at any moment
            phase = Phase.UPDATING
        else:
            phase = Phase.DONE if self._done else Phase.IDLE
        return GateState(self.version, phase, self._parked, self._closure, self._near)


class _Nearby:
    """The context manager of ``Gate.nearby``. A generator would take twice as long, in every update."""

    __slots__ = ("_gate", "_wake")

    def __init__(self, gate: Gate, wake: Callable[[], None]) -> None:
        self._gate, self._wake = gate, wake

    def __enter__(self) -> None:
        with self._gate._lock:
            self._gate._near, self._gate._wake = True, self._wake

    def __exit__(self, *_: object) -> None:
        with self._gate._lock:
            self._gate._near, self._gate._wake = False, _nothing
