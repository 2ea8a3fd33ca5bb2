"""When a rank on a device, released to go on in its process, may abort its communicators. Pure.

An abort ends the kernel of a collective that hangs, and whatever the host has queued behind it then runs on what the
collective has left. So no update may be among it: the host waits for each reduced gradient before it queues an update,
and an update that has begun is waited for here. What the backward pass leaves writes to gradients alone.
"""

from __future__ import annotations

from ttp.core.layout import Version
from ttp.core.messages import Phase

UPDATES_MIN = 2
"""Updates that a rank has to have made before: torch is known to crash when it is aborted in a first backward pass."""


def why_never(version: Version, base: Version) -> str:
    """Why this rank must not abort at all; empty: it may.

    Args:
        version: finished updates.
        base: with which this rank has started.
    """
    if version - base >= UPDATES_MIN:
        return ""
    return f"communicators are not aborted before {UPDATES_MIN} updates are made, and {version - base} are"


def why_not_yet(closed: bool, phase: Phase, finished: Version, begun: Version) -> str:
    """Why an abort might spoil the state of this rank now; empty: it does not.

    Args:
        closed: updates may not start.
        phase: of the update that the gate knows.
        finished: the newest version that the device has finished.
        begun: the newest one whose update it has begun.
    """
    if not closed:
        return "its gate is open"
    if phase is Phase.UPDATING:
        return "it is making an update"
    if phase is not Phase.TORN and begun > finished:  # what is torn is of no version, and nobody saves it
        return f"its device has begun update {begun} and not finished it"
    return ""
