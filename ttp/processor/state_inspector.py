"""Finds out what a rank answers to a freeze: its version, phase and digests at one moment.

A device may be behind its frozen host: it may still work through its queue, or hang in a collective whose peers are
dead, and the host cannot tell which. So the inspector waits for the device only while it makes progress. Then it
reports the version that the device has finished, and later a newer one if the device goes on after all. The controller
then makes its plan again. A save that has begun from the first plan checks the state after each piece, and fails.

If the program has put other weights into the model, to evaluate them, the copy counts as torn until they are gone. If
there is a copy of the version before, that one is offered, unless the weights of training are back in a moment.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TypeVar

from ttp.aside import aside
from ttp.core import messages as m
from ttp.core.layout import Version
from ttp.core.rank import events as ev
from ttp.processor.continuing import Continuing
from ttp.processor.gate.gate import Gate, GateState
from ttp.processor.serial_worker import SerialWorker
from ttp.processor.source import StateSource

T = TypeVar("T")

log = logging.getLogger("ttp.processor")

DEVICE_PATIENCE_S = 5.0
"""Seconds that a device may stand still after the gate is closed, if nothing is known to be broken."""

STILL_S = 0.02
"""Seconds that a device may stand still if something is broken: work after a hanging collective never runs.

If the device was only slow, the answer is corrected as soon as it goes on.
"""

FOLLOW_S = 0.005
"""Seconds between two checks whether a device goes on."""

COMES_S = 1.0
"""Seconds that a training thread which waits for its peers may take to reach the gate once it is closed."""

WEIGHTS_S = 5.0
"""Seconds to wait for the weights of training before a copy of the version before is offered, which costs a step."""

LOOK_S = 0.2
"""Seconds. If an inspection took longer than this, the next freeze is acknowledged before the state is inspected."""

_SWAPPED = (
    "version %s cannot be saved from this rank now: the program has put other weights into the model, such as averages "
    "for an evaluation. The save waits a moment for the weights of training. Evaluate a copy of the model instead"
)

Seen = tuple[tuple[m.ShardDigest, ...], tuple[str, ...]]
"""Digests of the shards, and names of tensors with NaN or Inf."""
NOTHING_SEEN: Seen = ((), ())
NOT_HELD = "", Version(0)


@dataclass(frozen=True, slots=True)
class Inspection:
    """The result of an inspection, and the closure of the gate during which it was made."""

    closure: int
    quiet: ev.Quiet


class StateInspector:
    """Inspects the state behind a closed gate, on a thread of its own.

    Args:
        source: the adapter, which knows the state.
        gate: gate of the training thread.
        held: returns the second copies that this host has.
        hold: returns where a checkpoint may be held in memory, and the version held.
        say: takes the results; may be called from any thread.
        survivor: lets this process go on after the death of another rank; None: it ends then.
    """

    def __init__(
        self,
        source: StateSource,
        gate: Gate,
        held: Callable[[], tuple[m.KeptCopy, ...]],
        hold: Callable[[Collection[m.ShardDigest]], tuple[str, Version]],
        say: Callable[[Inspection | ev.NotRedone], None],
        survivor: Continuing | None = None,
    ) -> None:
        self._source, self._gate, self._held, self._hold, self._put = source, gate, held, hold, say
        self._survivor = survivor
        self._worker = SerialWorker("ttp-looker", at_once=True)
        self._looks_during = 0  # the closure of the gate
        self._took_s = 0.0
        self._came = threading.Event()  # the training thread has come to the gate since it was closed
        self._patience_s = DEVICE_PATIENCE_S
        self._enough = threading.Event()  # set to end the thread that follows a device
        self.left = False
        """True when the training thread has left train() with an error: it puts no weights back any more."""
        self._seen: tuple[tuple[int, Version, m.Phase], Seen] | None = None
        self._said: tuple[GateState, Version, m.Phase] | None = None

    def freeze(self, *, hurry: bool = False) -> None:
        """Close the gate and report the state. With ``hurry`` a device that stands still is not waited for."""
        self._patience_s = STILL_S if hurry else DEVICE_PATIENCE_S
        self._came.clear()
        self._say(self._gate.close())

    def thaw(self) -> None:
        """Open the gate."""
        self._seen = None
        self._enough.set()
        self._gate.open()
        self._came.set()

    def redo(self, version: Version) -> None:
        """Let the training thread, or a device that is behind it, make the update to ``version``."""
        log.info("redo: this rank makes the update to version %s, for which it holds the gradient", version)
        queued, let_through = self._gate.version >= version, self._source.redo(version)
        if not (let_through if queued else self._gate.admit()):
            self._put(ev.NotRedone("the training thread does not wait at the gate"))

    def on_quiet(self, asked: bool) -> None:
        """Note that the training thread has come to the gate. Report the state if ``asked``: a freeze waits for it."""
        self._came.set()
        if asked:
            try:
                self._say(self._gate.state())
            except Exception:  # such as no thread to be started; this is the training thread
                log.exception("cannot tell the controller that the training thread has reached the gate")

    def reported(self, state: GateState) -> tuple[Version, m.Phase]:
        """Return version and phase as they were reported for this state of the gate, or else those of the gate.

        The reported ones differ from the gate's if a device is behind its host.
        """
        said = self._said
        return said[1:] if said is not None and said[0] == state else (state.version, state.phase)

    def look_again(self) -> None:
        """Inspect the state again, as it has changed, and report it. Returns when it was reported."""
        self._submit(self._gate.state())
        self._worker.wait_done(2 * DEVICE_PATIENCE_S)

    def close(self) -> None:
        """Stop inspecting."""
        self._enough.set()
        self._worker.close()

    def _say(self, state: GateState) -> None:
        updating = state.phase is m.Phase.UPDATING
        if updating or self._source.on_device or self._took_s > LOOK_S:
            self._acknowledge(state)
        if not updating:
            self._submit(state)

    def _acknowledge(self, state: GateState) -> None:
        """Say which version this rank has finished, as far as its host knows. The answer to the freeze follows."""
        self._put(Inspection(state.closure, ev.Quiet(state.version, m.Phase.UPDATING, state.parked, False)))

    def _submit(self, state: GateState) -> None:
        """Queue an inspection. One that still hangs from an earlier closure, behind a device, is abandoned."""
        if self._worker.busy and state.closure != self._looks_during:
            self._worker.leave_behind()
        self._looks_during = state.closure
        self._worker.submit(lambda: self._look(state))

    def _look(self, state: GateState) -> None:
        """Inspect and report the state, on the device too. No update runs on the host.

        If the gate's state differs from ``state`` after the inspection, nothing is reported: a rank that has come to
        the gate with its gradient meanwhile must not be taken for one that hangs elsewhere. Nor is anything reported of
        an open gate: it may close later, in the middle of an update.
        """
        if not self._gate.closed:
            return
        if state.near and not state.parked:
            self._came.wait(COMES_S)
        if self._moved_on(state):
            return
        began = time.monotonic()
        version = self._device_version(state)
        torn = version is None or state.phase is m.Phase.TORN
        swapped = not torn and self._asked(self._source.other_weights, False)
        has_preimage = self._asked(lambda: self._source.has_preimage, False)
        if swapped and has_preimage and version == state.version > 0:
            swapped = not self._weights_return(state)
            version = Version(state.version - swapped)
        else:
            has_preimage = has_preimage and not swapped
        phase = m.Phase.TORN if torn or swapped else state.phase
        answered = self._answer(state, version, phase, has_preimage=has_preimage)
        self._took_s = time.monotonic() - began
        if answered:
            if swapped and state.version:  # at version 0 restore() may be loading the weights, and nothing is lost
                log.warning(_SWAPPED, state.version)
            if version != state.version or swapped:
                self._follow(state, version, swapped)

    def _answer(self, state: GateState, version: Version | None, phase: m.Phase, *, has_preimage: bool) -> bool:
        """Report what is known of ``version``. Returns False if ``state`` is outdated: then this is not reported."""
        behind = version is not None and version < state.version
        digests, bad = self._inspected(state.closure, version, phase)
        hold_dir, in_memory = self._asked(lambda: self._hold(digests), NOT_HELD)
        quiet = ev.Quiet(
            version=state.version if version is None else version,
            phase=phase,
            parked=state.parked or self.left,
            post_step_done=self._asked(self._source.post_step_done, False),
            has_gradient=(state.parked or behind) and self._asked(self._source.gradient_ready, False),
            has_preimage=has_preimage,
            digests=digests,
            bad=bad,
            kept=self._held(),
            hold_dir=hold_dir,
            held=in_memory,
            cannot_continue="" if self._survivor is None else self._asked(self._survivor.why_no_longer, ""),
        )
        if self._moved_on(state):
            return False
        self._said = state, quiet.version, phase
        self._put(Inspection(state.closure, quiet))
        return True

    def _weights_return(self, state: GateState) -> bool:
        """Return whether the program puts the weights of training back in a moment.

        Until then this rank has no version, and says so: a save of ranks that have one must not wait for it.
        """
        if self.left or state.phase is m.Phase.DONE:
            self._acknowledge(state)  # to say that there is no version would end the job without a checkpoint
            return False
        if not state.parked:  # else the weights are back in the queue of a device
            self._answer(state, state.version, m.Phase.TORN, has_preimage=False)
        until = time.monotonic() + WEIGHTS_S
        while self._asked(self._source.other_weights, True):
            if self.left or time.monotonic() > until or self._gate.state() != state:
                return False
            time.sleep(FOLLOW_S)
        return True

    def _follow(self, state: GateState, said: Version | None, swapped: bool) -> None:
        """Report again when a device that is behind its host goes on, or when the weights of training are back."""
        self._enough.set()
        self._enough = enough = threading.Event()

        def moves() -> bool:
            source = self._source
            return not source.other_weights() if swapped else source.device_version(state.version, 0.0) != said

        def run() -> None:
            pause_s = FOLLOW_S
            while not enough.wait(pause_s) and self._gate.state() == state:
                try:
                    if moves():
                        self._submit(state)
                        return
                except Exception:
                    log.exception("the adapter could not inspect the state")
                    pause_s *= 2  # it may fail each time, at once

        aside("ttp-follower", run)

    def _moved_on(self, state: GateState) -> bool:
        """Return whether ``state`` is outdated. If so, report the new state, unless the gate was opened meanwhile."""
        now = self._gate.state()
        if now != state and now.closure == state.closure:
            self._say(now)
        return now != state

    def _device_version(self, state: GateState) -> Version | None:
        if not self._source.on_device or state.phase is m.Phase.TORN:
            return state.version
        return self._asked(lambda: self._source.device_version(state.version, self._patience_s), None)

    def _inspected(self, closure: int, version: Version | None, phase: m.Phase) -> Seen:
        """Return the result of the adapter's inspection, made once per version and phase while the gate is closed.

        An inspection may end after its closure, when the training thread changes the state: its result is used no more.
        """
        if version is None or phase is m.Phase.TORN:
            return NOTHING_SEEN
        key, seen = (closure, version, phase), self._seen
        if seen is None or seen[0] != key:
            self._seen = seen = key, self._asked(lambda: self._source.inspect(version), NOTHING_SEEN)
        return seen[1]

    @staticmethod
    def _asked(question: Callable[[], T], otherwise: T) -> T:
        """Return the answer of the adapter, or ``otherwise`` if it raises, which is logged."""
        try:
            return question()
        except Exception:
            log.exception("the adapter could not inspect the state")
            return otherwise
