"""The kinds of runs that a campaign draws from, and the functions that draw their faults."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from ttp.chaos.script import Fault, Run, Script
from ttp.chaos.vocabulary import STEP_PHASES, Target

ONE_HOST = ("small", "pair", "stock", "wide")
TWO_HOSTS = ("two hosts", "two hosts, scheduled")
SEVERAL_HOSTS = (*TWO_HOSTS, "three hosts, scheduled")
SCHEDULED = ("two hosts, scheduled", "three hosts, scheduled")
NO_PAIR = ("small", "stock", "wide")
INCIDENT = ("opened", "answer", "plan", "saved", "commit", "committed")


@dataclass(slots=True)
class RunDraw:
    """Draws the faults of one run: for one job, at one step and phase.

    Args:
        job: the script of the job, without runs.
        step: step of the first fault.
        phase: phase of that step.
        prefix: prefix of the names of the faults.
        chance: the random number generator.
    """

    job: Script
    step: int
    phase: str
    prefix: str
    chance: random.Random

    @property
    def rank(self) -> int:
        """A random rank."""
        return self.chance.randrange(self.job.world_size)

    def several(self, least: int, most: int) -> tuple[int, ...]:
        """Draw between ``least`` and ``most`` different ranks."""
        count = self.chance.randint(least, most)
        return tuple(sorted(self.chance.sample(range(self.job.world_size), count)))

    def seconds(self, least: float, most: float) -> float:
        """Draw a duration between ``least`` and ``most`` seconds."""
        return round(self.chance.uniform(least, most), 3)

    def here(self, what: str, who: Target, seconds: float = 0.0) -> Fault:
        """Return a fault at this step and phase."""
        seen_by = None if who.kind == "ranks" else self._rank_on_another_host(who)
        return Fault(f"{self.prefix} first", what, who, self.step, self.phase, seen_by, seconds=seconds)

    def _rank_on_another_host(self, who: Target) -> int:
        others = [r for r in range(self.job.world_size) if who.kind != "host" or self.job.host_of(r) not in who.numbers]
        return self.chance.choice(others)

    def at_event(self, event: str, what: str, who: Target, name: str = "second") -> Fault:
        """Return a fault at an event of the controller."""
        return Fault(f"{self.prefix} {name}", what, who, event=event)

    def later(self, seconds: float, what: str, who: Target, name: str = "second", after: str = "first") -> Fault:
        """Return a fault ``seconds`` after the fault named ``after``."""
        return Fault(f"{self.prefix} {name}", what, who, after=f"{self.prefix} {after}", seconds=seconds)

    def next_start(self, phase: str, what: str, who: Target, name: str = "second", seen_by: int | None = None) -> Fault:
        """Return a fault at a phase of the job's next start."""
        return Fault(f"{self.prefix} {name}", what, who, phase=phase, seen_by=seen_by)


