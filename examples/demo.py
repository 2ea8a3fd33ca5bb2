"""Trains twice, kills a rank with SIGKILL in the second run, and compares both runs: no step lost, no bit different.

    make demo                           trains on the digits; kills a random rank at a random moment
    RANK=0 STEP=30 make demo            kills rank 0 during step 30
    SEED=7 make demo                    repeats the random choice with this seed
    make demo ARGS="--example gpt"      trains a small GPT, sharded and replicated; flags after `--` go to its script

Exits with 0 only if no step was lost and both runs ended with the same weights, optimizer state and losses, bit for
bit.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from job import Ended, Event, Job, Output
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

from ttp.cli.incident_reader import Line
from ttp.cli.timeline import style_of, words

HERE = Path(__file__).resolve().parent
EXAMPLES = {"digits": HERE / "digits" / "train.py", "gpt": HERE / "gpt" / "train_gpt.py"}
PLAIN_EVERY = 20
"""Steps between two printed lines if the output is not a terminal."""

COMPARED = {"weights": "final weights", "optimizer": "optimizer state", "losses": "loss curve"}

_STEP = re.compile(r"step (\d+)/\d+  loss (\S+)")


@dataclass
class Kill:
    """The kill of a rank, and the rescue that followed. Times are on this host's monotonic clock, in seconds."""

    rank: int
    step: int
    fraction: float  # of a step's duration: the rank is killed so long after the step before has ended
    pid: int = 0
    at_s: float | None = None
    reached_s: dict[str, float] = field(default_factory=dict)
    newest: int = 0  # newest version that a rank is known to have finished
    restored: int | None = None

    def note(self, event: Event) -> None:
        """Note when the rescue has reached each stage."""
        if self.at_s is None:
            return
        reached = {"opened": "detect", "plan": "freeze", "saved": "save", "committed": "commit"}.get(event.kind)
        if reached in ("detect", "freeze"):  # when there is a plan, all ranks that it needs are frozen
            self.reached_s.setdefault(reached, event.monotonic_s)
        elif reached:
            self.reached_s[reached] = event.monotonic_s
        if event.kind == "answer":
            self.newest = max(self.newest, int(event.facts["version"]))
        if event.kind == "restore" and self.restored is None:
            self.restored = int(event.facts["version"])

    @property
    def lost_steps(self) -> int | None:
        """Number of finished steps that the restarted job lacked; None: it did not restart."""
        return None if self.restored is None else self.newest - self.restored


class Screen:
    """Prints progress: a live bar on a terminal, plain lines otherwise."""

    def __init__(self) -> None:
        self.console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
        self.bar = Progress(disable=True)
        self._name, self._steps = "", 0
        self._task = TaskID(0)

    def new_bar(self, name: str, steps: int) -> Progress:
        """Return the bar of one run, to be used as a context manager."""
        words_and_bar = (TextColumn("{task.description}"), BarColumn(40), MofNCompleteColumn())
        loss = TextColumn("{task.fields[loss]}")
        self.bar = Progress(*words_and_bar, loss, console=self.console, disable=not self.console.is_terminal)
        self._task = self.bar.add_task(name, total=steps, loss="starting")
        self._name, self._steps = name, steps
        return self.bar

    def say(self, text: str | Text = "") -> None:
        self.console.print(text if isinstance(text, Text) else Text(text), soft_wrap=True)

    def step(self, step: int, loss: str) -> None:
        self.bar.update(self._task, completed=step, loss=f"loss {loss}")
        if self.bar.disable and (step % PLAIN_EVERY == 0 or step == self._steps):
            self.say(f"{self._name}  step {step}/{self._steps}  loss {loss}")

    def event(self, event: Event, since_s: float) -> None:
        line = Line(event.kind, (event.monotonic_s - since_s) * 1e3, 0.0, event.monotonic_s, event.facts)
        moment = Text(f"  {line.at_ms:+9.1f} ms  ", "dim")
        self.say(Text.assemble(moment, (f"{line.kind:<13}", style_of(line.kind)), words(line)))


