"""The report of a campaign, as a page of Markdown. Every number is computed from the campaign's results."""

from __future__ import annotations

import os
import platform
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

from ttp._version import __version__
from ttp.chaos.checks import COVERED
from ttp.chaos.result import Result
from ttp.chaos.vocabulary import STEP_PHASES

OUTCOMES = ("saved", "kept", "unhurt", "gone", "refused", "lost", "stuck")
"""Outcomes of runs, in the order of the tables; ``_MEANING`` explains them."""
MOMENTS = ("detect_ms", "commit_ms")

_MEANING = """\
A *run* is one incident with its checks. Several runs follow one another in one job; each begins with the ranks that the
run before left. After every run every checkpoint is read and its digests are recomputed. The job has to resume from a
version that is at least the newest one finished by a rank whose state could still be read, and at most the newest one
that any rank had begun. After the restart and in every later step, weights, moments, schedule, random streams,
BatchNorm statistics and the loss curve of every rank must have the bits of an unbroken run. Checks after every job:
`ttp verify`, the exit code, and that no process and no file in shared memory is left. When all ranks of a host are
lost, their random streams are lost too, unless they are mirrored: then only weights and moments are compared at the
restart, and no bits in later steps.

- **saved**: restarted from a new checkpoint, no finished step lost. **kept**: restarted from the checkpoint on disk; no
  newer step existed. **unhurt**: never restarted. **gone**: restarted from the checkpoint on disk, because no rank with
  a newer step was left. **refused**: steps were lost, and ttp reported why it could not save. **lost**: steps were
  lost, and ttp did not report it. **stuck**: the run did not come to its end.
- **detected**: time from the fault to the opened incident. **committed**: time from the fault to the durable
  checkpoint. With several faults, both start at the first one that ends a launch. Both include the effects of other
  work on the machine."""


@dataclass(frozen=True, slots=True)
class Occasion:
    """How the reported campaign was run.

    Args:
        command: the command that repeats the campaign.
        machine: description of the machine.
        took_s: duration in seconds.
    """

    command: str
    machine: str
    took_s: float


def machine() -> str:
    """Return a description of this machine without its name: cores, memory, kernel."""
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
    healthy = [result for result in results if result.expect == "unhurt"]
    bad = sum(not result.good for result in results)
    share = f"{covered / coverable:.3f}" if coverable else "none drawn"
    versions = f"ttp {__version__}, Python {platform.python_version()}, torch {_torch()}, gloo"
    return f"""\
Real jobs in which faults were injected: `{occasion.command}`.
{len(results)} runs in {jobs} jobs, {occasion.took_s / 60:.0f} minutes on {occasion.machine}; {versions}.
The same seed draws the same runs; the exact times of the faults differ.

| | |
|---|---|
| states in which a consistent checkpoint existed | {coverable} |
| of these committed (**coverage**) | {covered}: **{share}** |
| finished steps lost in them | {lost} |
| healthy jobs that were restarted | {sum(result.outcome != "unhurt" for result in healthy)} of {len(healthy)} |
| inconsistent checkpoints, wrong versions, wrong bits, left-overs | {bad} runs with findings |"""


def coverage(results: Iterable[Result]) -> tuple[int, int]:
    """Return two numbers: the runs that had to be saved and were, and all runs that had to be saved."""
    coverable = [result for result in results if result.expect == "saved"]
    return sum(result.outcome in COVERED for result in coverable), len(coverable)


def by_title(results: Sequence[Result]) -> str:
    """Return a Markdown table with the outcomes and times of every kind of run."""
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
    """Return the group of faults that a run belongs to; faults of a group take about the same time to detect."""
    done = {fault.split()[0] for fault in result.faults}
    if done & {"partition", "unplug"} or any(fault.startswith("kill host") for fault in result.faults):
        return "all silent hosts"
    return "all that stand still" if done & {"stop", "hang", "hang-gil"} else "all others"


def by_phase(results: Sequence[Result]) -> str:
    """Return a Markdown table of the outcomes by kind of run and phase, such as ``3 saved`` for three runs."""
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
            f"\nIn {missed} runs a later fault was not injected: the event that it waited for did not come, or its "
            "target was gone. These runs are judged without that fault."
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
    return (STEP_PHASES.index(phase) if phase in STEP_PHASES else len(STEP_PHASES), phase)


def _torch() -> str:
    try:
        return version("torch")
    except PackageNotFoundError:
        return "unknown"


def write(path: Path, results: Sequence[Result], occasion: Occasion) -> None:
    """Write the page to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(results, occasion))
