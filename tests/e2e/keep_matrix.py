"""Twenty random kills for each way in which a model can be wrapped, under ``--continuity keep``; compares bits.

``python -m tests.e2e.keep_matrix [ROW ...] [--kills N] [--seed N]``; without arguments all rows. Each kill hits a
random rank at a random point of a step. Printed: how often the other ranks kept their processes, how often they stayed
in their loops, why not, the time until all had made a new step, and whether the bits are those of the unbroken run.
"""

from __future__ import annotations

import argparse
import math
import random
import re
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from tests.e2e import shards
from tests.e2e.forked import ForkedJob
from tests.e2e.harness import JOB, Job
from tests.e2e.test_faults import PHASES

STEP_JOB, SHARDED_JOB = (JOB.with_name(name) for name in ("step_job.py", "sharded_job.py"))
LEAVE = {"JOB_LEAVE": "1"}
ROWS: dict[str, tuple[Path, dict[str, str]]] = {
    "plain": (STEP_JOB, {"JOB_KIND": "bare", **LEAVE}),
    "plain, outside of train()": (STEP_JOB, {"JOB_KIND": "bare", "JOB_OUTSIDE": "1", **LEAVE}),
    "plain, one_step": (STEP_JOB, {"JOB_KIND": "bare"}),
    "DDP, no_sync": (STEP_JOB, {"JOB_KIND": "plain", **LEAVE}),
    "DDP, no_sync, all read": (STEP_JOB, {"JOB_KIND": "plain", "TTP_DIGEST": "off", **LEAVE}),
    "DDP, no_sync, outside of train()": (STEP_JOB, {"JOB_KIND": "plain", "JOB_OUTSIDE": "1", **LEAVE}),
    "DDP, no_sync, one_step": (STEP_JOB, {"JOB_KIND": "plain"}),
    "DDP, unused parameters": (STEP_JOB, {"JOB_KIND": "unused", **LEAVE}),
    "DDP, unused parameters, one_step": (STEP_JOB, {"JOB_KIND": "unused"}),
    "DDP, static graph": (STEP_JOB, {"JOB_KIND": "static", **LEAVE}),
    "DDP, communication hook": (STEP_JOB, {"JOB_KIND": "hook", **LEAVE}),
    "DDP, compiled": (STEP_JOB, {"JOB_KIND": "compiled", **LEAVE}),
    "HSDP 2x2": (SHARDED_JOB, {"JOB_KIND": "hsdp"}),
    "FSDP2, a copy of each shard": (SHARDED_JOB, {"JOB_KIND": "fsdp", "JOB_BUDDY": "1", "TTP_BUDDY_EVERY": "1"}),
    "TP2 x DP2": (SHARDED_JOB, {"JOB_KIND": "tp"}),
    "PP2 x DP2": (SHARDED_JOB, {"JOB_KIND": "pp"}),
    "ReplicatedOptimizer": (SHARDED_JOB, {"JOB_KIND": "replicated"}),
}
RANKS, APART, LIMIT_S = 4, 3, 1200.0


