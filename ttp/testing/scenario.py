"""What a simulated job looks like and what goes wrong in it; everything follows from the seed."""

from __future__ import annotations

import random
from dataclasses import dataclass

from ttp.core.layout import Layout, Rank, Shard

POINTS = (
    "in restore",
    "in data wait",
    "in forward",
    "in backward",
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
"""Where a rank can be killed, beside any moment."""

KINDS = (
    ("kill", "flap", "controller", "raise", "sigterm", "save", "write", "commit")
    + ("kill_at",) * 3
    + ("flap_at",) * 2
    + ("controller_at",)
)


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong.

    Args:
        kind: ``kill`` a rank, ``flap`` its stream, kill the ``controller``; the same with ``_at``: when ``rank`` is
            at ``point``; ``raise`` in the training code; ``sigterm`` to all; ``save`` on request; ``write`` and
            ``commit`` fail on this rank.
        at: virtual time in seconds after the launch; with a point: the how-maniest time there.
        rank: whom it hits.
        point: one of ``POINTS``; for ``raise`` ``forward`` or ``update``.
        lasts_s: for a flap: how long the rank cannot connect.
    """

    kind: str
    at: float
    rank: Rank
    point: str = ""
    lasts_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Scenario:
    """A job, and the faults of each of its incarnations; later ones run without."""

    seed: int
    layout: Layout
    hosts: tuple[str, ...]
    steps: int
    delay_s: float
    repeats: float
    faults: tuple[tuple[Fault, ...], ...] = ()


def grid(shards: int, replicas: int) -> Layout:
    """``shards * replicas`` ranks; rank r holds shard ``r % shards``."""
    world = shards * replicas
    groups = {Shard(f"s{s}"): tuple(Rank(r) for r in range(s, world, shards)) for s in range(shards)}
    return Layout(world, groups)


def mixed(layout: Layout) -> Layout:
    """The same with a shard that every rank holds, and one that has two holders: dense and expert groups differ."""
    everybody = tuple(Rank(r) for r in range(layout.world_size))
    return Layout(layout.world_size, {**layout.groups, Shard("dense"): everybody, Shard("expert"): everybody[:2]})


def random_scenario(seed: int, shards: int | None = None, replicas: int | None = None) -> Scenario:
    """A small job and up to three faults in each of its first two incarnations."""
    rng = random.Random(f"scenario {seed}")
    shards = shards or rng.choice((1, 1, 1, 2, 2, 3))
    replicas = replicas or rng.choice((1, 2, 2, 2, 3, 3, 4) if shards == 1 else (1, 2, 2, 3))
    layout = grid(shards, replicas)
    if shards > 1 and rng.random() < 0.3:
        layout = mixed(layout)
    world = layout.world_size
    per_host = rng.choice((1, 2, world))
    steps = rng.randint(2, 5)
    first = _faults(rng, world, rng.choice((0, 1, 1, 2, 2, 3, 4)))
    second = _faults(rng, world, rng.choice((0, 0, 0, 1, 2)))
    return Scenario(
        seed=seed,
        layout=layout,
        hosts=tuple(f"h{r // per_host}" for r in range(world)),
        steps=steps,
        delay_s=rng.choice((0.0002, 0.001, 0.005)),
        repeats=rng.choice((0.0, 0.0, 0.05, 0.2)),
        faults=(first, second),
    )


def _faults(rng: random.Random, world: int, count: int) -> tuple[Fault, ...]:
    faults = [_fault(rng, world, rng.choice(KINDS)) for _ in range(count)]
    if rng.random() < 0.2 and world > 1:  # all but one at once
        at, spared = rng.random() * 0.2, rng.randrange(world)
        faults += [Fault("kill", at + rng.random() * 0.003, Rank(r)) for r in range(world) if r != spared]
    return tuple(faults)


def _fault(rng: random.Random, world: int, kind: str) -> Fault:
    rank, at = Rank(rng.randrange(world)), 0.03 + rng.random() * 0.25
    lasts_s = rng.choice((0.0, 0.05, 0.2, 1.0)) if kind.startswith("flap") else 0.0
    if kind.endswith("_at"):
        early, times = rng.random() < 0.6, rng.randint(1, 3)
        return Fault(kind, 1 if early else times, rank, rng.choice(POINTS), lasts_s)
    if kind == "raise":
        return Fault(kind, rng.randint(1, 4), rank, rng.choice(("forward", "update")))
    return Fault(kind, at, rank, lasts_s=lasts_s)