Draw = Callable[[RunDraw], tuple[Fault, ...]]


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of run.

    Args:
        title: its name in the report.
        faults: function that draws the faults.
        expect: the expected outcome.
        weight: relative frequency.
        phases: phases of a step at which the run may begin.
        shapes: names of the jobs (``campaign.SHAPES``) that the run can be part of.
        needs: what the machine has to provide: ``hosts``, ``mount``.
        features: features of ``--include`` that have to be asked for.
        diverges: whether the run has to be the last of its job: rank-local state is lost in it, so that later bits
            cannot be compared, or later restarts differ.
    """

    title: str
    faults: Draw
    expect: str = "saved"
    weight: int = 1
    phases: tuple[str, ...] = STEP_PHASES
    shapes: tuple[str, ...] = ONE_HOST
    needs: frozenset[str] = field(default=frozenset())
    features: frozenset[str] = field(default=frozenset())
    diverges: bool = False

    def run(self, job: Script, step: int, phase: str, prefix: str, chance: random.Random) -> Run:
        """Draw one run of this kind."""
        return Run(self.title, self.faults(RunDraw(job, step, phase, prefix, chance)), self.expect)


def ranks(*numbers: int) -> Target:
    """Return the target of the ranks with these numbers."""
    return Target("ranks", numbers)


CONTROLLER, LAUNCHER, DISK = Target("controller"), Target("launcher"), Target("disk")
SAVER, COMMITTER, BYSTANDER = Target("saver"), Target("committer"), Target("bystander")


def one(what: str) -> Draw:
    """Return a draw: ``what`` strikes a rank at the point."""
    return lambda s: (s.here(what, ranks(s.rank)),)


def alone(what: str, who: Target) -> Draw:
    """Return a draw: ``what`` strikes ``who`` at the point."""
    return lambda s: (s.here(what, who),)


def kill_any_moment(s: RunDraw) -> tuple[Fault, ...]:
    """Draw: kill a rank up to 20 ms after the point."""
    return (s.here("kill", ranks(s.rank), seconds=s.seconds(0.0005, 0.02)),)


def kill_several(s: RunDraw) -> tuple[Fault, ...]:
    """Draw: kill from two ranks to all but one at once."""
    most = s.job.world_size - 1
    return (s.here("kill", ranks(*s.several(min(2, most), most))),)


def kill_all(s: RunDraw) -> tuple[Fault, ...]:
    """Draw: kill all ranks at once."""
    return (s.here("kill", ranks(*range(s.job.world_size))),)


def kill_then(event: str, who: Target) -> Draw:
    """Return a draw: kill a rank, and ``who`` at an event of the controller."""
    return lambda s: (s.here("kill", ranks(s.rank)), s.at_event(event, "kill", who))


def _then_another(what: str, after_s: float | None = None) -> Draw:
    """Return a draw: ``what`` strikes a rank, and another is killed ``after_s`` seconds later; None: within 0.2 s."""

    def draw(s: RunDraw) -> tuple[Fault, ...]:
        first, second = s.chance.sample(range(s.job.world_size), 2)
        delay_s = s.seconds(0, 0.2) if after_s is None else after_s
        return s.here(what, ranks(first)), s.later(delay_s, "kill", ranks(second))

    return draw


def _kill_and_at_the_next_start(s: RunDraw) -> tuple[Fault, ...]:
    phase = s.chance.choice(("joined", "restored"))
    return s.here("kill", ranks(s.rank)), s.next_start(phase, "kill", ranks(s.rank))


def _controller_then_rank(s: RunDraw) -> tuple[Fault, ...]:
    return s.here("kill", CONTROLLER), s.later(s.seconds(0, 2), "kill", ranks(s.rank))


def _kill_then_controller(s: RunDraw) -> tuple[Fault, ...]:
    return s.here("kill", ranks(s.rank)), s.at_event(s.chance.choice(INCIDENT), "kill", CONTROLLER)


def _kill_then_controller_and_saver(s: RunDraw) -> tuple[Fault, ...]:
    both = s.at_event("plan", "kill", CONTROLLER), s.later(0, "kill", SAVER, "third", "second")
    return s.here("kill", ranks(s.rank)), *both


def _pause(who: Callable[[RunDraw], Target], least: float, most: float) -> Draw:
    def draw(s: RunDraw) -> tuple[Fault, ...]:
        paused = who(s)
        return s.here("stop", paused), s.later(s.seconds(least, most), "cont", paused)

    return draw


def _controller_stopped_while_one_dies(s: RunDraw) -> tuple[Fault, ...]:
    dies = s.later(0.05, "kill", ranks(s.rank))
    return s.here("stop", CONTROLLER), dies, s.later(s.seconds(0.5, 3), "cont", CONTROLLER, "third")


def _save_and_kill(s: RunDraw) -> tuple[Fault, ...]:
    event = s.chance.choice(("acknowledged", "answer", "plan", "saved", "commit"))
    return s.here("save", CONTROLLER), s.at_event(event, "kill", ranks(s.rank))


def _disk(what: str, healed_at: str = "released") -> Draw:
    def draw(s: RunDraw) -> tuple[Fault, ...]:
        dies = s.later(0.02, "kill", ranks(s.rank))
        return s.here(what, DISK), dies, s.at_event(healed_at, "disk-heal", DISK, "third")

    return draw


def _host(what: str, number: int | None = None) -> Draw:
    """Return a draw: a fault of host ``number``; None means a random host without the controller (not host 0)."""

    def draw(s: RunDraw) -> tuple[Fault, ...]:
        host = s.chance.randrange(1, s.job.hosts) if number is None else number
        return (s.here(what, Target("host", (host,))),)

    return draw


def _flap(s: RunDraw) -> tuple[Fault, ...]:
    host = Target("host", (s.chance.randrange(1, s.job.hosts),))
    what = s.chance.choice(("partition", "unplug"))
    return s.here(what, host), s.later(s.seconds(0.2, 2.5), "heal", host)


def _cut_and_healed_late(s: RunDraw) -> tuple[Fault, ...]:
    host = Target("host", (s.chance.randrange(1, s.job.hosts),))
    return s.here("partition", host), s.at_event("released", "heal", host)


def _all_ranks_of_a_host(s: RunDraw) -> tuple[Fault, ...]:
    return (s.here("kill", ranks(*s.job.ranks_of(s.chance.randrange(s.job.hosts)))),)


_HOSTS, _MOUNT = frozenset({"hosts"}), frozenset({"mount"})
_OUTER = tuple(p for p in STEP_PHASES if p != "in_step")
_WATCHED = _OUTER[: _OUTER.index("stepped")]
"""Phases in which a rank that hangs is found: the evaluation that follows them waits on purpose."""
_WIDE = ("wide",)
_PAUSE = _pause(lambda _: CONTROLLER, 0.2, 4)

KINDS: tuple[Kind, ...] = (
    Kind("kill a rank", one("kill"), weight=9),
    Kind("kill a rank at any moment", kill_any_moment, weight=4, phases=("data",)),
    Kind("segfault of a rank", one("segv")),
    Kind("a rank exits", one("exit")),
    Kind("exception in a rank", one("raise"), weight=3),
    Kind("SIGTERM to a rank", one("term")),
    Kind("SIGTERM to the job", alone("term", LAUNCHER), weight=2),
    Kind("accused from outside", one("report")),
    Kind("kill several ranks at once", kill_several, weight=3, shapes=NO_PAIR),
    Kind("kill all ranks at once", kill_all, "any"),
    Kind("kill a rank, then the saver", kill_then("plan", SAVER), weight=3, shapes=NO_PAIR),
    Kind("kill a rank, then another one", kill_then("plan", BYSTANDER), weight=2, shapes=NO_PAIR),
    Kind("kill a rank, then the committer", kill_then("commit", COMMITTER), weight=2, shapes=NO_PAIR),
    Kind("kill two ranks, one after the other", _then_another("kill"), weight=2, shapes=NO_PAIR),
    Kind("kill a rank, and one at the next start", _kill_and_at_the_next_start, weight=2),
    Kind("kill the controller", alone("kill", CONTROLLER), "unhurt", weight=4),
    Kind("kill the controller, then a rank", _controller_then_rank, weight=3),
    Kind("kill a rank, then the controller", _kill_then_controller, weight=4),
    Kind("kill a rank, then controller and saver", _kill_then_controller_and_saver, weight=2, shapes=NO_PAIR),
    Kind("pause a rank", _pause(lambda s: ranks(s.rank), 0.2, 1.5), "unhurt", weight=2),
    Kind("pause the controller", _PAUSE, "unhurt", weight=2),
    Kind("kill a rank while another is stopped", _then_another("stop", 0.05), weight=2, shapes=NO_PAIR),
    Kind("kill a rank while the controller is stopped", _controller_stopped_while_one_dies, weight=2),
    Kind("checkpoint on request", alone("save", CONTROLLER), "unhurt", weight=2),
    Kind("kill a rank during a checkpoint on request", _save_and_kill, weight=2, phases=_OUTER),
    Kind("a rank cannot write, another dies", _then_another("disk-quota", 0.02), "saved", 2, _OUTER, _WIDE),
    Kind("full disk", _disk("disk-full"), "refused", shapes=_WIDE, needs=_MOUNT),
    Kind("read-only disk", _disk("disk-ro"), "refused", shapes=_WIDE, needs=_MOUNT),
    Kind("full disk for a moment", _disk("disk-full", "save_failed"), shapes=_WIDE, needs=_MOUNT),
    Kind("kill a rank of several hosts", one("kill"), weight=3, shapes=TWO_HOSTS, needs=_HOSTS),
    Kind("short loss of a host's network", _flap, "unhurt", weight=2, shapes=SEVERAL_HOSTS, needs=_HOSTS),
    Kind("kill all ranks of a host", _all_ranks_of_a_host, shapes=SCHEDULED, needs=_HOSTS, diverges=True),
    Kind("kill a host", _host("kill"), weight=3, shapes=SCHEDULED, needs=_HOSTS, diverges=True),
    Kind("cut off a host", _host("partition"), weight=2, shapes=SCHEDULED, needs=_HOSTS, diverges=True),
    Kind("pull a host's cable", _host("unplug"), shapes=SCHEDULED, needs=_HOSTS, diverges=True),
    Kind("cut off the controller's host", _host("partition", 0), shapes=SCHEDULED, needs=_HOSTS, diverges=True),
    Kind("cut off a host, heal it late", _cut_and_healed_late, shapes=SCHEDULED, needs=_HOSTS, diverges=True),
)


def _host_then_controller(s: RunDraw) -> tuple[Fault, ...]:
    host = Target("host", (s.chance.randrange(1, s.job.hosts),))
    return s.here("kill", host), s.at_event("plan", "kill", CONTROLLER)


def _flaps(s: RunDraw) -> tuple[Fault, ...]:
    """Draw: several short losses of one host's network."""
    host, faults, before = Target("host", (s.chance.randrange(s.job.hosts),)), [], "first"
    for number in range(s.chance.randint(1, 3)):
        cut = s.chance.choice(("partition", "unplug"))
        name = f"cut {number}"
        faults.append(s.later(s.seconds(0.2, 2), cut, host, name, before) if number else s.here(cut, host))
        faults.append(s.later(s.seconds(0.2, 2), "heal", host, f"heal {number}", name if number else "first"))
        before = f"heal {number}"
    return tuple(faults)


