"""``ttp chaos``: injects faults into real jobs on this machine and checks the results."""

from __future__ import annotations

import contextlib
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from ttp.chaos.vocabulary import FEATURES
from ttp.cli.output import Json, aside, count_text, print_json, say, screen, table
from ttp.errors import ConfigError, ToldAs, UsageError

if TYPE_CHECKING:
    from ttp.chaos.result import Result
    from ttp.chaos.script import Script

EXIT_FINDINGS = 1
_STYLES = {"saved": "green", "kept": "green", "unhurt": "green"}

ScriptFile = Annotated[Path | None, typer.Option("--script", help="Run this TOML file, instead of drawing runs.")]
Runs = Annotated[int, typer.Option("--runs", min=1, help="How many runs to draw.")]
Seed = Annotated[int | None, typer.Option("--seed", min=0, help="The same seed draws the same runs. Default: any.")]
Jobs = Annotated[int, typer.Option("--jobs", min=1, max=64, help="Jobs at a time.")]
Out = Annotated[Path | None, typer.Option("--out", help="Logs, scripts and results go here. Default: below runs/.")]
Report = Annotated[Path | None, typer.Option("--report", help="Write the results to this Markdown file.")]
Include = Annotated[
    str, typer.Option("--include", help=f"Also draw runs of these, separated by commas: {', '.join(FEATURES)}.")
]
Match = Annotated[str, typer.Option("--match", help="Draw only kinds of runs with this in their title.")]
Only = Annotated[int | None, typer.Option("--only", min=0, help="Run only the drawn job with this number, from 0.")]
Draw = Annotated[bool, typer.Option("--draw", help="Only write the scripts to --out, and run nothing.")]
Plain = Annotated[bool, typer.Option("--plain", help="No namespaces: this machine is the only host.")]
Keep = Annotated[bool, typer.Option("--keep", help="Keep the checkpoints of jobs without findings, too.")]


@dataclass(slots=True)
class Board:
    """Collects the results of a campaign, and shows its progress on the terminal.

    Args:
        total: number of runs.
        results: results of the finished runs.
    """

    total: int
    results: list[Result] = field(default_factory=list)
    _progress: Progress | None = None
    _task: TaskID | None = None

    @contextlib.contextmanager
    def shown(self) -> Iterator[Board]:
        """Show a progress bar on a terminal, elsewhere one line per run."""
        console = aside()
        words = (TextColumn("{task.description}"), BarColumn(40), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*words, console=console, disable=not console.is_terminal) as self._progress:
            self._task = self._progress.add_task("chaos", total=self.total)
            yield self

    def tell(self, result: Result) -> None:
        """Add the result of a finished run, and show it."""
        self.results.append(result)
        assert self._progress is not None and self._task is not None
        self._progress.update(self._task, advance=1)
        if not result.good or self._progress.disable:
            self._progress.console.print(_line(len(self.results), self.total, result), soft_wrap=True)


def chaos(
    script: ScriptFile = None,
    runs: Runs = 20,
    seed: Seed = None,
    jobs: Jobs = 1,
    out: Out = None,
    report: Report = None,
    include: Include = "",
    match: Match = "",
    only: Only = None,
    draw: Draw = False,
    plain: Plain = False,
    keep: Keep = False,
    json: Json = False,
) -> None:
    """Inject faults into real jobs on this machine and check the results: kills, stops, partitions, disk faults.

    Without --script a campaign is drawn from --seed. After every run every checkpoint is verified, the version from
    which the job goes on is compared with what its ranks had finished, and its bits with those of an unbroken run.
    Several hosts are simulated with namespaces, which needs root (or a system that lets users make namespaces); without
    them there is one host, and no disk faults. No process is left running, however the command ends.

    Exits with 0 without findings, with 1 if there are any. JSON: a list of runs with job, folder, title, phase, step,
    faults, world, launcher, expect, outcome, findings, missed, version, lost_steps, detect_ms, commit_ms, back_ms,
    freezes and kept_processes.
    """
    from ttp.chaos import world

    if draw and report is not None:
        raise UsageError("--draw runs nothing: --report would have no results")
    if not (world.inside() or draw):
        obstacle = "--plain" if plain else world.obstacle()
        if not obstacle:
            raise typer.Exit(world.enter(sys.argv[1:]))
        say(f"This machine is the only host, and no disk faults are injected: {obstacle}.", aside())
    chosen = random.randrange(10**6) if seed is None else seed
    folder = (out or Path("runs") / f"chaos-{time.strftime('%Y%m%d-%H%M%S')}").absolute()
    scripts = _scripts(script, runs, chosen, include, match, only, draw=draw)
    _prepare(folder)
    if draw:
        _write_scripts(folder, scripts)
        return
    again = _command(script, runs, chosen, include, match, jobs)
    results = _run(folder, scripts, jobs, only or 0, keep=keep, report=report, again=again)
    _tell(results, folder, json=json)
    if any(not result.good for result in results):
        raise typer.Exit(EXIT_FINDINGS)


