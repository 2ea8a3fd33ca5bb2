"""A chaos script: one job, and the faults to inject into it. ``ttp.chaos.reading`` parses scripts from TOML.

A fault has a target (``who``), a kind (``what``) and a time, which is one of: ``step`` and ``phase``; ``phase`` alone,
such as ``joined`` or ``restored``, at the next start; ``event``, when the controller sends it; ``after`` another fault.
Each can have ``seconds`` of delay. A fault with a new ``step`` begins a *run*: one incident with its checks. The faults
that follow belong to the same run, up to the next one with another step.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any

from ttp.chaos.vocabulary import FAULT_WORDS, START_PHASES, Target
from ttp.config import Config


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault to inject into the job; see the module.

    Args:
        name: name, for ``after`` and for the report.
        what: kind of the fault, a word of ``FAULT_WORDS``.
        who: the target.
        step: the step, counted from 0; None if the fault is not bound to a step.
        phase: one of ``STEP_PHASES``, ``CALLED_PHASES`` or ``START_PHASES``; empty if not bound to a phase.
        seen_by: if the target is not a set of ranks, the rank whose arrival at the phase counts; None for rank 0.
        event: an event of the controller; empty if the fault is not bound to an event.
        after: name of the fault that this one follows; empty if it follows none.
        seconds: delay in seconds. Ranks that reached the phase do not wait for it.
    """

    name: str
    what: str
    who: Target
    step: int | None = None
    phase: str = ""
    seen_by: int | None = None
    event: str = ""
    after: str = ""
    seconds: float = 0.0

    @property
    def watchers(self) -> tuple[int, ...]:
        """The ranks that have to reach the phase before the fault is injected."""
        if self.who.kind == "ranks":
            return self.who.numbers
        return (self.seen_by or 0,)

    @property
    def moment(self) -> str:
        """The time of the fault in a word or two, for tables."""
        if self.event:
            return f"at {self.event}"
        if self.after:
            return f"after {self.after}"
        return "any" if self.seconds else self.phase


@dataclass(frozen=True, slots=True)
class Run:
    """One incident with its checks.

    Args:
        title: title of the kind of run, for the report.
        faults: the faults, in their order.
        expect: the expected outcome, one of ``vocabulary.EXPECTED``.
    """

    title: str
    faults: tuple[Fault, ...]
    expect: str

    @property
    def step(self) -> int:
        """The step before which all ranks are held until the run before is over."""
        assert self.faults[0].step is not None
        return self.faults[0].step


@dataclass(frozen=True, slots=True)
class Script:
    """A job and its runs.

    Args:
        hosts: number of hosts; several hosts have an address each.
        ranks_per_host: number of ranks on each host.
        steps: number of steps of the training.
        launcher: ``ttp`` (run) or ``torchrun``.
        restart: what restarts the job, one of ``RESTARTS``.
        step_ms: milliseconds of sleep after each step.
        width: width of the model's wide layer; a checkpoint takes ``place.BYTES_PER_WIDTH`` for each unit.
        fallback: whether the job has a second directory to save to.
        seed: seed for targets that are ``random``.
        env: ``TTP_*`` settings of the job, as pairs.
        runs: the runs, by ascending steps.
    """

    hosts: int = 1
    ranks_per_host: int = 3
    steps: int = 12
    launcher: str = "ttp"
    restart: str = "agent"
    step_ms: int = 0
    width: int = 32
    fallback: bool = False
    seed: int = 0
    env: tuple[tuple[str, str], ...] = ()
    runs: tuple[Run, ...] = field(default=())

    @property
    def world_size(self) -> int:
        """Number of ranks of all hosts."""
        return self.hosts * self.ranks_per_host

    @property
    def faults(self) -> tuple[Fault, ...]:
        """The faults of all runs."""
        return tuple(fault for run in self.runs for fault in run.faults)

    @property
    def needs(self) -> frozenset[str]:
        """Which of ``hosts`` and ``mount`` the machine has to provide."""
        wanted = {FAULT_WORDS[fault.what].needs for fault in self.faults} | {"hosts" if self.hosts > 1 else ""}
        return frozenset(wanted - {""})

    @property
    def forks(self) -> bool:
        """Whether the job tests how ranks come back (``TTP_CONTINUITY`` is set): runs then wait for the templates."""
        return dict(self.env).get("TTP_CONTINUITY", "off") != "off"

    @property
    def mirrored(self) -> bool:
        """Whether rank-local state is also kept on another host (``TTP_MIRROR``)."""
        return Config.from_env(dict(self.env)).mirror

    def host_of(self, rank: int) -> int:
        """Return the host that a rank runs on."""
        return rank // self.ranks_per_host

    def ranks_of(self, host: int) -> tuple[int, ...]:
        """Return the ranks of a host."""
        return tuple(range(host * self.ranks_per_host, (host + 1) * self.ranks_per_host))

    def only(self, runs: tuple[Run, ...]) -> Script:
        """Return the same job with only these runs."""
        return replace(self, runs=runs)


def settled(fault: Fault, seed: int, index: int, world_size: int) -> Fault:
    """Return ``fault`` with a target that is ``random`` replaced by a rank; the same seed gives the same rank."""
    if fault.who.kind != "random":
        return fault
    return replace(fault, who=Target("ranks", (random.Random(f"{seed}/{index}").randrange(world_size),)))


def to_toml(script: Script) -> str:
    """Return the script as TOML, which ``read`` accepts."""
    keys = ("hosts", "ranks_per_host", "steps", "launcher", "restart", "step_ms", "width", "fallback", "seed")
    blocks = ["\n".join(f"{key} = {_value(getattr(script, key))}" for key in keys)]
    if script.env:
        blocks.append("\n".join(["[env]", *(f"{name} = {_value(value)}" for name, value in script.env)]))
    for run in script.runs:
        for index, fault in enumerate(run.faults):
            head = {"run": run.title, "expect": run.expect} if index == 0 else {}
            blocks.append("\n".join(["[[fault]]", *(f"{k} = {_value(v)}" for k, v in (head | _said(fault)).items())]))
    return "\n\n".join(blocks) + "\n"


def _said(fault: Fault) -> dict[str, Any]:
    told: dict[str, Any] = {"name": fault.name}
    for key in ("step", "phase", "seen_by", "event", "after", "seconds"):
        value = getattr(fault, key)
        if value not in (None, "", 0.0) or (key in ("step", "seen_by") and value == 0):
            told[key] = value
    return told | {"who": str(fault.who), "what": fault.what}


def _value(value: Any) -> str:
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return f'"{escaped}"'
    return str(value).lower() if isinstance(value, bool) else repr(value)


def usual_outcome(faults: tuple[Fault, ...], ranks: int) -> str:
    """Return the outcome that a run is expected to have if its script does not say so."""
    done = {fault.what for fault in faults}
    if {"disk-full", "disk-ro"} & done:
        return "any"
    fatal = [f for f in faults if f.what in _FATAL and f.who.kind not in ("controller", "disk")]
    if not fatal:
        return "any" if {"partition", "unplug", "hang", "hang-gil"} & done else "unhurt"
    dead = {n for f in fatal if f.who.kind == "ranks" and f.what != "raise" for n in f.who.numbers}
    everybody = len(dead) >= ranks or any(f.who.kind == "all" and f.what not in ("raise", "term") for f in fatal)
    elsewhere = any(f.who.kind == "host" for f in fatal) or any(f.phase in START_PHASES for f in faults)
    return "any" if everybody or elsewhere else "saved"


_FATAL = ("kill", "segv", "term", "raise", "exit", "report")
