"""``python -m benchmarks [NAME ...] [--quick] [--json FILE]``: measure, and compare with the budgets."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.table import Table

from benchmarks.peers import PYTHON as PEERS_PYTHON
from benchmarks.result import Result
from ttp.chaos import report

GROUPS = (
    "core", "steady", "keep", "buddy", "barrier", "exchange", "layouts", "zero", "save", "restore", "detect", "rescue",
    "resume", "peers", "controller", "gpu",
)  # fmt: skip
"""The groups of benchmarks, each in a module, which is imported only when it is measured: most import torch."""
MODULES = {"restore": "restoring", "controller": "controller_load"}
"""Modules that do not have the name of their group."""


def group(name: str) -> Any:
    """Return the module of a group.

    The module's ``run(quick)`` yields the results. If it has ``needs()``, this function returns the reason why the
    group cannot be measured on this machine, or an empty string.
    """
    return importlib.import_module(f"benchmarks.{MODULES.get(name, name)}")


def lacking(name: str) -> str:
    """Return the reason why a group cannot be measured on this machine; empty: it can be measured."""
    needs = getattr(group(name), "needs", lambda: "")
    return str(needs())


def main() -> int:
    """Run the chosen groups, and print one table of results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one or more of: {', '.join(GROUPS)} (default: all)")
    parser.add_argument(
        "--quick", action="store_true", help="small sizes, few repetitions: a smoke test, whose numbers mean nothing"
    )
    parser.add_argument(
        "--peers",
        nargs="?",
        const=sys.executable,
        metavar="PYTHON",
        help="kill ranks of other systems too, of those installed for this Python (default: the running one)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to this file")
    args = parser.parse_args()
    if args.peers:
        os.environ[PEERS_PYTHON] = str(Path(args.peers).absolute())
        args.names += ["peers"] if args.names and "peers" not in args.names else []
    unknown = set(args.names) - set(GROUPS)
    if unknown:
        parser.error(f"no benchmark is called {', '.join(sorted(unknown))}; choose from {', '.join(GROUPS)}")
    left_out = {name: reason for name in args.names or GROUPS if (reason := lacking(name))}
    for name, reason in left_out.items() if args.names else ():
        parser.error(f"{name} cannot be measured here: {reason}")
    with os.fdopen(os.dup(1), "w", buffering=1) as lines:  # line-buffered, even if the output is a file
        results = measure(args.names or [name for name in GROUPS if name not in left_out], args.quick, lines)
        console = Console(file=lines)
        for name, reason in left_out.items():
            console.print(f"left out: {name}, {reason}")
        console.print(machine())
        console.print(as_table([result for _, result in results]))
    if args.json:
        rows = [{"group": name} | result.as_dict() for name, result in results]
        args.json.write_text(json.dumps({"machine": machine(), "results": rows}, indent=1) + "\n")
    return 0


def measure(names: Sequence[str], quick: bool, lines: IO[str]) -> list[tuple[str, Result]]:
    """Run groups of benchmarks, print each result as soon as it is measured, and return (group, result) pairs."""
    console = Console(file=lines)
    results: list[tuple[str, Result]] = []
    for name in names:
        with console.status(f"measuring {name} ..."):
            for result in group(name).run(quick):
                results.append((name, result))
                console.log(f"{result.what}: {result.shown}")
    return results


def machine() -> str:
    """Return a description of this machine, to print with the numbers."""
    return f"{report.machine()}, Python {platform.python_version()}, load {os.getloadavg()[0]:.1f}"


def as_table(results: list[Result]) -> Table:
    """Return the results as a table to print."""
    table = Table("what", "measured", "budget", "verdict", "how", title="ttp against its budgets")
    for r in results:
        verdict = "" if r.budget is None else "[green]met[/]" if r.met else "[red]missed[/]"
        table.add_row(r.what, r.shown, r.budget_shown, verdict, r.how)
    return table


if __name__ == "__main__":
    sys.exit(main())