def _scripts(
    script: Path | None, runs: int, seed: int, include: str, match: str, only: int | None, *, draw: bool
) -> list[Script]:
    from ttp.chaos import world
    from ttp.chaos.campaign import draw as drawn
    from ttp.chaos.place import missing
    from ttp.chaos.reading import read

    if script is not None:
        chosen = [read(script)]
        if chosen[0].needs and not (draw or world.inside()):
            raise ConfigError(f"{script} needs {missing(chosen[0])}: run it as root, or see the line above")
        return chosen
    offers = ("hosts", "mount") if draw or world.inside() else ()
    chosen = drawn(seed, runs, _features(include), offers, match)
    if not chosen:
        raise ConfigError(f"--match {match!r}: no kind of run has this in its title; docs/reliability.md lists them")
    if only is None:
        return chosen
    if only >= len(chosen):
        raise ConfigError(f"--only {only}: there are {len(chosen)} jobs, counted from 0")
    return [chosen[only]]


def _features(include: str) -> list[str]:
    from ttp.chaos.reading import check_known

    names = [name.strip() for name in include.split(",") if name.strip()]
    for name in names:
        check_known(name, FEATURES, "a feature that runs can be drawn for", "--include")
    return names


def _prepare(folder: Path) -> None:
    from ttp.chaos.result import FILE

    with ToldAs(ConfigError, f"cannot write to {folder}", OSError):
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / FILE).exists() or list(folder.glob("job-*")):
            raise ConfigError(f"{folder} holds another campaign: give --out another directory")


def _write_scripts(folder: Path, scripts: list[Script]) -> None:
    from ttp.chaos.script import to_toml

    for index, script in enumerate(scripts):
        (folder / f"job-{index:03d}.toml").write_text(to_toml(script))
    say(f"{count_text(len(scripts), 'script')} in {folder}")


def _run(
    folder: Path, scripts: list[Script], jobs: int, first: int, *, keep: bool, report: Path | None, again: str
) -> list[Result]:
    from ttp.chaos import report as reports
    from ttp.chaos import world
    from ttp.chaos.runner import Runner

    if world.inside():
        world.settle()
    began = time.monotonic()
    board = Board(sum(len(script.runs) for script in scripts))

    def tell(result: Result) -> None:
        board.tell(result)
        if report is not None:  # after every run: a campaign that is cut off leaves a report
            took_s = time.monotonic() - began
            reports.write(report, board.results, reports.Occasion(again, reports.machine(), took_s))

    with board.shown():
        Runner(folder, tell, keep).run(scripts, jobs, first)
    return board.results


def _command(script: Path | None, runs: int, seed: int, include: str, match: str, jobs: int) -> str:
    words = ["ttp chaos", f"--script {script}" if script else f"--runs {runs} --seed {seed}"]
    words += [f"--jobs {jobs}"] if jobs > 1 else []
    words += [f"--include {include}"] if include else []
    words += [f"--match {match!r}"] if match else []
    return " ".join(words)


def _line(number: int, total: int, result: Result) -> Text:
    times = [
        f"{name} {ms:.0f} ms" for name, ms in (("detected", result.detect_ms), ("committed", result.commit_ms)) if ms
    ]
    outcome = (result.outcome, _STYLES.get(result.outcome, "yellow") if result.good else "bold red")
    words: list[str | tuple[str, str]] = [
        f"{number}/{total}  {result.folder}  {result.title}, {result.phase}: ",
        outcome,
    ]
    words += [f" at version {result.version}" if result.version is not None else "", *(f", {t}" for t in times)]
    return Text.assemble(*words, *[(f"\n    {finding}", "red") for finding in result.findings])


def _tell(results: list[Result], folder: Path, *, json: bool) -> None:
    from ttp.chaos.report import coverage, spread

    if json:
        print_json([asdict(result) for result in results])
        return
    rows: list[list[str | Text]] = []
    for title in sorted({result.title for result in results}):
        of_kind = [result for result in results if result.title == title]
        outcomes = {result.outcome: sum(r.outcome == result.outcome for r in of_kind) for result in of_kind}
        bad = sum(not result.good for result in of_kind)
        words = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.items())
        times = [spread(getattr(r, name) for r in of_kind) for name in ("detect_ms", "commit_ms")]
        rows.append([title, words, *times, Text(str(bad or ""), "bold red")])
    columns = ("fault", "outcome", "detected, ms (median / p99 / max)", "committed, ms", "findings")
    screen().print(table(columns, rows, right=("findings",)))
    covered, coverable = coverage(results)
    found = count_text(sum(not result.good for result in results), "run")
    freezes = count_text(sum(result.freezes for result in results), "freeze")
    kept = sum(result.kept_processes for result in results)
    told = f"; in {kept} the survivors kept their processes" if kept else ""
    covering = f"{covered} of {coverable} states with a consistent checkpoint committed"
    say(f"{covering}; {freezes}{told}; {found} with findings.")
    say(f"Logs, scripts and results are in {folder}")
