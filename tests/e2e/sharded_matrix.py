"""Runs the matrix of ``shards.py`` and prints the table of docs/reliability.md.

``python -m tests.e2e.sharded_matrix [KIND[-undo][:WHO[:PHASE]] ...]``; without arguments all kinds, with redo and with
undo.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.e2e.shards import KINDS, Row, faults_of, unbroken, victims


def main() -> int:
    """Every row is printed when it is done; problems go to standard error."""
    asked = sys.argv[1:] or [f"{kind}{undo}" for kind in KINDS for undo in ("", "-undo")]
    wrong = 0
    for name in asked:
        layout, only, phase = (*name.split(":"), "", "")[:3]
        kind, _, undo = layout.partition("-")
        with tempfile.TemporaryDirectory() as scratch:
            steps = max(len(faults_of(kind, who, bool(undo))) for who in victims(kind)) * 2 + 4
            bits = unbroken(Path(scratch) / "unbroken", kind, steps)
            for who in [only] if only else victims(kind):
                began = time.monotonic()
                faults = [f for f in faults_of(kind, who, bool(undo)) if phase in ("", f["phase"])]
                row = Row(kind, who, bool(undo)).run(Path(scratch) / who, bits, faults)
                cells = "; ".join(f"{phase}: {shown(seen)}" for phase, seen in row.outcomes.items())
                print(f"| {kind} | {undo or 'redo'} | {who} | {cells} | {time.monotonic() - began:.0f} s", flush=True)
                print(*row.problems, sep="\n", file=sys.stderr, flush=True)
                wrong += len(row.problems)
    return min(wrong, 100)


def shown(seen: Counter[str]) -> str:
    """``2 saved, 1 saved + redo``."""
    return ", ".join(f"{count} {what}" for what, count in sorted(seen.items()))


if __name__ == "__main__":
    sys.exit(main())
