"""Runs the matrix of ``shards.py`` and prints the table of docs/reliability.md.

``python -m tests.e2e.sharded_matrix [KIND[-MODE][:WHO[:PHASE]] ...]``; without arguments all rows.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from pathlib import Path

from tests.e2e.shards import Bits, Row, faults_of, rows, unbroken

LAYOUTS = {
    "hsdp": "HSDP 2x2 (`fully_shard`)",
    "tp": "TP2 x DP2 (`parallelize_module` below `replicate`)",
    "pp": "PP2 x DP2 (GPipe)",
    "replicated": "`ReplicatedOptimizer`, dp 4",
    "zero": "`ZeroRedundancyOptimizer`, dp 4",
}
MODES = {"redo": "redo", "hosts": "redo, two hosts", "undo": "undo", "buddy": "`buddy=True`"}


def main() -> int:
    """Print each finished row, and problems to stderr. Returns the number of problems."""
    wrong = 0
    print("| layout | with | killed | phases | half-way |\n|---|---|---|---|---|", flush=True)
    bits: dict[str, Bits] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for number, (kind, mode, who, phase) in enumerate(asked(sys.argv[1:])):
            if kind not in bits:
                bits[kind] = unbroken(Path(scratch) / f"unbroken {kind}", kind, longest(kind))
            faults = [f for f in faults_of(kind, who, mode) if phase in ("", f["phase"])]
            row = Row(kind, who, mode).run(Path(scratch) / f"{number}", bits[kind], faults)
            halfway = row.outcomes.pop("halfway", Counter())
            cells = [LAYOUTS[kind], MODES[mode], who, shown(sum(row.outcomes.values(), Counter())), shown(halfway)]
            print(f"| {' | '.join(cells)} |", flush=True)
            print(*row.problems, sep="\n", file=sys.stderr, flush=True)
            wrong += len(row.problems)
    return min(wrong, 100)


def asked(names: list[str]) -> list[tuple[str, str, str, str]]:
    """Yield kind, mode, who is killed and phase (empty: all phases) of each row that is named."""
    chosen = []
    for name in names or dict.fromkeys(f"{kind}-{mode}" for kind, mode, _ in rows()):
        layout, only, phase = (*name.split(":"), "", "")[:3]
        wanted = (*layout.split("-"), "redo")[:2]
        found = [row for row in rows() if row[:2] == wanted and only in ("", row[2])]
        if not found:
            raise SystemExit(f"{name} is no row: there are {', '.join(f'{k}-{mode}:{who}' for k, mode, who in rows())}")
        chosen += [(*row, phase) for row in found]
    return chosen


def longest(kind: str) -> int:
    """Return the number of steps of the longest row of a kind."""
    last: list[int] = [faults_of(kind, who, mode)[-1]["step"] for one, mode, who in rows() if one == kind]
    return max(last) + 3


def shown(seen: Counter[str]) -> str:
    """Format outcomes, such as ``2 saved, 1 saved + redo``."""
    return ", ".join(f"{count} {what}" for what, count in sorted(seen.items()))


if __name__ == "__main__":
    sys.exit(main())
