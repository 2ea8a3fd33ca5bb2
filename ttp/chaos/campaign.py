"""Draw a campaign from a seed: which runs, in which jobs. The same arguments give the same scripts."""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ttp.chaos import kinds as of_saves
from ttp.chaos.comebacks import COMEBACKS
from ttp.chaos.kinds import Kind
from ttp.chaos.script import Run, Script
from ttp.core.controller.hangs import LEARNT_VERSIONS
from ttp.processor.import_list import AFTER_UPDATES

RUNS_PER_JOB = 8
STEPS_AFTER = 3
APART = 3


@dataclass(frozen=True, slots=True)
class Shape:
    """A kind of job.

    Args:
        script: the script of the job, without runs.
        weight: relative frequency among the shapes that a run can be part of.
        features: features of ``--include`` that have to be asked for.
        apart: smallest number of steps from one run to the next; the largest is one more.
    """

    script: Script
    weight: int = 1
    features: frozenset[str] = frozenset()
    apart: int = APART


_WATCHFUL = (("TTP_HANG_S", "2"), ("TTP_HEARTBEAT_S", "0.5"))
_MIRRORED = (("TTP_MIRROR", "on"),)
_KEPT = (("TTP_CONTINUE_MAX", "100"), ("TTP_CONTINUE_S", "8"), ("TTP_CONTINUITY", "keep"))
_WARM = (("TTP_CONTINUITY", "warm"),)

SHAPES = {
    "small": Shape(Script(1, 3), 3),
    "pair": Shape(Script(1, 2), 2),
    "stock": Shape(Script(1, 3, launcher="torchrun"), 2),
    "wide": Shape(Script(1, 3, width=20_000), 3),
    "two hosts": Shape(Script(2, 2), 1),
    "two hosts, scheduled": Shape(Script(2, 2, restart="scheduler"), 2),
    "three hosts, scheduled": Shape(Script(3, 1, restart="scheduler"), 1),
    "watched": Shape(Script(1, 3, step_ms=250, env=_WATCHFUL), 1, frozenset({"hang"}), LEARNT_VERSIONS + 3),
    "two places": Shape(Script(1, 3, width=20_000, fallback=True), 1, frozenset({"fallback"})),
    "three hosts, standing by": Shape(Script(3, 1, restart="scheduler"), 1, frozenset({"standby"})),
    "going on": Shape(Script(1, 3, env=_KEPT), 3, frozenset({"keep"})),
    "going on, by reading": Shape(Script(1, 3, env=(*_KEPT, ("TTP_DIGEST", "off"))), 1, frozenset({"keep"})),
    "two hosts, going on": Shape(Script(2, 2, env=_KEPT), 1, frozenset({"keep"})),
    "warm": Shape(Script(1, 3, env=_WARM), 2, frozenset({"warm"})),
    "warm, torchrun": Shape(Script(1, 3, launcher="torchrun", env=_WARM), 1, frozenset({"warm"})),
    "mirrored": Shape(Script(2, 2, restart="scheduler", env=_MIRRORED), 1, frozenset({"mirror"})),
}
"""The kinds of jobs, by name."""

KINDS: tuple[Kind, ...] = (*of_saves.KINDS, *COMEBACKS)
"""All kinds of runs."""


def draw(
    seed: int, runs: int, include: Collection[str] = (), offers: Collection[str] = (), match: str = ""
) -> list[Script]:
    """Return the scripts of a campaign.

    Args:
        seed: determines the campaign.
        runs: number of runs.
        include: features to include; see ``vocabulary.FEATURES``.
        offers: which of ``hosts`` and ``mount`` this machine provides.
        match: draw only kinds whose title contains this text.
    """
    chance = random.Random(f"chaos {seed}")
    shapes = {name: s for name, s in SHAPES.items() if s.features <= set(include) and s.script.needs <= set(offers)}
    kinds = [k for k in KINDS if k.features <= set(include) and k.needs <= set(offers) and _bearing(k, shapes)]
    kinds = [kind for kind in kinds if match in kind.title]
    if not kinds:
        return []
    by_shape: dict[str, list[Kind]] = {name: [] for name in shapes}
    for kind in _chosen(kinds, runs, chance):
        names = _bearing(kind, shapes)
        by_shape[chance.choices(names, [shapes[n].weight for n in names])[0]].append(kind)
    phases = {kind.title: itertools.cycle(chance.sample(kind.phases, len(kind.phases))) for kind in kinds}
    scripts: list[Script] = []
    for name, chosen in by_shape.items():
        for group in _jobs(chosen):
            job = replace(shapes[name].script, seed=chance.randrange(10**6))
            scripts.append(_script(job, group, phases, chance, shapes[name].apart))
    chance.shuffle(scripts)
    return scripts


def _bearing(kind: Kind, shapes: Iterable[str]) -> list[str]:
    """Return the names of the shapes whose jobs can have runs of this kind."""
    return [name for name in shapes if name in kind.shapes]


def _chosen(kinds: Sequence[Kind], runs: int, chance: random.Random) -> list[Kind]:
    """Choose a kind for each run: every kind once if there are enough runs, then in proportion to the weights."""
    pool = [kind for kind in kinds for _ in range(kind.weight)]
    first = chance.sample(kinds, min(runs, len(kinds)))
    rest: list[Kind] = []
    while len(first) + len(rest) < runs:
        rest += chance.sample(pool, len(pool))
    return [*first, *rest][:runs]


def _jobs(kinds: Sequence[Kind]) -> list[list[Kind]]:
    """Group runs into jobs. A run that ``diverges`` is the last of its job."""
    last = [kind for kind in kinds if kind.diverges]
    others = [kind for kind in kinds if not kind.diverges]
    jobs = max(len(last), -(-len(kinds) // RUNS_PER_JOB))
    groups = [others[index::jobs] for index in range(jobs)]
    for group, kind in zip(groups, last, strict=False):
        group.append(kind)
    return [group for group in groups if group]


def _script(
    job: Script, kinds: Sequence[Kind], phases: Mapping[str, Iterator[str]], chance: random.Random, apart: int
) -> Script:
    runs: list[Run] = []
    # Before the first run, ranks write the list of their imports and the template imports these modules.
    first = AFTER_UPDATES if job.forks else 0
    step = chance.randint(first, first + 3) if apart == APART else apart
    for kind in kinds:
        phase = next(phases[kind.title])
        runs.append(kind.run(job, step, phase, f"r{len(runs)}", chance))
        step += chance.randint(apart, apart + 1)
    return replace(job, runs=tuple(runs), steps=runs[-1].step + STEPS_AFTER)
