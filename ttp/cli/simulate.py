"""``ttp simulate``: simulates whole jobs with faults in virtual time, and checks them."""

from __future__ import annotations

import hashlib
import shlex
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ttp.cli.output import Json, aside, count_text, duration_text, print_json, say
from ttp.errors import UsageError

if TYPE_CHECKING:
    from ttp.testing.campaign import Wish
    from ttp.testing.simulation import Result

RANKS_MAX = 100_000
BROKEN_SHOWN = 20
"""Number of broken runs that are printed; JSON has all of them."""

Ranks = Annotated[int | None, typer.Option("--ranks", min=1, help="World size. Default: drawn by the seed, small.")]
Shards = Annotated[int | None, typer.Option("--shards", min=1, help="Distinct pieces of state; divides the ranks.")]
Replicas = Annotated[int | None, typer.Option("--replicas", min=1, help="Ranks that hold each piece.")]
Hosts = Annotated[int | None, typer.Option("--hosts", min=1, help="Machines; ranks are spread evenly.")]
Steps = Annotated[int | None, typer.Option("--steps", min=1, max=10_000, help="Updates until the training is over.")]
Seed = Annotated[int, typer.Option("--seed", min=0, help="First seed; everything that chance decides follows from it.")]
Runs = Annotated[int, typer.Option("--runs", min=1, help="Number of seeds, from the first one on.")]
Jobs = Annotated[int, typer.Option("--jobs", min=1, help="Number of processes that run the simulations.")]
Faults = Annotated[str | None, typer.Option("--faults", help="What goes wrong, see above. Default: drawn by the seed.")]
Relays = Annotated[bool, typer.Option("--relays", help="Every job has relays. Default: the seed decides.")]
Transfers = Annotated[bool, typer.Option("--transfers", help="Ranks go on and send each other their state.")]
Trace = Annotated[bool, typer.Option("--trace", help="Print everything that happens; for one run.")]


def simulate(
    ranks: Ranks = None,
    shards: Shards = None,
    replicas: Replicas = None,
    hosts: Hosts = None,
    steps: Steps = None,
    seed: Seed = 0,
    runs: Runs = 1,
    jobs: Jobs = 1,
    faults: Faults = None,
    relays: Relays = False,
    transfers: Transfers = False,
    trace: Trace = False,
    json: Json = False,
) -> None:
    """Play whole training jobs in virtual time: the real protocol around a toy trainer, with faults and restarts.

    After every decision the simulator checks that what is saved is whole, of one version, and the newest possible, and
    that nothing hangs; at the end, that the job has the same bits as one without faults. If a run violates this, the
    command prints how to repeat it, and exits with 1. The same seed and options give the same run, event by event.

    Faults, separated by commas: kill:3@0.2 (rank 3, 0.2 s after the launch), kill:1%@0.2 (one rank in a hundred),
    kill:0@in_update#2 (in its second update), stop:2@0.2+1.5 (for 1.5 s; +ever: for good), partition:h1@0.25 (a host),
    controller@0.3, kill=2 (two of them, drawn by the seed), none. Kinds: kill, host, power, stop, silent, hang, relay,
    flap, partition, silence, split, controller, controller_restart, controller_twice, controller_stop, raise, sigterm,
    save, write, commit, sync, slow, transfer (only with --transfers).

    JSON keys: seed, runs, broken (list: seed, text, command), incarnations, checkpoints, exits (number of processes by
    exit code), events, virtual_s (seconds played), elapsed_s, digest (of all events: equal runs have equal digests).
    """
    from ttp.testing.campaign import Wish

    if trace and runs > 1:
        raise UsageError("simulate: --trace prints one run: leave --runs out, and give the --seed of the run")
    if relays and transfers:
        raise UsageError("simulate: ranks behind relays do not go on: leave --relays or --transfers out")
    wish = Wish(*_grid(ranks, shards, replicas), hosts, steps, faults, relays, transfers)
    wish.scenario(seed)  # raises for wrong options before anything is played
    tally = Tally(wish, seed, runs)
    began = time.monotonic()
    for result in _played(wish, range(seed, seed + runs), jobs, trace):
        tally.add(result)
        if result.trace:
            say(result.trace.rstrip("\n"))
    elapsed_s = time.monotonic() - began
    if json:
        print_json(tally.facts(elapsed_s))
    else:
        tally.tell(elapsed_s)
    if tally.broken:
        raise typer.Exit(1)