def run(screen: Screen, name: str, folder: Path, options: argparse.Namespace, kill: Kill | None) -> dict[str, str]:
    """Run the training once, with the kill that ``kill`` describes (None: no kill).

    Returns:
        The digests of final weights, optimizer state and losses, by the names in ``COMPARED``.
    """
    script = EXAMPLES[options.example]
    flags = ["--steps", str(options.steps), "--seed", str(options.seed), "--step-ms", str(options.step_ms)]
    flags += options.flags
    run_flags = ["--nproc-per-node", str(options.ranks), "--max-restarts", "3"]
    arguments = [*run_flags, str(script), *flags, "--save-dir", str(folder / "checkpoints")]
    screen.say(Text(f"$ ttp run {' '.join(run_flags)} {script.name} {' '.join(flags)}", "bold"))
    job = Job(folder, arguments)
    with screen.new_bar(name, options.steps):
        try:
            code = _follow(job, screen, kill, options.limit_s)
        finally:
            job.stop()
    if code != 0:
        raise SystemExit(f"the job ended with exit code {code}. The last lines of {job.log}:\n\n{tail(job.log)}")
    return dict(json.loads((folder / "checkpoints" / "result.json").read_text()))


def _follow(job: Job, screen: Screen, kill: Kill | None, limit_s: float) -> int:
    pids: dict[int, int] = {}
    last_s: float | None = None
    for news in job.follow(limit_s):
        match news:
            case Ended(code):
                return code
            case Event("formed"):
                pids = job.pids()
            case Event():
                _show_event(news, screen, kill)
            case Output(text) if found := _STEP.match(text):
                step, now_s = int(found[1]), time.monotonic()
                step_s = 0.05 if last_s is None else now_s - last_s
                last_s = now_s
                screen.step(step, found[2])
                if kill is not None and kill.at_s is None and step >= kill.step - 1 and kill.rank in pids:
                    _strike(kill, pids[kill.rank], step, step_s, screen)
            case Output(text):
                screen.say(f"  {text}")
    raise AssertionError("the last news is Ended")


def _strike(kill: Kill, pid: int, step: int, step_s: float, screen: Screen) -> None:
    time.sleep(kill.fraction * step_s)
    kill.pid, kill.newest = pid, step
    kill.at_s = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    screen.say(Text(f"  kill -9 {pid}: rank {kill.rank}, {kill.fraction:.0%} through step {step + 1}", "bold red"))


def _show_event(event: Event, screen: Screen, kill: Kill | None) -> None:
    if kill is None or kill.at_s is None:
        return
    kill.note(event)
    if event.incident:
        screen.event(event, kill.at_s)
    elif event.kind == "restore":
        screen.say(Text(f"  started again from version {event.facts['version']}", "bold green"))


# ---------------------------------------------------------------------------------------------------- the end


def report(screen: Screen, kill: Kill, unbroken: dict[str, str], broken: dict[str, str]) -> bool:
    """Print a table of the rescue and the comparison. Return True if no step was lost and both runs are equal."""
    same = {name: unbroken[name] == broken[name] for name in COMPARED}
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_header=False, title="kill -9 and its result")
    table.add_row("killed", f"rank {kill.rank} (pid {kill.pid}) during step {kill.newest + 1}")
    for name, title in (
        ("detect", "detected"),
        ("freeze", "frozen, planned"),
        ("save", "saved"),
        ("commit", "committed"),
    ):
        reached_s = kill.reached_s.get(name)
        took = "never" if reached_s is None or kill.at_s is None else f"{(reached_s - kill.at_s) * 1e3:8.1f} ms after"
        table.add_row(title, took)
    table.add_row("restored", f"version {kill.restored}; the newest version that a rank had finished: {kill.newest}")
    table.add_row("lost steps", Text(str(kill.lost_steps), "bold green" if kill.lost_steps == 0 else "bold red"))
    for name, title in COMPARED.items():
        verdict = Text(f"identical  {broken[name][:16]}", "bold green")
        differs = Text(f"DIFFERENT  {unbroken[name][:16]} unbroken, {broken[name][:16]} broken", "bold red")
        table.add_row(title, verdict if same[name] else differs)
    screen.console.print(table)
    return all(same.values()) and kill.lost_steps == 0


