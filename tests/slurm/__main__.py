"""``python -m tests.slurm``: runs pytest on this folder inside namespaces, so that nothing is left behind."""

from __future__ import annotations

import sys
from pathlib import Path

from ttp.chaos import world

if __name__ == "__main__":
    if problem := world.obstacle():
        sys.exit(f"tests/slurm cannot run here: {problem}")
    sys.exit(world.enter(["-m", "slow", str(Path(__file__).parent), *sys.argv[1:]], module="pytest"))
