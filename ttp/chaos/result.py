"""The result of a run as a line of JSON: everything that the report needs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ttp.chaos.checks import Judgement, expected
from ttp.chaos.driver import Judged
from ttp.chaos.script import Script
from ttp.chaos.ways import ways
from ttp.errors import ConfigError, ToldAs

FILE = "results.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Result(Judgement):
    """The result of one run: the judgement, and what the run was.

    Args:
        job: number of the job.
        folder: name of the job's folder.
        title: title of the kind of run.
        phase: phase of the first fault.
        step: step of the first fault.
        faults: the injected faults, in words.
        world: number of hosts and of ranks on each, such as ``1x3``.
        launcher: launcher of the job.
        expect: expected outcome; see ``ttp.chaos.vocabulary.EXPECTED``.
        missed: the faults that were not injected, with the reason.
        freezes: number of incidents, including those that were thawed.
        kept_processes: how often the survivors continued in their processes.
        ways: how the ranks came back at each restart, and the reasons; see ``ttp.chaos.ways``.
    """

    job: int
    folder: str
    title: str
    phase: str
    step: int
    faults: tuple[str, ...]
    world: str
    launcher: str
    expect: str
    missed: tuple[str, ...]
    freezes: int = 0
    kept_processes: int = 0
    ways: tuple[str, ...] = ()

    @property
    def good(self) -> bool:
        """Whether there are no findings."""
        return not self.findings


def result_of(job: int, script: Script, folder: Path, judged: Judged) -> Result:
    """Return the result of a judged run."""
    run, judgement = judged.record.run, judged.judgement
    return Result(
        job=job,
        folder=folder.name,
        title=run.title,
        phase=run.faults[0].moment,
        step=run.step,
        faults=tuple(f"{s.what} {s.who}" for s in judged.record.injections),
        world=f"{script.hosts}x{script.ranks_per_host}",
        launcher=script.launcher,
        expect=expected(judged.record),
        missed=tuple(judged.record.missed),
        freezes=len(judged.record.told("opened")),
        ways=ways(judged.record),
        kept_processes=sum(bool(seen.facts.get("again")) for seen in judged.record.told("released")),
        **dataclasses.asdict(judgement),
    )


def write(path: Path, result: Result) -> None:
    """Append one line to a file of results."""
    with path.open("a") as file:
        file.write(json.dumps(dataclasses.asdict(result)) + "\n")


def read(path: Path) -> list[Result]:
    """Read all lines of a file of results.

    Raises:
        ConfigError: the file cannot be read, or does not hold results.
    """
    with ToldAs(ConfigError, f"{path} does not hold the results of a campaign", OSError, ValueError, TypeError):
        return list(_results(path.read_text().splitlines()))


def _results(lines: Iterable[str]) -> Iterator[Result]:
    for line in lines:
        words = json.loads(line)
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in words.items()}
        yield Result(**values)
