"""Reads the faults of a simulated job from the command line.

``kill:3@0.2``         rank 3 is killed 0.2 s after the launch
``kill:1%@0.2``        so is one rank in a hundred, drawn by the seed; ``*`` is every rank
``stop:2@0.2+1.5``     rank 2 is stopped for 1.5 s; ``+ever`` is for good
``kill:0@in_update#2`` rank 0 is killed when it is in mid-update for the second time
``raise:1@forward#3``  the third forward pass of rank 1 raises
``partition:h1@0.25``  host h1 is cut off, as long as the seed says
``controller@0.3``     the controller is killed
``kill=2``             two kills, drawn by the seed

What is left out is drawn by the seed. Several are separated by commas; they all happen in the first incarnation.
"""

from __future__ import annotations

import difflib
import random
import re
from collections.abc import Iterable, Sequence

from ttp.core.layout import Rank
from ttp.errors import UsageError
from ttp.testing.scenario import KINDS, LASTS, POINTS, Fault, random_fault

_ITEM = re.compile(r"(?P<kind>[a-z_]+)(?::(?P<target>[^@+=]+))?(?:@(?P<when>[^@+=]+))?(?:\+(?P<lasts>[^@+=]+))?")
_COUNT = re.compile(r"(?P<kind>[a-z_]+)=(?P<count>\d+)")
_RAISES = ("forward", "update", "refused")
_OF_NOBODY = ("controller", "controller_restart", "controller_twice", "controller_stop", "split", "sigterm", "save")
_ALL_THE_TIME = ("write", "commit", "slow")


def parse(text: str, seed: int, hosts: Sequence[str]) -> tuple[Fault, ...]:
    """The faults that ``text`` names.

    Args:
        text: see the module; empty or ``none``: no faults.
        seed: of what chance decides.
        hosts: name of the host of each rank.

    Raises:
        UsageError: with what would be right.
    """
    rng = random.Random(f"faults {seed}")
    items = [item.strip() for item in text.split(",") if item.strip()]
    if items == ["none"]:
        return ()
    return tuple(fault for item in items for fault in _faults(item, rng, hosts))


def _faults(item: str, rng: random.Random, hosts: Sequence[str]) -> Iterable[Fault]:
    counted = _COUNT.fullmatch(item)
    if counted is not None:
        kind = _kind(counted["kind"], item)
        return [random_fault(rng, len(hosts), kind) for _ in range(int(counted["count"]))]
    match = _ITEM.fullmatch(item)
    if match is None:
        raise UsageError(f"{item!r} is no fault: write KIND:RANK@SECONDS+SECONDS, such as kill:3@0.2, or KIND=COUNT")
    kind = _kind(match["kind"], item)
    ranks = _ranks(kind, match["target"], item, rng, hosts)
    drawn = random_fault(rng, len(hosts), kind)
    at, point = _when(kind, match["when"], item, drawn)
    lasts_s = drawn.lasts_s if match["lasts"] is None else _lasts_s(kind, match["lasts"], item)
    return [Fault(kind, at, rank, point, lasts_s) for rank in ranks]


def _kind(name: str, item: str) -> str:
    if name not in KINDS:
        close = difflib.get_close_matches(name, KINDS, n=1)
        hint = f"did you mean {close[0]}?" if close else f"known kinds: {', '.join(KINDS)}"
        raise UsageError(f"{item!r}: there is no fault {name!r}; {hint}")
    return name


def _ranks(kind: str, target: str | None, item: str, rng: random.Random, hosts: Sequence[str]) -> list[Rank]:
    world = len(hosts)
    if target is None:
        return [Rank(rng.randrange(world))]
    if kind in _OF_NOBODY:
        raise UsageError(f"{item!r}: {kind} hits nobody in particular; leave {target!r} out")
    if target == "*":
        return [Rank(r) for r in range(world)]
    share = re.fullmatch(r"(\d+(?:\.\d+)?)%", target)
    if share is not None and float(share[1]) <= 100:
        return [Rank(r) for r in sorted(rng.sample(range(world), max(1, round(world * float(share[1]) / 100))))]
    if target in hosts:
        of_host = [Rank(r) for r in range(world) if hosts[r] == target]
        return of_host[:1] if kind in ("host", "power", "partition", "silence", "relay") else of_host
    if target.isdecimal() and int(target) < world:
        return [Rank(int(target))]
    raise UsageError(
        f"{item!r}: {target!r} is no rank from 0 to {world - 1}, no host from {hosts[0]} to {hosts[-1]}, no share like "
        "1% and not *"
    )


def _when(kind: str, when: str | None, item: str, drawn: Fault) -> tuple[float, str]:
    if when is None:
        return drawn.at, drawn.point
    if kind in _ALL_THE_TIME:
        raise UsageError(f"{item!r}: {kind} holds all the time; leave {when!r} out")
    name, _, times = when.partition("#")
    point = name.replace("_", " ")
    known = _RAISES if kind == "raise" else POINTS
    match = next((p for p in known if p.lower() == point.lower()), None)
    if match is not None and (times == "" or times.isdecimal()):
        return float(times or 1), match
    try:
        seconds = float(when)
    except ValueError:
        seconds = -1.0
    if kind == "raise" or not 0 <= seconds < 1e6:
        points = ", ".join(p.replace(" ", "_") for p in known)
        number = "" if kind == "raise" else "no number of seconds and "
        raise UsageError(f"{item!r}: {when!r} is {number}none of the points {points}")
    return seconds, ""


def _lasts_s(kind: str, lasts: str, item: str) -> float:
    if kind not in LASTS:
        raise UsageError(f"{item!r}: {kind} does not last; leave +{lasts} out. What lasts: {', '.join(LASTS)}")
    if lasts == "ever":
        return float("inf")
    try:
        seconds = float(lasts)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < 1e6:
        raise UsageError(f"{item!r}: {lasts!r} is no number of seconds; for good is +ever")
    return seconds
