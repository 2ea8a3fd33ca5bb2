"""Simulated jobs and their faults, drawn from a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from ttp.core.layout import Layout, Rank, Shard
from ttp.core.stripes import AUTO, WHOLE

POINTS = (
    "in restore",
    "in data wait",
    "in forward",
    "in backward",
    "in barrier",
    "before update",
    "parked",
    "update begun",
    "in update",
    "update ended",
    "in scheduler",
    "before Frozen",
    "after Frozen",
    "before save",
    "in save",
    "after save",
    "before Saved",
    "after Saved",
    "before commit",
    "in commit",
    "after rename",
    "before Committed",
    "after Committed",
    "before Goodbye",
    "after Goodbye",
    "before return",
    "after Hello",
)
"""Points of its step or of a rescue at which a rank can be hit, besides any moment."""
TRANSFER_POINTS = ("verified", "said", "sending", "receiving", "received")
"""Further points, for jobs with transfers: where ranks that go on get their state."""

KINDS = {
    "kill": "SIGKILL of a rank",
    "host": "the rank's host dies: every rank on it, its shared memory, a controller that runs there",
    "power": "the same without a last word: its streams stay, and nothing comes on them until they are given up",
    "stop": "SIGSTOP of a rank, SIGCONT after LASTS",
    "silent": "a rank does nothing for LASTS, and its connections stay alive (something holds the interpreter lock)",
    "hang": "the training thread of a rank does not move for LASTS",
    "relay": "SIGKILL of the relay on the rank's host, in a job that has relays; its ranks connect by themselves",
    "flap": "the stream of a rank breaks; it cannot connect for LASTS",
    "partition": "nobody on the rank's host reaches a controller elsewhere for LASTS, nor the other way round",
    "silence": "the same, but no stream breaks: nothing passes on it for LASTS, or until it is given up",
    "split": "a second controller is alive: for LASTS some ranks reach only that one, the others only the first",
    "controller": "SIGKILL of the controller; a rank that misses it starts another one",
    "controller_restart": "the same, and it is started again at once",
    "controller_twice": "the same, its successor dies too, and that is started again at once",
    "controller_stop": "SIGSTOP of the controller, SIGCONT after LASTS: it may find another one in its place",
    "raise": "the training code of a rank raises; POINT is forward, update or refused (all leave with 64)",
    "sigterm": "SIGTERM to every rank",
    "save": "somebody asks for a checkpoint",
    "write": "the disk of a rank refuses to write pieces for LASTS after the first one",
    "commit": "the disk of a rank refuses to commit for LASTS after the first time",
    "slow": "each file takes a rank LASTS longer",
    "transfer": "each message of a state that the rank sends or receives when it goes on takes LASTS longer",
}
"""Kinds of faults."""

LARGE = 64
"""Ranks from which on a world has hosts of eight ranks."""

NEVER = float("inf")
LASTS: dict[str, tuple[float, ...]] = {
    "flap": (0.0, 0.05, 0.2, 1.0),
    "partition": (0.05, 0.2, 1.0, 3.0),
    "silence": (0.2, 0.7, 1.2, 2.0, 3.5),
    "split": (0.3, 2.0, 10.0),
    "stop": (0.05, 0.3, 1.5, 4.0, NEVER),
    "silent": (0.05, 0.3, 2.0, NEVER),
    "hang": (0.05, 0.3, 2.0, NEVER),
    "controller_stop": (0.3, 1.5, 5.0),
    "slow": (0.05, 0.5, 3.0, NEVER),
    "transfer": (0.05, 2.0, NEVER),
    "write": (0.01, 1.0, NEVER),
    "commit": (0.01, 1.0, NEVER),
}
"""Seconds that a fault lasts, for kinds that end; one is drawn."""

AT_POINTS = ("kill", "kill", "kill", "flap", "flap", "controller", "stop", "silent", "hang", "host", "partition",
             "power", "silence", "controller_twice", "controller_stop")  # fmt: skip
"""Kinds of faults that strike when a rank is at a point; repeated kinds are likelier."""
ANY_TIME = (
    "kill", "kill", "kill", "flap", "flap", "controller", "raise", "raise", "sigterm", "save", "save", "write", "write",
    "commit", "commit", "host", "power", "silence", "stop", "silent", "hang", "partition", "split",
    "controller_restart", "controller_stop", "slow",
)  # fmt: skip
"""Kinds of faults that strike at a random time; repeated kinds are likelier."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault.

    Args:
        kind: one of ``KINDS``.
        at: virtual time in seconds after the launch; with a point: the number of the visit there, from 1.
        rank: the rank that it hits, or whose host it hits.
        point: one of ``POINTS``, where it strikes; for ``raise``: ``forward``, ``update`` or ``refused``.
        lasts_s: seconds that it lasts.
    """

    kind: str
    at: float
    rank: Rank
    point: str = ""
    lasts_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Scenario:
    """A job, and the faults of each of its incarnations; later incarnations have none.

    Args:
        seed: of everything that chance decides in the run.
        layout: replica groups.
        hosts: name of the host of each rank; the job's address is on that of rank 0.
        steps: updates until the training is over.
        delay_s: delay of a message.
        repeats: share of the messages that arrive twice.
        faults: of each incarnation.
        undo: whether ranks keep the state before their last update.
        fallback: whether there is a second directory for checkpoints.
        mirror: whether rank-local pages are kept on another host too.
        watched: whether hangs are looked for.
        buddy: whether second copies are kept.
        stripes: into how many parts shards are cut, as in ``TTP_STRIPES``.
        uneven: the rank that deals the words of its shards out in another way than its replicas; None for no rank.
        relays: whether ranks speak to controllers through the relay of their host.
        keep: whether survivors of a death may go on in their processes, and launchers can start the dead alone.
        shadow: whether checkpoints may be held in memory first; all ranks are on one host.
        transfers: whether ranks that go on keep their state or get it from each other; else they read the checkpoint.
    """

    seed: int
    layout: Layout
    hosts: tuple[str, ...]
    steps: int
    delay_s: float
    repeats: float
    faults: tuple[tuple[Fault, ...], ...] = ()
    undo: bool = False
    fallback: bool = False
    mirror: bool = False
    watched: bool = False
    buddy: bool = False
    stripes: int = WHOLE
    uneven: Rank | None = None
    relays: bool = False
    keep: bool = False
    transfers: bool = False
    shadow: bool = False


def grid(shards: int, replicas: int) -> Layout:
    """Return the layout of ``shards * replicas`` ranks in which rank r holds shard ``r % shards``."""
    world = shards * replicas
    groups = {Shard(f"s{s}"): tuple(Rank(r) for r in range(s, world, shards)) for s in range(shards)}
    return Layout(world, groups)


def mixed(layout: Layout) -> Layout:
    """Return the layout with two more shards, one that every rank holds and one with two holders, as dense and expert
    groups have.
    """
    everybody = tuple(Rank(r) for r in range(layout.world_size))
    return Layout(layout.world_size, {**layout.groups, Shard("dense"): everybody, Shard("expert"): everybody[:2]})


def random_scenario(seed: int, shards: int | None = None, replicas: int | None = None) -> Scenario:
    """Draw a small job and up to three faults in each of its first two incarnations.

    Args:
        seed: everything follows from it.
        shards: number of distinct shards; drawn if not given.
        replicas: ranks that hold each shard; drawn if not given.
    """
    rng = random.Random(f"scenario {seed}")
    shards = shards or rng.choice((1, 1, 1, 2, 2, 3))
    replicas = replicas or rng.choice((1, 2, 2, 2, 3, 3, 4) if shards == 1 else (1, 2, 2, 3))
    layout = grid(shards, replicas)
    if 1 < layout.world_size < LARGE and shards > 1 and rng.random() < 0.3:
        layout = mixed(layout)
    world = layout.world_size
    per_host = 8 if world >= LARGE else rng.choice((1, 2, world))
    watched = rng.random() < 0.03
    steps = rng.randint(16, 20) if watched else rng.randint(2, 5)
    first = _faults(rng, world, rng.choice((0, 1, 1, 2, 2, 3, 4)))
    second = _faults(rng, world, rng.choice((0, 0, 0, 1, 2)))
    scenario = Scenario(
        seed=seed,
        layout=layout,
        hosts=tuple(f"h{r // per_host}" for r in range(world)),
        steps=steps,
        delay_s=rng.choice((0.0002, 0.001, 0.005)),
        repeats=rng.choice((0.0, 0.0, 0.05, 0.2)),
        faults=(first, second),
        undo=rng.random() < 0.3,
        fallback=rng.random() < 0.2,
        mirror=rng.random() < 0.15,
        watched=watched,
        stripes=rng.choice((WHOLE, AUTO, AUTO, 2, 3)),
        uneven=Rank(rng.randrange(world)) if rng.random() < 0.1 else None,
        buddy=bool(layout.unreplicated()) and rng.random() < 0.5,
        keep=seed % 3 == 2,
    )
    return with_relays(scenario) if rng.random() < 0.15 else scenario


def with_relays(scenario: Scenario) -> Scenario:
    """Return the same job with relays, one of which may die at any point."""
    rng = random.Random(f"relays {scenario.seed}")
    first, *others = scenario.faults
    if rng.random() < 0.6:
        rank = Rank(rng.randrange(scenario.layout.world_size))
        if rng.random() < 0.5:
            first = (*first, Fault("relay", rng.randint(1, 3), rank, rng.choice(POINTS)))
        else:
            first = (*first, random_fault(rng, scenario.layout.world_size, "relay"))
    return replace(scenario, relays=True, faults=(first, *others))


def with_transfers(scenario: Scenario) -> Scenario:
    """Return the same job with ranks that go on after deaths, and faults while they get their state."""
    rng, world = random.Random(f"transfers {scenario.seed}"), scenario.layout.world_size
    first, *others = scenario.faults
    if rng.random() < 0.8:  # else the drawn faults stay, after which perhaps no rank may go on
        kills = range(rng.choice((1, 1, 1, 2)))
        first = tuple(
            Fault("kill", rng.randint(2, 4), Rank(rng.randrange(world)), rng.choice(POINTS[1:11])) for _ in kills
        )
    second = [_at_transfer(rng, world) for _ in range(rng.choice((0, 1, 1, 1, 2)))]
    if rng.random() < 0.3:
        second.append(_fault(rng, world))
    third = (_at_transfer(rng, world), *others[0]) if others and rng.random() < 0.3 else ()
    faults, steps = (first, tuple(second), third), rng.randint(5, 8)
    return replace(scenario, keep=True, relays=False, transfers=True, faults=faults, steps=max(scenario.steps, steps))


def with_shadow(scenario: Scenario) -> Scenario:
    """Return the same job, of one host, with ranks that go on from what is held in its memory, which is not lost."""
    world = scenario.layout.world_size
    scenario = with_transfers(replace(scenario, hosts=("h0",) * world))
    faults = tuple(tuple(f for f in at if f.kind not in ("host", "power", "split")) for at in scenario.faults)
    return replace(scenario, hosts=("h0",) * world, faults=faults, shadow=True)


def _at_transfer(rng: random.Random, world: int) -> Fault:
    rank, kind = Rank(rng.randrange(world)), rng.choice((*AT_POINTS, "transfer", "transfer", "transfer"))
    if kind == "transfer":
        return Fault(kind, 0.0, rank, lasts_s=_lasts_s(rng, kind))
    point = rng.choice((*TRANSFER_POINTS, *POINTS[1:11]))
    times = rng.randint(1, 4) if point in ("sending", "receiving") else 1
    return Fault(kind, times, rank, point, _lasts_s(rng, kind))


def _faults(rng: random.Random, world: int, count: int) -> tuple[Fault, ...]:
    faults = [_fault(rng, world) for _ in range(count)]
    if rng.random() < 0.2 and world > 1:  # all but one at once
        at, spared = rng.random() * 0.2, rng.randrange(world)
        faults += [Fault("kill", at + rng.random() * 0.003, Rank(r)) for r in range(world) if r != spared]
    return tuple(faults)


def _fault(rng: random.Random, world: int) -> Fault:
    rank = Rank(rng.randrange(world))
    if rng.random() < 0.4:
        early, times = rng.random() < 0.6, rng.randint(1, 3)
        kind = rng.choice(AT_POINTS)
        return Fault(kind, 1 if early else times, rank, rng.choice(POINTS), _lasts_s(rng, kind))
    return random_fault(rng, world, rng.choice(ANY_TIME))


def random_fault(rng: random.Random, world: int, kind: str) -> Fault:
    """Draw a fault of this kind, at a random time on a random rank."""
    rank, at = Rank(rng.randrange(world)), 0.03 + rng.random() * 0.25
    if kind == "raise":
        return Fault(kind, rng.randint(1, 4), rank, rng.choice(("forward", "update")))
    return Fault(kind, at, rank, lasts_s=_lasts_s(rng, kind))


def _lasts_s(rng: random.Random, kind: str) -> float:
    return rng.choice(LASTS[kind]) if kind in LASTS else 0.0