def _stopped_while_cut(s: RunDraw) -> tuple[Fault, ...]:
    """Draw: stop the controller, or a whole host, while the network of another host is lost."""
    cut, host = Target("host", (s.chance.randrange(1, s.job.hosts),)), Target("host", (0,))
    stopped = s.chance.choice((CONTROLLER, host))
    return (
        s.here("partition", cut),
        s.later(s.seconds(0, 1), "stop", stopped),
        s.later(s.seconds(0.2, 2), "heal", cut, "third", "first"),
        s.later(s.seconds(0.2, 2), "cont", stopped, "fourth", "second"),
    )


def _any_host(s: RunDraw) -> Target:
    return Target("host", (s.chance.randrange(s.job.hosts),))


_SOAK = frozenset({"soak"})
_ONCE = ("two hosts", "three hosts, scheduled")
_HANG, _STANDBY = frozenset({"hang"}), frozenset({"standby"})
_BY, _SEEN = ("three hosts, standing by",), ("watched",)
_FALLBACK, _MIRROR = frozenset({"fallback"}), frozenset({"mirror"})
_PLACES = ("two places",)

KINDS += (
    Kind("a rank hangs", one("hang"), weight=2, shapes=_SEEN, features=_HANG, phases=_WATCHED),
    Kind("a rank hangs with the interpreter lock", one("hang-gil"), shapes=_SEEN, features=_HANG, phases=_WATCHED),
    Kind("a rank is stopped for good", one("stop"), shapes=_SEEN, features=_HANG, phases=_WATCHED),
    Kind("kill the controller's host", _host("kill", 0), weight=3, shapes=_BY, features=_STANDBY, diverges=True),
    Kind("kill a host, then the controller", _host_then_controller, shapes=_BY, features=_STANDBY, diverges=True),
    Kind("full disk, second place", _disk("disk-full"), shapes=_PLACES, features=_FALLBACK, needs=_MOUNT),
    Kind("read-only disk, second place", _disk("disk-ro"), shapes=_PLACES, features=_FALLBACK, needs=_MOUNT),
    Kind("soak: flaps", _flaps, "unhurt", 3, shapes=_ONCE, needs=_HOSTS, features=_SOAK),
    Kind("soak: pause a host", _pause(_any_host, 0.2, 2), "unhurt", 2, shapes=_ONCE, needs=_HOSTS, features=_SOAK),
    Kind("soak: pause and cut", _stopped_while_cut, "unhurt", 2, shapes=_ONCE, needs=_HOSTS, features=_SOAK),
    Kind("soak: pause the controller", _PAUSE, "unhurt", shapes=_ONCE, needs=_HOSTS, features=_SOAK),
    Kind("kill a host, mirrored", _host("kill"), weight=2, shapes=("mirrored",), features=_MIRROR),
)
"""The kinds of runs, except those that test how ranks come back, which are in ``ttp.chaos.comebacks``."""
