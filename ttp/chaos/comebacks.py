"""Kinds of runs that test how ranks come back: survivors that continue in their processes, and forked ranks."""

from __future__ import annotations

from collections.abc import Callable

from ttp.chaos.kinds import (
    BYSTANDER,
    COMMITTER,
    CONTROLLER,
    INCIDENT,
    SAVER,
    Draw,
    Kind,
    RunDraw,
    alone,
    kill_all,
    kill_any_moment,
    kill_several,
    kill_then,
    one,
    ranks,
)
from ttp.chaos.script import Fault
from ttp.chaos.vocabulary import CALLED_PHASES, START_PHASES, STEP_PHASES, Target

TEMPLATE = Target("template")
_HOSTS = ("two hosts, going on",)
EVERYWHERE = (*STEP_PHASES, *CALLED_PHASES)
IN_TRAIN = ("entered", "joined", "restored")
"""Phases of a start at which a rank can carry out a fault itself."""


def _two(s: RunDraw) -> tuple[int, int]:
    """Draw two different ranks: one that dies, and one that lives."""
    one, two = s.chance.sample(range(s.job.world_size), 2)
    return one, two


def _then_at(stage: str, what: str = "kill") -> Draw:
    """Return a draw: kill a rank; at a phase of the next start, ``what`` strikes another rank or the replacement."""

    def draw(s: RunDraw) -> tuple[Fault, ...]:
        dead, other = _two(s)
        who = other if stage == "leaving" else s.chance.choice((dead, other))
        return s.here("kill", ranks(dead)), s.next_start(stage, what, ranks(who))

    return draw


def _then_somewhere(what: str, stages: tuple[str, ...] = START_PHASES) -> Draw:
    return lambda s: _then_at(s.chance.choice(stages), what)(s)


def _nobody_then_somewhere(s: RunDraw) -> tuple[Fault, ...]:
    return s.here("again", CONTROLLER), s.next_start(s.chance.choice(START_PHASES), "kill", ranks(s.rank))


def _newcomer_three_times(s: RunDraw) -> tuple[Fault, ...]:
    dead = ranks(s.rank)
    again = [s.next_start(s.chance.choice(IN_TRAIN), "kill", dead, name) for name in ("third", "fourth")]
    return s.here("kill", dead), s.next_start("seated", "kill", dead), *again


def _controller_somewhere(s: RunDraw) -> tuple[Fault, ...]:
    dead, other = _two(s)
    stage = s.chance.choice(START_PHASES)
    return s.here("kill", ranks(dead)), s.next_start(stage, "kill", CONTROLLER, seen_by=other)


def _then_at_some_event(who: Target) -> Draw:
    return lambda s: kill_then(s.chance.choice((*INCIDENT, "released")), who)(s)


def _then_soon(what: str, who: Callable[[RunDraw], Target]) -> Draw:
    """Return a draw: kill a rank; within 0.6 s, ``what`` strikes another target."""
    return lambda s: (s.here("kill", ranks(s.rank)), s.later(s.seconds(0, 0.6), what, who(s)))


def _without_template(what: str) -> Draw:
    return lambda s: (s.here(what, TEMPLATE), s.later(0.05, "kill", ranks(s.rank)))


def _template_stops_meanwhile(s: RunDraw) -> tuple[Fault, ...]:
    return s.here("kill", ranks(s.rank)), s.later(s.seconds(0, 0.3), "stop", TEMPLATE)


def _keep(
    title: str,
    faults: Draw,
    weight: int = 1,
    phases: tuple[str, ...] = EVERYWHERE,
    shapes: tuple[str, ...] = ("going on", "going on, by reading"),
    *,
    last: bool = False,
) -> Kind:
    return Kind(
        f"go on: {title}",
        faults,
        weight=weight,
        phases=phases,
        shapes=shapes,
        needs=frozenset({"hosts"} if shapes == _HOSTS else ()),
        features=frozenset({"keep"}),
        diverges=last,
    )


def _warm(title: str, faults: Draw, weight: int = 1, *, last: bool = False, expect: str = "saved") -> Kind:
    shapes, features = ("warm", "warm, torchrun"), frozenset({"warm"})
    return Kind(f"warm: {title}", faults, expect, weight, shapes=shapes, features=features, diverges=last)


COMEBACKS: tuple[Kind, ...] = (
    _keep("nobody dies", alone("again", CONTROLLER), 3),
    _keep("kill a rank", one("kill"), 11),
    _keep("kill rank 0", alone("kill", ranks(0)), 3),
    _keep("kill a rank at any moment", kill_any_moment, 4, ("data",)),
    _keep("kill several ranks", kill_several, 4),
    _keep("then the saver dies", kill_then("plan", SAVER), 2),
    _keep("then another dies during the save", kill_then("saved", BYSTANDER), 2),
    _keep("then the committer dies", kill_then("commit", COMMITTER), 2),
    *(_keep(f"another dies, {stage}", _then_at(stage), 2) for stage in START_PHASES),
    _keep("another dies soon", _then_soon("kill", lambda s: ranks(s.rank)), 3),
    _keep("nobody dies, then one does", _nobody_then_somewhere, 3),
    _keep("the replacement dies three times", _newcomer_three_times, 2),
    _keep("another is stopped", _then_somewhere("stop"), 2),
    _keep("another is stopped soon", _then_soon("stop", lambda s: ranks(s.rank))),
    _keep("another raises", _then_somewhere("raise", IN_TRAIN), 2),
    _keep("another hangs", _then_somewhere("hang", IN_TRAIN)),
    _keep("the controller dies", _controller_somewhere, 3),
    _keep("the controller dies in the incident", _then_at_some_event(CONTROLLER), 3),
    _keep("the controller dies soon", _then_soon("kill", lambda _: CONTROLLER)),
    _keep("on two hosts", one("kill"), 3, shapes=_HOSTS),
    _keep("on two hosts, another dies", _then_somewhere("kill"), 3, shapes=_HOSTS),
    _keep("no template", _without_template("kill"), last=True),
    _keep("template stopped", _without_template("stop"), last=True),
    _keep("template dies meanwhile", _then_at_some_event(TEMPLATE), last=True),
    _keep("template stops meanwhile", _template_stops_meanwhile, last=True),
    _warm("kill a rank", one("kill"), 3),
    _warm("exception in a rank", one("raise")),
    _warm("kill several ranks", kill_several),
    _warm("kill all ranks at once", kill_all, expect="any"),
    _warm("one dies at its start", _then_somewhere("kill", IN_TRAIN), 2),
    _warm("no template", _without_template("kill"), last=True),
    _warm("template stopped", _without_template("stop"), last=True),
    _warm("template dies meanwhile", _then_at_some_event(TEMPLATE), last=True),
    _warm("template stops meanwhile", _template_stops_meanwhile, last=True),
)
"""The kinds that are drawn with ``--include keep`` and ``--include warm``."""
