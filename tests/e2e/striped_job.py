"""``job.py`` with names of two hosts; the rank ``JOB_DIES_SAVING`` is killed in the middle of its first part."""

from __future__ import annotations

import os
import runpy
import signal
from pathlib import Path
from typing import Any

RANK = int(os.environ["RANK"])
os.environ["TTP_HOST"] = "one" if RANK < 2 else "two"

from ttp.store.digest import HashingFile

_write = HashingFile.write


def write(self: HashingFile, data: Any, /) -> int:
    """Write half of the piece, then stop."""
    if "of" not in self.path.name or self.path.suffix != ".distcp" or MARKER.exists():
        return _write(self, data)
    MARKER.write_text(self.path.name)
    _write(self, memoryview(data)[: memoryview(data).nbytes // 2])
    self.flush()
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("still there")


MARKER = Path(os.environ["JOB_DIR"]) / "died_saving"
if os.environ.get("JOB_DIES_SAVING") == str(RANK):
    HashingFile.write = write  # type: ignore[method-assign]

runpy.run_path(str(Path(__file__).with_name("job.py")), run_name="__main__")
