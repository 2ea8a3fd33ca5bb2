"""``python -m benchmarks [NAME ...] [--quick] [--json FILE]``: measure, and compare with the budgets."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks import (
    barrier,
    buddy,
    controller_load,
    core,
    detect,
    gpu,
    layouts,
    rescue,
    restoring,
    save,
    steady,
    zero,
)
from benchmarks.result import Result

GROUPS: dict[str, Callable[[bool], Iterable[Result]]] = {
    "core": core.run,
    "steady": steady.run,
    "buddy": buddy.run,
    "barrier": barrier.run,
    "layouts": layouts.run,
    "zero": zero.run,
    "save": save.run,
    "restore": restoring.run,
    "detect": detect.run,
    "rescue": rescue.run,
    "controller": controller_load.run,
    "gpu": gpu.run,
}
NEEDS = {"gpu": gpu.needs}
"""Groups that not every machine can measure: why it cannot, or nothing."""


def main() -> int:
    """Run what is asked for and print one table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one or more of: {', '.join(GROUPS)} (default: all)")
    parser.add_argument(
        "--quick", action="store_true", help="small sizes, few repetitions: for a look, not for numbers"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    args = parser.parse_args()
    unknown = set(args.names) - set(GROUPS)
    if unknown:
        parser.error(f"no benchmark is called {', '.join(sorted(unknown))}; there are {', '.join(GROUPS)}")
    lacking = {name: reason for name, needs in NEEDS.items() if (reason := needs())}
    for name in set(args.names) & set(lacking):
        parser.error(f"{name} cannot be measured here: {lacking[name]}")
    console = Console(file=os.fdopen(os.dup(1), "w", buffering=1))  # a line at a time, into a file too
    results: list[Result] = []
    for name in args.names or [name for name in GROUPS if name not in lacking]:
        with console.status(f"measuring {name} ..."):
            for result in GROUPS[name](args.quick):
                results.append(result)
                console.log(f"{result.what}: {result.shown}")
    for name, reason in () if args.names else lacking.items():
        console.print(f"left out: {name}, {reason}")
    console.print(machine())
    console.print(as_table(results))
    if args.json:
        rows = [r.as_dict() for r in results]
        args.json.write_text(json.dumps({"machine": machine(), "results": rows}, indent=1) + "\n")
    return 0


def machine() -> str:
    """The class of machine that the numbers are from."""
    memory = psutil.virtual_memory().total / 2**30
    return (
        f"{os.cpu_count()} cores, {memory:.0f} GiB, {platform.system()} {platform.release().split('-')[0]}, "
        f"Python {platform.python_version()}, load {os.getloadavg()[0]:.1f}"
    )


def as_table(results: list[Result]) -> Table:
    """What people read."""
    table = Table("what", "measured", "budget", "verdict", "how", title="ttp against its budgets")
    for r in results:
        verdict = "" if r.budget is None else "[green]met[/]" if r.met else "[red]missed[/]"
        table.add_row(r.what, r.shown, r.budget_shown, verdict, r.how)
    return table


if __name__ == "__main__":
    sys.exit(main())
