"""Decides when a rank that trains on a device and goes on in its process may abort its communicators. Pure functions.

An abort ends the kernel of a collective that hangs. The device then runs the kernels queued behind it, on incomplete
data. So no update may be in that queue: in training the host waits for each reduced gradient before it queues an
update, and before an abort it waits for an update that has begun. Queued kernels of the backward pass do no harm, as
they write only to gradients.
"""

from __future__ import annotations

from ttp.core.layout import Version
from ttp.core.messages import Phase

UPDATES_MIN = 2
"""Updates that a rank has to make before an abort: torch is known to crash after an abort in the first backward."""


def why_never(version: Version, base: Version) -> str:
    """Return why this rank must never abort its communicators; empty: it may.

    Args:
        version: the number of finished updates.
        base: the version that this rank started from.
    """
    if version - base >= UPDATES_MIN:
        return ""
    return f"communicators are not aborted before {UPDATES_MIN} updates, and this rank has made {version - base}"


def why_not_yet(closed: bool, phase: Phase, finished: Version, begun: Version) -> str:
    """Return why an abort could damage the state of this rank now; empty: it cannot.

    Args:
        closed: True if the gate is closed.
        phase: the gate's phase.
        finished: the newest version that the device has finished.
        begun: the newest version whose update the device has begun.
    """
    if not closed:
        return "its gate is open"
    if phase is Phase.UPDATING:
        return "it is making an update"
    if phase is not Phase.TORN and begun > finished:  # a torn state is of no version and is not saved
        return f"its device has begun update {begun} but not finished it"
    return ""