def main() -> int:
    """Print one line for each finished row, and problems to stderr. Returns the number of rows with problems."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", nargs="*", choices=[*ROWS, []], metavar="ROW")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=16)
    given = parser.parse_args()
    print("| wrapper | kills | kept | in their loops | next step, s: median / p99 / worst | bits |")
    print("|---|---|---|---|---|---|")
    wrong = 0
    with tempfile.TemporaryDirectory() as scratch:
        for number, name in enumerate(given.rows or ROWS):
            cells, problems = row(Path(scratch) / str(number), name, given.kills, random.Random(given.seed))
            print(f"| {name} | {given.kills} | {' | '.join(cells)} |", flush=True)
            print(*problems, sep="\n", end="\n" * bool(problems), file=sys.stderr, flush=True)
            wrong += bool(problems)
    return wrong


def row(directory: Path, name: str, kills: int, chance: random.Random) -> tuple[list[str], list[str]]:
    """Return the cells of one row of the table, and the problems found."""
    script, env = ROWS[name]
    faults = list(drawn(script, env["JOB_KIND"], kills, chance))
    steps = faults[-1]["step"] + APART
    job = Job(directory / "job", RANKS, steps, max_restarts=kills, faults=faults, script=script, env=dict(env))
    job.flags, job.env["TTP_CONTINUE_MAX"] = ["--standalone", "--continuity", "keep"], str(kills)
    try:
        code = job.run(LIMIT_S)
    finally:
        job.stop()
    log = job.log.read_text()
    events = [event for incident in job.incidents() for event in incident]
    released = [event for event in events if event["kind"] == "released"]
    whys = Counter(event["why_not_again"] for event in released if event.get("why_not_again"))
    whys.update(re.findall(r"do not go on in their processes: (.*)", log))
    whys.update(re.findall(r"its loop is left: (?:rank \d+: )?(.*)", log) if "JOB_LEAVE" not in env else ())
    stayed = len(set(re.findall(r"its loop was not left: update (\d+)", log)))
    kept = sum(bool(event.get("again")) for event in released)
    same = code == 0 and bits_are_equal(job, directory / "unbroken")
    took = sorted(back_after(job, log))
    times = (
        " / ".join(f"{t:.2f}" for t in (statistics.median(took), took[int(len(took) * 0.99)], took[-1])) if took else ""
    )
    problems = [f"{name}: {count} times: {why}" for why, count in whys.items()]
    if not same:
        problems.append(f"{name}: exit code {code}, other bits, or none\n{job.story()}")
    return [str(kept), str(stayed), times, "equal" if same else "OTHER"], problems


def back_after(job: Job, log: str) -> list[float]:
    """Return the seconds from each kill to the last rank's return to training, where survivors kept their processes."""
    said = re.findall(r"([\d-]{10} [\d:]{8}),(\d{3}) INFO \[ttp rank \d+\] training goes on in this process", log)
    back = [datetime.fromisoformat(second).timestamp() + int(ms) / 1e3 for second, ms in said]
    kills = sorted(path.stat().st_mtime for path in (job.directory / "done").glob("kill*"))
    pairs = (
        [at for at in back if kill <= at < after] for kill, after in zip(kills, [*kills[1:], math.inf], strict=True)
    )
    return [max(these) - kill for kill, these in zip(kills, pairs, strict=True) if these]


def drawn(script: Path, kind: str, kills: int, chance: random.Random) -> Iterator[dict[str, Any]]:
    """Return the kills of a row, drawn at random, one every few steps."""
    points = [*PHASES, *(f"micro{n}" for n in range(4))] if script is STEP_JOB else shards.phases(kind, "redo")
    if kind == "static":
        points = [*PHASES, "micro0"]
    for number in range(kills):
        fault = {"id": f"kill{number}", "rank": chance.randrange(RANKS), "step": 4 + APART * number, "action": "kill"}
        yield fault | {"phase": chance.choice(points)}


def bits_are_equal(job: Job, directory: Path) -> bool:
    """Whether the job ends with the same bits as the job without ttp and kills."""
    if job.script is SHARDED_JOB:
        unbroken = shards.unbroken(directory, job.env["JOB_KIND"], job.steps)
        pairs = zip(shards.bits_of(job.directory), unbroken, strict=True)
        return all(mine <= theirs and any(line.startswith(f"{job.steps} ") for line in mine) for mine, theirs in pairs)
    module = f"tests.e2e.{job.script.stem}"
    env = {name: value for name, value in job.env.items() if name.startswith("JOB_")}
    reference = ForkedJob(directory, RANKS, job.steps, env=env, module=module, protected=False)
    assert reference.live(LIMIT_S) == [0] * RANKS, reference.story()
    return job.results() == reference.results()


if __name__ == "__main__":
    sys.exit(main())
