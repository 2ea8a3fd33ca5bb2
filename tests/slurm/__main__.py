"""``python -m tests.slurm``: runs pytest on this folder inside namespaces, so that nothing is left behind."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from ttp.chaos import world

if __name__ == "__main__":
    if problem := world.obstacle():
        sys.exit(f"tests/slurm cannot run here: {problem}")
    # The batch script calls ttp by its name, also if this environment is not activated.
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    sys.exit(world.enter(["-m", "slow", str(Path(__file__).parent), *sys.argv[1:]], module="pytest"))
