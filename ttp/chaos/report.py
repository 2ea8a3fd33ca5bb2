"""The report of a campaign, as a page of Markdown. Every number comes from its results."""

from __future__ import annotations

import os
import platform
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from ttp._version import __version__
from ttp.chaos.checks import COVERED
from ttp.chaos.result import Result

OUTCOMES = ("saved", "kept", "unhurt", "gone", "refused", "lost", "stuck")
MOMENTS = ("detect_ms", "commit_ms")

_MEANING = """\
A *run* is one incident with its checks; several runs follow one another in one job, each in the life that the one
before has left. After every run: every checkpoint is read and its digests are recomputed; the version that the job goes
on from is at least the newest that a rank which could still be read had finished, and at most the newest that anybody
had begun; after the restart and in every later step, weights, moments, schedule, random streams, BatchNorm statistics
and the loss curve of every rank have the bits of an unbroken run. After every job: `ttp verify`, its exit code, and
that no process and no file in shared memory is left behind. Where all ranks of a host are lost, their random streams
are, too (unless mirrored): weights and moments are compared then, and the job's later bits have no reference.

- **saved**: restarted from a new checkpoint, no finished step lost. **kept**: restarted, and nothing newer than what
  was on disk could be lost. **unhurt**: never restarted. **gone**: no rank was left that had anything newer than what
  was on disk. **refused**: steps were lost, and ttp said why it could not save. **lost**: steps were lost without a
  word. **stuck**: it did not get anywhere.
- **detected**: from the fault to the open incident. **committed**: from the fault to the durable checkpoint; of several
  faults from the first that a job cannot survive. Both include what the machine did meanwhile."""


@dataclass(frozen=True, slots=True)
class Occasion:
    """The campaign that the page reports.

    Args:
        command: command that repeats it.
        machine: the machine it ran on.
        took_s: its duration in seconds.
    """

    command: str
    machine: str
    took_s: float


def machine() -> str:
    """Return what this machine is, without a name."""
    memory = round(psutil.virtual_memory().total / 2**30)
    cores = len(os.sched_getaffinity(0))
    return f"{cores} cores ({platform.machine()}), {memory} GiB, Linux {platform.release().split('-')[0]}"


def page(results: Sequence[Result], occasion: Occasion) -> str:
    """Return the whole page, as Markdown."""
    parts = [
        "# Reliability",
        _summary(results, occasion),
        _MEANING,
        "## By fault",
        by_title(results),
        "## Fault, phase, outcome",
        by_phase(results),
        "## Findings",
        findings(results),
    ]
    return "\n\n".join(parts) + "\n"


def _summary(results: Sequence[Result], occasion: Occasion) -> str:
    covered, coverable = coverage(results)
    jobs = len({result.folder for result in results})
    lost = sum(result.lost_steps for result in results if result.expect == "saved")
    bad = sum(not result.good for result in results)
    share = f"{covered / coverable:.3f}" if coverable else "none drawn"
    versions = f"ttp {__version__}, Python {platform.python_version()}, torch {_torch()}, gloo"
    return f"""\
Real jobs, hurt on purpose: `{occasion.command}`. {len(results)} runs in {jobs} jobs, {occasion.took_s / 60:.0f} minutes
on {occasion.machine}; {versions}.
The same seed draws the same runs; moments differ.

| | |
|---|---|
| states in which a consistent checkpoint existed | {coverable} |
| of these committed (**coverage**) | {covered}: **{share}** |
| finished steps lost in them | {lost} |
| healthy jobs that were restarted | {_restarted(results)} of {sum(r.expect == "unhurt" for r in results)} |
| inconsistent checkpoints, wrong versions, wrong bits, left-overs | {bad} runs with findings |"""


def coverage(results: Iterable[Result]) -> tuple[int, int]:
    """Return the number of runs that had to be saved and were, and of all runs that had to be saved."""
    coverable = [result for result in results if result.expect == "saved"]
    return sum(result.outcome in COVERED for result in coverable), len(coverable)


def _restarted(results: Iterable[Result]) -> int:
    return sum(result.expect == "unhurt" and result.outcome != "unhurt" for result in results)


def by_title(results: Sequence[Result]) -> str:
    """Return a table of outcomes and times of every kind of run."""
    present = [o for o in OUTCOMES if any(result.outcome == o for result in results)]
    head = ["fault", "runs", *present, "detected, ms: median / p99 / max", "committed, ms: median / p99 / max"]
    rows = []
    for title in sorted({result.title for result in results}):
        rows.append(_row(title, [result for result in results if result.title == title], present))
    for name in sorted({manner(result) for result in results}):
        rows.append(_row(f"**{name}**", [r for r in results if manner(r) == name], present))
    return table(head, rows)


def _row(name: str, results: Sequence[Result], outcomes: Sequence[str]) -> list[str]:
    counts = Counter(result.outcome for result in results)
    times = [spread(getattr(r, moment) for r in results) for moment in MOMENTS]
    return [name, str(len(results)), *(str(counts[o] or "") for o in outcomes), *times]


def manner(result: Result) -> str:
    """Return the kind of sign that a fault gives: signs of one kind are noticed in about the same time."""
    done = {fault.split()[0] for fault in result.faults}
    if done & {"partition", "unplug"} or any(fault.startswith("kill host") for fault in result.faults):
        return "all silent hosts"
    return "all that stand still" if done & {"stop", "hang", "hang-gil"} else "all others"


def by_phase(results: Sequence[Result]) -> str:
    """Return a table of faults by phase, with outcomes: ``3 saved`` for three runs."""
    phases = sorted({result.phase for result in results}, key=_phase_order)
    rows = []
    for title in sorted({result.title for result in results}):
        cells = []
        for phase in phases:
            counts = Counter(r.outcome for r in results if r.title == title and r.phase == phase)
            cells.append(", ".join(f"{counts[o]} {o}" for o in OUTCOMES if counts[o]))
        rows.append([title, *cells])
    return table(["fault", *phases], rows)


def findings(results: Sequence[Result]) -> str:
    """Return a list of every run with findings."""
    bad = [result for result in results if not result.good]
    missed = sum(bool(result.missed) for result in results)
    lines = [f"- {r.title}, {r.phase}, `{r.folder}`: {'; '.join(r.findings)}" for r in bad] or ["None."]
    if missed:
        lines.append(
            f"\nIn {missed} runs a later fault was not done: the event that it waited for did not come, or nobody was "
            "there any more. They count as what they were without it."
        )
    return "\n".join(lines)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table as Markdown."""
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def spread(values: Iterable[float | None]) -> str:
    """Return ``median / p99 / max``; empty if there are no values."""
    known = sorted(value for value in values if value is not None)
    if not known:
        return ""
    return " / ".join(f"{known[at]:.3g}" if known[at] < 10 else f"{known[at]:.0f}" for at in _places(len(known)))


def _places(count: int) -> tuple[int, int, int]:
    """Return the indices of the median, the 99th percentile and the largest among ``count`` sorted values."""
    return count // 2, round((count - 1) * 0.99), count - 1


def _phase_order(phase: str) -> tuple[int, str]:
    from ttp.chaos.vocabulary import STEP_PHASES

    return (STEP_PHASES.index(phase) if phase in STEP_PHASES else len(STEP_PHASES), phase)


def _torch() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("torch")
    except PackageNotFoundError:
        return "unknown"


def write(path: Path, results: Sequence[Result], occasion: Occasion) -> None:
    """Write the page to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(results, occasion))
