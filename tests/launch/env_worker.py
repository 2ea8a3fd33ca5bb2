"""A rank that writes its environment to a file and exits with a given code; with ``wait`` it exits when told to."""

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