def tail(path: Path, lines: int = 40) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])


def command() -> str:
    """Return the command that calls the ``ttp`` of this Python."""
    script = Path(sys.executable).with_name("ttp")
    return os.path.relpath(script) if script.exists() else f"{sys.executable} -m ttp"


def choose(options: argparse.Namespace) -> Kill:
    """Return the rank to kill and the moment, from the options or at random. The same seed gives the same choice."""
    chance = random.Random(options.kill_seed)
    rank, step = chance.randrange(options.ranks), chance.randint(options.steps // 4, options.steps * 2 // 3)
    return Kill(rank if options.rank is None else options.rank, options.step or step, chance.random())


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    def from_env(name: str) -> int | None:
        return int(os.environ[name]) if os.environ.get(name) else None

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--example", choices=EXAMPLES, default="digits", help="what to train (default %(default)s)")
    parser.add_argument("flags", nargs="*", metavar="-- FLAGS", help="flags for the training script")
    parser.add_argument("--steps", type=int, default=80, help="optimizer steps of each run (default %(default)s)")
    parser.add_argument("--step-ms", type=float, default=60, help="sleep after each step, in ms (default %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the training (default %(default)s)")
    parser.add_argument("--ranks", type=int, default=4, help="ranks of each run (default %(default)s)")
    parser.add_argument("--rank", type=int, default=from_env("RANK"), help="rank to kill (default: RANK)")
    parser.add_argument("--step", type=int, default=from_env("STEP"), help="step to kill it in (default: STEP)")
    parser.add_argument("--kill-seed", type=int, default=from_env("SEED"), help="seed of both (default: SEED)")
    parser.add_argument("--limit-s", type=float, default=240, help="seconds that a run may take (default %(default)s)")
    parser.add_argument("--folder", type=Path, default=None, help="folder for logs and checkpoints (default: in runs/)")
    options = parser.parse_args(argv)
    if options.rank is not None and not 0 <= options.rank < options.ranks:
        parser.error(f"RANK={options.rank}: there are {options.ranks} ranks, counted from 0; give one of them")
    if options.step is not None and not 2 <= options.step <= options.steps:
        parser.error(f"STEP={options.step}: give a step from 2 to {options.steps}")
    options.kill_seed = random.randrange(10**6) if options.kill_seed is None else options.kill_seed
    options.folder = (options.folder or Path("runs") / f"demo-{time.strftime('%Y%m%d-%H%M%S')}").absolute()
    return options


def main() -> int:
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # gRPC would log the end of each controller
    options, screen = parse(), Screen()
    kill = choose(options)
    screen.say(f"Two runs of {options.ranks} ranks, {options.steps} steps. Logs and checkpoints: {options.folder}\n")
    try:
        unbroken = run(screen, "unbroken", options.folder / "unbroken", options, None)
        screen.say()
        broken = run(screen, "broken  ", options.folder / "broken", options, kill)
    except TimeoutError as problem:
        raise SystemExit(str(problem)) from None
    screen.say()
    good = report(screen, kill, unbroken, broken)
    checkpoints = os.path.relpath(options.folder / "broken" / "checkpoints")
    screen.say(f"To look closer:     {command()} incidents {checkpoints} --last")
    screen.say(f"                    {command()} verify {checkpoints}")
    again = "" if options.example == "digits" else f' ARGS="--example {options.example}"'
    screen.say(f"To repeat this:     RANK={kill.rank} STEP={kill.step} SEED={options.kill_seed} make demo{again}")
    if not good:
        screen.say(Text("The broken run lost a step, or differs from the unbroken run.", "bold red"))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
