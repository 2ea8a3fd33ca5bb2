"""The description of simulated jobs and their faults, and how both are drawn from a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from ttp.core.layout import Layout, Rank, Shard
from ttp.core.stripes import AUTO, WHOLE

POINTS = (
    "in restore", "in data wait", "in forward", "in backward", "in barrier", "before update", "parked", "update begun",
    "in update", "update ended", "in scheduler", "before Frozen", "after Frozen", "before save", "in save",
    "after save", "before Saved", "after Saved", "before commit", "in commit", "after rename", "before Committed",
    "after Committed", "before Goodbye", "after Goodbye", "before return", "after Hello",
)  # fmt: skip
"""Named points of a training step or of a rescue at which a fault can strike a rank."""
TRANSFER_POINTS = ("verified", "said", "sending", "receiving", "received")
"""Further points, in jobs with transfers: while ranks that continue in their processes receive their state."""

KINDS = {
    "kill": "SIGKILL of a rank",
    "host": "the rank's host dies with every rank on it, its shared memory, and a controller that runs there",
    "power": "the rank's host loses power: as host, but its streams stay open and silent until a peer gives them up",
    "stop": "SIGSTOP of a rank, SIGCONT after LASTS",
    "silent": "a rank does nothing for LASTS while its connections stay alive (a thread holds the interpreter lock)",
    "hang": "the training thread of a rank stands still for LASTS",
    "leave": "a rank that stands at the closed gate leaves it by an exception of a signal handler; else nothing",
    "relay": "SIGKILL of the relay on the rank's host, in a job with relays; its ranks then connect by themselves",
    "flap": "the stream of a rank breaks, and the rank cannot connect for LASTS",
    "partition": "processes on the rank's host cannot reach those of other hosts for LASTS, and the other way round",
    "silence": "as partition, but no stream breaks: streams are silent for LASTS, or until a peer gives them up",
    "split": "a second controller is alive: for LASTS some ranks reach only that one, the others only the first",
    "controller": "SIGKILL of the controller; a rank that misses it starts another one",
    "controller_restart": "SIGKILL of the controller, which is restarted at once",
    "controller_twice": "SIGKILL of the controller and of its successor, whose successor is started at once",
    "controller_stop": "SIGSTOP of the controller, SIGCONT after LASTS; another one may lead by then",
    "raise": "the training code of a rank raises; POINT is forward, update or refused (all ranks exit with 64)",
    "sigterm": "SIGTERM to every rank",
    "save": "an operator asks for a checkpoint",
    "write": "the disk of a rank refuses to write pieces for LASTS after the first write",
    "commit": "the disk of a rank refuses to commit for LASTS after the first commit",
    "sync": "as commit, but the checkpoint exists by then: what fails is the sync after the rename",
    "slow": "each file takes a rank LASTS longer",
    "transfer": "each message of state that the rank sends or receives to continue in its process takes LASTS longer",
}
"""The kinds of faults and what they do."""

LARGE = 64
"""World size from which on every host has eight ranks."""

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
    "sync": (0.01, 1.0, NEVER),
}
"""Possible durations in seconds, for the kinds of faults that have one."""

AT_POINTS = ("kill", "kill", "kill", "flap", "flap", "controller", "stop", "silent", "hang", "host", "partition",
             "power", "silence", "controller_twice", "controller_stop")  # fmt: skip
"""Kinds of faults to draw for a named point; a kind that is listed more often is likelier."""
ANY_TIME = (
    "kill", "kill", "kill", "flap", "flap", "controller", "raise", "raise", "sigterm", "save", "save", "write", "write",
    "commit", "sync", "host", "power", "silence", "stop", "silent", "hang", "partition", "split",
    "controller_restart", "controller_stop", "slow",
)  # fmt: skip
"""Kinds of faults to draw for a random time; a kind that is listed more often is likelier."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault.

    Args:
        kind: one of ``KINDS``.
        at: virtual time in seconds after the launch; with a point, which visit of that point, from 1.
        rank: the rank that the fault strikes, or whose host it strikes.
        point: where the fault strikes, one of ``POINTS`` or ``TRANSFER_POINTS``; for ``raise``, ``forward``,
            ``update`` or ``refused``.
        lasts_s: duration in seconds.
    """

    kind: str
    at: float
    rank: Rank
    point: str = ""
    lasts_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Scenario:
    """A simulated job, and the faults of each of its incarnations.

    Args:
        seed: seed of all random choices in the run.
        layout: replica groups.
        hosts: name of the host of each rank; the job's address is on that of rank 0.
        steps: updates until the training is over.
        delay_s: largest usual delay of a message in seconds; see ``network.Stream``.
        repeats: share of the messages that arrive twice.
        faults: the faults of each incarnation; later incarnations have none.
        undo: whether ranks keep the state before their last update.
        fallback: whether there is a second directory for checkpoints.
        mirror: whether rank-local pages are kept on another host too.
        watched: whether the controller looks for hangs.
        buddy: whether shards that only one rank holds have a second copy on another host.
        stripes: number of parts that shards are cut into, as ``TTP_STRIPES``.
        uneven: a rank that divides the words of its shards differently from its replicas; None for no such rank.
        relays: whether ranks speak to controllers through the relay of their host.
        keep: whether survivors of a death may continue in their processes while launchers start only the dead again.
        transfers: whether ranks that continue keep their state or get it from each other, instead of reading the
            checkpoint.
        shadow: whether checkpoints may be held in memory before they are on the storage; all ranks are on one host.
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
    """Return the layout with two more shards, one held by every rank and one held by two, as dense and expert
    parameters of a mixture-of-experts model are.
    """
    everybody = tuple(Rank(r) for r in range(layout.world_size))
    return Layout(layout.world_size, {**layout.groups, Shard("dense"): everybody, Shard("expert"): everybody[:2]})


def random_scenario(seed: int, shards: int | None = None, replicas: int | None = None) -> Scenario:
    """Draw a small job and up to three faults in each of its first two incarnations.

    Args:
        seed: determines the whole scenario.
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
    """Return the same job with relays; often one of them dies."""
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
    """Return the same job with ranks that continue in their processes after deaths, and faults during transfers."""
    rng, world = random.Random(f"transfers {scenario.seed}"), scenario.layout.world_size
    first, *others = scenario.faults
    if rng.random() < 0.8:  # else the drawn faults stay, after which perhaps no rank may continue
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
    """Return the same job on one host whose ranks continue from checkpoints held in its memory.

    Faults in which that memory would be lost, or the host divided, are left out.
    """
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
    """Draw a fault of kind ``kind`` for a random rank of ``world``, at a random time."""
    rank, at = Rank(rng.randrange(world)), 0.03 + rng.random() * 0.25
    if kind == "raise":
        return Fault(kind, rng.randint(1, 4), rank, rng.choice(("forward", "update")))
    return Fault(kind, at, rank, lasts_s=_lasts_s(rng, kind))


def _lasts_s(rng: random.Random, kind: str) -> float:
    return rng.choice(LASTS[kind]) if kind in LASTS else 0.0
