"""Decides when a rank on a device that is released to go on in its process may abort its communicators. Pure.

An abort ends the kernel of a collective that hangs, and the device then runs what the host has queued behind it, on
incomplete data. No update may be in that queue: the host waits for each reduced gradient before it queues an update,
and here for an update that has begun. Queued work of the backward pass does no harm, as it writes to gradients only.
"""

from __future__ import annotations

from ttp.core.layout import Version
from ttp.core.messages import Phase

UPDATES_MIN = 2
"""Updates that a rank has to make before an abort: torch is known to crash if aborted in the first backward pass."""


def why_never(version: Version, base: Version) -> str:
    """Return why this rank must never abort its communicators; empty: it may.

    Args:
        version: number of the last finished update.
        base: version from which this rank has started.
    """
    if version - base >= UPDATES_MIN:
        return ""
    return f"communicators are not aborted before {UPDATES_MIN} updates are made, and {version - base} are"


def why_not_yet(closed: bool, phase: Phase, finished: Version, begun: Version) -> str:
    """Return why an abort could damage the state of this rank now; empty: it cannot.

    Args:
        closed: True if the gate lets no update start.
        phase: phase of the update, as the gate knows it.
        finished: the newest version that the device has finished.
        begun: the newest version whose update the device has begun.
    """
    if not closed:
        return "its gate is open"
    if phase is Phase.UPDATING:
        return "it is making an update"
    if phase is not Phase.TORN and begun > finished:  # a torn state belongs to no version and is never saved
        return f"its device has begun update {begun} and not finished it"
    return ""
