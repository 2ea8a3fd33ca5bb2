"""A rank as a launcher starts it. ``JOB_SHAPE``: the layout; ``JOB_FAULT``: a fault in the first life;
``JOB_STEPS``.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

from tests.adapters.megatron import worlds

if __name__ == "__main__":
    life = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    worlds.job(
        json.loads(os.environ["JOB_SHAPE"]),
        int(os.environ["JOB_STEPS"]),
        life,
        json.loads(os.environ["JOB_FAULT"]) if life == 0 else None,
        launched=True,
    )
