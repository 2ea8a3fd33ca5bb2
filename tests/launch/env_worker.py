"""A rank that notes its environment and leaves with the code it was given; with ``wait`` only when told."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

out, code = Path(sys.argv[1]), int(sys.argv[2])
draft = out / f".env-{os.environ['RANK']}"
draft.write_text(json.dumps(dict(os.environ)))
draft.replace(out / f"env-{os.environ['RANK']}")
if "wait" in sys.argv:
    while not (out / "go").exists():
        time.sleep(0.01)
sys.exit(code)