def _grid(ranks: int | None, shards: int | None, replicas: int | None) -> tuple[int | None, int | None]:
    """Return the number of shards and of replicas; None: not given, and so drawn by the seed."""
    if ranks is not None:
        if shards is None:
            shards = 1 if replicas is None else ranks // replicas
        replicas = ranks // shards if replicas is None else replicas
        if shards * replicas != ranks:
            raise UsageError(f"simulate: {ranks} ranks cannot hold {shards} shards with {replicas} replicas each")
    if (shards or 1) * (replicas or 1) > RANKS_MAX:
        raise UsageError(f"simulate: at most {RANKS_MAX} ranks can be played")
    return shards, replicas


def _played(wish: Wish, seeds: range, jobs: int, trace: bool) -> Iterator[Result]:
    from ttp.testing.campaign import play, play_many

    if len(seeds) == 1:
        yield play(wish, seeds[0], keep_trace=trace)
        return
    console = aside()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("runs", total=len(seeds))
        broken = 0
        for result in play_many(wish, seeds, jobs):
            broken += bool(result.problem)
            bar.update(task, advance=1, description=f"runs, {broken} broken" if broken else "runs")
            yield result


@dataclass(slots=True)
class Tally:
    """Counts over all runs.

    Args:
        wish: options of the runs.
        seed: the first seed.
        runs: the number of seeds.
    """

    wish: Wish
    seed: int
    runs: int
    broken: list[Result] = field(default_factory=list)
    incarnations: int = 0
    checkpoints: int = 0
    events: int = 0
    virtual_s: float = 0.0
    exits: Counter[int | None] = field(default_factory=Counter)
    last: Result | None = None
    _hash: Any = field(default_factory=hashlib.sha256)

    def add(self, result: Result) -> None:
        """Add the result of one run."""
        if result.problem:
            self.broken.append(result)
        self.incarnations += len(result.exits)
        self.checkpoints += len(result.saved)
        self.events += result.events
        self.virtual_s += result.virtual_s
        for codes in result.exits:
            self.exits.update(codes)
        self._hash.update(result.digest.encode())
        self.last = result

    @property
    def digest(self) -> str:
        """Digest of all traces: equal if the same events happened."""
        return self.last.digest if self.runs == 1 and self.last is not None else str(self._hash.hexdigest())

    def command(self, seed: int) -> str:
        """Return the command that repeats the run of one seed and prints its trace."""
        words = ["ttp", "simulate", "--seed", str(seed)]
        for name in ("shards", "replicas", "hosts", "steps", "faults"):
            if (value := getattr(self.wish, name)) is not None:
                words += [f"--{name}", str(value)]
        flags = [f"--{name}" for name in ("relays", "transfers") if getattr(self.wish, name)]
        return shlex.join([*words, *flags, "--trace"])

    def facts(self, elapsed_s: float) -> dict[str, Any]:
        """Return what ``ttp simulate --json`` prints."""
        return {
            "seed": self.seed,
            "runs": self.runs,
            "broken": [{"seed": o.seed, "text": o.problem, "command": self.command(o.seed)} for o in self.broken],
            "incarnations": self.incarnations,
            "checkpoints": self.checkpoints,
            "exits": {
                "killed" if code is None else str(code): count for code, count in sorted(self.exits.items(), key=str)
            },
            "events": self.events,
            "virtual_s": round(self.virtual_s, 6),
            "elapsed_s": round(elapsed_s, 3),
            "digest": self.digest,
        }

    def tell(self, elapsed_s: float) -> None:
        """Print the result for people."""
        for result in self.broken[:BROKEN_SHOWN]:
            say(f"BROKEN  {result.problem}")
            say(f"        {self.command(result.seed)}")
        if len(self.broken) > BROKEN_SHOWN:
            say(f"        and {len(self.broken) - BROKEN_SHOWN} more")
        if self.runs == 1 and self.last is not None:
            for number, codes in enumerate(self.last.exits):
                counted = sorted(Counter(codes).items(), key=str)
                ended = ", ".join(f"{count} {_ended(code)}" for code, count in counted)
                say(f"incarnation {number}: {ended}")
        made = f"{count_text(self.incarnations, 'incarnation')}, {count_text(self.checkpoints, 'checkpoint')}"
        say(
            f"{count_text(self.runs, 'run')}, {len(self.broken)} broken; {made}, {self.events} events; "
            f"{duration_text(self.virtual_s)} played in {duration_text(elapsed_s)}; trace {self.digest[:16]}"
        )


def _ended(code: int | None) -> str:
    return {None: "killed", 0: "trained to the end", 75: "saved (75)", 70: "not saved (70)"}.get(
        code, f"ended with {code}"
    )
