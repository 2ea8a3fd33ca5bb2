"""Decides when a launcher may stop the surviving workers of a failed group. Pure: facts in, decision out.

Torch's agent sends SIGTERM as soon as it sees one worker dead, and SIGKILL 30 s later. ttp makes it wait. A worker is
*armed* while a processor runs in it, and holds a *lease* while it saves (``ttp.launch.leases``). The rules:

- no worker is armed: stop at once, as torch's agent does by itself;
- a worker holds a lease: wait until it has left or its lease is over, at most ``patience_s`` in all;
- a worker still holds a lease ``LEAVING_S`` after another worker with a lease was released: the job is saved, and a
  healthy rank would have left by itself. It is stopped or hung: kill it, so that the restart begins;
- workers are armed, but none has a lease yet: wait ``first_lease_s`` for the first lease, which comes with the
  controller's freeze, milliseconds after a death;
- all live workers were released to go on in their processes: leave them alone;
- other workers were released (exit 75, 70 or 64), and an armed worker has no lease: it is hung or stopped. The job is
  saved without it, and a SIGTERM would only cost 30 s: kill it.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from ttp.errors import EXIT_BAD_CONFIG, EXIT_NOT_SAVED, EXIT_SAVED

FIRST_LEASE_S = 5.0
"""Seconds to wait for the first lease. The longest delay of a freeze is the restart of a dead controller, which takes
less."""

STRAGGLER_S = 1.0
"""Seconds for which an armed worker may have no lease after its peers were released: its freeze may come late."""

LEAVING_S = 11.0
"""Seconds that a worker with a lease may stay after a peer was released. A released rank leaves within 10 s
(``ttp.processor.exiting``), and may be released later than its peers."""

Pid = int


class HoldDecision(enum.Enum):
    """What the launcher has to do now."""

    WAIT = "wait"  # a worker is saving, or may be about to
    LEFT = "left"  # no worker is left to wait for
    KILL_HUNG = "kill hung"  # kill the workers in ``Hold.hung``, then look again
    STOP = "stop"  # stop the workers, as torch's agent does by itself
    AGAIN = "again"  # the live workers go on in their processes: start only the dead ones
    OUT_OF_PATIENCE = "out of patience"  # the same as STOP, though a worker was saving


@dataclass(frozen=True, slots=True)
class WorkersNow:
    """What a launcher sees of the workers of this host at one moment.

    Args:
        alive: pids of workers that run.
        exits: pid -> exit code, of workers that ended.
        armed: pids (of any process) that may ask for a lease.
        deadlines: pid -> end of its lease, in seconds on the clock of ``now``.
        again: pid -> time by which it has to go on, on the same clock; only processes that were released to go on.
    """

    alive: frozenset[Pid]
    exits: Mapping[Pid, int]
    armed: frozenset[Pid]
    deadlines: Mapping[Pid, float]
    again: Mapping[Pid, float] = field(default_factory=dict)


class Hold:
    """One wait for surviving workers, which begins when the launcher wants to stop them.

    Args:
        now: seconds on the clock of the leases (``time.monotonic()``).
        patience_s: how long to wait at most in all, in seconds.
        first_lease_s: how long to wait for armed survivors while none has a lease, in seconds.
    """

    def __init__(self, now: float, patience_s: float, first_lease_s: float = FIRST_LEASE_S) -> None:
        self._started = now
        self._quiet_since: float | None = None
        self._patience_s = patience_s
        self._first_lease_s = first_lease_s
        self._held: set[Pid] = set()
        self._released_at: float | None = None
        self._given_up: frozenset[Pid] = frozenset()
        self.hung: frozenset[Pid] = frozenset()
        """The pids to kill after ``KILL_HUNG``. Each pid appears once: a process inside a system call may die late."""

    def look(self, now: float, scene: WorkersNow) -> HoldDecision:
        """Decide at time ``now`` what to do. Call it again after ``WAIT`` and ``KILL_HUNG``."""
        alive = scene.alive - self._given_up
        holding = {pid for pid in alive if scene.deadlines.get(pid, now) > now}
        self._held |= holding | (scene.deadlines.keys() & scene.exits.keys())
        if holding:
            self._quiet_since = None
        elif self._quiet_since is None:
            self._quiet_since = now
        if not alive:
            return HoldDecision.LEFT
        if holding and self._released_for(now, scene) >= LEAVING_S:
            return self._kill(frozenset(holding))
        if all(scene.again.get(pid, now) > now for pid in alive):
            return self._going_on(scene, alive)
        armed = alive & (scene.armed | holding)
        if not armed:
            return HoldDecision.STOP
        if now - self._started >= self._patience_s:
            return HoldDecision.OUT_OF_PATIENCE if self._held & armed else HoldDecision.STOP  # leases end then, too
        return HoldDecision.WAIT if holding else self._without_lease(now, scene, frozenset(armed))

    def _going_on(self, scene: WorkersNow, alive: frozenset[Pid]) -> HoldDecision:
        """Decide for survivors that all were released to go on, so that killing them loses nothing.

        If a worker has exited with 75, 70 or 64, then not all ranks of the job go on, and the survivors are killed.
        """
        if not any(code in (EXIT_SAVED, EXIT_NOT_SAVED, EXIT_BAD_CONFIG) for code in scene.exits.values()):
            return HoldDecision.AGAIN
        return self._kill(alive)

    def _released_for(self, now: float, scene: WorkersNow) -> float:
        """Return the seconds since a worker that held a lease exited with 75 or went on; 0.0 if none has."""
        if self._released_at is None and any(
            scene.exits.get(pid) == EXIT_SAVED or scene.again.get(pid, now) > now for pid in self._held
        ):
            self._released_at = now
        return 0.0 if self._released_at is None else now - self._released_at

    def _kill(self, hung: frozenset[Pid]) -> HoldDecision:
        self.hung = hung
        self._given_up |= hung
        return HoldDecision.KILL_HUNG

    def _without_lease(self, now: float, scene: WorkersNow, armed: frozenset[Pid]) -> HoldDecision:
        assert self._quiet_since is not None
        quiet_s = now - self._quiet_since
        hung = armed - self._held
        if hung and quiet_s >= STRAGGLER_S and self._peers_were_released(scene.exits):
            return self._kill(hung)
        return HoldDecision.WAIT if quiet_s < self._first_lease_s else HoldDecision.STOP

    def _peers_were_released(self, exits: Mapping[Pid, int]) -> bool:
        """Return whether peers were released. A 70 without a lease proves nothing: fenced ranks exit with it, too."""
        saved = any(code == EXIT_SAVED for code in exits.values())
        return saved or any(exits.get(pid) in (EXIT_NOT_SAVED, EXIT_BAD_CONFIG) for pid in self._held)
