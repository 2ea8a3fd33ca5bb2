"""A chaos script: one job, and which faults it gets when. Read from TOML, checked, and written as TOML.

A fault says when, ``who`` and ``what``. When is one of: ``step`` and ``phase``; ``phase`` alone, such as ``joined`` or
``restored``, at the next start; ``event``, when the controller sends it; ``after`` another fault. Each can have
``seconds`` of delay. A fault with a ``step`` of its own begins a *run*: one incident with its checks. The faults that
follow it belong to the same run, up to the next one with another step.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any

from ttp.chaos.vocabulary import FAULT_WORDS, START_PHASES, Target
from ttp.config import Config


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault that is injected into the job; see the module.

    Args:
        name: for ``after``, and for the report.
        what: a word of ``FAULT_WORDS``.
        who: the target.
        step: counted from 0; None: not bound to a step.
        phase: one of ``STEP_PHASES`` or ``START_PHASES``; empty: not bound to one.
        seen_by: the rank whose arrival at the phase counts, where the target is no rank; None: the lowest one.
        event: an event of the controller; empty: not bound to an event.
        after: name of the fault that this one follows; empty: none.
        seconds: delay. The rank that reached the phase does not wait for it.
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
        """The ranks that have to be at the phase."""
        if self.who.kind == "ranks":
            return self.who.numbers
        return (self.seen_by or 0,)

    @property
    def moment(self) -> str:
        """The moment of the fault, in a word or two, for tables."""
        if self.event:
            return f"at {self.event}"
        if self.after:
            return f"after {self.after}"
        return "any" if self.seconds else self.phase


@dataclass(frozen=True, slots=True)
class Run:
    """One incident with its checks.

    Args:
        title: the kind of run, for the report.
        faults: in the order in which they are armed.
        expect: one of ``OUTCOMES``.
    """

    title: str
    faults: tuple[Fault, ...]
    expect: str

    @property
    def step(self) -> int:
        """The step before which the job is held until the run before is over."""
        assert self.faults[0].step is not None
        return self.faults[0].step


@dataclass(frozen=True, slots=True)
class Script:
    """A job and its runs.

    Args:
        hosts: number of hosts, each with an address of its own if there are several.
        ranks_per_host: number of ranks on each host.
        steps: number of steps of the training.
        launcher: ``ttp`` (run) or ``torchrun``.
        restart: what starts the job again: ``agent`` (in place) or ``scheduler``.
        step_ms: milliseconds of sleep after each step.
        width: width of the model's wide layer; weights and moments take about ``0.6 kB * width``.
        fallback: whether the job has a second directory to save to.
        seed: for targets that are ``random``.
        env: ``TTP_*`` settings of the job, as pairs.
        runs: by ascending steps.
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
        """Which of ``hosts`` and ``mount`` this machine has to offer."""
        wanted = {FAULT_WORDS[fault.what].needs for fault in self.faults} | {"hosts" if self.hosts > 1 else ""}
        return frozenset(wanted - {""})

    @property
    def forks(self) -> bool:
        """True if the job is about how ranks come back: then a process to fork them from is waited for."""
        return dict(self.env).get("TTP_CONTINUITY", "off") != "off"

    @property
    def mirrored(self) -> bool:
        """True if rank-local state is kept on another host, too."""
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
    """Return ``fault`` with a random target drawn; the same seed draws the same."""
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
    """Return the default expectation of a run: ``saved`` if a rank is left to save, and so on."""
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
